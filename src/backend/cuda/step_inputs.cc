#include "backend/cuda/step_inputs.h"

#include <algorithm>
#include <cstring>

namespace pliant::cuda {
namespace {

constexpr std::size_t kAlign = 256;
std::size_t Aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

static_assert(sizeof(BlockView) == 2 * kPlanes * sizeof(std::uint32_t),
              "the block table is sent as it lies in the batch");

}  // namespace

Status StepInputs::Mirror::Reserve(std::size_t bytes) {
  used = 0;
  if (bytes <= host.size()) return {};
  const std::size_t size = Aligned(bytes + bytes / 2);
  PLIANT_ASSIGN_OR_RETURN(host, PinnedArray<std::byte>::Make(size, "step inputs"));
  PLIANT_ASSIGN_OR_RETURN(device, DeviceArray<std::byte>::Make(size, "step inputs"));
  return {};
}

template <typename T>
std::size_t StepInputs::Mirror::Put(std::span<const T> values) {
  const std::size_t at = used;
  if (!values.empty()) std::memcpy(host.data() + at, values.data(), values.size_bytes());
  used = Aligned(at + values.size_bytes());
  PLIANT_CHECK(used <= host.size(), "step inputs pass what was reserved");
  return at;
}

void StepInputs::Mirror::Send(const Stream& stream) const {
  if (used == 0) return;
  PLIANT_CUDA_CHECK(
      cudaMemcpyAsync(device.data(), host.data(), used, cudaMemcpyHostToDevice, stream.get()));
}

Status StepInputs::Begin(const StepBatch& batch, std::size_t group_blocks, const Stream& stream) {
  rows_ = static_cast<int>(batch.tokens.size());
  logit_count_ = static_cast<int>(batch.logit_rows.size());
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
      if (slice.rows <= kDecodeRows)
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
    for (int i = 0; i < slice.rows; i += kPrefillTileRows) {
      tile_list_.push_back({slice.first_row + i, std::min(kPrefillTileRows, slice.rows - i),
                            slice.context + i, group.sources});
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
  PLIANT_RETURN_IF_ERROR(step_.Reserve(
      batch.tokens.size_bytes() * 3 + batch.logit_rows.size_bytes() + batch.blocks.size_bytes() +
      source_list_.size() * sizeof(int2) + tile_list_.size() * sizeof(PrefillTile) + 8 * kAlign));
  tokens_at_ = step_.Put(batch.tokens);
  positions_at_ = step_.Put(batch.positions);
  slots_at_ = step_.Put<std::int32_t>(slot_list_);
  logit_rows_at_ = step_.Put(batch.logit_rows);
  blocks_at_ = step_.Put(batch.blocks);
  sources_at_ = step_.Put<int2>(source_list_);
  tiles_at_ = step_.Put<PrefillTile>(tile_list_);
  step_.Send(stream);
  return {};
}

Status StepInputs::PlanAttention(const DecodeLaunch& launch, const Stream& stream) {
  PlanDecode(items_, block_views_, launch.PlanGroups(), plan_);
  PLIANT_RETURN_IF_ERROR(plan_mirror_.Reserve(plan_.segments.size() * sizeof(Segment) +
                                              plan_.ranges.size() * sizeof(Range) +
                                              plan_.cut_rows.size() * sizeof(CutRow) + 6 * kAlign));
  segments_at_ = plan_mirror_.Put<Segment>(plan_.segments);
  ranges_at_ = plan_mirror_.Put<Range>(plan_.ranges);
  cut_rows_at_ = plan_mirror_.Put<CutRow>(plan_.cut_rows);
  plan_mirror_.Send(stream);
  return {};
}

void StepInputs::SetPlan(DecodeArgs& args) const {
  const std::byte* base = plan_mirror_.device.data();
  args.segments = reinterpret_cast<const Segment*>(base + segments_at_);
  args.ranges = reinterpret_cast<const Range*>(base + ranges_at_);
  args.cut_rows = reinterpret_cast<const CutRow*>(base + cut_rows_at_);
  args.max_cut_rows = static_cast<int>(plan_.cut_rows.size());
}

}  // namespace pliant::cuda
