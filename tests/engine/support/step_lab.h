// The engine's parts with the shipped reckoner model on the CPU backend, driven step by step on the
// test's own thread, with a clock of its own: time is counted in steps. Copies go through the fault
// decorator.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/calibration.h"
#include "engine/step_loop.h"
#include "support/faulty_backend.h"

namespace pliant {

struct StepLabOptions {
  KvOptions kv;
  SchedulerOptions sched{
      .max_batch_tokens = 128, .max_running = 32, .max_waiting = 1 << 20, .max_context = 4096};
  testing::Faults faults;
  int blocks = 0;        // of the pool, at 16 bits
  int store_blocks = 0;  // of a RAM store
  Nanoseconds step_time = 5'000'000;
};

class StepLab {
 public:
  struct Answer {
    std::vector<TokenId> tokens;
    Usage usage;
    Status error;
    bool done = false;
  };

  explicit StepLab(StepLabOptions options) : step_time_(options.step_time) {
    model_ = Model::Open(std::string(PLIANT_TEST_DATA) + "/models/reckoner-q8_0.gguf").value();
    tokenizer_ = Tokenizer::Create(model_->ReadVocabulary().value()).value();
    backend_ = std::make_unique<testing::FaultyBackend>(MakeCpuBackend({.threads = 1}).value(),
                                                        options.faults);
    Require(model_->Load(*backend_, options.sched.max_batch_tokens, options.sched.max_running, {}));
    const KvGeometry geometry = model_->config().Kv();
    const std::size_t block_bytes = 2 * kPlanes * backend_->PageBytes(geometry);
    options.kv.memory_bytes = options.blocks * block_bytes;
    if (options.store_blocks > 0) {
      options.kv.store.kind = StoreSpec::Kind::kRam;
      options.kv.store.bytes = options.store_blocks * block_bytes;
    }
    auto kv = KvManager::Create(*backend_, geometry, options.kv, clock_).value();
    Require(Calibrate(*backend_, *model_, *tokenizer_, kv->pool().total(),
                      options.sched.max_batch_tokens));
    auto scheduler = std::make_unique<Scheduler>(options.sched, *kv, clock_);
    kv_ = kv.get();
    scheduler_ = scheduler.get();
    loop_ = std::make_unique<StepLoop>(backend_.get(), model_.get(), tokenizer_.get(),
                                       std::move(kv), std::move(scheduler), &clock_);
  }

  /// A greedy request of made-up or given text that runs to `max_tokens`.
  void Ask(std::uint64_t id, std::vector<TokenId> prompt, std::int64_t max_tokens,
           int min_bits = 0) {
    GenerateRequest request;
    request.prompt = std::move(prompt);
    request.sampling.temperature = 0;
    request.stop.max_tokens = max_tokens;
    request.stop.ignore_eos = true;
    request.kv.min_bits = min_bits;
    answers_[id];
    ++live_;
    const auto sink = [this, id](RequestId, TokenEvent event) {
      Answer& answer = answers_[id];
      answer.tokens.insert(answer.tokens.end(), event.tokens.begin(), event.tokens.end());
      produced_ += static_cast<std::int64_t>(event.tokens.size());
      if (!event.finish) return;
      answer.usage = event.usage;
      answer.error = event.error;
      answer.done = true;
      --live_;
    };
    loop_->Add(RequestId(id), std::move(request), sink, id);
  }
  /// Text of digits and letters that the model may read on; the same for the same seed.
  static std::vector<TokenId> Prompt(std::int64_t length, std::uint64_t seed) {
    std::vector<TokenId> tokens;
    std::uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;
    for (std::int64_t i = 0; i < length; ++i) {
      x ^= x << 13, x ^= x >> 7, x ^= x << 17;
      tokens.push_back(static_cast<TokenId>("0123456789abcdef=+-*;"[x % 21]));
    }
    return tokens;
  }

  void Step() {
    clock_.Advance(step_time_);
    loop_->Step();
    ++turns_;
  }
  /// Steps until all have ended; false when that takes more than `most` turns.
  bool Run(int most) {
    for (int i = 0; i < most && live_ > 0; ++i) Step();
    return live_ == 0;
  }

  const Answer& answer(std::uint64_t id) const { return answers_.at(id); }
  const std::map<std::uint64_t, Answer>& answers() const { return answers_; }
  int live() const { return live_; }
  std::int64_t produced() const { return produced_; }
  std::int64_t turns() const { return turns_; }
  KvManager& kv() { return *kv_; }
  Scheduler& scheduler() { return *scheduler_; }
  testing::FaultyBackend& backend() { return *backend_; }
  EngineStats Stats() const { return loop_->Stats(); }
  double seconds() const { return static_cast<double>(turns_ * step_time_) / kNanosPerSecond; }

 private:
  static void Require(const Status& status) { PLIANT_CHECK(status.ok(), status.message()); }

  const Nanoseconds step_time_;
  ManualClock clock_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<testing::FaultyBackend> backend_;
  KvManager* kv_ = nullptr;
  Scheduler* scheduler_ = nullptr;
  std::map<std::uint64_t, Answer> answers_;
  int live_ = 0;
  std::int64_t produced_ = 0, turns_ = 0;
  std::unique_ptr<StepLoop> loop_;  // first to go: it ends requests through the sinks
};

}  // namespace pliant
