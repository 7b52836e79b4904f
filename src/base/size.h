// Room: base. Byte sizes as people write them. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace pliant {

/// "1GiB", "512MiB", "64KiB", "2GB", "1.5GiB", "123" (bytes). InvalidArgument for anything else, a negative size or one past 2^62.
Result<std::uint64_t> ParseSize(std::string_view text);

/// "1.0 GiB", "92 KiB", "17 B": three significant digits at most.
std::string FormatSize(std::uint64_t bytes);

}  // namespace pliant
