// Room: kv. Which blocks of one request's history take part in attention, when it has a capacity
// (DESIGN section 5): what is looked at stays, the least looked at leaves, and a block that left
// comes back when a head asks for it. Bookkeeping only: no pages, no copies. Owned by whoever owns
// the request.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace pliant {

/// How much of its history a request wants to take part in attention.
struct Capacity {
  enum class Kind : std::uint8_t { kDefault, kFull, kFixed, kGrow } kind = Kind::kDefault;
  std::int64_t tokens = 0;  // kFixed
  bool operator==(const Capacity&) const = default;
};
/// "full", "grow", or a number of tokens.
Result<Capacity> ParseCapacity(std::string_view text);

/// What a server lets its requests have.
struct HistoryOptions {
  Capacity default_capacity{.kind = Capacity::Kind::kFull, .tokens = 0};
  bool returns = true;             // dropped blocks come back, where there is an exact store
  std::int32_t sink_blocks = 1;    // first blocks, never dropped
  std::int32_t recent_blocks = 2;  // last full blocks, never dropped
  float memory_steps = 256;        // a block's score falls to 1/e over so many steps
  float return_weight = 0.3f;      // a dropped block returns above this
  std::int32_t most_returns = 2;   // a token is computed again for so many returns
  std::int32_t start_blocks = 16;  // kGrow: capacity at the start
  float grow_above =
      0.05f;  // kGrow: one block more when the last 32 tokens wanted more blocks than this each
  bool operator==(const HistoryOptions&) const = default;
};

class History {
 public:
  /// `capacity` blocks take part at most, the one being written included. With `grows` that is how
  /// many to begin with.
  History(const HistoryOptions& options, std::int32_t capacity, bool grows);

  /// The request has so many blocks now; new ones take part. True when the capacity grew.
  bool Extend(std::int32_t blocks);
  std::int32_t blocks() const { return static_cast<std::int32_t>(blocks_.size()); }
  std::int32_t taking_part() const { return taking_part_; }
  bool TakesPart(std::int32_t block) const { return blocks_[block].takes_part; }
  bool OverCapacity() const { return taking_part_ > capacity_; }
  std::int32_t capacity() const { return capacity_; }
  const HistoryOptions& options() const { return options_; }

  /// What the step looked at: Backend::BlockWeights of this request's blocks.
  void Note(std::span<const float> weights);
  /// The dropped block that a head asks for most, if it may return; -1: none.
  std::int32_t Wanted(std::span<const float> weights) const;
  /// The block that should be dropped next among those that `may(block)` allows; -1: none.
  template <typename F>
  std::int32_t Victim(F&& may) const {
    std::int32_t victim = -1;
    const std::int32_t end = blocks() - 1 - options_.recent_blocks;
    for (std::int32_t b = options_.sink_blocks; b < end; ++b) {
      if (!blocks_[b].takes_part || (victim >= 0 && blocks_[b].score >= blocks_[victim].score))
        continue;
      if (may(b)) victim = b;
    }
    return victim;
  }

  void Drop(std::int32_t block);
  void Return(std::int32_t block);

 private:
  struct Entry {
    bool takes_part = true;
    float score = 0;  // largest weight seen, fading
  };
  HistoryOptions options_;
  float fade_;
  std::int32_t capacity_;
  bool grows_;
  std::int32_t recent_returns_ = 0;  // since the block being written was begun
  std::vector<Entry> blocks_;
  std::int32_t taking_part_ = 0;
};

}  // namespace pliant
