// Room: base. How much memory this process may still take. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace pliant {

/// Bytes that can be allocated without swapping: MemAvailable, or less inside a memory-limited
/// cgroup. Nothing when the system does not say.
std::optional<std::uint64_t> AvailableHostMemory();

/// MemAvailable of a /proc/meminfo text, in bytes.
std::optional<std::uint64_t> ParseMemAvailable(std::string_view meminfo);

}  // namespace pliant
