// Room: backend. Sequences with a RetainedHistory: the block tables that attention reads for them,
// and what is done with weights and logits. Owner thread between steps; Mind from the threads of a
// step.
//
// Attention does not care for the order of blocks. So the kept blocks and the whole ones are put
// one behind the other, the one being written last, and kernels see a shorter context without gaps;
// dropped blocks, of which plane 0 of K is there, are put into a table of their own, whose keys are
// watched (kv_watch.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kv_attention.h"

namespace pliant {

/// The table of one sequence.
struct HistoryTable {
  RetainedHistory* history = nullptr;
  std::span<const BlockView> kept;
  std::int32_t first_taking_part = 0, taking_part = 0;  // into HistoryTables' views
  std::int32_t first_dropped = 0, dropped = 0;          // the same: blocks with K only
  std::int32_t tokens = 0;  // of the blocks taking part, the row's included

  std::int32_t watched() const { return dropped * kBlockTokens; }
  static int SplitsFor(int blocks) { return (blocks + kSplitBlocks - 1) / kSplitBlocks; }
};

class HistoryTables {
 public:
  /// Starts a step. The batch must outlive it.
  void Start(const StepBatch& batch);
  /// Null for sequences without a history.
  const HistoryTable* TableOf(std::size_t sequence) const {
    return table_of_[sequence] < 0 ? nullptr : &tables_[table_of_[sequence]];
  }
  const BlockView* Views(std::int32_t first) const { return views_.data() + first; }

 private:
  std::vector<std::int32_t> table_of_;  // [sequences]
  std::vector<HistoryTable> tables_;
  std::vector<BlockView> views_;
};

/// What attention made of one unit.
struct UnitAttention {
  int columns = 0;
  int head_dim = 0;
  const AttentionKernel* kernel = nullptr;
  const float* weights = nullptr;  // QueryTile::weights of one split after the other
  const float* bases = nullptr;    // QueryTile::bases, the same
  const float* watched = nullptr;  // logits of dropped tokens: [splits][columns][kSplitTokens]
  const float* total = nullptr;    // merged partial results: [columns][PartialFloats]
  bool squared = false;            // RetentionOptions::squared
};

/// The most query heads of a KV head that a history can have.
inline constexpr int kMaxHistoryColumns = 16;

struct HistoryKernel {
  /// masses [2 * dropped blocks], as RetainedHistory::Wanted reads them; what is surely too small
  /// to be wanted is 0. False: all are.
  bool (*page_masses)(const HistoryTable& table, int unit, const UnitAttention& attention,
                      std::vector<float>& masses);
  /// Adds to RetainedHistory::Scores what each of `tokens` that take part got.
  void (*add_scores)(int tokens, const UnitAttention& attention, std::span<float> scores);
};
const HistoryKernel& ChooseHistoryKernel(CpuLevel level);

}  // namespace pliant
