#include "server/json.h"

#include <cstdint>
#include <vector>

namespace pliant {
namespace {

/// Length of the well-formed UTF-8 character at `text[at]`, or 0. Table 3-7 of the Unicode
/// standard.
std::size_t CharacterLength(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u;
  };
  const auto tail = [&](std::size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return tail(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const unsigned low = lead == 0xE0 ? 0xA0 : 0x80;
    const unsigned high = lead == 0xED ? 0x9F : 0xBF;
    return byte(1) >= low && byte(1) <= high && tail(2) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const unsigned low = lead == 0xF0 ? 0x90 : 0x80;
    const unsigned high = lead == 0xF4 ? 0x8F : 0xBF;
    return byte(1) >= low && byte(1) <= high && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

ApiError BadBody(std::string message, std::string code = "invalid_json") {
  return BadField("", std::move(message), std::move(code));
}

std::string Over(std::string_view what, std::size_t limit) {
  return "the JSON body has " + std::string(what) + "; the limit is " + std::to_string(limit);
}

/// Counts nesting, values and members without judging the grammar: what is malformed is found by
/// the parser afterwards.
std::optional<ApiError> CheckBounds(std::string_view body, const JsonLimits& limits) {
  std::vector<std::size_t> members;  // of each open container
  members.reserve(static_cast<std::size_t>(limits.max_depth) + 1);
  std::size_t values = 1;
  std::size_t total_members = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    switch (c) {
      case '"':
        in_string = true;
        break;
      case '{':
      case '[':
        members.push_back(0);
        ++values;
        if (members.size() > static_cast<std::size_t>(limits.max_depth)) {
          return BadBody(Over("too deep a nesting", static_cast<std::size_t>(limits.max_depth)));
        }
        break;
      case '}':
      case ']':
        if (!members.empty()) members.pop_back();
        break;
      case ',':
        ++values;
        break;
      case ':':
        ++total_members;
        if (!members.empty() && ++members.back() > limits.max_members) {
          return BadBody(Over("an object with too many members", limits.max_members));
        }
        break;
      default:
        break;
    }
    if (values > limits.max_values) return BadBody(Over("too many values", limits.max_values));
    if (total_members > limits.max_total_members) {
      return BadBody(Over("too many object members", limits.max_total_members));
    }
  }
  return std::nullopt;
}

}  // namespace

bool IsValidUtf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = CharacterLength(text, i);
    if (length == 0) return false;
    i += length;
  }
  return true;
}

std::string Excerpt(std::string_view text, std::size_t max_bytes) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = CharacterLength(text, i);
    const std::string_view piece = length == 0 ? "\xEF\xBF\xBD" : text.substr(i, length);
    if (out.size() + piece.size() > max_bytes) return out + "...";
    out += piece;
    i += length == 0 ? 1 : length;
  }
  return out;
}

std::optional<ApiError> ParseBoundedJson(std::string_view body, const JsonLimits& limits,
                                         Json* out) {
  if (std::optional<ApiError> error = CheckBounds(body, limits)) return error;
  if (!IsValidUtf8(body)) return BadBody("the body is not valid UTF-8");
  try {
    *out = Json::parse(body.begin(), body.end());
  } catch (const Json::exception& e) {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: ...": the part in brackets
    // helps nobody.
    std::string_view what = e.what();
    if (const std::size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
    return BadBody("the body is not valid JSON: " + Excerpt(what, 300));
  }
  return std::nullopt;
}

std::optional<ApiError> ParseJsonBody(std::string_view body, const JsonLimits& limits, Json* out) {
  if (body.empty()) return BadBody("the body is empty; a JSON object is expected");
  if (std::optional<ApiError> error = ParseBoundedJson(body, limits, out)) return error;
  if (!out->is_object()) {
    return BadBody(std::string("the body must be a JSON object, not ") + out->type_name());
  }
  return std::nullopt;
}

std::string DumpJson(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace pliant
