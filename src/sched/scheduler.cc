#include "sched/scheduler.h"

#include <algorithm>
#include <string>

#include "sched/scheduler_impl.h"

namespace pliant {

void StepPlan::Clear() {
  entries_.clear();
  tokens_.clear();
  positions_.clear();
  logit_rows_.clear();
  slices_.clear();
  samplers_.clear();
  tokens_to_come_.clear();
  histories_.clear();
  step_ = 0;
  prefill_rows_ = 0;
  idle_ = true;
  wait_ = 0;
}

Scheduler::Scheduler(const SchedulerOptions& options, KvManager& kv, const Clock& clock)
    : kv_(kv), impl_(std::make_unique<Impl>(options, kv, clock)) {
  PLIANT_CHECK(options.max_context > 0 && options.max_batch_tokens > 0 && options.max_running > 0,
               "scheduler options");
}

Scheduler::~Scheduler() {
  for (auto& [id, request] : impl_->requests) {
    if (request->sequence != nullptr) kv_.Release(request->sequence);
  }
}

std::int64_t Scheduler::MaxContext() const {
  return std::min(impl_->options.max_context, kv_.MaxTokens(kv_.FloorLevel(0)) + 1);
}

Status Scheduler::Add(SchedRequest spec) {
  Impl& s = *impl_;
  const auto reject = [&](Status status) {
    ++s.stats.rejected;
    return status;
  };
  if (spec.prompt.empty()) return reject(InvalidArgument("the prompt is empty"));
  if (spec.max_new_tokens < 1) return reject(InvalidArgument("max_tokens must be at least 1"));
  const Level floor = kv_.FloorLevel(spec.min_bits);
  if (floor == kLevelCount) {
    return reject(InvalidArgument("kv.min_bits of " + std::to_string(spec.min_bits) +
                                  ": expected 16, 12, 8 or 4"));
  }
  const auto prompt = static_cast<std::int64_t>(spec.prompt.size());
  if (prompt > s.options.max_context || spec.max_new_tokens > s.options.max_context - prompt) {
    return reject(TooLarge("prompt of " + std::to_string(prompt) + " tokens and " +
                           std::to_string(spec.max_new_tokens) +
                           " new ones are over the context of " +
                           std::to_string(s.options.max_context) + " tokens"));
  }
  // The last token's K and V are never computed.
  const std::int64_t most = kv_.MaxTokens(floor);
  if (prompt + spec.max_new_tokens - 1 > most) {
    return reject(TooLarge("prompt of " + std::to_string(prompt) + " tokens and " +
                           std::to_string(spec.max_new_tokens) + " new ones are over the " +
                           std::to_string(most) + " tokens that the KV memory can hold"));
  }
  auto request = std::make_unique<Request>();
  if (Status status = s.SetCapacity(*request, spec.capacity); !status.ok()) return reject(status);
  if (s.requests.contains(spec.id)) return reject(InvalidArgument("request id in use"));
  if (s.queue.size() >= static_cast<std::size_t>(s.options.max_waiting)) {
    return reject(ResourceExhausted("the queue is full: " + std::to_string(s.queue.size()) +
                                    " requests wait"));
  }
  request->id = spec.id;
  request->arrival = ++s.arrivals;
  request->priority = spec.priority;
  request->floor = floor;
  request->salt = std::move(spec.cache_salt);
  request->tokens = std::move(spec.prompt);
  request->prompt_tokens = prompt;
  request->max_new = spec.max_new_tokens;
  s.queue.insert(request.get());
  s.requests.emplace(spec.id, std::move(request));
  return Status::Ok();
}

void Scheduler::Cancel(RequestId id) {
  Request* request = impl_->Find(id);
  if (request == nullptr) return;
  ++impl_->stats.cancelled;
  impl_->End(*request, Reason::kCancel);
}

void Scheduler::WhileRunning() {
  kv_.StartSaves();
  impl_->saves_come_later = true;
}

void StepPlan::Fill(std::span<const SampledToken> sampled) {
  std::size_t next = 0;
  for (const TokenToCome& wanted : tokens_to_come_) {
    // Both lists are in the order of the running requests, but decodes that take turns may not be.
    std::size_t looked = 0;
    while (sampled[next].request != wanted.request) {
      next = (next + 1) % sampled.size();
      PLIANT_CHECK(++looked < sampled.size(), "a token to come was not sampled");
    }
    tokens_[static_cast<std::size_t>(wanted.row)] = sampled[next].token;
  }
  tokens_to_come_.clear();
}

StepPlan Scheduler::Plan() {
  PLIANT_CHECK(!kv_.pool().step_in_flight(), "PlanNext plans while a step is in flight");
  StepPlan plan = impl_->Plan(/*next=*/false);
  if constexpr (kChecked) Audit();
  return plan;
}

StepPlan Scheduler::PlanNext() {
  Impl& s = *impl_;
  PLIANT_CHECK(s.steps == s.settled + 1, "PlanNext plans ahead of the one step in flight");
  const auto waits = [&s](const auto& r) { return s.HistoryWaits(*r.second); };
  if (std::any_of(s.requests.begin(), s.requests.end(), waits)) return {};
  StepPlan plan = s.Plan(/*next=*/true);
  if constexpr (kChecked) Audit();
  if (plan.empty()) {
    s.spare = std::move(plan);
    return {};
  }
  return plan;
}

void Scheduler::Settle(StepPlan plan, std::span<const SampledToken> sampled) {
  Impl& s = *impl_;
  PLIANT_CHECK(!plan.empty() && sampled.size() == plan.samplers_.size(),
               "one sampled token for each logit row");
  kv_.EndStep(plan.step_);
  s.settled = plan.step_;
  ++s.stats.steps;
  std::size_t next = 0;
  for (const StepPlan::Entry& entry : plan.entries_) {
    const SampledToken* token = nullptr;
    if (entry.samples) {
      token = &sampled[next++];
      PLIANT_CHECK(token->request == entry.request,
                   "sampled tokens in the order of the plan's samplers");
    }
    Request* r = s.Find(entry.request);
    const std::optional<Request::Flight> flight = r == nullptr ? std::nullopt : r->Land(plan.step_);
    if (!flight) continue;  // cancelled meanwhile
    if (r->history && entry.rows == 1) s.SettleHistory(*r);
    kv_.Advance(*r->sequence, entry.rows, r->tokens, flight->context);
    s.NoteContext(*r, flight->context, token != nullptr);
    if (token == nullptr) continue;
    ++s.stats.generated_tokens;
    if (token->finished) {
      ++s.stats.finished;
      s.End(*r, Reason::kFinish);
      continue;
    }
    r->tokens.push_back(token->token);
    if (r->generated() >= r->max_new) {
      s.events.push_back({SchedEvent::Kind::kLength, r->id, Status::Ok()});
      ++s.stats.finished;
      s.End(*r, Reason::kFinish);
    }
  }
  plan.Clear();
  s.spare = std::move(plan);
  if constexpr (kChecked) Audit();
}

void Scheduler::Abandon(StepPlan plan) {
  Impl& s = *impl_;
  kv_.EndStep(plan.step_);
  s.settled = plan.step_;
  for (const StepPlan::Entry& entry : plan.entries_) {
    Request* r = s.Find(entry.request);
    if (r != nullptr) r->Land(plan.step_);
  }
  plan.Clear();
  s.spare = std::move(plan);
}

std::vector<SchedEvent> Scheduler::TakeEvents() { return std::exchange(impl_->events, {}); }

bool Scheduler::HasWork() const { return !impl_->requests.empty(); }

std::optional<RequestKvFacts> Scheduler::Facts(RequestId id) const {
  if (const Request* r = impl_->Find(id)) {
    RequestKvFacts facts = r->facts;
    if (r->history) {
      facts.capacity_blocks = r->history->capacity();
      if (r->sequence != nullptr) {
        facts.taking_part = r->sequence->retained->TakingPart(
            static_cast<std::int32_t>(r->sequence->blocks.size()));
      }
    }
    if (r->sequence != nullptr) {
      facts.demotions += r->sequence->demotions;
      facts.restores += r->sequence->restores;
    }
    return facts;
  }
  for (const auto& [ended_id, facts] : impl_->ended) {
    if (ended_id == id) return facts;
  }
  return std::nullopt;
}

std::string_view Scheduler::StateOf(RequestId id) const {
  const Request* r = impl_->Find(id);
  if (r == nullptr) return "gone";
  switch (r->state) {
    case Request::State::kWaiting:
      return "waiting";
    case Request::State::kLoading:
      return "loading";
    case Request::State::kRunning:
      return "running";
    case Request::State::kOffloading:
      return "offloading";
    case Request::State::kOffloaded:
      return "offloaded";
  }
  return "gone";
}

SchedStats Scheduler::Stats() const {
  SchedStats stats = impl_->stats;
  stats.running = static_cast<std::int64_t>(impl_->running.size());
  stats.loading = static_cast<std::int64_t>(impl_->loading.size());
  stats.offloaded = static_cast<std::int64_t>(impl_->offloading.size());
  for (const Request* r : impl_->queue) {
    ++(r->state == Request::State::kOffloaded ? stats.offloaded : stats.waiting);
  }
  for (const auto& [id, r] : impl_->requests) {
    if (!r->history) continue;
    ++stats.with_capacity;
    if (r->sequence == nullptr) continue;
    const RetainedHistory& retained = *r->sequence->retained;
    const std::int64_t dropped = retained.dropped_tokens() / retained.units();
    stats.blocks_taking_part +=
        retained.TakingPart(static_cast<std::int32_t>(r->sequence->blocks.size()));
    stats.blocks_dropped += retained.frontier();
    stats.dropped_tokens += dropped;
    stats.retained_tokens += r->computed() - dropped;
  }
  return stats;
}

void Scheduler::Audit() const {
  const Impl& s = *impl_;
  kv_.Audit();
  PLIANT_CHECK(s.running.size() + s.loading.size() + s.offloading.size() + s.queue.size() ==
                   s.requests.size(),
               "requests do not sum");
  PLIANT_CHECK(std::is_sorted(s.running.begin(), s.running.end(), Impl::Order()),
               "running requests are out of order");
  for (const auto& [id, r] : s.requests) {
    using State = Request::State;
    PLIANT_CHECK((r->state == State::kWaiting) == (r->sequence == nullptr),
                 "only waiting requests hold nothing");
    PLIANT_CHECK(!r->in_flight() || r->state == State::kRunning,
                 "a step in flight has a request that does not run");
    if (r->sequence == nullptr) continue;
    PLIANT_CHECK(r->sequence->request == id && r->sequence->floor == r->floor,
                 "a sequence belongs to someone else");
    PLIANT_CHECK(r->state != State::kRunning || r->sequence->Ready(),
                 "a running request has blocks below its floor");
    PLIANT_CHECK(r->sequence->computed < static_cast<std::int64_t>(r->tokens.size()),
                 "more computed than known");
    const bool off = r->state == State::kOffloading || r->state == State::kOffloaded;
    PLIANT_CHECK(r->sequence->active != off, "an offloaded sequence is active, or the reverse");
  }
}

// ---- requests and their lists
// -----------------------------------------------------------------------------------------------

Request* Scheduler::Impl::Find(RequestId id) const {
  const auto it = requests.find(id);
  return it == requests.end() ? nullptr : it->second.get();
}

void Scheduler::Impl::Log(Reason reason, const Request& r, int pages) {
  kv.log().Add({kv.step(), clock.Now(), reason, r.id, BlockId(), 0, 0, 0, 0, pages});
}

void Scheduler::Impl::EraseFrom(std::vector<Request*>& list, const Request& r) {
  list.erase(std::find(list.begin(), list.end(), &r));
}

void Scheduler::Impl::Unlist(Request& r) {
  switch (r.state) {
    case Request::State::kWaiting:
    case Request::State::kOffloaded:
      queue.erase(&r);
      break;
    case Request::State::kLoading:
      EraseFrom(loading, r);
      break;
    case Request::State::kRunning:
      EraseFrom(running, r);
      break;
    case Request::State::kOffloading:
      EraseFrom(offloading, r);
      break;
  }
}

void Scheduler::Impl::Run(Request& r) {
  r.state = Request::State::kRunning;
  running.insert(std::upper_bound(running.begin(), running.end(), &r, Order()), &r);
}

void Scheduler::Impl::DropSequence(Request& r) {
  if (r.sequence == nullptr) return;
  r.facts.demotions += r.sequence->demotions;
  r.facts.restores += r.sequence->restores;
  kv.Release(std::exchange(r.sequence, nullptr));
  ++frees;
}

void Scheduler::Impl::Requeue(Request& r) {
  Unlist(r);
  DropSequence(r);
  r.flights = {};
  r.state = Request::State::kWaiting;
  r.short_of_pages = false;
  queue.insert(&r);
}

void Scheduler::Impl::End(Request& r, Reason reason) {
  Unlist(r);
  DropSequence(r);
  Log(reason, r);
  ended.emplace_back(r.id, r.facts);
  ++frees;
  requests.erase(r.id);
}

void Scheduler::Impl::Fail(Request& r, Status error) {
  ++stats.failed;
  events.push_back({SchedEvent::Kind::kFailed, r.id, std::move(error)});
  End(r, Reason::kFail);
}

/// Who goes when nothing else helps: never hit before hit before, then lowest priority, then latest
/// arrival.
Request* Scheduler::Impl::ChooseVictim(const std::vector<Request*>& among) const {
  Request* victim = nullptr;
  for (Request* r : among) {
    if (r->in_flight()) continue;
    if (victim == nullptr || r->hits < victim->hits ||
        (r->hits == victim->hits && Order()(victim, r)))
      victim = r;
  }
  return victim;
}

void Scheduler::Impl::TakeOut(Request& victim, Reason preempt_reason) {
  ++victim.hits;
  // Without returns nobody has the rows of dropped blocks any more.
  const bool can_return = !victim.history || victim.returns;
  const bool offload = kv.can_offload() && can_return && victim.state == Request::State::kRunning &&
                       victim.computed() > 0 &&
                       kv.SlotsToOffload(*victim.sequence) <= kv.StoreSlotsAvailable();
  if (offload) {
    Log(Reason::kOffload, victim);
    ++stats.offloads;
    ++victim.facts.offloads;
    Unlist(victim);
    victim.state = Request::State::kOffloading;
    offloading.push_back(&victim);
    kv.Offload(*victim.sequence);
    return;
  }
  Log(preempt_reason, victim);
  ++stats.preemptions;
  ++victim.facts.preemptions;
  Requeue(victim);
}

void Scheduler::Impl::NoteContext(Request& r, Level context, bool sampled) {
  const PlaneCount planes = kLevels[context];
  r.facts.lowest_k_bits = std::min(r.facts.lowest_k_bits, planes.k * kBitsPerPlane);
  r.facts.lowest_v_bits = std::min(r.facts.lowest_v_bits, planes.v * kBitsPerPlane);
  if (sampled && context > kTargetLevel) {
    ++r.facts.tokens_below_16_bits;
    ++stats.tokens_below_16_bits;
  }
}

}  // namespace pliant
