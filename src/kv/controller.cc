#include "kv/controller.h"

#include <algorithm>
#include <limits>

namespace pliant {
namespace {

constexpr std::int32_t kMaxRestoresPerStep = 64;
constexpr std::int32_t kMaxVisitsPerStep = 2048;

std::int32_t EndBefore(std::int64_t tokens) {
  return static_cast<std::int32_t>(std::max<std::int64_t>(tokens, 0) / kBlockTokens);
}

}  // namespace

Draft& Controller::NewDraft() {
  draft_.id_ = ++drafts_;
  draft_.measures_.clear();
  draft_.touched_.clear();
  draft_.freed_ = 0;
  draft_.cut_ = false;
  return draft_;
}

void Controller::Pin(Draft& draft, const PrefixMatch& match) {
  for (Block* block : match.blocks) block->draft_pin = draft.id_;
}

void Controller::Plan(Draft& draft, Block& block, Level to, Reason reason, Sequence* donor) {
  const int pages = PagesOf(LevelOf(draft, block)) - PagesOf(to);
  block.draft = draft.id_;
  block.draft_level = to;
  block.draft_evicted = false;
  draft.measures_.push_back({&block, donor, to, false, reason, pages});
  draft.freed_ += pages;
}

bool Controller::MakeRoom(Draft& draft, std::int64_t target, std::int64_t coming, Rung last) {
  const auto short_by = [&] {
    return target - static_cast<std::int64_t>(kv_.pool().free()) - coming - draft.freed_;
  };
  if (short_by() <= 0) return true;
  if (kv_.planes_bend()) IdlePlanes(draft, short_by());
  if (short_by() > 0) IdleWhole(draft, short_by());
  if (!kv_.planes_bend()) return short_by() <= 0;
  for (Level to = kv_.ceiling() + 1; to < kLadderLevels; ++to) {
    if (short_by() <= 0 || last < (to > kBaseLevel ? Rung::kDeep : Rung::kBase)) break;
    Lower(draft, to, to > kBaseLevel ? Reason::kDemoteDeep : Reason::kDemoteBase, short_by());
  }
  return short_by() <= 0;
}

/// Rung 2, first part: idle cached blocks give their low planes, least recently used first.
void Controller::IdlePlanes(Draft& draft, std::int64_t short_by) {
  const std::int64_t goal = draft.freed_ + short_by;
  for (Block* b = kv_.prefix().Oldest(IdleList::kCanGive); b != nullptr && draft.freed_ < goal;
       b = b->idle_next) {
    if (b->draft_pin == draft.id_ || b->draft == draft.id_ || b->copying == Copying::kSaving)
      continue;
    Plan(draft, *b, kv_.idle_floor(), Reason::kCachePlanes, nullptr);
  }
}

/// Rung 2, second part: idle cached blocks go whole. A block whose planes the draft takes gives
/// what is left of it.
void Controller::IdleWhole(Draft& draft, std::int64_t short_by) {
  const std::int64_t goal = draft.freed_ + short_by;
  for (IdleList list : {IdleList::kCannotGive, IdleList::kCanGive}) {
    for (Block* b = kv_.prefix().Oldest(list); b != nullptr && draft.freed_ < goal;
         b = b->idle_next) {
      if (b->draft_pin == draft.id_ || b->copying != Copying::kNone) continue;
      if (b->draft == draft.id_ && b->draft_evicted) continue;
      const int pages = PagesOf(LevelOf(draft, *b));
      if (b->draft != draft.id_) b->draft_level = b->level;
      b->draft = draft.id_;
      b->draft_evicted = true;
      draft.measures_.push_back({b, nullptr, b->draft_level, true, Reason::kCacheEvict, pages});
      draft.freed_ += pages;
    }
  }
}

bool Controller::IsCandidate(const Draft& draft, const Sequence& sequence, const Block& block,
                             Level to) const {
  return block.residency == Residency::kDevice && LevelOf(draft, block) < to && block.floor >= to &&
         block.copying != Copying::kSaving && block.draft_pin != draft.id_ &&
         kv_.MayDrop(block, to) && sequence.active;
}

void Controller::Touch(Draft& draft, Sequence& sequence) {
  if (sequence.draft == draft.id_) return;
  sequence.draft = draft.id_;
  sequence.draft_from = sequence.demote_from;
  sequence.draft_missing = sequence.missing_pages;
  draft.touched_.push_back(&sequence);
}

/// Blocks from here on are too recent to go to `to`.
std::int32_t Controller::SearchEnd(const Sequence& sequence, Level to) const {
  const KvOptions& o = kv_.options();
  return EndBefore(sequence.computed -
                   (to > kBaseLevel ? o.recent_tokens_deep : o.recent_tokens_base));
}

/// The oldest block of the sequence that may go to `to`. What was passed over stays passed over
/// until something about it changes (KvManager::ReopenSearch), so that the search costs little over
/// many steps.
Block* Controller::NextCandidate(Draft& draft, Sequence& sequence, Level to) {
  const std::int32_t end = SearchEnd(sequence, to);
  std::int32_t& from = sequence.draft_from[to];
  while (from < end) {
    Block* block = sequence.blocks[from];
    if (block != nullptr && IsCandidate(draft, sequence, *block, to)) return block;
    ++from;
  }
  return nullptr;
}

/// Rungs 3 and 5: blocks of running requests go one step down, oldest first; who has given least
/// gives next.
void Controller::Lower(Draft& draft, Level to, Reason reason, std::int64_t short_by) {
  const std::int64_t goal = draft.freed_ + short_by;
  // Smallest on top: fewest pages given, then the older request.
  const auto later = [](const Giver& a, const Giver& b) {
    return a.given != b.given ? a.given > b.given : a.request > b.request;
  };
  heap_.clear();
  for (Sequence* s : kv_.active()) {
    if (s->floor < to) continue;
    const bool touched = s->draft == draft.id_;
    if ((touched ? s->draft_from : s->demote_from)[to] >= SearchEnd(*s, to)) continue;
    heap_.push_back({touched ? s->draft_missing : s->missing_pages, s->request, s});
  }
  std::make_heap(heap_.begin(), heap_.end(), later);
  while (!heap_.empty() && draft.freed_ < goal) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    Sequence& sequence = *heap_.back().sequence;
    Touch(draft, sequence);
    Block* block = NextCandidate(draft, sequence, to);
    if (block == nullptr) {
      heap_.pop_back();
      continue;
    }
    Plan(draft, *block, to, reason, &sequence);
    sequence.draft_missing += draft.measures_.back().pages;
    heap_.back().given = sequence.draft_missing;
    std::push_heap(heap_.begin(), heap_.end(), later);
  }
}

void Controller::CutTo(Draft& draft, std::int64_t target) {
  std::int64_t have = kv_.pool().free();
  std::size_t keep = 0;
  while (keep < draft.measures_.size() && have < target) have += draft.measures_[keep++].pages;
  draft.cut_ = keep < draft.measures_.size();
  draft.measures_.resize(keep);
  draft.freed_ = have - kv_.pool().free();
}

void Controller::Commit(Draft& draft) {
  for (const Measure& m : draft.measures_) {
    if (m.evict) {
      kv_.EvictIdle(*m.block);
      continue;
    }
    kv_.DemoteNow(*m.block, m.to, m.reason, m.donor);
    if (m.donor != nullptr) m.donor->demote_from[m.to] = m.block->index + 1;
  }
  // A draft that was cut has passed over blocks that it then left alone: only what it took is
  // known.
  if (!draft.cut_) {
    for (Sequence* s : draft.touched_) {
      for (int level = 0; level < kLevelCount; ++level)
        s->demote_from[level] = std::max(s->demote_from[level], s->draft_from[level]);
    }
  }
  draft.measures_.clear();
  draft.touched_.clear();
  draft.freed_ = 0;
}

/// Brings blocks lower than `above` up to `to`: the request that misses most first, in it the
/// youngest block first. False when pages, rate or this step's share of work are used up.
bool Controller::RestoreDown(Level above, Level to, std::int64_t keep) {
  heap_.clear();
  for (Sequence* s : kv_.active()) {
    bool any = false;
    for (int level = above + 1; level < kLevelCount; ++level)
      any = any || s->level_count[level] > 0;
    if (any) heap_.push_back({s->missing_pages, s->request, s});
  }
  std::sort(heap_.begin(), heap_.end(), [](const Giver& a, const Giver& b) {
    return a.given != b.given ? a.given > b.given : a.request < b.request;
  });
  std::int32_t started = 0, visits = 0;
  for (const Giver& giver : heap_) {
    Sequence& s = *giver.sequence;
    bool at_end = true;
    std::int32_t left = 0;  // blocks of it that stand too low; dropped ones are not among them
    for (int level = above + 1; level < kLevelCount; ++level) left += s.level_count[level];
    for (std::int32_t i = s.lowered_end; left > 0 && i-- > 0;) {
      if (s.blocks[i] == nullptr ||
          (s.blocks[i]->residency == Residency::kDevice && s.blocks[i]->level <= kv_.ceiling())) {
        if (at_end) s.lowered_end = i;
        continue;
      }
      Block& block = *s.blocks[i];
      at_end = false;
      if (block.residency != Residency::kDevice || block.level <= above) continue;
      left -= s.dropped[i] ? 0 : 1;
      if (block.Unwanted()) continue;
      if (++visits > kMaxVisitsPerStep || started >= kMaxRestoresPerStep || !kv_.CopiesHaveRoom())
        return false;
      const std::int64_t cost = PagesOf(to) - PagesOf(block.level);
      if (kv_.restore_allowance() <
          static_cast<double>(cost) * static_cast<double>(kv_.page_bytes()))
        return false;
      if (kv_.pool().free() + kv_.idle_pages() < keep + cost) return false;
      if (!kv_.MayRestore(block, to)) continue;
      if (kv_.pool().free() < keep + cost) {
        Draft& draft = NewDraft();
        MakeRoom(draft, keep + cost, kv_.pool().fenced(), Rung::kCache);
        Commit(draft);
        if (kv_.pool().free() < keep + cost) return false;
      }
      started += kv_.StartRestore(block, to);
    }
  }
  return true;
}

void Controller::Restore(std::int64_t keep) {
  if (!kv_.planes_bend() || kv_.lowered_blocks() == 0 || !kv_.CopiesHaveRoom()) return;
  if (kv_.pool().free() + kv_.idle_pages() <= keep) return;
  const Level base = std::max(kBaseLevel, kv_.ceiling());
  if (RestoreDown(base, base, keep)) RestoreDown(kv_.ceiling(), kv_.ceiling(), keep);
}

void Controller::DemoteAll() {
  if (!kv_.planes_bend()) return;
  Draft& draft = NewDraft();
  IdlePlanes(draft, std::numeric_limits<std::int32_t>::max());
  for (Level to = kv_.ceiling() + 1; to < kLadderLevels; ++to) {
    Lower(draft, to, to > kBaseLevel ? Reason::kDemoteDeep : Reason::kDemoteBase,
          std::numeric_limits<std::int32_t>::max());
  }
  Commit(draft);
}

}  // namespace pliant
