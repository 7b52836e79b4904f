// Room: text. Where the reference's Unicode data differ from the libraries Pliant links; the tables
// are made by unicode_ranges.py, which says what the reference is. Constants; any thread.
#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

namespace pliant {

/// Code points from low to high, both included.
struct CodePointRange {
  char32_t low, high;
};

struct CategoryRanges {
  std::string_view category;  // "Lu", ...
  std::span<const CodePointRange> ranges;
};

#include "text/unicode_ranges.inc"

/// The ranges as members of a PCRE2 class: "\x{a}-\x{b}...".
std::string ClassText(std::span<const CodePointRange> ranges);

/// Whether a sorted table holds `c`.
inline bool Contains(std::span<const CodePointRange> table, char32_t c) {
  const auto after = std::upper_bound(
      table.begin(), table.end(), c, [](char32_t v, const CodePointRange& r) { return v < r.low; });
  return after != table.begin() && c <= std::prev(after)->high;
}

}  // namespace pliant
