// Room: text. Methods of Python's str, as templates call them; filters share some of them.
// Rendering thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "text/jinja_ops.h"
#include "text/jinja_value.h"

namespace pliant::jinja {

MethodFn FindStringMethod(std::string_view name);

/// str.strip: which ends, and which characters (nothing: white space).
std::string_view Strip(std::string_view text, const std::optional<std::string>& characters,
                       bool left, bool right);
/// str.replace; a negative count means all.
std::string Replace(std::string_view text, std::string_view old, std::string_view with,
                    std::int64_t count);
/// str.splitlines.
std::vector<std::string> SplitLines(std::string_view text, bool keep_ends);
/// str.islower, str.isupper.
bool IsAllLower(std::string_view text);
bool IsAllUpper(std::string_view text);

}  // namespace pliant::jinja
