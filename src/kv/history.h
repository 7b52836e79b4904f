// Room: kv. How many blocks of one request's history take part in attention, when it has a capacity
// (DESIGN section 5): when it grows, and when a block must be dropped. What is dropped and what
// comes back is the backend's part (backend/retained_history.h). Bookkeeping only: no pages, no
// copies. Owned by whoever owns the request.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "backend/retained_history.h"
#include "base/status.h"
#include "kv/block_state.h"

namespace pliant {

/// How much of its history a request wants to take part in attention.
struct Capacity {
  enum class Kind : std::uint8_t { kDefault, kFull, kFixed, kGrow } kind = Kind::kDefault;
  std::int64_t tokens = 0;  // kFixed
  bool operator==(const Capacity&) const = default;
};
/// "full", "grow", or a number of tokens.
Result<Capacity> ParseCapacity(std::string_view text);

/// What makes a growing capacity grow.
enum class GrowthSignal : std::uint8_t {
  // Pages that returned, a token and unit, since the last block: asked when a block is full.
  kReturns,
  // Of the queries' short and long running means: asked whenever half a block is full, as the short
  // mean forgets sooner than a block fills. Each half that says so counts half a block.
  kDivergence,
  // The chance that more will be needed, by weights fitted to the model (RetentionOptions::
  // growth_weights): asked, and counted, in the same way.
  kLearned,
};

/// Upper bounds by which growth signals are counted.
inline constexpr std::array<double, 10> kSignalBounds = {0.003, 0.01, 0.02, 0.03, 0.05,
                                                         0.1,   0.3,  0.5,  0.7,  0.9};

/// What a server lets its requests have.
struct HistoryOptions {
  Capacity default_capacity{.kind = Capacity::Kind::kFull, .tokens = 0};
  RetentionOptions retention;
  std::int32_t recent_blocks = 1;  // last full blocks, always whole
  Level kept_level = 0;            // of kept tokens, but not below the request's floor
  // kGrow: blocks to begin with, and with start_from_prompt those of the prompt besides.
  std::int32_t start_blocks = 6;
  bool start_from_prompt = false;
  GrowthSignal growth = GrowthSignal::kReturns;
  float grow_above = 0.2f;
  /// What a history's tables are made with.
  RetentionOptions RetentionOf(bool grows) const {
    RetentionOptions options = retention;
    options.query_means = grows && growth != GrowthSignal::kReturns;
    if (!grows || growth != GrowthSignal::kLearned) options.growth_weights = nullptr;
    return options;
  }
  bool operator==(const HistoryOptions&) const = default;
};

/// The same for a server where what is dropped is gone (quality.md says how the numbers came
/// about): likeness counts more, more of what is recent stays, and the divergence of the queries
/// tells when to grow.
HistoryOptions DroppingForGood(HistoryOptions options);

/// The same where fitted weights tell when to grow, above what they say.
HistoryOptions GrowingBy(HistoryOptions options, std::shared_ptr<const GrowthWeights> weights);

class History {
 public:
  /// `capacity` blocks take part at most, the one being written included. With `grows` that is how
  /// many to begin with.
  History(const HistoryOptions& options, std::int32_t capacity, bool grows);

  std::int32_t capacity() const { return capacity_; }
  double signal() const { return signal_; }  // last one asked for; 0 before
  enum class Growth : std::uint8_t {
    kNotAsked,  // the signal: nothing was filled, or the capacity is fixed
    kStayed,
    kGrew,
  };
  /// The cache holds so many tokens, and a row is to be added. To be called before every row of a
  /// decode.
  Growth Extend(std::int64_t tokens, const RetainedHistory& retained);
  /// Extend would find nothing to do: no block has begun since it was called, nothing is asked.
  bool IsUpToDate(std::int64_t tokens) const;
  /// A sequence of so many blocks must drop one: block retained.frontier().
  bool MustDrop(std::int32_t blocks, const RetainedHistory& retained) const {
    return retained.TakingPart(blocks) > capacity_ &&
           retained.frontier() + recent_blocks_ + 1 < blocks;
  }
  /// What is dropped next goes into a kept block of its own: there are not yet as many as there may
  /// be.
  bool MayAddKept(const RetainedHistory& retained) const {
    return retained.kept_blocks() < capacity_ - recent_blocks_ - 1;
  }

 private:
  std::int32_t recent_blocks_;
  GrowthSignal growth_;
  float grow_above_;
  std::int32_t capacity_;
  bool grows_;
  std::int32_t blocks_ = 0;    // at the last call, the one being written included
  std::int64_t asked_at_ = 0;  // tokens
  int halves_ = 0;             // of a block, by which it should grow
  std::int64_t returned_before_ = 0;
  double signal_ = 0;
};

}  // namespace pliant
