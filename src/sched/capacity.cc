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
  if (options.history_heads == 0) {
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
  r.returns = o.retention.returns && kv.has_store();
  r.history.emplace(o, static_cast<std::int32_t>(blocks), grows);
  r.capacity_blocks = r.history->capacity();
  r.grows = grows;
  return {};
}

void Scheduler::Impl::StartHistory(Request& r) {
  if (!r.history) return;
  const HistoryOptions& o = options.history;
  const auto prompt =
      static_cast<std::int32_t>((r.prompt_tokens + kBlockTokens - 1) / kBlockTokens);
  r.history.emplace(o, r.capacity_blocks + (r.grows && o.start_from_prompt ? prompt : 0), r.grows);
  RetentionOptions retention = o.RetentionOf(r.grows);
  retention.returns = r.returns;
  kv.Retain(*r.sequence, options.history_heads, retention, o.kept_level);
  r.returned_seen = r.lost_seen = 0;
}

void Scheduler::Impl::MindCapacities() {
  for (std::size_t i = 0; i < running.size();) {
    Request& r = *running[i];
    // The prompt is computed with all of itself.
    if (!r.history || r.in_flight() || r.remaining() != 1 || DropOver(r)) {
      ++i;
      continue;
    }
    Log(Reason::kLostBlock, r);
    ++r.facts.preemptions;
    ++stats.preemptions;
    Requeue(r);
  }
}

bool Scheduler::Impl::HistoryWaits(const Request& r) const {
  if (!r.history || r.sequence == nullptr) return false;
  if (!r.in_flight()) return true;
  if (r.remaining() != 1) return false;
  const std::int64_t tokens = r.planned();
  return !r.history->IsUpToDate(tokens) ||
         r.history->MustDrop(static_cast<std::int32_t>(tokens / kBlockTokens + 1),
                             *r.sequence->retained);
}

bool Scheduler::Impl::DropOver(Request& r) {
  Sequence& s = *r.sequence;
  RetainedHistory& retained = *s.retained;
  const auto blocks = static_cast<std::int32_t>(s.computed / kBlockTokens + 1);
  retained.Reserve(std::int64_t{blocks} * kBlockTokens);
  if (!kv.NoteHistory(s)) return false;
  const History::Growth growth = r.history->Extend(s.computed, retained);
  if (growth == History::Growth::kGrew) {
    ++r.facts.growths;
    ++stats.growths;
    Log(Reason::kGrow, r);
  }
  if (growth != History::Growth::kNotAsked) {
    const double signal = r.history->signal();
    const auto* bound = std::lower_bound(kSignalBounds.begin(), kSignalBounds.end(), signal);
    ++stats.signals[static_cast<std::size_t>(bound - kSignalBounds.begin())];
    stats.signal_sum += signal;
  }
  while (r.history->MustDrop(blocks, retained)) {
    KvManager::DropState state = KvManager::DropState::kNoPages;
    if (r.history->MayAddKept(retained)) state = kv.DropOldest(s, true);
    // With no free page it compacts into what it has; the rest is the ladder's.
    if (state == KvManager::DropState::kNoPages && retained.kept_blocks() > 0)
      state = kv.DropOldest(s, false);
    if (state == KvManager::DropState::kLost) return false;
    if (state == KvManager::DropState::kNoPages) break;
    ++r.facts.dropped;
    ++stats.drops;
    ++frees;
  }
  return true;
}

void Scheduler::Impl::AddHistory(Request& r, SequenceSlice& slice, StepPlan& plan) {
  if (!r.history) return;
  Sequence& s = *r.sequence;
  PLIANT_CHECK(slice.rows == 1 || !s.retained->drops(),
               "several rows over a history of which tokens were dropped");
  s.retained->Reserve(std::int64_t{slice.blocks} * kBlockTokens);
  slice.history = s.retained.get();
  plan.histories_.push_back(s.retained);
  slice.first_kept = static_cast<std::int32_t>(plan.blocks_.size());
  plan.blocks_.insert(plan.blocks_.end(), s.kept_views.begin(), s.kept_views.end());
  Request::Flight& flight = r.flights[r.flights[1].step != 0 ? 1 : 0];
  if (!s.kept.empty()) flight.context = std::max(flight.context, s.kept_level);
}

void Scheduler::Impl::SettleHistory(Request& r) {
  const Sequence& s = *r.sequence;
  const std::int64_t returned = s.retained->returned_pages(), lost = s.retained->lost_pages();
  r.facts.returned += returned - r.returned_seen;
  stats.returned_pages += returned - r.returned_seen;
  r.facts.lost += lost - r.lost_seen;
  stats.lost_pages += lost - r.lost_seen;
  if (lost > r.lost_seen) Log(Reason::kLostBlock, r);
  r.returned_seen = returned;
  r.lost_seen = lost;
  r.facts.held_pages += kv.PagesHeld(s);
  r.facts.whole_pages += static_cast<std::int64_t>(s.blocks.size()) * kv.pages_per_block();
}

}  // namespace pliant
