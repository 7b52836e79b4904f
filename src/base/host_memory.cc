// Room: base. Available memory from /proc and the cgroup.
#include "base/host_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <string>

namespace pliant {
namespace {

std::string FileText(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// The first number at or after the start of `text`, past spaces.
std::optional<std::uint64_t> Number(std::string_view text) {
  const std::size_t start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data() + start, text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() + start) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> NumberAfter(std::string_view text, std::string_view label) {
  const std::size_t at = text.find(label);
  return at == std::string_view::npos ? std::nullopt : Number(text.substr(at + label.size()));
}

}  // namespace

std::optional<std::uint64_t> ParseMemAvailable(std::string_view meminfo) {
  const auto kib = NumberAfter(meminfo, "MemAvailable:");
  if (!kib || *kib > (std::uint64_t{1} << 50)) return std::nullopt;
  return *kib * 1024;
}

std::optional<std::uint64_t> AvailableHostMemory() {
  std::optional<std::uint64_t> available = ParseMemAvailable(FileText("/proc/meminfo"));
  // Inside a container the cgroup's limit counts ("max" when there is none). Its file cache can be
  // dropped, so it is not held against us.
  const auto limit = Number(FileText("/sys/fs/cgroup/memory.max"));
  const auto used = Number(FileText("/sys/fs/cgroup/memory.current"));
  if (limit && used) {
    const std::uint64_t cache =
        NumberAfter(FileText("/sys/fs/cgroup/memory.stat"), "inactive_file").value_or(0);
    const std::uint64_t held = *used - std::min(*used, cache);
    const std::uint64_t left = *limit - std::min(*limit, held);
    available = std::min(available.value_or(left), left);
  }
  return available;
}

}  // namespace pliant
