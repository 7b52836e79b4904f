// Room: replay. Plays a workload against an engine by the real clock and measures what its clients
// would see. One call runs on the caller's thread; the engine's events arrive on the engine thread
// and only take times.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "replay/statistics.h"
#include "replay/workload.h"

namespace pliant {

struct ReplayOptions {
  std::int64_t vocabulary = 0;  // ids of prompts lie below it; required
  int min_bits = 0;             // as KvParams
  double sample_seconds = 0.1;  // how often block states and the queue are looked at
  double give_up_seconds = 0;   // cancel what is unfinished this long after the start; 0: never
};

/// The cache and the queue at one moment.
struct ReplaySample {
  double seconds = 0;
  std::int64_t running = 0, waiting = 0;
  double pages_used = 0;           // share of all pages, idle cached blocks not counted
  std::int64_t blocks[5][5] = {};  // by planes of K and V
};

struct ReplayResult {
  std::int64_t requests = 0, finished = 0, refused = 0, failed = 0, cancelled = 0;
  std::string first_error;  // of a refused or failed request
  double seconds = 0;       // from the start to the last answer's end
  Distribution ttft;        // seconds from arrival to the first token
  Distribution itl;         // seconds between the tokens of an answer
  Distribution latency;     // seconds from arrival to the last token
  std::int64_t prompt_tokens = 0, output_tokens = 0, cached_tokens = 0, tokens_below_16_bits = 0;
  std::int64_t preemptions = 0, demotions = 0, restores = 0, offloads = 0;
  std::int64_t peak_running = 0, peak_waiting = 0;
  std::int64_t steps = 0;
  // As EngineStats, over all steps.
  double step_seconds = 0, plan_seconds = 0, settle_seconds = 0, hidden_seconds = 0;
  double idle_p50 = 0;  // seconds that a device waited before a step of decodes, half of the times
  std::int64_t steps_ahead = 0;
  int lowest_k_bits = 16, lowest_v_bits = 16;
  std::vector<ReplaySample> samples;
  double output_tokens_per_second() const { return seconds > 0 ? output_tokens / seconds : 0; }
};

struct ReplayProgress {
  std::int64_t submitted = 0, ended = 0, total = 0, running = 0, waiting = 0, output_tokens = 0;
  double seconds = 0;
};

/// Submits every request at its arrival, waits for all to end, and sums up. Requests ignore
/// end-of-sequence and produce exactly their output, greedily. A request that the engine refuses is
/// counted, and told in first_error.
ReplayResult Replay(Engine& engine, const std::vector<WorkloadRequest>& workload,
                    const ReplayOptions& options,
                    const std::function<void(const ReplayProgress&)>& progress = {});

}  // namespace pliant
