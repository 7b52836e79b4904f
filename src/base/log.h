// Room: base. One place to set up logging: to standard error, warnings and up by default. Any thread.
#pragma once

#include <spdlog/spdlog.h>

#include <string_view>

namespace pliant {

/// Sends log lines to standard error at `level` ("debug", "info", "warn", "error", "off"). Call once, before threads start.
/// Returns false, changing nothing, when the word is not one of these.
bool InitLogging(std::string_view level);

}  // namespace pliant
