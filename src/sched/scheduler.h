// Room: sched. Which requests run in the next step and with how many tokens: continuous batching,
// chunked prefill, prefix reuse, and the pressure ladder. The engine's loop is: plan, run, settle.
//
//   StepPlan plan = scheduler.Plan();
//   if (plan.empty()) { sleep (plan.idle() ? until the next Add : plan.wait()); continue; }
//   model.Forward(backend, plan.batch());       // or scheduler.Abandon(std::move(plan)) when it
//   fails sample a token for each of plan.samplers(); // samplers()[i] belongs to
//   batch().logit_rows[i] scheduler.Settle(std::move(plan), tokens); for (SchedEvent& event :
//   scheduler.TakeEvents()) ...
//
// Threads: the engine thread owns it. Deterministic: the same calls, clock and copy completions
// give the same plans.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "kv/kv_manager.h"
#include "sched/sched_request.h"
#include "sched/step_plan.h"

namespace pliant {

struct SchedulerOptions {
  std::int32_t max_batch_tokens = 512;  // rows of a step
  std::int32_t max_running = 256;       // requests holding blocks on the device
  std::int32_t max_waiting = 1024;      // beyond it Add returns ResourceExhausted
  std::int64_t max_context = 0;         // prompt + output of one request, tokens; required
  HistoryOptions history;               // of requests with a capacity, and the default capacity
  // Query heads, for Backend::RetainsHistory; 0: capacities are refused.
  std::int32_t history_heads = 0;
};

/// Gauges after the last call, and counters that only rise.
struct SchedStats {
  std::int64_t running = 0, waiting = 0, offloaded = 0, loading = 0;
  std::int64_t admitted = 0, finished = 0, cancelled = 0, failed = 0, rejected = 0;
  std::int64_t preemptions = 0, offloads = 0;
  std::int64_t prompt_tokens = 0, generated_tokens = 0, tokens_below_16_bits = 0;
  std::int64_t prefix_lookup_tokens = 0, prefix_hit_tokens = 0;
  std::int64_t steps = 0;
  // Requests with a capacity: now, and what became of their blocks. retained_tokens and
  // dropped_tokens: of each (layer, KV head), their mean.
  std::int64_t with_capacity = 0, blocks_taking_part = 0, blocks_dropped = 0;
  std::int64_t retained_tokens = 0, dropped_tokens = 0;
  std::int64_t drops = 0, growths = 0, returned_pages = 0, lost_pages = 0;
  /// Growth signals seen, counted by upper bound kSignalBounds; the last: above all.
  std::array<std::int64_t, kSignalBounds.size() + 1> signals{};
  double signal_sum = 0;
};

class Scheduler {
 public:
  Scheduler(const SchedulerOptions& options, KvManager& kv, const Clock& clock);
  ~Scheduler();

  /// Queues a request. InvalidArgument: empty prompt, max_new_tokens < 1, odd min_bits. TooLarge:
  /// prompt + max_new_tokens over the context, or over what the pool could ever hold (the message
  /// has both numbers). ResourceExhausted: the queue is full.
  Status Add(SchedRequest request);
  /// Forgets a request in any state, also in a step in flight. Unknown ids are ignored. No event
  /// follows.
  void Cancel(RequestId id);

  /// Decides on the next step and commits it: blocks are allocated, measures of the ladder taken.
  /// Polls copies. No step may be in flight.
  StepPlan Plan();
  /// While the one step in flight runs: the step after it, so that it can start as soon as that one
  /// has ended and before it is settled. Its requests go on where they will stand then; tokens that
  /// are not sampled yet are filled in (StepPlan::Fill). A request that turns out to be finished
  /// takes part all the same, and its result is ignored. Empty, whatever idle() and wait() say: a
  /// request would have to leave the device, a request has a capacity, or there is nothing to do:
  /// Settle, then Plan. Measures taken before that was known stay.
  StepPlan PlanNext();
  /// While a planned step runs on a device that works by itself: what need not hold up the next
  /// plan (write-aheads are started). A caller that never calls it has Plan do it.
  void WhileRunning();
  /// Takes the results of a plan that has run (Backend::EndStep has returned); in the order in
  /// which steps were planned. `sampled` matches plan.samplers() in order; requests cancelled
  /// meanwhile are included and ignored.
  void Settle(StepPlan plan, std::span<const SampledToken> sampled);
  /// The plan did not run or failed: its requests stand where they stood before. Call it in
  /// Settle's place.
  void Abandon(StepPlan plan);

  /// What happened since the last call; the requests in it are gone.
  std::vector<SchedEvent> TakeEvents();
  /// Of a live request, or of one that ended since the last Plan(); nothing for others.
  std::optional<RequestKvFacts> Facts(RequestId id) const;

  /// "waiting", "loading", "running", "offloading" or "offloaded"; "gone" for others.
  std::string_view StateOf(RequestId id) const;

  SchedStats Stats() const;
  /// Largest prompt + output that Add takes: the smaller of max_context and what the pool holds at
  /// the ceiling.
  std::int64_t MaxContext() const;
  const DecisionLog& Log() const { return kv_.log(); }
  bool HasWork() const;

  /// Every invariant that can be checked, in O(everything). Called after each step in checked
  /// builds, and by tests.
  void Audit() const;

 private:
  struct Impl;
  KvManager& kv_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pliant
