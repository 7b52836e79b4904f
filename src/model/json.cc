// Room: model. Bounded parsing of JSON and typed access to members.
#include "model/json.h"

#include <algorithm>

namespace pliant {

int JsonDepth(std::string_view text) {
  int depth = 0;
  int deepest = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

namespace {

/// Finds the byte of the first syntax error; the library's own parse says it only by exception.
class ErrorFinder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::size_t position = 0;
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t at, const std::string&, const nlohmann::json::exception&) override {
    position = at;
    return false;
  }
};

/// The member, or null when it is missing or JSON null.
const nlohmann::json* Member(const nlohmann::json& object, std::string_view key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

Status WrongType(std::string_view key, std::string_view wanted) {
  return InvalidArgument(std::string(key) + " must be " + std::string(wanted));
}

}  // namespace

Result<nlohmann::json> ParseJsonObject(std::string_view text, int max_depth) {
  if (const int depth = JsonDepth(text); depth > max_depth) {
    return InvalidArgument("the JSON nests " + std::to_string(depth) + " deep, at most " +
                           std::to_string(max_depth) + " is allowed");
  }
  nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    ErrorFinder finder;
    nlohmann::json::sax_parse(text, &finder);
    return InvalidArgument("the JSON is not valid near byte " + std::to_string(finder.position) +
                           " of " + std::to_string(text.size()));
  }
  if (!json.is_object()) {
    return InvalidArgument(std::string("the JSON is not an object but ") + json.type_name());
  }
  return json;
}

Result<std::optional<std::int64_t>> JsonInt(const nlohmann::json& object, std::string_view key) {
  const nlohmann::json* member = Member(object, key);
  if (member == nullptr) return std::optional<std::int64_t>();
  if (member->is_number_unsigned() &&
      member->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
    return WrongType(key, "an integer below 2^63");
  }
  if (!member->is_number_integer()) return WrongType(key, "an integer");
  return std::optional(member->get<std::int64_t>());
}

Result<std::optional<double>> JsonNumber(const nlohmann::json& object, std::string_view key) {
  const nlohmann::json* member = Member(object, key);
  if (member == nullptr) return std::optional<double>();
  if (!member->is_number()) return WrongType(key, "a number");
  return std::optional(member->get<double>());
}

Result<std::optional<bool>> JsonBool(const nlohmann::json& object, std::string_view key) {
  const nlohmann::json* member = Member(object, key);
  if (member == nullptr) return std::optional<bool>();
  if (!member->is_boolean()) return WrongType(key, "true or false");
  return std::optional(member->get<bool>());
}

Result<std::optional<std::string>> JsonString(const nlohmann::json& object, std::string_view key) {
  const nlohmann::json* member = Member(object, key);
  if (member == nullptr) return std::optional<std::string>();
  if (!member->is_string()) return WrongType(key, "a string");
  return std::optional(member->get<std::string>());
}

}  // namespace pliant
