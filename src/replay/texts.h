// Room: replay. Long texts to measure on: made up from a seed, or files of a folder. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace pliant {

struct SampleText {
  std::string name, text;
};

/// Seven texts of about `bytes` bytes, each of another kind: narrative, dialogue, a table, a log,
/// code, worked arithmetic, an encyclopaedia in two languages. The same on every machine.
std::vector<SampleText> BuiltInTexts(std::size_t bytes, std::uint64_t seed = 1);

/// Every regular file of a folder, by name, at most `max_files` and of each its first `max_bytes`
/// bytes. NotFound when there are none.
Result<std::vector<SampleText>> ReadTexts(const std::string& folder, std::size_t max_bytes,
                                          std::size_t max_files = 64);

}  // namespace pliant
