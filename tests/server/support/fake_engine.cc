#include "server/support/fake_engine.h"

#include <algorithm>

namespace pliant::testing {

FakeEngine::FakeEngine(const Tokenizer* tokenizer, FakeEngineOptions options)
    : tokenizer_(tokenizer), options_(options) {
  script_ = [](const GenerateRequest& request) {
    static constexpr std::string_view kWord = "hello ";
    Script script;
    const auto count = std::min<std::int64_t>(request.stop.max_tokens, 4096);
    for (std::int64_t i = 0; i < count; ++i) {
      script.tokens.push_back(
          static_cast<unsigned char>(kWord[static_cast<std::size_t>(i) % kWord.size()]));
    }
    return script;
  };
  thread_ = std::thread([this] { Loop(); });
}

FakeEngine::~FakeEngine() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void FakeEngine::SetScript(ScriptFn script) {
  const std::lock_guard lock(mutex_);
  script_ = std::move(script);
}

void FakeEngine::HoldQueue(bool hold) {
  const std::lock_guard lock(mutex_);
  hold_ = hold;
  changed_.notify_all();
}

std::vector<GenerateRequest> FakeEngine::Submitted() const {
  const std::lock_guard lock(mutex_);
  return submitted_;
}

void FakeEngine::SetStats(const EngineStats& base) {
  const std::lock_guard lock(mutex_);
  base_ = base;
}

Result<RequestId> FakeEngine::Submit(GenerateRequest request, EventSink sink) {
  const std::lock_guard lock(mutex_);
  if (draining_) return Unavailable("the engine is draining");
  const auto needed = static_cast<std::int64_t>(request.prompt.size()) + request.stop.max_tokens;
  if (request.prompt.empty() || request.stop.max_tokens < 1 || needed > options_.context) {
    ++base_.requests_rejected;
    return TooLarge("needs " + std::to_string(needed) + " tokens");
  }
  if (waiting_.size() >= options_.max_waiting) {
    ++base_.requests_rejected;
    return ResourceExhausted("the queue holds " + std::to_string(waiting_.size()) +
                             " requests, its limit");
  }
  Job job;
  job.id = RequestId(next_id_++);
  job.script = script_(request);
  submitted_.push_back(request);
  job.request = std::move(request);
  job.sink = std::move(sink);
  const RequestId id = job.id;
  waiting_.push_back(std::move(job));
  changed_.notify_all();
  return id;
}

void FakeEngine::Cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  for (auto* queue : {&waiting_, &running_}) {
    for (Job& job : *queue) {
      if (job.id == id) job.cancelled = true;
    }
  }
  changed_.notify_all();
}

EngineStats FakeEngine::Stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = base_;
  stats.running = static_cast<std::int64_t>(running_.size());
  stats.waiting = static_cast<std::int64_t>(waiting_.size());
  return stats;
}

bool FakeEngine::Drain(double seconds) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  const auto idle = [&] { return waiting_.empty() && running_.empty(); };
  if (changed_.wait_for(lock, std::chrono::duration<double>(seconds), idle)) return true;
  for (auto* queue : {&waiting_, &running_}) {
    for (Job& job : *queue) job.cancelled = true;
  }
  changed_.notify_all();
  changed_.wait(lock, idle);
  return false;
}

void FakeEngine::End(Job* job, TokenEvent event, FinishReason reason) {
  event.finish = reason;
  event.usage.prompt_tokens = static_cast<std::int64_t>(job->request.prompt.size());
  event.usage.completion_tokens = static_cast<std::int64_t>(job->next);
  switch (reason) {
    case FinishReason::kCancelled:
      ++base_.requests_cancelled;
      break;
    case FinishReason::kError:
      ++base_.requests_failed;
      break;
    default:
      ++base_.requests_finished;
      break;
  }
  job->sink(job->id, std::move(event));
}

bool FakeEngine::Step(Job* job) {
  TokenEvent event;
  if (job->cancelled) {
    End(job, std::move(event), FinishReason::kCancelled);
    return true;
  }
  if (job->script.silent) return false;
  if (job->next < job->script.tokens.size()) {
    const TokenId token = job->script.tokens[job->next++];
    ++base_.generated_tokens;
    event.tokens = {token};
    event.text = tokenizer_->TokenBytes(token, job->request.special_in_text);
    const int top = job->request.sampling.top_logprobs;
    if (top >= 0) {
      TokenLogprob logprob{token, -0.5f, {}};
      for (int i = 0; i < top; ++i)
        logprob.top.emplace_back((token + i) % 256, -0.5f - static_cast<float>(i));
      event.logprobs = {logprob};
    }
    job->text += event.text;
    for (const std::string& stop : job->request.stop.strings) {
      if (job->text.ends_with(
              stop)) {  // text of one token only, so that nothing has to be held back
        event.text.clear();
        event.stop_match = stop;
        End(job, std::move(event), FinishReason::kStop);
        return true;
      }
    }
    if (static_cast<std::int64_t>(job->next) >= job->request.stop.max_tokens) {
      End(job, std::move(event), FinishReason::kLength);
      return true;
    }
    job->sink(job->id, std::move(event));
    return false;
  }
  if (!job->script.error.ok()) {
    event.error = job->script.error;
    End(job, std::move(event), FinishReason::kError);
  } else {
    End(job, std::move(event), FinishReason::kStop);
  }
  return true;
}

void FakeEngine::Loop() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      if (it->cancelled) {
        End(&*it, {}, FinishReason::kCancelled);
        it = waiting_.erase(it);
      } else {
        ++it;
      }
    }
    while (!hold_ && !waiting_.empty() && running_.size() < options_.max_running) {
      ++base_.requests_admitted;
      running_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    for (auto it = running_.begin(); it != running_.end();) {
      it = Step(&*it) ? running_.erase(it) : it + 1;
    }
    changed_.notify_all();
    if (running_.empty() && (waiting_.empty() || hold_)) {
      changed_.wait_for(lock, std::chrono::milliseconds(5));
    } else {
      changed_.wait_for(lock, options_.tick);
    }
  }
}

}  // namespace pliant::testing
