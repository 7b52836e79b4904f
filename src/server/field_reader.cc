#include "server/field_reader.h"

#include <cmath>
#include <cstdio>

namespace pliant {
namespace {

std::string FormatNumber(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

bool FitsInt64(const Json& value) {
  return !value.is_number_unsigned() ||
         value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX);
}

}  // namespace

std::string Describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "an array";
    case Json::value_t::string:
      return "the text \"" + Excerpt(value.get_ref<const std::string&>(), 40) + "\"";
    case Json::value_t::boolean:
      return value.get<bool>() ? "true" : "false";
    default:
      return "the number " + Excerpt(DumpJson(value), 40);
  }
}

std::optional<std::string> ReadTokenId(const Json& value, std::int32_t vocab_size, TokenId* out) {
  if (!value.is_number_integer()) return "a token id must be an integer, not " + Describe(value);
  if (!FitsInt64(value) || value.get<std::int64_t>() < 0 ||
      value.get<std::int64_t>() >= vocab_size) {
    return "token id " + DumpJson(value) + " is outside the vocabulary [0, " +
           std::to_string(vocab_size) + ")";
  }
  *out = value.get<TokenId>();
  return std::nullopt;
}

FieldReader::FieldReader(const Json* object, std::string prefix)
    : object_(object), prefix_(std::move(prefix)) {
  PLIANT_CHECK(object->is_object(), "fields are read from an object");
}

void FieldReader::Fail(std::string_view name, const std::string& message, std::string code) {
  const std::string field = Qualified(name);
  Fail(BadField(field, "'" + field + "' " + message, std::move(code)));
}

void FieldReader::Fail(ApiError error) {
  if (!error_) error_ = std::move(error);
}

const Json* FieldReader::Find(std::string_view name) const {
  if (error_) return nullptr;
  const auto it = object_->find(std::string(name));
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

std::optional<bool> FieldReader::Bool(std::string_view name) {
  const Json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) {
    Fail(name, "must be true or false, not " + Describe(*value));
    return std::nullopt;
  }
  return value->get<bool>();
}

std::optional<std::int64_t> FieldReader::Int(std::string_view name, std::int64_t low,
                                             std::int64_t high) {
  const Json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_integer()) {
    Fail(name, "must be an integer, not " + Describe(*value));
    return std::nullopt;
  }
  if (!FitsInt64(*value) || value->get<std::int64_t>() < low || value->get<std::int64_t>() > high) {
    Fail(name, "must be an integer from " + std::to_string(low) + " to " + std::to_string(high) +
                   ", not " + DumpJson(*value));
    return std::nullopt;
  }
  return value->get<std::int64_t>();
}

std::optional<double> FieldReader::Number(std::string_view name, double low, double high) {
  const Json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) {
    Fail(name, "must be a number, not " + Describe(*value));
    return std::nullopt;
  }
  const double number = value->get<double>();
  if (!std::isfinite(number) || number < low || number > high) {
    Fail(name, "must be a number from " + FormatNumber(low) + " to " + FormatNumber(high) +
                   ", not " + DumpJson(*value));
    return std::nullopt;
  }
  return number;
}

std::optional<std::string> FieldReader::String(std::string_view name, std::size_t max_bytes) {
  const Json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) {
    Fail(name, "must be a string, not " + Describe(*value));
    return std::nullopt;
  }
  const auto& text = value->get_ref<const std::string&>();
  if (text.size() > max_bytes) {
    Fail(name, "has " + std::to_string(text.size()) + " bytes; the limit is " +
                   std::to_string(max_bytes));
    return std::nullopt;
  }
  return text;
}

}  // namespace pliant
