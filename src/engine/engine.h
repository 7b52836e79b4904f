// Room: engine. The engine thread: plan, run, settle, until told to stop. All its state belongs to
// that thread; Submit, Cancel, Stats and Drain may be called from any thread and talk to it by a
// queue.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/request.h"
#include "kv/decision_log.h"
#include "kv/history.h"

namespace pliant {

/// Counters only rise; gauges are the state after the last step.
struct EngineStats {
  // gauges
  std::int64_t running = 0, waiting = 0;
  std::int64_t pages_total = 0, pages_free = 0,
               pages_cached = 0;  // cached: held only by the prefix cache
  std::int64_t kv_bytes_total = 0, kv_bytes_used = 0;
  std::int64_t blocks_by_state[5][5] = {};  // [planes of K][planes of V]
  std::int64_t store_bytes_total = 0,
               store_bytes_used = 0;  // the exact store's budget, and what is in it
  // Requests with a capacity, and their blocks; tokens: of each (layer, KV head), their mean.
  std::int64_t with_capacity = 0, blocks_taking_part = 0, blocks_dropped = 0;
  std::int64_t retained_tokens = 0, dropped_tokens = 0;
  // counters
  std::int64_t requests_admitted = 0, requests_finished = 0, requests_cancelled = 0,
               requests_failed = 0, requests_rejected = 0;
  std::int64_t prompt_tokens = 0, generated_tokens = 0;
  std::int64_t prefix_lookup_tokens = 0, prefix_hit_tokens = 0;
  std::int64_t preemptions = 0, demotions = 0, restores = 0, offloads = 0;
  std::int64_t tokens_below_16_bits = 0, restore_nanoseconds = 0;
  // Of requests with a capacity; pages of 16 tokens of one (layer, KV head).
  std::int64_t drops = 0, returned_pages = 0, lost_pages = 0, capacity_growths = 0;
  std::array<std::int64_t, kSignalBounds.size() + 1> signals{};  // growth signals by kSignalBounds
  double signal_sum = 0;
  std::int64_t decisions[static_cast<int>(Reason::kCount)] =
      {};                                        // by reason: what each rung of the ladder did
  std::int64_t steps = 0, step_nanoseconds = 0;  // the time from a plan to its tokens
  std::int64_t plan_nanoseconds =
      0;  // deciding on steps, ladder and copies included; the device idles meanwhile
  std::int64_t settle_nanoseconds = 0;  // taking results in and handing tokens over, likewise
  // Where a device works by itself: steps planned while the one before ran, and the time that took;
  // and how long it waited before steps of decodes alone, by upper bound IdleBound.
  std::int64_t steps_ahead = 0, hidden_nanoseconds = 0;
  std::array<std::int64_t, 48> idle_counts{};
  std::int64_t nonfinite_requests = 0;  // ended because their logits were not finite
};

/// Of EngineStats::idle_counts: nanoseconds, four bounds an octave from a microsecond on.
inline double IdleBound(std::size_t i) { return 1e3 * std::exp2(0.25 * static_cast<double>(i)); }

class Engine {
 public:
  virtual ~Engine() = default;
  /// Queues a request. ResourceExhausted when the waiting queue is full, Unavailable while
  /// draining, TooLarge when it could never fit (prompt + max_tokens over the context or the pool):
  /// nothing was queued then and the sink is not called.
  virtual Result<RequestId> Submit(GenerateRequest request, EventSink sink) = 0;
  /// Ends a request soon; its last event says kCancelled. Unknown or finished ids are ignored.
  virtual void Cancel(RequestId id) = 0;
  virtual EngineStats Stats() const = 0;
  /// The live memory map as JSON (engine/kv_report.h). Waits for the step under way: not for a
  /// thread that must not block.
  virtual Result<std::string> KvReportJson() {
    return Unimplemented("this engine has no memory map");
  }
  /// No new requests; returns true when all have finished, false after `seconds` (what is left is
  /// then cancelled).
  virtual bool Drain(double seconds) = 0;
  /// Largest prompt + output in tokens a request may have here (the model's context or --context,
  /// and the pool).
  virtual std::int64_t MaxContext() const = 0;
};

}  // namespace pliant
