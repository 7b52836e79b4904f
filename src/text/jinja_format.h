// Room: text. Python's format specification ("{:>8.3f}") and what it shares with printf-style
// formats. Rendering thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "text/jinja_value.h"

namespace pliant::jinja {

struct FormatSpec {
  std::string fill = " ";
  char align = '\0';  // < > = ^ or none
  char sign = '\0';   // + - space or none
  bool alternate = false;
  std::size_t width = 0;
  char grouping = '\0';  // , _ or none
  std::optional<int> precision;
  char type = '\0';

  /// Fails on what is no specification, and on sizes over the limit.
  static FormatSpec Parse(std::string_view text, const Value& value);
};

/// format(value, spec).
std::string FormatValue(const Value& value, std::string_view spec);
/// Digits of a float for the types e E f F g G, without sign. `precision` is at most kMaxPrecision.
std::string FloatDigits(double value, char type, int precision, bool alternate);
/// Digits of an absolute value in base 2, 8, 10 or 16.
std::string IntDigits(std::uint64_t value, int base, bool upper);
std::uint64_t Magnitude(std::int64_t value);
/// Fills to `width` code points.
std::string Pad(std::string text, std::size_t width, std::string_view fill, char align);
inline constexpr int kMaxPrecision = 1000;

}  // namespace pliant::jinja
