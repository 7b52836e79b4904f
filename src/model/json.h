// Room: model. The JSON files beside a model (config.json, generation_config.json, the shard
// index), untrusted: bounded depth, no exceptions, messages that name the key. Pure functions, any
// thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace pliant {

/// Deepest nesting of arrays and objects in a JSON text, found without parsing (strings are
/// skipped).
int JsonDepth(std::string_view text);

/// Parses an object. InvalidArgument on a syntax error (with its byte), another kind of value, or
/// nesting over `max_depth`.
Result<nlohmann::json> ParseJsonObject(std::string_view text, int max_depth = 32);

/// Typed members of an object. Missing or null: nullopt. A value of another type or out of range:
/// InvalidArgument naming the key.
Result<std::optional<std::int64_t>> JsonInt(const nlohmann::json& object, std::string_view key);
Result<std::optional<double>> JsonNumber(const nlohmann::json& object, std::string_view key);
Result<std::optional<bool>> JsonBool(const nlohmann::json& object, std::string_view key);
Result<std::optional<std::string>> JsonString(const nlohmann::json& object, std::string_view key);

}  // namespace pliant
