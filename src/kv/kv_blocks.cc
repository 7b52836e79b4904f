// Blocks, their holders and their accounts.
#include <algorithm>

#include "kv/kv_manager.h"

namespace pliant {

Block& KvManager::NewBlock(int index) {
  Block* block;
  if (free_blocks_.empty()) {
    block = &blocks_.emplace_back();
    block->id = BlockId(static_cast<std::uint32_t>(blocks_.size() - 1));
  } else {
    block = free_blocks_.back();
    free_blocks_.pop_back();
  }
  block->live = true;
  block->index = index;
  block->level = ceiling_;
  block->changed_step = step_;
  for (int p = 0; p < kLevels[ceiling_].k; ++p) block->k[p] = pool_.Take();
  for (int p = 0; p < kLevels[ceiling_].v; ++p) block->v[p] = pool_.Take();
  Count(*block, +1);
  return *block;
}

void KvManager::FreeBlock(Block& block) {
  PLIANT_CHECK(block.holders.empty() && block.idle == IdleList::kNone, "block freed while in use");
  if (block.published) prefix_.Erase(block);
  if (block.copying != Copying::kNone) {
    if (!block.doomed) {
      Mutate(block, [&] { block.doomed = true; });
      if (block.copying == Copying::kBringing) AbandonBring(block);
    }
    return;
  }
  PLIANT_CHECK(IsLegal(BlockEvent::kEvict, FactsOf(block, true)), "illegal transition: evict");
  Count(block, -1);
  for (auto& page : block.k) pool_.Return(std::move(page));
  for (auto& page : block.v) pool_.Return(std::move(page));
  DropStoreCopy(block);
  Recycle(block);
}

void KvManager::Recycle(Block& block) {
  ++block.generation;
  block.live = block.full = block.doomed = block.leaving = block.leave_failed = block.copy_bad =
      false;
  block.residency = Residency::kDevice;
  block.readers = 0;
  block.floor = kLevelCount - 1;
  block.save_failures = block.bring_failures = 0;
  block.mark = 0;
  block.salt.clear();
  block.draft = block.draft_pin = 0;
  block.bring_abandoned = false;
  block.arriving = 0;
  free_blocks_.push_back(&block);
}

void KvManager::Count(const Block& block, int sign) {
  const bool device = block.residency == Residency::kDevice;
  const int pages = block.device_pages();
  live_blocks_ += sign;
  if (device) {
    level_blocks_[block.level] += sign;
  } else {
    store_blocks_ += sign;
  }
  if (block.idle != IdleList::kNone) idle_pages_ += sign * pages;
  if (block.leaving || block.doomed) pages_leaving_ += sign * pages;
  if (IsLowered(block)) lowered_blocks_ += sign;
  for (Sequence* sequence : block.holders) {
    if (!device) {
      sequence->absent += sign;
    } else if (!sequence->dropped[block.index]) {
      sequence->level_count[block.level] += sign;
    }
    sequence->missing_pages += sign * (pages_per_block() - pages);
    if (sign > 0) sequence->SetView(block.index, sequence->ViewOf(block));
  }
}

void KvManager::AddHolder(Block& block, Sequence& sequence) {
  PLIANT_CHECK(static_cast<std::int32_t>(sequence.blocks.size()) == block.index,
               "block at the wrong place");
  if (block.idle != IdleList::kNone) {
    Mutate(block, [&] { prefix_.RemoveIdle(block); });
  }
  sequence.blocks.push_back(&block);
  sequence.views.emplace_back();
  sequence.dropped.push_back(false);
  Mutate(block, [&] {
    block.holders.push_back(&sequence);
    block.floor = std::min(block.floor, sequence.floor);
  });
  if (sequence.active) ++block.readers;
  // A block without planes below the ceiling keeps lowered_end exact for the search of restores.
  if (block.level > ceiling_)
    sequence.lowered_end = std::max(sequence.lowered_end, block.index + 1);
}

void KvManager::RemoveHolder(Block& block, Sequence& sequence) {
  const auto it = std::find(block.holders.begin(), block.holders.end(), &sequence);
  PLIANT_CHECK(it != block.holders.end(), "sequence does not hold the block");
  Mutate(block, [&] { block.holders.erase(it); });
  if (sequence.active) --block.readers;
  UpdateFloor(block);
  if (block.holders.empty()) {
    if (block.published && options_.prefix_cache && !block.copy_bad) {
      BecomeIdle(block);
    } else {
      FreeBlock(block);
    }
  } else if (block.readers == 0) {
    NoReaderLeft(block);
  } else {
    DemoteIfUnwanted(block);
  }
}

/// All that still hold the block have dropped it, and it can be brought back.
void KvManager::DemoteIfUnwanted(Block& block) {
  if (!block.holders.empty() && block.Unwanted() && block.residency == Residency::kDevice &&
      block.level < kSensorLevel && MayDrop(block, kSensorLevel) &&
      block.copying != Copying::kSaving) {
    DemoteNow(block, kSensorLevel, Reason::kDemoteSensor, block.holders.front());
  }
}

void KvManager::UpdateFloor(Block& block) {
  const Level before = block.floor;
  Mutate(block, [&] {
    block.floor = kLevelCount - 1;
    for (const Sequence* holder : block.holders) {
      block.floor = std::min(block.floor, holder->FloorOf(block.index));
    }
  });
  if (block.floor > before) ReopenSearch(block);
}

/// Only offloaded sequences hold the block now.
void KvManager::NoReaderLeft(Block& block) {
  if (block.residency == Residency::kDevice && !block.leaving) Leave(block);
}

IdleList KvManager::IdleListFor(const Block& block) const {
  if (block.residency == Residency::kStore) return IdleList::kStoreOnly;
  const bool can_give = bends_ && block.level < idle_floor_ && block.index >= sink_blocks_ &&
                        MayDrop(block, idle_floor_);
  return can_give ? IdleList::kCanGive : IdleList::kCannotGive;
}

void KvManager::BecomeIdle(Block& block) {
  Mutate(block, [&] {
    block.leaving = block.leave_failed = false;
    prefix_.PushIdle(block, IdleListFor(block));
  });
  if (bends_ && block.residency == Residency::kDevice && !block.copy_bad) {
    // With plenty of room in the store, idle blocks prepare to leave the device whole; else they
    // prepare to give planes.
    const bool roomy = store_->free() > store_->slots() / 2;
    const int from = roomy ? 0 : FirstAbsentPlane(idle_floor_);
    if (block.saved_from > from) QueueSave(block, from);
  }
}

void KvManager::DropPlanes(Block& block, Level level) {
  Mutate(block, [&] {
    for (int p = kLevels[level].k; p < kPlanes; ++p) pool_.Return(std::move(block.k[p]));
    for (int p = kLevels[level].v; p < kPlanes; ++p) pool_.Return(std::move(block.v[p]));
    block.level = level;
    block.changed_step = step_;
  });
}

void KvManager::DemoteNow(Block& block, Level level, Reason reason, Sequence* donor) {
  PLIANT_CHECK(level > block.level, "a demotion goes down");
  PLIANT_CHECK(IsLegal(BlockEvent::kDemote, FactsOf(block, MayDrop(block, level))),
               "illegal transition: demote");
  if (block.copying == Copying::kBringing) AbandonBring(block);
  const PlaneCount from = kLevels[block.level];
  DropPlanes(block, level);
  for (Sequence* holder : block.holders) {
    ++holder->demotions;
    holder->lowered_end = std::max(holder->lowered_end, block.index + 1);
  }
  ++counters_.demotions;
  if (block.idle == IdleList::kCanGive && IdleListFor(block) != IdleList::kCanGive) {
    Mutate(block, [&] {
      prefix_.RemoveIdle(block);
      prefix_.PushIdle(block, IdleListFor(block));
    });
  }
  LogBlock(reason, block, from, kLevels[level], from.pages() - PagesOf(level),
           donor != nullptr ? donor->request : RequestId());
}

void KvManager::DropToStore(Block& block) {
  PLIANT_CHECK(
      IsLegal(BlockEvent::kOffload, FactsOf(block, block.saved_from == 0 && !block.copy_bad)),
      "illegal transition: offload");
  Mutate(block, [&] {
    for (auto& page : block.k) pool_.Return(std::move(page));
    for (auto& page : block.v) pool_.Return(std::move(page));
    block.residency = Residency::kStore;
    block.leaving = false;
  });
}

void KvManager::DropStoreCopy(Block& block) {
  for (int p = block.saved_from; p < kPlanes; ++p) {
    for (auto* slots : {&block.k_slot, &block.v_slot}) {
      SlotId& slot = (*slots)[p];
      if (slot.valid()) store_->Give(slot);
      slot = SlotId();
    }
  }
  block.saved_from = kPlanes;
  NotePlaces(block);
}

void KvManager::EvictIdle(Block& block) {
  PLIANT_CHECK(block.idle != IdleList::kNone, "only idle blocks are evicted");
  const int pages = block.device_pages();
  const PlaneCount from = pages > 0 ? kLevels[block.level] : PlaneCount{};
  if (block.residency == Residency::kDevice && block.saved_from == 0 && !block.copy_bad) {
    DropToStore(block);
    Mutate(block, [&] {
      prefix_.RemoveIdle(block);
      prefix_.PushIdle(block, IdleList::kStoreOnly);
    });
    LogBlock(Reason::kCacheToStore, block, from, {}, pages, {});
    return;
  }
  LogBlock(Reason::kCacheEvict, block, from, {}, pages, {});
  ++counters_.cache_evictions;
  Mutate(block, [&] { prefix_.RemoveIdle(block); });
  FreeBlock(block);
}

void KvManager::Publish(Sequence& sequence, Block& block, std::span<const std::int32_t> tokens) {
  if (!options_.prefix_cache || sequence.chain_broken) return;
  block.key = prefix_.Key(sequence.chain_key, tokens, sequence.mark);
  block.parent = sequence.chain_content;
  block.mark = sequence.mark;
  std::copy(tokens.begin(), tokens.end(), block.tokens.begin());
  if (block.index == 0) block.salt = sequence.salt;
  const Block* twin =
      prefix_.Find(block.key, block.parent, tokens, block.mark, block.index, sequence.salt);
  if (twin == nullptr) prefix_.Insert(block);
  // An equal block is there already: this one stays private, and the chain goes on from the other's
  // content, which is the same.
  sequence.chain_key = block.key;
  sequence.chain_content = twin != nullptr ? twin->content : block.content;
}

BlockFacts KvManager::FactsOf(const Block& block, bool copy_valid) const {
  return {block.residency,        block.full,   copy_valid, block.readers > 0,
          !block.holders.empty(), block.copying};
}

void KvManager::LogBlock(Reason reason, const Block& block, PlaneCount from, PlaneCount to,
                         int pages, RequestId request) {
  log_.Add({step_, now_, reason, request, block.id, from.k, from.v, to.k, to.v, pages});
}

/// The block may have become a candidate for demotion: searches must not start behind it.
void KvManager::ReopenSearch(Block& block) {
  for (Sequence* holder : block.holders) {
    for (std::int32_t& from : holder->demote_from)
      from = std::min(from, std::max(block.index, sink_blocks_));
  }
  if (block.idle == IdleList::kCannotGive && IdleListFor(block) == IdleList::kCanGive) {
    Mutate(block, [&] {
      prefix_.RemoveIdle(block);
      prefix_.PushIdle(block, IdleList::kCanGive);
    });
  }
}

}  // namespace pliant
