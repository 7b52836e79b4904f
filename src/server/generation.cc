#include "server/generation.h"

#include <algorithm>

namespace pliant {

void Mailbox::Push(Item item) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  const bool was_empty = items_.empty();
  items_.push_back(std::move(item));
  if (was_empty) notify_();
}

std::vector<Mailbox::Item> Mailbox::Take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(items_, {});
}

void Mailbox::Close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  items_.clear();
  notify_ = nullptr;
}

Generation::Generation(GenerationPlan plan, Engine* engine, const Tokenizer* tokenizer,
                       ServerMetrics* metrics, std::function<void()> notify)
    : plan_(std::move(plan)),
      engine_(engine),
      tokenizer_(tokenizer),
      metrics_(metrics),
      mailbox_(std::make_shared<Mailbox>(std::move(notify))),
      choices_(plan_.prompts.size() * static_cast<std::size_t>(plan_.n)) {}

Result<std::unique_ptr<Generation>> Generation::Start(GenerationPlan plan, Engine* engine,
                                                      const Tokenizer* tokenizer,
                                                      ServerMetrics* metrics,
                                                      std::function<void()> notify) {
  std::unique_ptr<Generation> made(
      new Generation(std::move(plan), engine, tokenizer, metrics, std::move(notify)));
  PLIANT_RETURN_IF_ERROR(made->SubmitAll());
  return made;
}

Generation::~Generation() {
  mailbox_->Close();
  CancelOpen();
}

Status Generation::SubmitAll() {
  submitted_at_ = SystemClock::Instance().Now();
  const auto n = static_cast<std::size_t>(plan_.n);
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    const GenerationPlan::Prompt& prompt = plan_.prompts[i / n];
    Choice& choice = choices_[i];
    choice.text = prompt.echo;
    GenerateRequest request = plan_.base;
    request.prompt = prompt.ids;
    request.stop.max_tokens = prompt.max_tokens;
    // The same seed would give n equal answers.
    if (request.sampling.seed) *request.sampling.seed += i % n;
    const Result<RequestId> id = engine_->Submit(
        std::move(request), [box = mailbox_, index = static_cast<int>(i)](RequestId, TokenEvent e) {
          box->Push({index, SystemClock::Instance().Now(), std::move(e)});
        });
    if (!id.ok()) return id.status();  // the destructor cancels those before
    choice.request = *id;
    choice.submitted = true;
    ++open_;
  }
  return Status::Ok();
}

void Generation::CancelOpen() {
  for (Choice& choice : choices_) {
    if (choice.submitted && !choice.finish) engine_->Cancel(choice.request);
  }
}

/// What came for a choice while nobody looked becomes one event, so that a server that has fallen
/// behind has less to write, not more.
std::vector<Mailbox::Item> Generation::TakeMerged() {
  std::vector<Mailbox::Item> merged;
  std::vector<std::size_t> last(choices_.size(), ~std::size_t{0});  // of each choice, in `merged`
  for (Mailbox::Item& item : mailbox_->Take()) {
    const auto index = static_cast<std::size_t>(item.choice);
    Observe(item, &choices_[index]);
    if (last[index] == ~std::size_t{0}) {
      last[index] = merged.size();
      merged.push_back(std::move(item));
      continue;
    }
    TokenEvent& into = merged[last[index]].event;
    TokenEvent& from = item.event;
    // What adds up is added; what describes the state now is the later event's.
    from.text.swap(into.text);
    from.text += into.text;
    into.logprobs.insert(into.logprobs.end(), std::make_move_iterator(from.logprobs.begin()),
                         std::make_move_iterator(from.logprobs.end()));
    from.logprobs.swap(into.logprobs);
    into = std::move(from);
  }
  return merged;
}

Generation::Progress Generation::Advance() {
  Progress progress;
  for (Mailbox::Item& item : TakeMerged()) {
    if (over_) break;
    Take(std::move(item), &progress);
  }
  if (!over_ && open_ == 0) Finish(&progress);
  progress.done = over_;
  return progress;
}

void Generation::Observe(const Mailbox::Item& item, Choice* choice) {
  const auto count = item.event.tokens.size();
  if (count == 0) return;
  const auto seconds = [](Nanoseconds span) { return static_cast<double>(span) * 1e-9; };
  if (choice->last_token == 0) {
    metrics_->ObserveTimeToFirstToken(seconds(item.at - submitted_at_));
  } else {
    metrics_->ObserveInterTokenLatency(seconds(item.at - choice->last_token) /
                                       static_cast<double>(count));
  }
  choice->last_token = item.at;
}

void Generation::Take(Mailbox::Item item, Progress* progress) {
  Choice& choice = choices_[static_cast<std::size_t>(item.choice)];
  if (choice.finish) return;
  TokenEvent& event = item.event;
  if (event.finish) {
    choice.finish = event.finish;
    choice.usage = event.usage;
    choice.stop_match = event.stop_match;
    --open_;
    if (*event.finish == FinishReason::kError) {
      return Fail(
          FromStatus(event.error.ok() ? Internal("the engine ended the request") : event.error),
          progress);
    }
    if (*event.finish == FinishReason::kCancelled) {
      return Fail(FromStatus(Unavailable("the server ended the request; it is shutting down")),
                  progress);
    }
  }
  if (plan_.stream) return TakeStreamed(item.choice, std::move(event), &choice, progress);
  plain_bytes_ += event.text.size();
  for (const TokenLogprob& one : event.logprobs) plain_bytes_ += 64 * (1 + one.top.size());
  if (plain_bytes_ > plan_.max_plain_bytes) {
    return Fail(BadField("stream",
                         "the answer passed " + std::to_string(plan_.max_plain_bytes) +
                             " bytes, the limit of answers that are not streamed",
                         "answer_too_large"),
                progress);
  }
  choice.text += event.text;
  choice.logprobs.insert(choice.logprobs.end(), std::make_move_iterator(event.logprobs.begin()),
                         std::make_move_iterator(event.logprobs.end()));
}

void Generation::TakeStreamed(int index, TokenEvent event, Choice* choice, Progress* progress) {
  const bool wanted = plan_.base.sampling.top_logprobs >= 0;
  const bool first = !choice->started;
  std::string text =
      std::exchange(choice->text, {}) + event.text;  // echo goes with the first chunk
  if (first && plan_.header.chat) {
    // As OpenAI does it: the role comes alone.
    progress->stream += SseEvent(StreamChunk(plan_.header, index, "", true, nullptr, nullptr, ""));
  }
  if (!text.empty() || (wanted && !event.logprobs.empty())) {
    Json logprobs =
        LogprobsJson(plan_.header.chat, wanted, event.logprobs, *tokenizer_, &choice->cursor);
    progress->stream +=
        SseEvent(StreamChunk(plan_.header, index, text, false, std::move(logprobs), nullptr, ""));
  }
  if (event.finish) {
    progress->stream += SseEvent(
        StreamChunk(plan_.header, index, "", false, nullptr, &*event.finish, event.stop_match));
  }
  choice->started = true;
  sent_ = sent_ || !progress->stream.empty();
}

void Generation::Fail(const ApiError& error, Progress* progress) {
  over_ = true;
  CancelOpen();
  if (sent_ || !progress->stream.empty()) {
    progress->stream += SseEvent(ErrorBody(error));
    progress->stream += kSseDone;
  } else {
    progress->response = ErrorResponse(error);
  }
}

Usage Generation::TotalUsage() const {
  Usage total;
  const auto n = static_cast<std::size_t>(plan_.n);
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    const Usage& one = choices_[i].usage;
    if (i % n == 0) {  // the choices of a prompt share it
      total.prompt_tokens += one.prompt_tokens;
      total.cached_tokens += one.cached_tokens;
    }
    total.completion_tokens += one.completion_tokens;
    total.tokens_below_16_bits += one.tokens_below_16_bits;
    total.lowest_k_bits = std::min(total.lowest_k_bits, one.lowest_k_bits);
    total.lowest_v_bits = std::min(total.lowest_v_bits, one.lowest_v_bits);
    total.preemptions += one.preemptions;
    total.demotions += one.demotions;
    total.restores += one.restores;
    total.dropped += one.dropped;
    total.returned += one.returned;
    total.held_pages += one.held_pages;
    total.whole_pages += one.whole_pages;
  }
  return total;
}

void Generation::Finish(Progress* progress) {
  over_ = true;
  if (plan_.stream) {
    if (plan_.header.include_usage) {
      progress->stream += SseEvent(StreamUsageChunk(plan_.header, TotalUsage()));
    }
    progress->stream += kSseDone;
    return;
  }
  Json choices = Json::array();
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    Choice& choice = choices_[i];
    Json logprobs = LogprobsJson(plan_.header.chat, plan_.base.sampling.top_logprobs >= 0,
                                 choice.logprobs, *tokenizer_, &choice.cursor);
    choices.push_back(PlainChoice(plan_.header.chat, static_cast<int>(i), std::move(choice.text),
                                  std::move(logprobs), *choice.finish, choice.stop_match));
  }
  HttpResponse response;
  response.body = PlainAnswer(plan_.header, std::move(choices), TotalUsage());
  progress->response = std::move(response);
}

}  // namespace pliant
