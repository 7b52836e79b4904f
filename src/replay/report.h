// Room: replay. What was measured, as tables for people and as JSON. Pure functions, any thread.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "replay/context_quality.h"
#include "replay/reckoner.h"
#include "replay/replayer.h"

namespace pliant {

struct NamedReplay {
  std::string policy;
  ReplayResult result;
};
/// One column a policy: times, tokens, measures of the ladder; below it the share of blocks in each
/// state over the run.
std::string ReplayTable(const std::vector<NamedReplay>& replays);
/// At most `max_samples` samples of the run are kept, evenly spread.
nlohmann::ordered_json ReplayJson(const ReplayResult& result, std::size_t max_samples = 200);

struct NamedText {
  std::string name;
  TextReport report;
};
/// Mean over all texts first, then the mean KL of each text.
std::string ContextTable(const std::vector<CacheState>& states,
                         const std::vector<NamedText>& texts);
nlohmann::ordered_json ContextJson(const std::vector<CacheState>& states,
                                   const std::vector<NamedText>& texts);

std::string ReckonerTable(const std::vector<ReckonerScore>& scores);
nlohmann::ordered_json ReckonerJson(const std::vector<ReckonerScore>& scores);

}  // namespace pliant
