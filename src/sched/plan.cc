// How a step is decided: what the running requests need comes first, then the queue, then restores.
// Each part makes a draft of measures, and commits it only when it leads to something.
#include <algorithm>
#include <string>
#include <utility>

#include "sched/scheduler_impl.h"

namespace pliant {
namespace {

// A queue head that did not fit is looked at again after so many steps even if nothing was freed
// meanwhile.
constexpr std::uint64_t kRetrySteps = 8;
// Plans in a row that wait for copies under way before a request is taken off the device.
constexpr std::int32_t kPatience = 16;
// Times that a request which cannot be loaded is made to recompute instead, before it is given up.
constexpr std::int32_t kMostLoads = 32;
// A sequence's part of the block table grows by so many blocks at a time: what lies behind it
// moves.
constexpr std::int32_t kRegionBlocks = 8;
constexpr Nanoseconds kPollCopies = 100'000, kPollElse = 1'000'000;

}  // namespace

StepPlan Scheduler::Impl::Plan(bool is_next) {
  next = is_next;
  // Whatever was freed while a step is in flight is there when it ends.
  coming = next ? kv.pool().fenced() : 0;
  const std::size_t turn = rotation;
  ended.clear();
  const bool saves_later = std::exchange(saves_come_later, false);
  kv.Poll(!saves_later);
  MoveLoads();
  MoveOffloads();
  MindCapacities();
  if (kv.options().always_demote) controller.DemoteAll();
  StepPlan plan = std::move(spare);
  plan.Clear();
  do {
    grants.clear();
    rows_left = options.max_batch_tokens;
    under_pressure = held = admitted = false;
    PlanRunning();
    PlanAdmissions();
  } while (grants.empty() && !admitted && BreakDeadlock());
  PlanRestores();
  if (!next) stalled_plans = under_pressure ? stalled_plans + 1 : 0;
  if (next && grants.empty()) rotation = turn;  // Plan comes in its place
  if (saves_later && grants.empty() && !next) kv.StartSaves();
  Build(plan);
  return plan;
}

// ---- copies that ended
// ------------------------------------------------------------------------------------------------------

void Scheduler::Impl::MoveLoads() {
  for (std::size_t i = 0; i < loading.size();) {
    Request& r = *loading[i];
    const KvManager::LoadState state = kv.Load(*r.sequence);
    r.short_of_pages = state == KvManager::LoadState::kNoPages;
    if (state == KvManager::LoadState::kReady) {
      loading.erase(loading.begin() + static_cast<std::ptrdiff_t>(i));
      Run(r);
    } else if (state == KvManager::LoadState::kLost) {
      Log(Reason::kLostBlock, r);
      ++r.facts.preemptions;
      ++stats.preemptions;
      Requeue(r);
    } else {
      ++i;
    }
  }
}

void Scheduler::Impl::MoveOffloads() {
  for (std::size_t i = 0; i < offloading.size();) {
    Request& r = *offloading[i];
    const KvManager::OffloadState state = kv.OffloadProgress(*r.sequence);
    if (state == KvManager::OffloadState::kPending) {
      ++i;
    } else if (state == KvManager::OffloadState::kDone) {
      offloading.erase(offloading.begin() + static_cast<std::ptrdiff_t>(i));
      r.state = Request::State::kOffloaded;
      queue.insert(&r);
      ++frees;
    } else {  // the store did not take all of it: rung 8
      Log(Reason::kPreempt, r);
      ++r.facts.preemptions;
      ++stats.preemptions;
      Requeue(r);
    }
  }
}

// ---- running requests
// -------------------------------------------------------------------------------------------------------

/// Sorts the running requests into decodes and prefills and adds up what they need.
void Scheduler::Impl::CollectRunning(Needs& n) {
  n = Needs();
  decodes.clear();
  prefills.clear();
  const std::int64_t horizon = 1 + kv.options().horizon_steps;
  for (Request* r : running) {
    if (r->left_to_generate() <= 0) continue;  // the step in flight samples its last token
    (r->remaining() == 1 ? decodes : prefills).push_back(r);
  }
  // When decodes alone would fill the step, a quarter of it stays for prompts, and decodes take
  // turns.
  const std::int32_t total = options.max_batch_tokens;
  const bool prompts =
      !prefills.empty() ||
      (!queue.empty() && static_cast<std::int32_t>(running.size()) < options.max_running);
  const auto most = static_cast<std::size_t>(std::max(1, prompts ? total - total / 4 : total));
  if (decodes.size() > most) {
    std::rotate(decodes.begin(),
                decodes.begin() + static_cast<std::ptrdiff_t>(rotation % decodes.size()),
                decodes.end());
    rotation += most;
    decodes.resize(most);
  }
  for (const Request* r : decodes) {
    const int pages = PagesToExtend(*r, 1);
    n.decodes += pages;
    n.ahead += PagesToExtend(*r, std::min(horizon, r->left_to_generate())) - pages;
  }
  n.now = n.decodes;
  std::int64_t rows = rows_left - static_cast<std::int64_t>(decodes.size());
  for (const Request* r : prefills) {
    const std::int64_t chunk = std::min(r->remaining(), std::max<std::int64_t>(rows, 0));
    const int pages = chunk > 0 ? PagesToExtend(*r, chunk) : 0;
    rows -= chunk;
    n.now += pages;
    n.promised += PagesToExtend(*r, r->remaining()) - pages;
  }
  n.now += kv.withheld_lacking();
  for (const Request* r : loading) {
    if (r->short_of_pages) n.now += kv.PagesToReady(*r->sequence);
  }
}

void Scheduler::Impl::PlanRunning() {
  while (true) {
    grants.clear();
    CollectRunning(needs);
    const bool fits = [&] {
      Draft& draft = controller.NewDraft();
      const bool enough = controller.MakeRoom(draft, needs.now, coming, Controller::Rung::kDeep);
      if (enough && kv.planes_bend()) {
        const auto reserve =
            static_cast<std::int64_t>(kv.options().low_watermark * kv.pool().total());
        controller.MakeRoom(draft, needs.now + needs.ahead + reserve, kv.PagesComing(),
                            Controller::Rung::kBase);
      } else if (enough && next) {
        // What the cache gives now is there for the plan after this one.
        controller.MakeRoom(draft, needs.now + needs.ahead, kv.PagesComing(),
                            Controller::Rung::kCache);
      }
      controller.Commit(draft);
      kv.TakeWithheld();
      return enough;
    }();
    const std::int64_t lacking = GrantRunning();
    if ((fits && lacking == 0) || !RelieveShortage(lacking)) break;
  }
  if (next && under_pressure) grants.clear();  // who goes is decided with nothing in flight
  for (const Grant& grant : grants) {
    kv.Extend(*grant.request->sequence, grant.request->rows_in_flight() + grant.rows);
    rows_left -= grant.rows;
  }
}

/// Gives this step's rows to running requests as far as free pages go: decodes first, then prompts.
/// Takes nothing yet.
std::int64_t Scheduler::Impl::GrantRunning() {
  std::int64_t free = kv.pool().free(), lacking = 0;
  for (Request* r : decodes) {
    const int pages = PagesToExtend(*r, 1);
    if (pages > free) {
      lacking += pages;
      continue;
    }
    free -= pages;
    grants.push_back({r, 1});
  }
  if (lacking > 0) return lacking - free;
  std::int64_t rows = rows_left - static_cast<std::int64_t>(grants.size());
  for (Request* r : prefills) {
    if (rows <= 0) break;
    const Sequence& s = *r->sequence;
    const std::int64_t slack =
        static_cast<std::int64_t>(s.blocks.size()) * kBlockTokens - r->planned();
    const std::int64_t fitting = slack + free / kv.pages_per_block() * kBlockTokens;
    const std::int64_t chunk = std::min({r->remaining(), rows, fitting});
    if (chunk <= 0) continue;
    free -= PagesToExtend(*r, chunk);
    rows -= chunk;
    grants.push_back({r, static_cast<std::int32_t>(chunk)});
  }
  // Prompts wait for pages while decodes go on; they count as lacking when nothing else could run.
  return grants.empty() && !prefills.empty() ? kv.pages_per_block() - free : 0;
}

/// Running requests lack pages after rungs 1 to 5. True when somebody was taken out, so that the
/// plan must be made anew.
bool Scheduler::Impl::RelieveShortage(std::int64_t lacking) {
  if (lacking <= 0) return false;
  under_pressure = true;
  if (next) return false;
  // Pages of a step in flight, or of a request that is leaving, will come: one measure for one
  // shortage.
  if (kv.PagesComing() >= lacking) return false;
  // Exact copies under way will let blocks give planes.
  if (kv.planes_bend() && kv.CopiesUnderWay() && stalled_plans < kPatience) return false;
  if (running.size() < 2) return false;  // alone: see BreakDeadlock
  Request* victim = ChooseVictim(running);
  if (victim == nullptr) return false;  // all are in flight
  TakeOut(*victim, Reason::kPreempt);
  return true;
}

// ---- the queue
// --------------------------------------------------------------------------------------------------------------

void Scheduler::Impl::PlanAdmissions() {
  while (!queue.empty() && rows_left > 0 &&
         static_cast<std::int32_t>(running.size() + loading.size() + offloading.size()) <
             options.max_running) {
    Request& head = **queue.begin();
    // What pressure freed belongs to those who lacked it.
    const bool wait = under_pressure || !offloading.empty() ||
                      (head.id == held_id && kv.step() < held_until && frees == held_frees &&
                       !(running.empty() && loading.empty()));
    soon = false;
    if (!wait && TryAdmit(head)) continue;
    held = true;
    if (!wait) {
      if (held_id != head.id) Log(Reason::kHoldAdmission, head);
      held_id = head.id;
      held_until = kv.step() + (soon ? 1 : kRetrySteps);
      held_frees = frees;
    }
    return;
  }
}

/// Room that an admitted request should find beyond what it needs at once. It doubles each time the
/// request was taken out, so that it comes back for longer and longer.
std::int64_t Scheduler::Impl::Headroom(const Request& r) const {
  const std::int64_t rows = std::int64_t{kBlockTokens} << std::min(r.hits, 16);
  return std::min(rows, r.max_new - r.generated());
}

bool Scheduler::Impl::TryAdmit(Request& head) {
  const bool alone = running.empty() && loading.empty() && offloading.empty();
  if (!(head.state == Request::State::kOffloaded ? AdmitOffloaded(head, alone)
                                                 : AdmitWaiting(head, alone)))
    return false;
  held_id = RequestId();
  admitted = true;
  return true;
}

bool Scheduler::Impl::AdmitOffloaded(Request& head, bool alone) {
  Sequence& sequence = *head.sequence;
  const std::int64_t pages = kv.PagesToReady(sequence);
  const std::int64_t growth = kv.PagesToExtend(
      sequence,
      std::min(head.remaining() - 1, std::int64_t{options.max_batch_tokens}) + Headroom(head));
  Draft& draft = controller.NewDraft();
  const std::int64_t all = pages + growth + needs.promised + needs.ahead;
  if (!controller.MakeRoom(draft, all, coming, Controller::Rung::kDeep)) {
    if (!alone || kv.pool().free() + draft.pages_freed() < pages) return false;
  }
  controller.Commit(draft);
  Unlist(head);
  kv.Reactivate(sequence);
  Log(Reason::kResume, head, -static_cast<int>(pages));
  StartLoad(head);
  return true;
}

/// The request takes part as soon as its blocks are all there: in this step, if they are.
void Scheduler::Impl::StartLoad(Request& r) {
  const KvManager::LoadState state = kv.Load(*r.sequence);
  if (state != KvManager::LoadState::kReady) {
    r.state = Request::State::kLoading;
    r.short_of_pages = state == KvManager::LoadState::kNoPages;
    loading.push_back(&r);
    return;
  }
  Run(r);
  const Sequence& s = *r.sequence;
  const std::int64_t slack = static_cast<std::int64_t>(s.blocks.size()) * kBlockTokens - s.computed;
  const std::int64_t fitting = slack + kv.pool().free() / kv.pages_per_block() * kBlockTokens;
  const std::int64_t chunk = std::min({r.remaining(), std::int64_t{rows_left}, fitting});
  if (chunk <= 0) return;
  kv.Extend(*r.sequence, chunk);
  grants.push_back({&r, static_cast<std::int32_t>(chunk)});
  rows_left -= static_cast<std::int32_t>(chunk);
  needs.promised += kv.PagesToExtend(s, r.remaining());
}

bool Scheduler::Impl::AdmitWaiting(Request& head, bool alone) {
  const int block_pages = kv.pages_per_block();
  PrefixMatch match = kv.Match(head.floor, head.salt, head.tokens);
  const auto total = static_cast<std::int64_t>(head.tokens.size());
  const auto pages_for = [&](std::int64_t tokens) {
    return ((tokens + kBlockTokens - 1) / kBlockTokens -
            static_cast<std::int64_t>(match.blocks.size())) *
           block_pages;
  };
  Draft* draft = &controller.NewDraft();
  controller.Pin(*draft, match);
  std::int64_t bring = kv.PagesToReady(match.blocks, head.floor);
  std::int64_t chunk = std::min<std::int64_t>(total - match.tokens(), rows_left);
  const std::int64_t reserved = needs.promised + needs.ahead;
  if (!controller.MakeRoom(*draft, bring + pages_for(total + Headroom(head)) + reserved, coming,
                           Controller::Rung::kDeep)) {
    if (!alone) return false;
    // Nobody else is there to leave room: it goes as far as it gets, if need be without the cached
    // start.
    std::int64_t room = kv.pool().free() + draft->pages_freed() - bring;
    if (room < block_pages && !match.blocks.empty()) {
      match.blocks.clear();
      bring = 0;
      draft = &controller.NewDraft();
      controller.MakeRoom(*draft, pages_for(std::min<std::int64_t>(total, rows_left)), 0,
                          Controller::Rung::kDeep);
      room = kv.pool().free() + draft->pages_freed();
    }
    if (room < block_pages) return false;
    chunk = std::min(
        {total - match.tokens(), std::int64_t{rows_left}, room / block_pages * kBlockTokens});
  } else {
    // Later chunks make their room when they come.
    controller.CutTo(*draft, bring + pages_for(match.tokens() + chunk) + reserved - coming);
  }
  controller.Commit(*draft);
  if (static_cast<std::int64_t>(kv.pool().free()) < bring + pages_for(match.tokens() + chunk)) {
    soon = true;  // fenced
    return false;
  }

  Unlist(head);
  head.sequence = kv.Open(head.id, head.floor, head.salt);
  StartHistory(head);
  kv.Attach(*head.sequence, match);
  Log(match.blocks.empty() ? Reason::kAdmit : Reason::kAdmitCached, head,
      -static_cast<int>(pages_for(match.tokens() + chunk)));
  if (!head.was_admitted) {
    head.was_admitted = true;
    head.facts.cached_tokens = match.tokens();
    ++stats.admitted;
    stats.prompt_tokens += head.prompt_tokens;
    stats.prefix_lookup_tokens += head.prompt_tokens;
    stats.prefix_hit_tokens += match.tokens();
  }
  StartLoad(head);
  return true;
}

// ---- the way back, and the way out
// ------------------------------------------------------------------------------------------

void Scheduler::Impl::PlanRestores() {
  if (held || under_pressure || !loading.empty() || kv.options().always_demote) return;
  const auto reserve = static_cast<std::int64_t>(kv.options().high_watermark * kv.pool().total());
  controller.Restore(static_cast<std::int64_t>(kv.pool().free()) - needs.ahead - needs.promised -
                     reserve);
}

/// Nothing can run. If nothing is under way that would change that, somebody must give up: true
/// when the plan should be tried anew.
bool Scheduler::Impl::BreakDeadlock() {
  if (requests.empty() || next || kv.CopiesUnderWay()) return false;
  if (!offloading.empty() || kv.PagesComing() > 0) return false;
  if (Request* victim = ChooseVictim(loading); victim != nullptr && victim->hits < kMostLoads) {
    TakeOut(*victim, Reason::kPreemptNoProgress);
    return true;
  }
  // Offloaded requests that still hold pages or store slots, latest first.
  for (auto it = queue.rbegin(); it != queue.rend(); ++it) {
    if ((*it)->state != Request::State::kOffloaded) continue;
    TakeOut(**it, Reason::kPreemptNoProgress);
    return true;
  }
  if (running.size() > 1) {
    TakeOut(*ChooseVictim(running), Reason::kPreemptNoProgress);
    return true;
  }
  Request* stuck = !running.empty()   ? running.front()
                   : !loading.empty() ? loading.front()
                                      : *queue.begin();
  Fail(*stuck, OutOfMemory("the KV memory of " + std::to_string(kv.pool().total()) +
                           " pages is used up by this request alone, at " +
                           std::to_string(stuck->computed()) + " tokens"));
  return true;
}

// ---- the plan
// ---------------------------------------------------------------------------------------------------------------

void Scheduler::Impl::Build(StepPlan& plan) {
  if (grants.empty()) {
    // Copies of requests that are gone still hold pages: somebody must look when they have ended.
    plan.idle_ = requests.empty() && !kv.CopiesUnderWay();
    plan.wait_ = kv.CopiesUnderWay() ? kPollCopies : kPollElse;
    return;
  }
  plan.step_ = ++steps;
  plan.regions_.resize(grants.size());
  std::int32_t at = 0;
  for (std::size_t i = 0; i < grants.size(); ++i) {
    const Grant& grant = grants[i];
    Request& r = *grant.request;
    Sequence& s = *r.sequence;
    const auto computed = static_cast<std::int32_t>(r.planned());
    const auto blocks = (computed + grant.rows + kBlockTokens - 1) / kBlockTokens;
    const bool samples = grant.rows == r.remaining();
    plan.slices_.push_back({.first_row = static_cast<std::int32_t>(plan.tokens_.size()),
                            .rows = grant.rows,
                            .context = computed,
                            .first_block = at,
                            .blocks = blocks});
    const std::int64_t known =
        std::min<std::int64_t>(grant.rows, static_cast<std::int64_t>(r.tokens.size()) - computed);
    plan.tokens_.insert(plan.tokens_.end(), r.tokens.begin() + computed,
                        r.tokens.begin() + computed + known);
    if (known < grant.rows) {  // the last: the step in flight samples it
      plan.tokens_to_come_.push_back({r.id, static_cast<std::int32_t>(plan.tokens_.size())});
      plan.tokens_.push_back(0);
    }
    for (std::int32_t row = 0; row < grant.rows; ++row) plan.positions_.push_back(computed + row);
    StepPlan::Region& region = plan.regions_[i];
    const auto views = static_cast<std::int32_t>(s.views.size());
    if (region.first != at || region.capacity < views ||
        region.capacity > views + 2 * kRegionBlocks)
      region = {at, (views / kRegionBlocks + 1) * kRegionBlocks, 0};
    at += region.capacity;
    if (static_cast<std::size_t>(at) > plan.blocks_.size())
      plan.blocks_.resize(static_cast<std::size_t>(at));
    kv.CopyViews(s, plan.blocks_.data() + region.first, region.mark);
    if (samples) {
      plan.logit_rows_.push_back(static_cast<std::int32_t>(plan.tokens_.size()) - 1);
      plan.samplers_.push_back(r.id);
    }
    if (computed + grant.rows < r.prompt_tokens || grant.rows > 1) plan.prefill_rows_ += grant.rows;
    plan.entries_.push_back({r.id, grant.rows, samples});
    r.Depart({plan.step_, grant.rows, samples, std::max(s.WorstLevel(), kv.ceiling())});
  }
  plan.blocks_.resize(static_cast<std::size_t>(at));
  for (std::size_t i = 0; i < grants.size(); ++i)
    AddHistory(*grants[i].request, plan.slices_[i], plan);
  kv.BeginStep(plan.step_);
}

}  // namespace pliant
