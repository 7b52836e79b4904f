// Room: server. JSON as the server reads and writes it: bounded before it is built, always valid
// UTF-8 when written. Any thread.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "server/api_error.h"

namespace pliant {

/// Members keep their order: chat templates print objects as the client wrote them.
using Json = nlohmann::ordered_json;

/// Bounds on a body, checked in one pass over its bytes before a value is built, so that neither
/// recursion nor memory nor the linear look-up of ordered objects can be driven by a client. An
/// object of `max_members` costs max_members^2 / 2 key comparisons to build.
struct JsonLimits {
  int max_depth = 100;
  std::size_t max_values = 1'000'000;
  std::size_t max_members = 2'000;          // of one object
  std::size_t max_total_members = 100'000;  // of all objects together
};

/// Reads `body`, which must be one JSON value. The error names the place or the limit.
std::optional<ApiError> ParseBoundedJson(std::string_view body, const JsonLimits& limits,
                                         Json* out);

/// The same for a body that must be one JSON object.
std::optional<ApiError> ParseJsonBody(std::string_view body, const JsonLimits& limits, Json* out);

/// Compact text. Bytes that are not UTF-8 become U+FFFD.
std::string DumpJson(const Json& json);

/// Whether `text` is well-formed UTF-8 (no surrogates, nothing above U+10FFFF, shortest forms).
bool IsValidUtf8(std::string_view text);

/// `text` with every ill-formed byte replaced, cut to at most `max_bytes` on a character boundary;
/// for quoting in messages.
std::string Excerpt(std::string_view text, std::size_t max_bytes = 100);

}  // namespace pliant
