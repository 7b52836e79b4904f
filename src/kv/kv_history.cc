// Sequences with a capacity: kept blocks, and what becomes of the blocks they drop.
#include <algorithm>

#include "kv/kv_manager.h"

namespace pliant {
namespace {

/// Where the originals of a sequence's blocks lie: on the device as far as they still are there,
/// else in the exact store.
class Originals final : public RowSource {
 public:
  Originals(const Sequence& sequence, const ExactStore* store, const KvGeometry& geometry)
      : sequence_(&sequence), store_(store), geometry_(geometry) {}

  /// The sequence has no blocks any more.
  void Detach() { sequence_ = nullptr; }

  PlanePlace Find(std::int32_t index, bool is_v, int plane, int unit,
                  std::span<std::byte> buffer) override {
    SlotId slot;
    if (const PageId page = Resident(index, is_v, plane, slot); page.valid()) return {.page = page};
    if (!slot.valid()) return {};
    if (unit == kAllUnits) {
      const ByteRange all[] = {{0, geometry_.PageBytes()}};
      return {.host = store_->Peek(slot, all, buffer)};
    }
    const int layer = unit / geometry_.kv_heads, head = unit % geometry_.kv_heads;
    const std::size_t rows = geometry_.RowOffset(layer, head, 0);
    const std::size_t scales = geometry_.ScaleOffset(layer, head, 0);
    const ByteRange ranges[] = {
        {rows, rows + geometry_.UnitBytes()},
        {scales, scales + kBlockTokens * sizeof(std::uint16_t)},  // in plane 0 only
    };
    return {.host = store_->Peek(slot, std::span(ranges).first(plane == 0 ? 2 : 1), buffer)};
  }
  PlanePlace Place(std::int32_t index, bool is_v, int plane) override {
    SlotId slot;
    if (const PageId page = Resident(index, is_v, plane, slot); page.valid()) return {.page = page};
    return {.host = slot.valid() ? store_->Address(slot) : nullptr};
  }
  void Places(std::int32_t index, std::span<PlanePlace, 2 * kPlanes> places) override {
    for (int p = 0; p < 2 * kPlanes; ++p)
      places[p] = Originals::Place(index, p >= kPlanes, p % kPlanes);
  }
  std::uint64_t PlaceChanges() const override {
    return sequence_ == nullptr ? 0 : sequence_->place_changes;
  }

 private:
  /// The plane's page; else `slot` is where it is in the store, if it is.
  PageId Resident(std::int32_t index, bool is_v, int plane, SlotId& slot) const {
    const Block* block = sequence_ == nullptr ? nullptr : sequence_->blocks[index];
    if (block == nullptr) return {};
    const OwnedPage& page = (is_v ? block->v : block->k)[plane];
    if (page.valid()) return page.id();
    if (store_ != nullptr && !block->copy_bad) slot = (is_v ? block->v_slot : block->k_slot)[plane];
    return {};
  }

  const Sequence* sequence_;
  const ExactStore* store_;
  const KvGeometry geometry_;
};

}  // namespace

void KvManager::Retain(Sequence& sequence, int heads, const RetentionOptions& options,
                       Level kept_level) {
  PLIANT_CHECK(sequence.blocks.empty() && sequence.retained == nullptr,
               "a history begins with an empty sequence");
  PLIANT_CHECK(!options.returns || store_ != nullptr, "returns need an exact store");
  sequence.retained = std::make_shared<RetainedHistory>(
      geometry_, heads, options, std::make_shared<Originals>(sequence, store_.get(), geometry_));
  backend_.StartHistory(*sequence.retained);
  sequence.kept_level = std::clamp(kept_level, ceiling_, sequence.floor);
  if (options.returns) sequence.save_from = 0;
}

void KvManager::EndHistory(Sequence& sequence) {
  if (sequence.retained == nullptr) return;
  static_cast<Originals&>(sequence.retained->source()).Detach();
  GiveKept(sequence);
  sequence.retained.reset();
}

bool KvManager::NoteHistory(Sequence& sequence) {
  const auto full = static_cast<std::int32_t>(sequence.computed / kBlockTokens);
  return backend_.NoteHistory(*sequence.retained, full).ok();
}

KvManager::DropState KvManager::DropOldest(Sequence& sequence, bool add_kept) {
  RetainedHistory& retained = *sequence.retained;
  const std::int32_t index = retained.frontier();
  Block& block = *sequence.blocks[index];
  PLIANT_CHECK(block.full && sequence.Ready(), "the block may not be dropped");
  if (add_kept) {
    if (static_cast<int>(pool_.free()) < PagesOf(sequence.kept_level)) return DropState::kNoPages;
    sequence.kept.push_back(TakeKept(sequence.kept_level));
    sequence.kept_views.push_back(sequence.kept.back().View());
  }
  if (!backend_.DropFromHistory(retained, sequence.kept_views).ok()) {
    if (add_kept) {
      for (auto& page : sequence.kept.back().k) pool_.ReturnUnread(std::move(page));
      for (auto& page : sequence.kept.back().v) pool_.ReturnUnread(std::move(page));
      kept_pages_ -= PagesOf(sequence.kept_level);
      sequence.kept.pop_back();
      sequence.kept_views.pop_back();
    }
    return DropState::kLost;
  }
  // What is computed from now on is not what the whole history gives.
  sequence.chain_broken = true;
  if (retained.options().returns) {
    LogBlock(Reason::kDrop, block, kLevels[block.level], kLevels[kSensorLevel], 0,
             sequence.request);
    Mutate(block, [&] { sequence.dropped[index] = true; });
    UpdateFloor(block);
    DemoteIfUnwanted(block);
  } else {
    LogBlock(Reason::kForget, block, kLevels[block.level], {},
             block.holders.size() == 1 ? block.device_pages() : 0, sequence.request);
    RemoveHolder(block, sequence);
    sequence.blocks[index] = nullptr;
    sequence.SetView(index, BlockView{});
    ++sequence.place_changes;
  }
  return DropState::kDropped;
}

std::int64_t KvManager::PagesHeld(const Sequence& sequence) const {
  const auto gone = sequence.retained != nullptr && !sequence.retained->options().returns
                        ? sequence.retained->frontier()
                        : 0;
  const auto there = static_cast<std::int64_t>(sequence.blocks.size()) - gone;
  return there * pages_per_block() - sequence.missing_pages +
         static_cast<std::int64_t>(sequence.kept.size()) * PagesOf(sequence.kept_level);
}

KeptBlock KvManager::TakeKept(Level level) {
  KeptBlock kept;
  for (int p = 0; p < kLevels[level].k; ++p) kept.k[p] = pool_.Take();
  for (int p = 0; p < kLevels[level].v; ++p) kept.v[p] = pool_.Take();
  kept_pages_ += PagesOf(level);
  return kept;
}

void KvManager::GiveKept(Sequence& sequence) {
  for (KeptBlock& kept : sequence.kept) {
    for (auto& page : kept.k) pool_.Return(std::move(page));
    for (auto& page : kept.v) pool_.Return(std::move(page));
    kept_pages_ -= PagesOf(sequence.kept_level);
  }
  sequence.kept.clear();
  sequence.kept_views.clear();
}

KvManager::LoadState KvManager::RefillKept(Sequence& sequence) {
  const std::int32_t missing = sequence.kept_missing();
  if (missing > 0) {
    if (static_cast<int>(pool_.free()) < missing * PagesOf(sequence.kept_level))
      return LoadState::kNoPages;
    for (std::int32_t i = 0; i < missing; ++i) {
      sequence.kept.push_back(TakeKept(sequence.kept_level));
      sequence.kept_views.push_back(sequence.kept.back().View());
    }
    if (!backend_.RefillHistory(*sequence.retained, sequence.kept_views).ok()) {
      GiveKept(sequence);
      return LoadState::kLost;
    }
  }
  return sequence.Ready() ? LoadState::kReady : LoadState::kPending;
}

}  // namespace pliant
