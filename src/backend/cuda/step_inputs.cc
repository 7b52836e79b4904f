#include "backend/cuda/step_inputs.h"

#include <algorithm>
#include <cstring>

namespace pliant::cuda {
namespace {

constexpr std::size_t kAlign = 256;
constexpr std::size_t kLeastBytes = 1u << 20;
std::size_t Aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// Single rows of histories with a capacity are attended to by history_attention.
bool HasKernelOfItsOwn(const SequenceSlice& slice) {
  return slice.history != nullptr && slice.rows == 1;
}

static_assert(sizeof(BlockView) == 2 * kPlanes * sizeof(std::uint32_t),
              "the block table is sent as it lies in the batch");

}  // namespace

Status StepInputs::Mirror::Reserve(std::size_t bytes) {
  used = 0;
  turn = 1 - turn;
  // Twice what is needed, and not too little to begin with: a move costs a synchronisation.
  const std::size_t size = Aligned(std::max(2 * bytes, kLeastBytes));
  if (bytes > device.size()) {
    ++moves;
    PLIANT_ASSIGN_OR_RETURN(device, DeviceArray<std::byte>::Make(size, "step inputs"));
  }
  if (bytes > host().size()) {
    PLIANT_ASSIGN_OR_RETURN(host(), PinnedArray<std::byte>::Make(size, "step inputs"));
  }
  return {};
}

template <typename T>
std::size_t StepInputs::Mirror::Put(std::span<const T> values) {
  const std::size_t at = used;
  used = Aligned(at + values.size_bytes());
  PutAt(at, values);
  return at;
}

template <typename T>
void StepInputs::Mirror::PutAt(std::size_t at, std::span<const T> values) {
  PLIANT_CHECK(used <= host().size() && at + values.size_bytes() <= used,
               "step inputs pass what was reserved");
  if (!values.empty()) std::memcpy(host().data() + at, values.data(), values.size_bytes());
}

void StepInputs::Mirror::Send(const Stream& stream) {
  if (used == 0) return;
  PLIANT_CUDA_CHECK(
      cudaMemcpyAsync(device.data(), host().data(), used, cudaMemcpyHostToDevice, stream.get()));
}

Status StepInputs::Lay(const StepBatch& batch, int padded_rows, int padded_logits,
                       std::size_t group_blocks, int tile_rows) {
  rows_ = padded_rows;
  logit_count_ = padded_logits;
  PLIANT_CHECK(rows_ >= static_cast<int>(batch.tokens.size()) &&
                   logit_count_ >= static_cast<int>(batch.logit_rows.size()),
               "a step is padded to fewer rows than it has");
  block_views_ = batch.blocks;
  items_.clear();
  groups_.clear();
  source_list_.clear();
  tile_list_.clear();
  slot_list_.assign(rows_, -1);
  gathered_blocks_ = 0;
  for (const SequenceSlice& slice : batch.sequences) {
    for (int i = 0; i < slice.rows; ++i) {
      const int at = slice.context + i;
      slot_list_[slice.first_row + i] =
          (slice.first_block + at / kBlockTokens) * kBlockTokens + at % kBlockTokens;
      if (slice.rows <= kDecodeRows && !HasKernelOfItsOwn(slice))
        items_.push_back({slice.first_row + i, slice.first_block, at + 1});
    }
    if (slice.rows <= kDecodeRows) continue;
    const int tokens = slice.context + slice.rows,
              blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
    if (groups_.empty() ||
        static_cast<std::size_t>(groups_.back().sources + blocks) > group_blocks) {
      groups_.push_back(
          {static_cast<int>(source_list_.size()), 0, static_cast<int>(tile_list_.size()), 0});
    }
    PrefillGroup& group = groups_.back();
    const auto views = block_views_.subspan(slice.first_block, blocks);
    const bool holes = std::any_of(views.begin(), views.end(), [](const BlockView& view) {
      return !view.k[0].valid() || !view.v[0].valid();
    });
    for (int i = 0; i < slice.rows; i += tile_rows) {
      tile_list_.push_back({slice.first_row + i, std::min(tile_rows, slice.rows - i),
                            slice.context + i, group.sources, holes});
    }
    for (int b = 0; b < blocks; ++b)
      source_list_.push_back(
          {slice.first_block + b, std::min(kBlockTokens, tokens - b * kBlockTokens)});
    group.sources += blocks;
    group.tiles = static_cast<int>(tile_list_.size()) - group.first_tile;
    gathered_blocks_ = std::max(gathered_blocks_, group.sources);
  }
  for (const PrefillGroup& group : groups_) {
    std::sort(tile_list_.begin() + group.first_tile,
              tile_list_.begin() + group.first_tile + group.tiles,
              [](const PrefillTile& a, const PrefillTile& b) {
                return a.first_position < b.first_position;
              });
  }
  const std::size_t rows = static_cast<std::size_t>(rows_),
                    logits = static_cast<std::size_t>(logit_count_);
  PLIANT_RETURN_IF_ERROR(step_.Reserve(
      rows * 3 * sizeof(std::int32_t) + logits * (sizeof(std::int32_t) + sizeof(RowSampling)) +
      batch.blocks.size_bytes() + source_list_.size() * sizeof(int2) +
      tile_list_.size() * sizeof(PrefillTile) + 10 * kAlign));
  const auto put_padded = [&](std::span<const std::int32_t> values, std::size_t count) {
    padded_list_.assign(values.begin(), values.end());
    padded_list_.resize(count, 0);
    return step_.Put<std::int32_t>(padded_list_);
  };
  tokens_at_ = put_padded(batch.tokens, rows);
  positions_at_ = put_padded(batch.positions, rows);
  slots_at_ = step_.Put<std::int32_t>(slot_list_);
  logit_rows_at_ = put_padded(batch.logit_rows, logits);
  sampling_at_ = step_.Put<RowSampling>(std::vector<RowSampling>(logits, {.on_host = 1}));
  blocks_at_ = step_.Put(batch.blocks);
  sources_at_ = step_.Put<int2>(source_list_);
  tiles_at_ = step_.Put<PrefillTile>(tile_list_);
  return {};
}

Status StepInputs::Send(const StepBatch& batch, const Stream& stream) {
  // Apart, since how many there are must not decide where a graph finds anything.
  if (!batch.changes.empty()) {
    PLIANT_RETURN_IF_ERROR(change_mirror_.Reserve(batch.changes.size_bytes() + kAlign));
    change_mirror_.Put(batch.changes);
    change_mirror_.Send(stream);
  }
  step_.PutAt(tokens_at_, batch.tokens);
  step_.PutAt(sampling_at_, batch.sampling);
  step_.Send(stream);
  return {};
}

Result<bool> StepInputs::PlanAttention(const DecodeLaunch& launch,
                                       std::optional<int> fixed_cut_rows) {
  PlanDecode(items_, block_views_, launch.PlanGroups(), plan_);
  cut_row_list_ = plan_.cut_rows;
  bool fits = true;
  if (fixed_cut_rows) {
    const auto count = static_cast<std::size_t>(*fixed_cut_rows);
    fits = cut_row_list_.size() <= count;
    if (fits) cut_row_list_.resize(count, CutRow{});
  }
  PLIANT_RETURN_IF_ERROR(plan_mirror_.Reserve(plan_.segments.size() * sizeof(Segment) +
                                              plan_.ranges.size() * sizeof(Range) +
                                              cut_row_list_.size() * sizeof(CutRow) + 6 * kAlign));
  ranges_at_ = plan_mirror_.Put<Range>(plan_.ranges);
  cut_rows_at_ = plan_mirror_.Put<CutRow>(cut_row_list_);
  segments_at_ = plan_mirror_.Put<Segment>(plan_.segments);
  return fits;
}

void StepInputs::SetPlan(DecodeArgs& args) const {
  const std::byte* base = plan_mirror_.device.data();
  args.segments = reinterpret_cast<const Segment*>(base + segments_at_);
  args.ranges = reinterpret_cast<const Range*>(base + ranges_at_);
  args.cut_rows = reinterpret_cast<const CutRow*>(base + cut_rows_at_);
  args.max_cut_rows = static_cast<int>(cut_row_list_.size());
}

}  // namespace pliant::cuda
