// Room: backend. Sequences with a RetainedHistory: the block tables that attention reads for them,
// and what is done with the logits. Owner thread between steps; Mind from the threads of a step.
//
// Attention does not care for the order of blocks. So the kept blocks and the whole ones are put
// one behind the other, the one being written last, and kernels see a shorter context without gaps;
// dropped blocks, of which plane 0 of K is there, are put into a table of their own, of which
// kernels make logits only.
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
  std::int32_t tokens = 0;    // of the blocks taking part, the row's included

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

/// What attention made of one unit: logits in units of log2, [splits][columns][kSplitTokens], the
/// dropped blocks' behind the others'; and the merged partial results [columns][PartialFloats].
struct UnitLogits {
  int columns = 0;
  int head_dim = 0;
  float total_unit = 0;  // AttentionKernel::total_unit
  const float* taking_part = nullptr;
  const float* dropped = nullptr;
  const float* total = nullptr;
};

struct HistoryKernel {
  /// masses [2 * dropped blocks], as RetainedHistory::Wanted reads them; what is surely too small
  /// to be wanted is 0.
  void (*page_masses)(const HistoryTable& table, int unit, const UnitLogits& logits,
                      std::vector<float>& masses);
  /// shares [table.tokens], as RetainedHistory::AddScores reads them.
  void (*shares)(const HistoryTable& table, const UnitLogits& logits, std::vector<float>& shares);
};
const HistoryKernel& ChooseHistoryKernel(CpuLevel level);

}  // namespace pliant
