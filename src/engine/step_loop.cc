#include "engine/step_loop.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine/kv_report.h"

namespace pliant {

StepLoop::StepLoop(Backend* backend, Model* model, const Tokenizer* tokenizer,
                   std::unique_ptr<KvManager> kv, std::unique_ptr<Scheduler> scheduler,
                   const Clock* clock, bool steps_ahead)
    : backend_(backend),
      model_(model),
      tokenizer_(tokenizer),
      clock_(clock),
      kv_(std::move(kv)),
      scheduler_(std::move(scheduler)),
      steps_ahead_(steps_ahead) {}

void StepLoop::Add(RequestId id, GenerateRequest request, EventSink sink,
                   std::uint64_t random_seed) {
  SchedRequest sched{.id = id,
                     .prompt = request.prompt,
                     .max_new_tokens = request.stop.max_tokens,
                     .priority = request.priority,
                     .min_bits = request.kv.min_bits,
                     .cache_salt = request.kv.cache_salt,
                     .capacity = request.kv.capacity};
  const Status status = scheduler_->Add(std::move(sched));
  if (!status.ok()) {
    TokenEvent event;
    event.finish = FinishReason::kError;
    event.error = status;
    event.usage.prompt_tokens = static_cast<std::int64_t>(request.prompt.size());
    sink(id, std::move(event));
    return;
  }
  Sampler sampler(request.sampling, request.prompt, random_seed);
  OutputStream output(tokenizer_, request.stop.strings, request.special_in_text);
  if (not_started_ == 0) new_request_ = true;
  live_.emplace(id,
                Live{std::move(request), std::move(sink), std::move(sampler), std::move(output)});
  ++not_started_;
}

void StepLoop::Cancel(RequestId id) {
  const auto is_it = [id](const Ending& ending) { return ending.id == id; };
  if (std::any_of(endings_.begin(), endings_.end(), is_it)) SettleRun();  // it has its answer
  if (!live_.contains(id)) return;
  gone_ = true;
  const Usage usage = UsageOf(id, live_.at(id));
  scheduler_->Cancel(id);
  TokenEvent event;
  event.usage = usage;
  End(id, FinishReason::kCancelled, Status::Ok(), std::move(event));
}

void StepLoop::FailAll(const Status& status) {
  SettleRun();
  gone_ = true;
  std::vector<RequestId> ids;
  for (const auto& [id, live] : live_) ids.push_back(id);
  for (const RequestId id : ids) {
    scheduler_->Cancel(id);
    End(id, FinishReason::kError, status);
  }
}

Nanoseconds StepLoop::Step() {
  // A request that is new and alone in waiting would wait for a whole step more.
  if (new_request_ || ((gone_ || !endings_.empty()) && !IsWanted(next_))) ForgetNext();
  new_request_ = gone_ = false;
  const Nanoseconds plan_start = clock_->Now();
  if (ran_at_ == 0) ran_at_ = plan_start;
  const bool ahead = !next_.empty();
  StepPlan plan = ahead ? std::exchange(next_, StepPlan()) : scheduler_->Plan();
  HandleSchedulerEvents();
  if (plan.empty()) {
    HandOver();
    ran_at_ = 0;
    return plan.idle() ? -1 : std::max<Nanoseconds>(plan.wait(), 1000);
  }
  const Nanoseconds start = clock_->Now();
  counters_.plan_nanoseconds += start - plan_start;
  counters_.steps_ahead += ahead ? 1 : 0;
  const Status status = Run(plan);
  counters_.step_nanoseconds += ran_at_ - start;
  if (!status.ok()) {
    Fail(std::move(plan), status);
    return 0;
  }
  run_ = std::move(plan);
  if (next_.empty()) {
    SettleRun();
    counters_.settle_nanoseconds += clock_->Now() - ran_at_;
  } else {
    next_.Fill(sampled_);
  }
  if (!device_works_) HandOver();
  return 0;
}

void StepLoop::WhileRunning() {
  const Nanoseconds started = clock_->Now();
  device_works_ = true;
  SettleRun();
  HandOver();
  scheduler_->WhileRunning();
  if (steps_ahead_) next_ = scheduler_->PlanNext();
  if (!next_.empty()) backend_->PrepareStep(next_.batch());
  HandleSchedulerEvents();
  counters_.hidden_nanoseconds += clock_->Now() - started;
}

void StepLoop::CountIdle(Nanoseconds waited) {
  std::size_t i = 0;
  while (i + 1 < counters_.idle_counts.size() && static_cast<double>(waited) > IdleBound(i)) ++i;
  ++counters_.idle_counts[i];
}

bool StepLoop::IsWanted(const StepPlan& plan) const {
  return std::any_of(plan.entries().begin(), plan.entries().end(), [this](const auto& entry) {
    const auto is_it = [&](const Ending& ending) { return ending.id == entry.request; };
    return live_.contains(entry.request) && std::none_of(endings_.begin(), endings_.end(), is_it);
  });
}

void StepLoop::SettleRun() {
  if (run_.empty()) return;
  scheduler_->Settle(std::exchange(run_, StepPlan()), sampled_);
  for (Ending& ending : endings_)
    End(ending.id, ending.reason, std::move(ending.error), std::move(ending.event));
  endings_.clear();
  HandleSchedulerEvents();
}

void StepLoop::ForgetNext() {
  SettleRun();
  if (!next_.empty()) scheduler_->Abandon(std::exchange(next_, StepPlan()));
}

void StepLoop::Fail(StepPlan plan, const Status& why) {
  SettleRun();  // the step before ran
  HandOver();
  // The step's requests cannot be trusted to do better next time: end them, keep the others.
  spdlog::error("step failed: {}", why.ToString());
  std::vector<RequestId> ids;
  for (const StepPlan::Entry& entry : plan.entries()) ids.push_back(entry.request);
  scheduler_->Abandon(std::move(plan));
  ForgetNext();
  for (const RequestId id : ids) {
    if (!live_.contains(id)) continue;
    scheduler_->Cancel(id);
    End(id, FinishReason::kError, why);
  }
}

void StepLoop::HandOver() {
  for (Delivery& delivery : deliveries_) {
    const auto found = live_.find(delivery.id);
    if (found != live_.end()) found->second.sink(delivery.id, std::move(delivery.event));
  }
  deliveries_.clear();
}

Status StepLoop::Run(const StepPlan& plan) {
  const std::span<const RequestId> samplers = plan.samplers();
  StepBatch batch = plan.batch();
  if (backend_->SamplesTokens()) {
    batch.sampling = PlanSampling(samplers);
    batch.sampled_columns = static_cast<std::int32_t>(ValidTokens());
    batch.changes = changes_;
  }
  const Status status = model_->Forward(*backend_, batch, [this, &plan] {
    if (plan.prefill_rows() == 0) CountIdle(clock_->Now() - ran_at_);
    WhileRunning();
  });
  ran_at_ = clock_->Now();
  if (!status.ok()) return status;
  ReportPrefill(plan);
  TakeTokens(plan, batch);
  return Status::Ok();
}

void StepLoop::TakeTokens(const StepPlan& plan, const StepBatch& batch) {
  PLIANT_CHECK(run_.empty(), "a step is settled before the next one's tokens are taken");
  const std::span<const RequestId> samplers = plan.samplers();
  const std::span<const float> logits = backend_->LogitRows();
  const std::span<const std::int32_t> tokens = backend_->SampledTokens();
  const std::span<const RowLogprobs> logprobs = backend_->SampledLogprobs();
  const auto vocabulary = static_cast<std::size_t>(model_->config().vocab_size);
  PLIANT_CHECK(batch.sampling.empty() || tokens.size() >= samplers.size(),
               "the backend sampled fewer rows than asked for");
  sampled_.clear();
  std::size_t host_row = 0;
  for (std::size_t i = 0; i < samplers.size(); ++i) {
    if (!batch.sampling.empty() && batch.sampling[i].on_host == 0) {
      sampled_.push_back(
          TakeRow(samplers[i], tokens[i], i < logprobs.size() ? &logprobs[i] : nullptr));
      continue;
    }
    PLIANT_CHECK(logits.size() >= (host_row + 1) * vocabulary,
                 "the backend gave fewer logit rows than asked for");
    sampled_.push_back(SampleRow(samplers[i], logits.subspan(host_row++ * vocabulary, vocabulary)));
  }
}

std::int64_t StepLoop::ValidTokens() const {
  return std::min<std::int64_t>(model_->config().vocab_size, tokenizer_->size());
}

std::span<const RowSampling> StepLoop::PlanSampling(std::span<const RequestId> samplers) {
  sampling_.clear();
  changes_.clear();
  for (const RequestId id : samplers) {
    RowSampling row;  // of a request that is gone: any token, which nobody gets
    if (const auto found = live_.find(id); found != live_.end()) {
      ForbidEarlyEnd(found->second);
      const Sampler& sampler = found->second.sampler;
      row = sampler.ForDevice();
      row.first_change = static_cast<std::int32_t>(changes_.size());
      row.changes = static_cast<std::int32_t>(sampler.Changes().size());
      changes_.insert(changes_.end(), sampler.Changes().begin(), sampler.Changes().end());
    }
    sampling_.push_back(row);
  }
  return sampling_;
}

void StepLoop::ForbidEarlyEnd(Live& live) const {
  const bool may_stop = live.produced + 1 > live.request.stop.min_tokens;
  if (!may_stop && !live.request.stop.ignore_eos) {
    live.sampler.Forbid(tokenizer_->vocabulary().end_of_generation);
  } else {
    live.sampler.Forbid({});
  }
}

SampledToken StepLoop::TakeRow(RequestId id, TokenId token, const RowLogprobs* logprobs) {
  const auto found = live_.find(id);
  if (found == live_.end()) return {.request = id, .token = 0, .finished = true};
  if (token == kNoToken) {
    return EndRow(id, Internal(found->second.sampler.Changes().empty()
                                   ? "the model's logits are not finite for this request"
                                   : "the model's logits are not finite for this request, or bias "
                                     "and penalties leave no token"));
  }
  found->second.sampler.Took(token);
  TokenLogprob sampled;
  sampled.token = token;
  if (found->second.request.sampling.top_logprobs >= 0) {
    PLIANT_CHECK(logprobs != nullptr, "a backend that samples has no logprobs");
    SetLogprobs(*logprobs, sampled);
  }
  return Deliver(id, found->second, sampled);
}

SampledToken StepLoop::SampleRow(RequestId id, std::span<const float> logits) {
  const auto found = live_.find(id);
  // Cancelled while the step ran; the scheduler ignores it.
  if (found == live_.end()) return {.request = id, .token = 0, .finished = true};
  Live& live = found->second;
  ForbidEarlyEnd(live);
  Result<TokenLogprob> sampled = live.sampler.Sample(logits, ValidTokens());
  if (!sampled.ok()) return EndRow(id, sampled.status());
  return Deliver(id, live, *sampled);
}

SampledToken StepLoop::EndRow(RequestId id, Status error) {
  ++counters_.nonfinite_requests;
  endings_.push_back({id, FinishReason::kError, std::move(error), {}});
  return {.request = id, .token = 0, .finished = true};
}

SampledToken StepLoop::Deliver(RequestId id, Live& live, const TokenLogprob& sampled) {
  TokenEvent event;
  const bool finished = Take(live, sampled, event);
  if (finished) {
    endings_.push_back({id, *event.finish, Status::Ok(), std::move(event)});
  } else {
    deliveries_.push_back({id, std::move(event)});
  }
  return {.request = id, .token = sampled.token, .finished = finished};
}

bool StepLoop::Take(Live& live, const TokenLogprob& sampled, TokenEvent& event) {
  const StopParams& stop = live.request.stop;
  ++live.produced;
  const bool may_stop = live.produced > stop.min_tokens;
  const TokenId token = sampled.token;
  const bool ends = may_stop && ((!stop.ignore_eos && tokenizer_->IsEndOfGeneration(token)) ||
                                 std::find(stop.token_ids.begin(), stop.token_ids.end(), token) !=
                                     stop.token_ids.end());
  if (ends) {
    OutputStream::Piece rest = live.output.Finish();
    event.text = std::move(rest.text);
    event.stop_match = rest.stop.value_or("");
    event.finish = FinishReason::kStop;
    return true;
  }
  event.tokens.push_back(token);
  if (live.request.sampling.top_logprobs >= 0) event.logprobs.push_back(sampled);
  OutputStream::Piece piece = live.output.Push(token, may_stop);
  event.text = std::move(piece.text);
  if (!piece.stop && live.produced >= stop.max_tokens) {
    OutputStream::Piece rest = live.output.Finish();
    event.text += rest.text;
    piece.stop = std::move(rest.stop);
    event.finish = FinishReason::kLength;
  }
  if (piece.stop) {
    event.stop_match = *piece.stop;
    event.finish = FinishReason::kStop;
  }
  return event.finish.has_value();
}

void StepLoop::ReportPrefill(const StepPlan& plan) {
  const StepBatch batch = plan.batch();
  for (std::size_t i = 0; i < plan.entries().size(); ++i) {
    const auto found = live_.find(plan.entries()[i].request);
    if (found == live_.end()) continue;
    Live& live = found->second;
    if (!live.started) {
      live.started = true;
      --not_started_;
    }
    if (!live.request.report_prefill || live.produced > 0) continue;
    TokenEvent event;
    event.prompt_done = batch.sequences[i].context + batch.sequences[i].rows;
    live.sink(found->first, std::move(event));
  }
}

void StepLoop::HandleSchedulerEvents() {
  for (SchedEvent& event : scheduler_->TakeEvents()) {
    const auto found = live_.find(event.request);
    if (found == live_.end()) continue;
    TokenEvent last;
    OutputStream::Piece rest = found->second.output.Finish();
    last.text = std::move(rest.text);
    if (event.kind == SchedEvent::Kind::kLength) {
      End(event.request, FinishReason::kLength, Status::Ok(), std::move(last));
    } else {
      End(event.request, FinishReason::kError, event.error, std::move(last));
    }
  }
}

void StepLoop::End(RequestId id, FinishReason reason, Status error, TokenEvent event) {
  auto node = live_.extract(id);
  if (node.empty()) return;
  Live& live = node.mapped();
  if (!live.started) --not_started_;
  event.finish = reason;
  event.error = std::move(error);
  if (reason != FinishReason::kCancelled) event.usage = UsageOf(id, live);
  // Tokens of this very step that were not delivered yet come first.
  for (Delivery& delivery : deliveries_) {
    if (delivery.id == id) live.sink(id, std::move(delivery.event));
  }
  std::erase_if(deliveries_, [&](const Delivery& delivery) { return delivery.id == id; });
  if (reason == FinishReason::kError) ++counters_.requests_failed;
  live.sink(id, std::move(event));
}

Usage StepLoop::UsageOf(RequestId id, const Live& live) const {
  Usage usage;
  usage.prompt_tokens = static_cast<std::int64_t>(live.request.prompt.size());
  usage.completion_tokens = live.produced;
  if (const std::optional<RequestKvFacts> facts = scheduler_->Facts(id)) {
    usage.cached_tokens = facts->cached_tokens;
    usage.tokens_below_16_bits = facts->tokens_below_16_bits;
    usage.lowest_k_bits = facts->lowest_k_bits;
    usage.lowest_v_bits = facts->lowest_v_bits;
    usage.preemptions = facts->preemptions;
    usage.demotions = facts->demotions;
    usage.restores = facts->restores;
    usage.dropped = facts->dropped;
    usage.returned = facts->returned;
    usage.held_pages = facts->held_pages;
    usage.whole_pages = facts->whole_pages;
  }
  return usage;
}

EngineStats StepLoop::Stats() const {
  EngineStats stats = counters_;
  const SchedStats sched = scheduler_->Stats();
  const KvStats kv = kv_->Stats();
  stats.running = sched.running;
  stats.waiting = sched.waiting + sched.offloaded + sched.loading;
  stats.pages_total = kv.pages_total;
  stats.pages_free = kv.pages_free;
  stats.pages_cached = kv.pages_cached;
  stats.kv_bytes_total = kv.pages_total * kv.page_bytes;
  stats.kv_bytes_used = (kv.pages_total - kv.pages_free) * kv.page_bytes;
  std::copy(&kv.blocks_by_state[0][0], &kv.blocks_by_state[0][0] + 25,
            &stats.blocks_by_state[0][0]);
  stats.requests_admitted = sched.admitted;
  stats.requests_finished = sched.finished;
  stats.requests_cancelled = sched.cancelled;
  stats.prompt_tokens = sched.prompt_tokens;
  stats.generated_tokens = sched.generated_tokens;
  stats.prefix_lookup_tokens = sched.prefix_lookup_tokens;
  stats.prefix_hit_tokens = sched.prefix_hit_tokens;
  stats.preemptions = sched.preemptions;
  stats.offloads = sched.offloads;
  stats.demotions = kv.demotions;
  stats.restores = kv.restores;
  stats.steps = sched.steps;
  stats.with_capacity = sched.with_capacity;
  stats.blocks_taking_part = sched.blocks_taking_part;
  stats.blocks_dropped = sched.blocks_dropped;
  stats.drops = sched.drops;
  stats.retained_tokens = sched.retained_tokens;
  stats.dropped_tokens = sched.dropped_tokens;
  stats.returned_pages = sched.returned_pages;
  stats.lost_pages = sched.lost_pages;
  stats.signals = sched.signals;
  stats.signal_sum = sched.signal_sum;
  stats.capacity_growths = sched.growths;
  stats.store_bytes_total = kv.store_bytes_total;
  stats.store_bytes_used = kv.store_bytes_used;
  stats.tokens_below_16_bits = sched.tokens_below_16_bits;
  stats.restore_nanoseconds = kv.restore_nanoseconds;
  for (int i = 0; i < static_cast<int>(Reason::kCount); ++i) {
    stats.decisions[i] = static_cast<std::int64_t>(kv_->log().Count(static_cast<Reason>(i)));
  }
  return stats;
}

std::string StepLoop::KvReport() const {
  pliant::KvReport report{.kv = kv_.get(), .scheduler = scheduler_.get()};
  for (const auto& [id, live] : live_) {
    report.requests.push_back(
        {.id = id,
         .state = scheduler_->StateOf(id),
         .prompt_tokens = static_cast<std::int64_t>(live.request.prompt.size()),
         .produced = live.produced,
         .facts = scheduler_->Facts(id).value_or(RequestKvFacts{})});
  }
  std::sort(report.requests.begin(), report.requests.end(),
            [](const auto& a, const auto& b) { return a.id < b.id; });
  return KvReportJson(report);
}

}  // namespace pliant
