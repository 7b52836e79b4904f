#include "base/size.h"

#include <charconv>
#include <cmath>
#include <cstdio>

namespace pliant {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr Unit kUnits[] = {{"", 1},           {"B", 1},           {"KiB", 1024.0},       {"MiB", 1048576.0},
                           {"GiB", 1073741824.0}, {"TiB", 1099511627776.0}, {"KB", 1e3}, {"MB", 1e6},
                           {"GB", 1e9},       {"TB", 1e12},       {"K", 1024.0},         {"M", 1048576.0},
                           {"G", 1073741824.0}};

}  // namespace

Result<std::uint64_t> ParseSize(std::string_view text) {
  const auto refuse = [&] {
    return InvalidArgument("'" + std::string(text) + "' is not a size such as 512MiB or 4GiB");
  };
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (error != std::errc() || !(number >= 0)) return refuse();
  std::string_view suffix(end, text.data() + text.size() - end);
  while (suffix.starts_with(' ')) suffix.remove_prefix(1);
  for (const Unit& unit : kUnits) {
    if (suffix != unit.name) continue;
    const double bytes = number * unit.bytes;
    if (bytes > 0x1p62) return refuse();
    return static_cast<std::uint64_t>(std::llround(bytes));
  }
  return refuse();
}

std::string FormatSize(std::uint64_t bytes) {
  static constexpr const char* kNames[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 6) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 || value >= 100 ? "%.0f %s" : value >= 10 ? "%.1f %s" : "%.2f %s", value,
                kNames[unit]);
  return text;
}

}  // namespace pliant
