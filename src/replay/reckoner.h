// Room: replay. Problems with one right answer each, decoded greedily with the cache at a lower
// state behind a short protected tail: how many are still solved. Runs on the thread that owns the
// backend.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "kv/history.h"
#include "model/model.h"
#include "replay/cache_state.h"
#include "text/tokenizer.h"

namespace pliant {

struct ReckonerProblem {
  std::string id, level, prompt, answer;
};
/// JSON lines with "level", "prompt" and "answer"; refused with path and line.
Result<std::vector<ReckonerProblem>> ReadReckonerProblems(const std::string& path);
/// The first `limit` problems of every level (0: all).
std::vector<ReckonerProblem> LimitPerLevel(std::vector<ReckonerProblem> problems,
                                           std::size_t limit);

struct ReckonerOptions {
  std::vector<CacheState> states;
  Protection protection{.sink = 0, .recent_base = 16, .recent_deep = 16};
  int capacity = 0;  // blocks of each problem's history that take part in decode; 0: all
  bool grows = false;
  HistoryOptions history;
  bool courses = false;            // keep answers and signals
  int slots = 32;                  // sequences decoded together
  std::int64_t max_tokens = 4096;  // prompt and answer; longer ones count as wrong
  int max_rows = 512;              // as given to Model::Load; at least slots
};
/// Pages that must have been allocated.
std::uint32_t ReckonerPages(const ReckonerOptions& options);

/// What a growing capacity met on its way through one answer.
struct ReckonerCourse {
  std::string id, answer;  // the answer with its chain of thought
  bool right = false;
  std::int64_t prompt_tokens = 0;
  struct Signal {
    std::int64_t tokens;  // prompt and answer so far
    double value;
    bool grew;
  };
  std::vector<Signal> signals;
};

/// Operations of decode steps, a multiplication and an addition each counting one.
struct DecodeOperations {
  double model = 0;     // products with weights, and attention to what takes part
  double scoring = 0;   // of a history: what each token got, and likeness
  double watching = 0;  // logits of dropped keys; of 8 and 4 bits, attention's are not
};

struct ReckonerScore {
  CacheState state;
  std::string level;
  int problems = 0, right = 0, unfinished = 0;
  std::int64_t tokens = 0;  // generated
  // Of decode steps, in pages: held, those of the whole cache; most of one problem, against its
  // whole cache's most.
  std::int64_t held_pages = 0, whole_pages = 0;
  std::int64_t peak_pages = 0, whole_peak_pages = 0;     // summed over problems
  std::int64_t drops = 0, growths = 0;                   // blocks
  std::int64_t returned_tokens = 0, returned_pages = 0;  // of one (layer, KV head) each
  int units = 1;
  DecodeOperations operations;
  std::vector<std::string> wrong;  // ids
  std::vector<ReckonerCourse> courses;
};

using PromptEncoder = std::function<Result<std::vector<TokenId>>(const std::string& prompt)>;

/// Solves every problem once a state. The prompt is read in pieces of at most one block, so that it
/// is degraded as early as the answer is. The answer is the text after "</think>", stripped. Scores
/// by state, then level, as they come.
Result<std::vector<ReckonerScore>> MeasureReckoner(
    Model& model, Backend& backend, const Tokenizer& tokenizer, const PromptEncoder& encode,
    std::span<const ReckonerProblem> problems, const ReckonerOptions& options,
    const std::function<void(std::int64_t done, std::int64_t total)>& progress = {});

}  // namespace pliant
