// Room: backend. Sequences whose blocks are watched (SequenceSlice::watched): the block tables that
// attention reads for them, and the weights it reports. Owner thread, but for Fold.
//
// Attention does not care for the order of blocks. So the blocks that take part are put one behind
// the other, the one being written last, and kernels see a shorter context without gaps; blocks
// that only have K are put into a table of their own, of which kernels make the largest logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kv_attention.h"

namespace pliant {

/// The table of one watched sequence.
struct WatchedTable {
  std::int32_t first_taking_part = 0, taking_part = 0;  // into WatchedBlocks' views
  std::int32_t first_watched = 0, watched = 0;          // the same: blocks with K only
  std::int32_t tokens = 0;       // of the blocks taking part, the row's included
  std::size_t first_weight = 0;  // into weights: [kv_heads][taking_part + watched]

  int TopSplits() const { return SplitsFor(taking_part) + SplitsFor(watched); }
  static int SplitsFor(int blocks) { return (blocks + kSplitBlocks - 1) / kSplitBlocks; }
};

class WatchedBlocks {
 public:
  /// Starts a step. The batch must outlive it.
  void Start(const StepBatch& batch, int kv_heads);
  bool any() const { return any_; }
  /// Null for sequences that are not watched.
  const WatchedTable* TableOf(std::size_t sequence) const {
    return table_of_[sequence] < 0 ? nullptr : &tables_[table_of_[sequence]];
  }
  const BlockView* Views(std::int32_t first) const { return views_.data() + first; }

  /// One KV head of one layer is done. `tops` [splits][columns][kSplitBlocks]: the splits of blocks
  /// taking part, then those of the watched ones. `total`: the merged partial results
  /// [columns][PartialFloats]. Different heads may be folded at the same time.
  void Fold(const WatchedTable& table, int kv_head, int head_dim, int columns, float total_unit,
            const float* tops, const float* total);

  /// [blocks of the batch]: what Backend::BlockWeights reports.
  std::span<const float> Gather();

 private:
  const StepBatch* batch_ = nullptr;
  int kv_heads_ = 0;
  bool any_ = false;
  std::vector<std::int32_t> table_of_;  // [sequences]
  std::vector<WatchedTable> tables_;
  std::vector<BlockView> views_;
  std::vector<std::int32_t> origin_;  // [views]: index into the batch's blocks
  std::vector<float> weights_;
  std::vector<float> gathered_;
};

}  // namespace pliant
