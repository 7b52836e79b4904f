// Room: cli. A plain blocking HTTP GET for the program's own tools. Main thread.
#pragma once

#include <string>

#include "base/status.h"

namespace pliant {

/// Body of a 200 answer; anything else is a Status. The answer may have at most 64 MiB and must come within 10 s a read.
Result<std::string> HttpGet(const std::string& host, int port, const std::string& path, const std::string& api_key);

}  // namespace pliant
