// Room: sched. The step that the scheduler has decided on and committed, as a value: it owns the
// arrays behind a StepBatch. Plan it, run it, settle it. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/ids.h"
#include "sched/sched_request.h"

namespace pliant {

class StepPlan {
 public:
  /// One request's part of the step.
  struct Entry {
    RequestId request;
    std::int32_t rows = 0;
    bool samples = false;  // its last row has a logit row
  };

  StepPlan() = default;
  StepPlan(StepPlan&&) = default;
  StepPlan& operator=(StepPlan&&) = default;
  StepPlan(const StepPlan&) = delete;
  StepPlan& operator=(const StepPlan&) = delete;

  /// Nothing to run now. Not settled. Then: idle() or wait() says what to do next.
  bool empty() const { return entries_.empty(); }
  /// With empty(): no request waits or runs, no copy is under way; sleep until the next Add.
  bool idle() const { return empty() && idle_; }
  /// With empty() and not idle(): copies or fenced pages are pending; plan again after this long,
  /// or after a new Add or Cancel.
  Nanoseconds wait() const { return wait_; }

  /// Views into this plan; valid while it lives and is not moved from.
  StepBatch batch() const {
    return {.tokens = tokens_,
            .positions = positions_,
            .sequences = slices_,
            .blocks = blocks_,
            .logit_rows = logit_rows_,
            .step = step_};
  }
  /// The request that samples logit row i.
  std::span<const RequestId> samplers() const { return samplers_; }
  std::span<const Entry> entries() const { return entries_; }  // one per sequence of the batch
  /// Does a row of this plan wait for a token that the step before it samples? Then Fill comes
  /// before the plan is run.
  bool lacks_tokens() const { return !tokens_to_come_.empty(); }
  /// `sampled`: what Settle gets for the step before.
  void Fill(std::span<const SampledToken> sampled);
  /// Number of this step, from 1; steps are settled in this order.
  std::uint64_t step() const { return step_; }
  std::int32_t rows() const { return static_cast<std::int32_t>(tokens_.size()); }
  std::int32_t prefill_rows() const { return prefill_rows_; }

 private:
  friend class Scheduler;
  void Clear();  // all but the block table, most of which the next step will have too

  /// Where in blocks_ an entry's views lie, with room for some more.
  struct Region {
    std::int32_t first = 0, capacity = 0;
    std::uint64_t mark = 0;  // KvManager::CopyViews
  };

  std::vector<Entry> entries_;
  std::vector<std::int32_t> tokens_, positions_, logit_rows_;
  std::vector<SequenceSlice> slices_;
  std::vector<BlockView> blocks_;
  std::vector<Region> regions_;
  std::vector<RequestId> samplers_;
  struct TokenToCome {
    RequestId request;
    std::int32_t row;  // into tokens_
  };
  std::vector<TokenToCome> tokens_to_come_;
  std::vector<std::shared_ptr<RetainedHistory>> histories_;  // of the slices: kept until it has run
  std::uint64_t step_ = 0;
  std::int32_t prefill_rows_ = 0;
  bool idle_ = true;
  Nanoseconds wait_ = 0;
};

}  // namespace pliant
