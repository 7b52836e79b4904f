// Room: backend/cuda. What a step's kernels need to know, laid out in one pinned buffer and sent to
// the device in one copy: tokens, positions, cache slots, the block table, and how attention is
// divided between the decode kernel (sequences of few new rows) and the prefill kernel. Owned by
// the engine thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/attention_decode/attention_decode.h"
#include "backend/cuda/attention_prefill/attention_prefill.h"
#include "backend/cuda/device_memory.h"

namespace pliant::cuda {

/// Sequences of at most so many new rows are worked by the decode kernel, row by row.
inline constexpr int kDecodeRows = 4;

/// Sequences whose K and V are gathered together.
struct PrefillGroup {
  int first_source = 0, sources = 0;  // blocks
  int first_tile = 0, tiles = 0;
};

class StepInputs {
 public:
  /// Lays a checked batch out on the host, all but its tokens and sampling; the step before may be
  /// under way. `group_blocks`: gathered blocks a prefill group may have, unless one
  /// sequence needs more. `padded_rows`: at least the batch's rows; rows beyond them are padding
  /// (token 0, no slot, no attention). `padded_logits` likewise: logits of row 0, not sampled.
  /// Where an array lies depends on the padded numbers alone, except for blocks, sources and tiles.
  /// `tile_rows`: of prefill attention's tiles.
  Status Lay(const StepBatch& batch, int padded_rows, int padded_logits, std::size_t group_blocks,
             int tile_rows);
  /// Cuts the decode rows for this launch. Once a step. With `fixed_cut_rows` the merge is launched
  /// for so many rows; false when the plan has more.
  Result<bool> PlanAttention(const DecodeLaunch& launch, std::optional<int> fixed_cut_rows);
  /// Fills in tokens and sampling of the batch that was laid out, and sends it.
  Status Send(const StepBatch& batch, const Stream& stream);
  void SendPlan(const Stream& stream) { plan_mirror_.Send(stream); }

  const std::int32_t* tokens() const { return At<std::int32_t>(tokens_at_); }
  const std::int32_t* positions() const { return At<std::int32_t>(positions_at_); }
  const std::int32_t* slots() const { return At<std::int32_t>(slots_at_); }
  const std::int32_t* logit_rows() const { return At<std::int32_t>(logit_rows_at_); }
  const RowSampling* sampling() const { return At<RowSampling>(sampling_at_); }
  /// Null until there were any. The kernel may use them up.
  LogitChange* changes() const {
    return reinterpret_cast<LogitChange*>(change_mirror_.device.data());
  }
  const std::uint32_t* blocks() const { return At<std::uint32_t>(blocks_at_); }
  const int2* sources() const { return At<int2>(sources_at_); }
  const PrefillTile* tiles() const { return At<PrefillTile>(tiles_at_); }
  int rows() const { return rows_; }                // with padding
  int logit_count() const { return logit_count_; }  // with padding
  /// Counts the times that a buffer moved: whoever keeps addresses must fetch them anew.
  std::uint64_t moves() const { return step_.moves + plan_mirror_.moves + change_mirror_.moves; }
  const std::vector<PrefillGroup>& prefill() const { return groups_; }
  /// Blocks of the largest group.
  int gathered_blocks() const { return gathered_blocks_; }
  bool has_decode() const { return !items_.empty(); }

  /// After PlanAttention: sets what of `args` belongs to the plan.
  void SetPlan(DecodeArgs& args) const;
  std::size_t planned_segments() const { return plan_.segments.size(); }

 private:
  /// Pinned buffers and their copy on the device. Two, filled in turns: what one of them sent may
  /// be on its way while the next step is laid out in the other, but the step before that has
  /// ended.
  struct Mirror {
    PinnedArray<std::byte> hosts[2];
    DeviceArray<std::byte> device;
    int turn = 0;
    std::size_t used = 0;
    std::uint64_t moves = 0;
    PinnedArray<std::byte>& host() { return hosts[turn]; }
    Status Reserve(std::size_t bytes);  // and takes the other buffer
    template <typename T>
    std::size_t Put(std::span<const T> values);
    template <typename T>
    void PutAt(std::size_t at, std::span<const T> values);
    void Send(const Stream& stream);
  };
  template <typename T>
  const T* At(std::size_t offset) const {
    return reinterpret_cast<const T*>(step_.device.data() + offset);
  }

  Mirror step_, plan_mirror_, change_mirror_;
  std::size_t tokens_at_ = 0, positions_at_ = 0, slots_at_ = 0, logit_rows_at_ = 0,
              sampling_at_ = 0, blocks_at_ = 0, sources_at_ = 0, tiles_at_ = 0;
  std::size_t segments_at_ = 0, ranges_at_ = 0, cut_rows_at_ = 0;
  int rows_ = 0, logit_count_ = 0, gathered_blocks_ = 0;
  std::span<const BlockView> block_views_;  // the batch's, borrowed until EndStep
  std::vector<QueryItem> items_;
  std::vector<PrefillGroup> groups_;
  std::vector<int2> source_list_;
  std::vector<PrefillTile> tile_list_;
  std::vector<std::int32_t> slot_list_;
  std::vector<std::int32_t> padded_list_;
  std::vector<CutRow> cut_row_list_;
  DecodePlan plan_;
};

}  // namespace pliant::cuda
