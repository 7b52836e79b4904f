// Recounts everything from the blocks up and compares it with the running sums.
#include <algorithm>

#include "kv/kv_manager.h"

namespace pliant {

void KvManager::CorruptStoreForTest() {
  for (Block& b : blocks_) {
    if (!b.live || b.copying != Copying::kNone) continue;
    for (const auto* slots : {&b.k_slot, &b.v_slot}) {
      for (SlotId slot : *slots) {
        if (slot.valid()) store_->CorruptForTest(slot);
      }
    }
  }
}

void KvManager::Audit() const {
  std::vector<std::uint8_t> page_seen(pool_.total());
  std::int64_t owned = 0;
  const auto see = [&](PageId id) {
    PLIANT_CHECK(id.value() < pool_.total() && page_seen[id.value()]++ == 0,
                 "a page has two owners");
    ++owned;
  };
  std::array<std::int64_t, kLevelCount> levels{};
  std::int64_t stored = 0, idle_pages = 0, leaving = 0, abandoned = 0, lowered = 0, live = 0,
               idle = 0, slots = 0, copying = 0;
  const PlaneCount top = kLevels[ceiling_];
  for (const Block& b : blocks_) {
    if (!b.live) {
      PLIANT_CHECK(b.holders.empty() && !b.published && b.idle == IdleList::kNone &&
                       b.copying == Copying::kNone,
                   "a dead block is in use");
      continue;
    }
    ++live;
    const PlaneCount planes = b.residency == Residency::kDevice ? kLevels[b.level] : PlaneCount{};
    for (int p = 0; p < kPlanes; ++p) {
      PLIANT_CHECK(b.k[p].valid() == (p < planes.k) && b.v[p].valid() == (p < planes.v),
                   "pages do not match the level");
      if (b.k[p].valid()) see(b.k[p].id());
      if (b.v[p].valid()) see(b.v[p].id());
      PLIANT_CHECK(b.k_slot[p].valid() == (p >= b.saved_from && p < top.k),
                   "slots do not match the exact copy");
      PLIANT_CHECK(b.v_slot[p].valid() == (p >= b.saved_from && p < top.v),
                   "slots do not match the exact copy");
      slots += b.k_slot[p].valid() + b.v_slot[p].valid();
    }
    PLIANT_CHECK(b.level >= ceiling_, "block above the ceiling");
    const bool lower = b.residency == Residency::kStore || b.level > ceiling_;
    PLIANT_CHECK(
        !lower || b.copy_bad ||
            b.saved_from <= (b.residency == Residency::kStore ? 0 : FirstAbsentPlane(b.level)),
        "planes were dropped without an exact copy");
    PLIANT_CHECK(b.residency == Residency::kStore || b.level == ceiling_ || b.full,
                 "a block being filled was demoted");
    PLIANT_CHECK(!b.published || b.full, "an unfinished block is published");
    if (b.residency == Residency::kDevice) {
      ++levels[b.level];
    } else {
      ++stored;
      PLIANT_CHECK(b.copying != Copying::kSaving, "a block in the store is being saved");
    }
    if (IsLowered(b)) ++lowered;
    if (b.leaving || b.doomed) leaving += b.device_pages();
    if (b.bring_abandoned) abandoned += b.arriving;
    copying += b.copying != Copying::kNone;
    std::int32_t readers = 0;
    Level floor = kLevelCount - 1;
    for (const Sequence* s : b.holders) {
      PLIANT_CHECK(s->open && s->blocks.at(b.index) == &b, "a holder does not know its block");
      PLIANT_CHECK(s->views.at(b.index) == s->ViewOf(b), "a view is out of date");
      readers += s->active;
      floor = std::min(floor, s->FloorOf(b.index));
    }
    PLIANT_CHECK(readers == b.readers && floor == b.floor, "readers or floor are wrong");
    if (b.idle != IdleList::kNone) {
      ++idle;
      idle_pages += b.device_pages();
      PLIANT_CHECK(b.published && b.holders.empty() && !b.doomed,
                   "an idle block is held or unknown to the cache");
      PLIANT_CHECK((b.idle == IdleList::kStoreOnly) == (b.residency == Residency::kStore),
                   "idle block in the wrong list");
    } else {
      PLIANT_CHECK(!b.holders.empty() || b.doomed, "nobody owns a block");
    }
  }
  for (const OwnedPage& page : withheld_) see(page.id());
  std::int64_t kept_pages = 0;
  for (const Sequence& s : sequences_) {
    PLIANT_CHECK(s.kept.empty() || (s.open && s.retained != nullptr && s.kept_missing() == 0),
                 "kept blocks do not match the history");
    for (std::size_t i = 0; i < s.kept.size(); ++i) {
      PLIANT_CHECK(s.kept_views.at(i) == s.kept[i].View(), "a kept block's view is out of date");
      for (const auto* pages : {&s.kept[i].k, &s.kept[i].v}) {
        for (const OwnedPage& page : *pages) {
          if (!page.valid()) continue;
          see(page.id());
          ++kept_pages;
        }
      }
    }
  }
  PLIANT_CHECK(kept_pages == kept_pages_, "kept pages are miscounted");
  std::int64_t jobs = 0, arriving = 0;
  copies_.ForEachJob([&](const CopyJob& job) {
    ++jobs;
    PLIANT_CHECK(job.block->live && job.block->copying != Copying::kNone,
                 "a copy without its block");
    for (const CopyJob::Item& item : job.items) {
      if (job.kind == CopyJob::Kind::kBring) {
        see(item.arriving.id());
        ++arriving;
      } else {
        ++slots;  // not yet the block's
      }
    }
  });
  PLIANT_CHECK(jobs == copying, "copies under way do not match the blocks");
  PLIANT_CHECK(arriving == copies_.arriving_pages(), "arriving pages are miscounted");
  PLIANT_CHECK(owned == pool_.owned(), "owned pages are miscounted");
  PLIANT_CHECK(pool_.free() + pool_.fenced() + owned == pool_.total(), "pages do not sum");
  PLIANT_CHECK(levels == level_blocks_ && stored == store_blocks_ && live == live_blocks_,
               "blocks are miscounted");
  PLIANT_CHECK(
      idle_pages == idle_pages_ && leaving == pages_leaving_ && abandoned == pages_abandoned_,
      "page sums are wrong");
  PLIANT_CHECK(lowered == lowered_blocks_, "lowered blocks are miscounted");
  PLIANT_CHECK(store_ == nullptr ? slots == 0 : slots == store_->used(), "slots do not sum");
  PLIANT_CHECK(idle == prefix_.IdleCount(IdleList::kCanGive) +
                           prefix_.IdleCount(IdleList::kCannotGive) +
                           prefix_.IdleCount(IdleList::kStoreOnly),
               "idle blocks are miscounted");
  std::size_t actives = 0, published = 0;
  for (const Block& b : blocks_) published += b.published;
  PLIANT_CHECK(published == prefix_.size(), "the prefix index is out of step");
  for (const Sequence& s : sequences_) {
    if (!s.open) continue;
    if (s.active) {
      ++actives;
      PLIANT_CHECK(active_.at(s.active_slot) == &s, "active list is out of step");
    }
    std::array<std::int32_t, kLevelCount> count{};
    std::int32_t absent = 0, missing = 0;
    for (std::size_t i = 0; i < s.blocks.size(); ++i) {
      const bool before =
          s.retained != nullptr && static_cast<std::int32_t>(i) < s.retained->frontier();
      PLIANT_CHECK(before == (s.blocks[i] == nullptr || s.dropped[i]),
                   "dropped blocks are not those before the frontier");
      if (s.blocks[i] == nullptr) {
        PLIANT_CHECK(!s.dropped[i] && s.views[i] == BlockView{} &&
                         static_cast<std::int64_t>(i + 1) * kBlockTokens <= s.computed,
                     "a forgotten block is seen");
        continue;
      }
      const Block& b = *s.blocks[i];
      PLIANT_CHECK(b.index == static_cast<std::int32_t>(i) &&
                       std::count(b.holders.begin(), b.holders.end(), &s) == 1,
                   "a sequence holds a block that does not know it");
      PLIANT_CHECK(b.full == (static_cast<std::int64_t>(i + 1) * kBlockTokens <= s.computed),
                   "full blocks are miscounted");
      if (b.residency == Residency::kDevice) {
        if (!s.dropped[i]) ++count[b.level];
        PLIANT_CHECK(b.level == ceiling_ || static_cast<std::int32_t>(i) < s.lowered_end,
                     "a lowered block is out of sight");
      } else {
        ++absent;
      }
      missing += pages_per_block() - b.device_pages();
    }
    PLIANT_CHECK(count == s.level_count && absent == s.absent && missing == s.missing_pages,
                 "a sequence's sums are wrong");
  }
  PLIANT_CHECK(actives == active_.size(), "active list is out of step");
}

}  // namespace pliant
