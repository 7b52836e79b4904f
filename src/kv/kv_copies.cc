// Copies between device and exact store: when they may start, and what their ends mean for the
// block.
#include <algorithm>

#include "kv/kv_manager.h"

namespace pliant {
namespace {

constexpr int kMaxCopyFailures = 3;  // of one block, in a row; then it is left alone

}  // namespace

// ---- out
// ------------------------------------------------------------------------------------------------------------------

bool KvManager::StartSave(Block& block, int from, bool background) {
  PLIANT_CHECK(IsLegal(BlockEvent::kSave, FactsOf(block, true)), "illegal transition: save");
  CopyJob job;
  job.kind = CopyJob::Kind::kSave;
  job.background = background;
  job.block = &block;
  job.save_from = static_cast<std::uint8_t>(from);
  job.started = clock_.Now();
  job.items.reserve(2 * kPlanes);
  for (int is_v = 0; is_v < 2; ++is_v) {
    const auto& pages = is_v != 0 ? block.v : block.k;
    const int end =
        std::min<int>(block.saved_from, is_v != 0 ? kLevels[ceiling_].v : kLevels[ceiling_].k);
    for (int p = from; p < end; ++p) {
      PLIANT_CHECK(pages[p].valid(), "a plane without exact copy is not on the device");
      job.items.push_back(
          {is_v != 0, static_cast<std::uint8_t>(p), SlotId(), pages[p].id(), OwnedPage()});
    }
  }
  if (job.items.empty()) {
    block.saved_from = job.save_from;
    return true;
  }
  if (!MakeSlots(static_cast<int>(job.items.size()))) return false;
  for (CopyJob::Item& item : job.items) item.slot = store_->Take();
  block.copying = Copying::kSaving;
  copies_.Submit(std::move(job));
  return true;
}

/// Frees slots of blocks that live in the store only and that nobody but the prefix cache knows.
bool KvManager::MakeSlots(int count) {
  while (static_cast<int>(store_->free()) < count) {
    Block* victim = prefix_.Oldest(IdleList::kStoreOnly);
    if (victim == nullptr || victim->copying != Copying::kNone) return false;
    EvictIdle(*victim);
  }
  return true;
}

std::int64_t KvManager::StoreSlotsAvailable() const {
  if (store_ == nullptr) return 0;
  return static_cast<std::int64_t>(store_->free()) +
         prefix_.IdleCount(IdleList::kStoreOnly) * pages_per_block();
}

void KvManager::QueueSave(Block& block, int from) {
  if (block.save_failures >= kMaxCopyFailures || block.copy_bad || block.saved_from <= from) return;
  saves_.push_back({&block, block.generation, static_cast<std::uint8_t>(from)});
}

void KvManager::StartQueuedSaves() {
  const auto stale = [](const PendingSave& p) {
    const Block& b = *p.block;
    return b.generation != p.generation || !b.live || b.doomed || b.copy_bad ||
           b.residency == Residency::kStore || b.saved_from <= p.from;
  };
  for (std::size_t left = saves_.size(); left > 0 && copies_.HasRoom(); --left) {
    const PendingSave pending = saves_.front();
    saves_.pop_front();
    if (stale(pending)) continue;
    if (pending.block->copying != Copying::kNone) {
      saves_.push_back(pending);
      continue;
    }
    if (!StartSave(*pending.block, pending.from, true)) {
      if (!store_was_full_) LogBlock(Reason::kStoreFull, *pending.block, {}, {}, 0, {});
      store_was_full_ = true;
      saves_.push_front(pending);
      break;
    }
    store_was_full_ = false;
  }
  // While the store is full, entries of blocks that are long gone must not pile up.
  if (saves_.size() > 2 * static_cast<std::size_t>(live_blocks_) + 64) std::erase_if(saves_, stale);
}

void KvManager::SaveEnded(CopyJob& job) {
  Block& block = *job.block;
  block.copying = Copying::kNone;
  const bool done = job.end == CopyJob::End::kDone;
  for (CopyJob::Item& item : job.items) {
    if (done) {
      (item.is_v ? block.v_slot : block.k_slot)[item.plane] = item.slot;
    } else {
      store_->Give(item.slot);
    }
  }
  if (done) {
    block.saved_from = job.save_from;
    block.save_failures = 0;
    NotePlaces(block);
    counters_.write_ahead_bytes += static_cast<std::int64_t>(job.items.size() * page_bytes_);
  } else {
    ++counters_.copies_failed;
    ++block.save_failures;
    LogBlock(Reason::kWriteAheadFailed, block, {}, {}, 0, {});
  }
  if (block.doomed) return FreeBlock(block);
  if (block.leaving) {
    const bool still_leaving = block.readers == 0 && !block.holders.empty();
    Mutate(block, [&] {
      block.leaving = false;
      block.leave_failed = still_leaving && !done;
    });
    if (still_leaving && done) Leave(block);
  } else if (!done) {
    QueueSave(block, job.save_from);
  }
  if (done) {
    ReopenSearch(block);
    DemoteIfUnwanted(block);
  }
}

/// Moves a block that only offloaded sequences hold to the store, now or when its copies have
/// ended.
void KvManager::Leave(Block& block) {
  if (block.residency == Residency::kStore) return;
  const auto set_leaving = [&](bool on) { Mutate(block, [&] { block.leaving = on; }); };
  if (block.copying != Copying::kNone) {
    if (block.copying == Copying::kBringing) AbandonBring(block);
    return set_leaving(true);
  }
  if (block.copy_bad || store_ == nullptr) {
    block.leave_failed = true;
    return;
  }
  if (block.saved_from > 0 && !StartSave(block, 0, false)) {
    block.leave_failed = true;
    return;
  }
  if (block.copying == Copying::kNone) return DropToStore(block);
  set_leaving(true);
}

int KvManager::SlotsToOffload(const Sequence& sequence) const {
  int slots = 0;
  for (const Block* block : sequence.blocks) {
    if (block == nullptr || block->residency == Residency::kStore || block->readers > 1) continue;
    slots += std::min<int>(block->saved_from, kLevels[ceiling_].k) +
             std::min<int>(block->saved_from, kLevels[ceiling_].v);
  }
  return slots;
}

void KvManager::Offload(Sequence& sequence) {
  PLIANT_CHECK(sequence.active && can_offload_, "offload of a sequence that is not active");
  sequence.active = false;
  active_[sequence.active_slot] = active_.back();
  active_[sequence.active_slot]->active_slot = sequence.active_slot;
  active_.pop_back();
  GiveKept(sequence);  // they are copies: RefillKept makes them anew
  for (Block* block : sequence.blocks) {
    if (block == nullptr) continue;
    block->leave_failed = false;
    if (--block->readers == 0) Leave(*block);
  }
}

KvManager::OffloadState KvManager::OffloadProgress(const Sequence& sequence) const {
  OffloadState state = OffloadState::kDone;
  for (const Block* block : sequence.blocks) {
    if (block == nullptr) continue;
    if (block->leaving) return OffloadState::kPending;
    if (block->leave_failed) state = OffloadState::kFailed;
  }
  return state;
}

void KvManager::Reactivate(Sequence& sequence) {
  PLIANT_CHECK(!sequence.active, "sequence is active already");
  sequence.active = true;
  sequence.active_slot = active_.size();
  active_.push_back(&sequence);
  for (Block* block : sequence.blocks) {
    if (block == nullptr) continue;
    ++block->readers;
    block->leave_failed = false;
  }
}

// ---- in
// -------------------------------------------------------------------------------------------------------------------

bool KvManager::StartBring(Block& block, Level level, bool background) {
  const bool stored = block.residency == Residency::kStore;
  PLIANT_CHECK(stored || level < block.level, "a restore goes up");
  PLIANT_CHECK(
      IsLegal(stored ? BlockEvent::kLoad : BlockEvent::kRestore,
              FactsOf(block, !block.copy_bad &&
                                 block.saved_from <= (stored ? 0 : FirstAbsentPlane(block.level)))),
      "illegal transition: restore or load");
  const PlaneCount have = stored ? PlaneCount{} : kLevels[block.level];
  const PlaneCount want = kLevels[level];
  const int count = want.pages() - have.pages();
  if (static_cast<int>(pool_.free()) < count) return false;
  CopyJob job;
  job.items.reserve(static_cast<std::size_t>(count));
  job.kind = CopyJob::Kind::kBring;
  job.background = background;
  job.block = &block;
  job.to_level = level;
  job.started = clock_.Now();
  for (int is_v = 0; is_v < 2; ++is_v) {
    for (int p = is_v != 0 ? have.v : have.k; p < (is_v != 0 ? want.v : want.k); ++p) {
      const SlotId slot = (is_v != 0 ? block.v_slot : block.k_slot)[p];
      PLIANT_CHECK(slot.valid(), "a missing plane has no exact copy");
      job.items.push_back({is_v != 0, static_cast<std::uint8_t>(p), slot, PageId(), pool_.Take()});
    }
  }
  block.copying = Copying::kBringing;
  block.arriving = static_cast<std::uint8_t>(count);
  block.bring_abandoned = false;
  copies_.Submit(std::move(job));
  return true;
}

void KvManager::AbandonBring(Block& block) {
  if (block.bring_abandoned) return;
  block.bring_abandoned = true;
  pages_abandoned_ += block.arriving;
}

void KvManager::BringEnded(CopyJob& job) {
  Block& block = *job.block;
  block.copying = Copying::kNone;
  if (block.bring_abandoned) pages_abandoned_ -= block.arriving;
  const bool abandoned = block.bring_abandoned || block.doomed;
  block.bring_abandoned = false;
  block.arriving = 0;
  const bool stored = block.residency == Residency::kStore;
  const PlaneCount from = stored ? PlaneCount{} : kLevels[block.level];
  if (abandoned || job.end != CopyJob::End::kDone) {
    for (CopyJob::Item& item : job.items) pool_.ReturnUnread(std::move(item.arriving));
  } else {
    Mutate(block, [&] {
      for (CopyJob::Item& item : job.items) {
        (item.is_v ? block.v : block.k)[item.plane] = std::move(item.arriving);
      }
      block.residency = Residency::kDevice;
      block.level = job.to_level;
      block.changed_step = step_;
    });
    block.bring_failures = 0;
    ++counters_.restores;
    counters_.restore_bytes += static_cast<std::int64_t>(job.items.size() * page_bytes_);
    counters_.restore_nanoseconds += clock_.Now() - job.started;
    for (Sequence* holder : block.holders) {
      ++holder->restores;
      if (block.level > ceiling_)
        holder->lowered_end = std::max(holder->lowered_end, block.index + 1);
    }
    LogBlock(Reason::kRestore, block, from, kLevels[block.level],
             -static_cast<int>(job.items.size()),
             block.holders.empty() ? RequestId() : block.holders.front()->request);
    if (!block.full) DropStoreCopy(block);  // it will be written to again
    if (block.idle != IdleList::kNone && block.idle != IdleListFor(block)) {
      Mutate(block, [&] {
        prefix_.RemoveIdle(block);
        prefix_.PushIdle(block, IdleListFor(block));
      });
    }
  }
  const CopyJob::End end = job.end;
  if (end == CopyJob::End::kFailed || end == CopyJob::End::kCorrupt) {
    ++counters_.copies_failed;
    ++block.bring_failures;
    Mutate(block, [&] { block.changed_step = step_; });
    LogBlock(Reason::kRestoreFailed, block, from, from, 0, {});
  }
  if (block.doomed) return FreeBlock(block);
  if (end == CopyJob::End::kCorrupt) {
    // What is on the device stays readable as it is; it is all there will ever be.
    ++counters_.checksum_failures;
    block.copy_bad = true;
    DropStoreCopy(block);
    if (block.published && block.holders.empty()) {
      Mutate(block, [&] { prefix_.RemoveIdle(block); });
      return FreeBlock(block);
    }
    if (block.published) prefix_.Erase(block);
  }
  if (block.leaving) {
    const bool still_leaving = block.readers == 0 && !block.holders.empty();
    Mutate(block, [&] { block.leaving = false; });
    if (still_leaving) Leave(block);
  }
  ReopenSearch(block);
}

/// The level that a block is brought to for a sequence that needs it at `floor` or better.
Level KvManager::LevelToLoad(const Block& block, Level floor) const {
  if (floor >= kSensorLevel) return kSensorLevel;
  if (block.level >= kSensorLevel) return ceiling_;  // it was dropped, and comes back as it was
  return block.residency == Residency::kStore ? std::min(block.level, floor) : floor;
}

KvManager::LoadState KvManager::Load(Sequence& sequence) {
  if (sequence.Ready()) return LoadState::kReady;
  bool pending = false, short_of_pages = false;
  for (Block* block : sequence.blocks) {
    if (block == nullptr) continue;
    const bool stored = block->residency == Residency::kStore;
    const Level floor = sequence.FloorOf(block->index);
    if (!stored && block->level <= floor) continue;
    if (block->copy_bad || block->bring_failures >= kMaxCopyFailures) return LoadState::kLost;
    if (block->copying != Copying::kNone || block->leaving) {
      pending = true;
      continue;
    }
    const Level level = LevelToLoad(*block, floor);
    if (short_of_pages || !StartBring(*block, level, false)) {
      short_of_pages = true;
    } else {
      pending = true;
    }
  }
  if (!pending && !short_of_pages) return RefillKept(sequence);
  return pending ? LoadState::kPending : LoadState::kNoPages;
}

int KvManager::PagesToReady(std::span<Block* const> blocks, Level floor) const {
  int pages = 0;
  for (const Block* block : blocks) {
    if (block->residency == Residency::kStore) {
      pages += PagesOf(LevelToLoad(*block, floor));
    } else if (block->level > floor) {
      pages += PagesOf(LevelToLoad(*block, floor)) - PagesOf(block->level);
    }
  }
  return pages;
}

int KvManager::PagesToReady(const Sequence& s) const {
  if (s.Ready()) return 0;
  int pages = s.kept_missing() * PagesOf(s.kept_level);
  for (Block* const& block : s.blocks) {
    if (block != nullptr) pages += PagesToReady(std::span(&block, 1), s.FloorOf(block->index));
  }
  return pages;
}

bool KvManager::MayRestore(const Block& block, Level level) const {
  if (block.residency != Residency::kDevice || block.level <= level ||
      block.copying != Copying::kNone || block.Unwanted())
    return false;
  if (block.copy_bad || block.bring_failures >= kMaxCopyFailures || !copies_.HasRoom())
    return false;
  if (block.changed_step + static_cast<std::uint64_t>(options_.dwell_steps) > step_) return false;
  return restore_allowance_ >= static_cast<double>(PagesOf(level) - PagesOf(block.level)) *
                                   static_cast<double>(page_bytes_);
}

bool KvManager::StartRestore(Block& block, Level level) {
  const int pages = PagesOf(level) - PagesOf(block.level);
  if (!MayRestore(block, level) || !StartBring(block, level, true)) return false;
  restore_allowance_ -= static_cast<double>(pages) * static_cast<double>(page_bytes_);
  return true;
}

// ---- both
// -----------------------------------------------------------------------------------------------------------------

void KvManager::Poll(bool start_saves) {
  if (store_ == nullptr) {
    now_ = clock_.Now();
    return;
  }
  const Nanoseconds now = now_ = clock_.Now();
  const double rate = static_cast<double>(options_.restore_bytes_per_second);
  // At most a tenth of a second's worth is saved up, but always enough for one whole block.
  const double most = std::max(rate / 10, static_cast<double>(page_bytes_) * 2 * kPlanes);
  restore_allowance_ =
      std::min(most, restore_allowance_ + rate * static_cast<double>(now - restore_allowance_at_) /
                                              static_cast<double>(kNanosPerSecond));
  restore_allowance_at_ = now;

  ended_.clear();
  if (!copies_.Idle()) copies_.Poll(ended_);
  for (CopyJob& job : ended_) {
    if (job.kind == CopyJob::Kind::kSave) {
      SaveEnded(job);
    } else {
      BringEnded(job);
    }
  }
  ended_.clear();
  if (start_saves) StartSaves();
}

}  // namespace pliant
