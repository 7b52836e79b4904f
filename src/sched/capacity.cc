// Requests whose history has a capacity: what leaves their attention, and what comes back.
#include <algorithm>
#include <string>

#include "sched/scheduler_impl.h"

namespace pliant {

Status Scheduler::Impl::SetCapacity(Request& r, Capacity capacity) const {
  const HistoryOptions& o = options.history;
  if (capacity.kind == Capacity::Kind::kDefault) capacity = o.default_capacity;
  if (capacity.kind == Capacity::Kind::kFull || capacity.kind == Capacity::Kind::kDefault)
    return {};
  if (!options.watches_blocks) {
    return InvalidArgument(
        "kv.capacity: this server cannot tell what a request looks at, only \"full\" is possible");
  }
  const bool grows = capacity.kind == Capacity::Kind::kGrow;
  if (!grows && capacity.tokens < 1) {
    return InvalidArgument("kv.capacity of " + std::to_string(capacity.tokens) +
                           " tokens: at least 1");
  }
  const std::int64_t blocks =
      grows ? o.start_blocks
            : (std::min<std::int64_t>(capacity.tokens, 1 << 30) + kBlockTokens - 1) / kBlockTokens;
  r.returns = o.returns && kv.has_store();
  r.history.emplace(o, static_cast<std::int32_t>(blocks), grows);
  r.capacity_blocks = r.history->capacity();
  r.grows = grows;
  return {};
}

void Scheduler::Impl::StartHistory(Request& r) {
  if (!r.history) return;
  r.history.emplace(options.history, r.capacity_blocks, r.grows);
  if (r.returns) kv.KeepCopies(*r.sequence);
}

void Scheduler::Impl::MindCapacities() {
  for (Request* r : running) {
    // The prompt is computed with all of itself.
    if (r->history && !r->in_flight() && r->remaining() == 1) DropOver(*r);
  }
}

void Scheduler::Impl::ExtendHistory(Request& r) {
  if (!r.history->Extend(static_cast<std::int32_t>(r.sequence->blocks.size()))) return;
  ++r.facts.growths;
  ++stats.growths;
  Log(Reason::kGrow, r);
}

void Scheduler::Impl::DropOver(Request& r) {
  Sequence& s = *r.sequence;
  History& history = *r.history;
  ExtendHistory(r);
  while (history.OverCapacity()) {
    const std::int32_t victim = history.Victim([&](std::int32_t b) {
      // What is about to be recalled still counts as dropped there.
      return s.blocks[b]->full && !s.dropped[b];
    });
    if (victim < 0) return;
    history.Drop(victim);
    if (r.returns) {
      kv.Drop(s, victim);
    } else {
      kv.Forget(s, victim);
    }
    ++r.facts.dropped;
    ++stats.drops;
    ++frees;
  }
}

bool Scheduler::Impl::IsWatched(Request& r, std::int32_t rows) {
  if (!r.history) return false;
  ExtendHistory(r);
  PLIANT_CHECK(rows == 1 || r.history->taking_part() == r.history->blocks(),
               "several rows over a history of which blocks were dropped");
  return rows == 1;
}

void Scheduler::Impl::CountPages(Request& r) {
  const Sequence& s = *r.sequence;
  const auto whole = static_cast<std::int64_t>(s.blocks.size()) * kv.pages_per_block();
  r.facts.whole_pages += whole;
  std::int64_t forgotten = 0;
  for (const Block* block : s.blocks) forgotten += block == nullptr ? kv.pages_per_block() : 0;
  r.facts.held_pages += whole - s.missing_pages - forgotten;
}

void Scheduler::Impl::BringBack(Request& r) {
  ++r.returns_of_token;
  ++r.facts.recomputed;
  ++stats.recomputed_tokens;
  for (const std::int32_t block : r.wanted) {
    r.history->Return(block);
    ++r.facts.recalled;
    ++stats.recalls;
  }
  DropOver(r);  // before pages are asked for
  for (const std::int32_t block : r.wanted) {
    if (r.history->TakesPart(block)) kv.Recall(*r.sequence, block);
  }
  r.wanted.clear();
  if (r.sequence->Ready()) return;
  Unlist(r);
  r.state = Request::State::kLoading;
  r.short_of_pages = kv.Load(*r.sequence) == KvManager::LoadState::kNoPages;
  loading.push_back(&r);
}

std::span<const std::uint8_t> Scheduler::Review(const StepPlan& plan,
                                                std::span<const float> block_weights) {
  Impl& s = *impl_;
  s.again.clear();
  for (std::size_t i = 0; i < plan.entries_.size(); ++i) {
    const StepPlan::Entry& entry = plan.entries_[i];
    const SequenceSlice& slice = plan.slices_[i];
    Request* r = s.Find(entry.request);
    bool again = false;
    if (slice.watched && r != nullptr && r->flight_step == plan.step_) {
      const auto own = block_weights.subspan(static_cast<std::size_t>(slice.first_block),
                                             static_cast<std::size_t>(slice.blocks));
      r->history->Note(own);
      if (r->returns && r->returns_of_token < s.options.history.most_returns) {
        if (const std::int32_t wanted = r->history->Wanted(own); wanted >= 0)
          r->wanted.push_back(wanted);
      }
      again = !r->wanted.empty();
      if (!again) r->returns_of_token = 0;
    }
    if (entry.samples) s.again.push_back(again ? 1 : 0);
  }
  return s.again;
}

}  // namespace pliant
