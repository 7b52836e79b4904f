// A shipped model (tests/data/models; the reckoner unless told otherwise) behind an engine, for
// tests that need real answers.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine_factory.h"
#include "engine/support/sampling_backend.h"
#include "support/rounds.h"

namespace pliant {

// Not written as a braced temporary (TestModel model({.floor_bits = 8})): GCC 12 takes its strings
// for uninitialised ones.
struct TestEngineOptions {
  static const TestEngineOptions& Default() {
    static const TestEngineOptions options;
    return options;
  }

  std::uint64_t kv_bytes = 64u << 20;
  int max_running = 32;
  int max_batch_tokens = 128;
  int max_waiting = 256;
  KvPolicy policy = KvPolicy::kFull;
  StoreSpec store;
  int floor_bits = 16;
  bool prefix_cache = true;
  bool always_demote = false;
  // Each start reads a text for it; under a sanitizer that is most of a test's time, and
  // calibration_test.cc covers it there.
  bool calibrate = !kSanitized;
  HistoryOptions history;
  std::string level = "auto";
  bool backend_samples = false;  // tokens are taken by the backend, as on a GPU
  std::string model_path = std::string(PLIANT_TEST_DATA) + "/models/reckoner-q8_0.gguf";
};

/// Collects the events of many requests; Wait returns when one has ended.
class Collector {
 public:
  struct Answer {
    std::vector<TokenId> tokens;
    std::string text;
    std::vector<TokenLogprob> logprobs;
    FinishReason finish = FinishReason::kError;
    std::string stop_match;
    Status error;
    Usage usage;
    bool done = false;
  };

  EventSink Sink() {
    return [this](RequestId id, TokenEvent event) {
      const std::lock_guard lock(mutex_);
      Answer& answer = answers_[id];
      ASSERT_FALSE(answer.done) << "an event after the last one";
      answer.tokens.insert(answer.tokens.end(), event.tokens.begin(), event.tokens.end());
      answer.logprobs.insert(answer.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
      answer.text += event.text;
      if (event.finish) {
        answer.finish = *event.finish;
        answer.stop_match = event.stop_match;
        answer.error = event.error;
        answer.usage = event.usage;
        answer.done = true;
      }
      changed_.notify_all();
    };
  }
  Answer Wait(RequestId id) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return answers_[id].done; });
    return answers_[id];
  }
  /// Returns once the request has `count` tokens or has ended.
  void WaitTokens(RequestId id, std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return answers_[id].done || answers_[id].tokens.size() >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<RequestId, Answer> answers_;
};

/// The statistics after every step whose events the caller has seen. An answer's last event comes
/// before its step is counted, and steps are counted for whoever has asked: so this asks, and has
/// the engine thread answer twice; in between it has counted.
inline EngineStats StatsNow(Engine& engine) {
  (void)engine.Stats();
  for (int i = 0; i < 2; ++i) PLIANT_CHECK(engine.KvReportJson().ok(), "the engine answers");
  return engine.Stats();
}

/// Copies to the exact store may outlive the last answer, and hold their pages meanwhile: waits for
/// them, but not for ever.
inline void ExpectIdle(Engine& engine) {
  EngineStats stats;
  for (int i = 0; i < 500; ++i) {
    stats = StatsNow(engine);
    if (stats.running == 0 && stats.waiting == 0 &&
        stats.pages_free + stats.pages_cached == stats.pages_total)
      return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  FAIL() << stats.running << " running, " << stats.waiting << " waiting, " << stats.pages_free
         << " + " << stats.pages_cached << " of " << stats.pages_total << " pages free or cached";
}

class TestModel {
 public:
  TestModel() : TestModel(TestEngineOptions::Default()) {}
  explicit TestModel(const TestEngineOptions& options) {
    auto opened = Model::Open(options.model_path);
    PLIANT_CHECK(opened.ok(), opened.status().message());
    model = *std::move(opened);
    tokenizer = Tokenizer::Create(model->ReadVocabulary().value()).value();
    std::unique_ptr<Backend> backend =
        MakeCpuBackend({.threads = 2, .level = options.level}).value();
    if (options.backend_samples) {
      auto samples = std::make_unique<SamplingBackend>(std::move(backend));
      sampling = samples.get();
      backend = std::move(samples);
    }
    const Status loaded = model->Load(*backend, options.max_batch_tokens, options.max_running, {});
    PLIANT_CHECK(loaded.ok(), loaded.message());
    EngineOptions engine_options;
    engine_options.kv.memory_bytes = options.kv_bytes;
    engine_options.kv.policy = options.policy;
    engine_options.kv.store = options.store;
    engine_options.kv.floor_bits = options.floor_bits;
    engine_options.kv.prefix_cache = options.prefix_cache;
    engine_options.kv.always_demote = options.always_demote;
    engine_options.calibrate = options.calibrate;
    engine_options.sched.max_batch_tokens = options.max_batch_tokens;
    engine_options.sched.max_running = options.max_running;
    engine_options.sched.max_waiting = options.max_waiting;
    engine_options.sched.history = options.history;
    auto made = MakeEngine(engine_options, std::move(backend), model.get(), tokenizer.get());
    PLIANT_CHECK(made.ok(), made.status().message());
    engine = *std::move(made);
  }

  std::vector<TokenId> Encode(const std::string& text) const {
    return tokenizer->Encode(text, {.parse_special = true}).value();
  }
  /// The chat prompt of one problem, as the model's own template writes it.
  std::vector<TokenId> Problem(const std::string& problem) const {
    return Encode("<|im_start|>user\n" + problem + "<|im_end|>\n<|im_start|>assistant\n<think>\n");
  }
  static GenerateRequest Greedy(std::vector<TokenId> prompt, std::int64_t max_tokens) {
    GenerateRequest request;
    request.prompt = std::move(prompt);
    request.sampling.temperature = 0;
    request.stop.max_tokens = max_tokens;
    return request;
  }
  Collector::Answer Ask(GenerateRequest request) {
    Collector collector;
    const Result<RequestId> id = engine->Submit(std::move(request), collector.Sink());
    PLIANT_CHECK(id.ok(), id.status().message());
    return collector.Wait(*id);
  }
  /// All at once; answers in the order of the requests.
  std::vector<Collector::Answer> AskAll(std::vector<GenerateRequest> requests) {
    Collector collector;
    std::vector<RequestId> ids;
    for (GenerateRequest& request : requests) {
      const Result<RequestId> id = engine->Submit(std::move(request), collector.Sink());
      PLIANT_CHECK(id.ok(), id.status().message());
      ids.push_back(*id);
    }
    std::vector<Collector::Answer> answers;
    for (const RequestId id : ids) answers.push_back(collector.Wait(id));
    return answers;
  }

  SamplingBackend* sampling = nullptr;  // the engine's, with backend_samples
  std::unique_ptr<Model> model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Engine> engine;  // last: it uses the others
};

inline const std::vector<std::pair<std::string, std::string>>& SmallProblems() {
  // Easy-level problems with their answers (from the held-out set of the reckoner task).
  static const std::vector<std::pair<std::string, std::string>> problems = {
      {"u6=h3-m7+n8;d7=50;l7=d7*2;c4=m7!09;x2=h3!08;n8=l7*6;n1=46;p1=x1+l7;l3=x1#85*08;q3=h3-x1;q9="
       "h3+n1+x9;x1=d7*4;m7=40;k8=51;g9=h3-m7;x9=h3+l7;e7=89;r2=08;l2=n8+q3;h3=82;m3=r2+d7;?=u6",
       "42"},
      {"x3=b4*4;e8=t7+c9-i1;y9=55;t7=w5+d1;x2=w5*4;w5=y9#16*04;x5=x3+b4+d1;z7=40;a9=c9-w5;m1=24;o6="
       "p7+x2;b4=22;h2=59;o8=43;q6=p7-c9;c9=z7+b4;n7=62;p7=c9*7;q8=x3*3;v7=b4+w5;a1=a9+w5;h6=11;d1="
       "y9-x3;q1=a9+y9;i1=w5+q8+c9;?=c9,w5",
       "62,19"},
      {"e9=45;e7=y8!08;l5=29;s3=y8+x9-e7;t8=74;t3=16;j0=k7+y8;o0=t3+y8;q7=76;u6=k7-u1-o0;r9=k7#15*"
       "08;o8=96;u4=05;v8=34;x9=u6-k7;i1=v8!06;h3=57;p6=e9-e7;e1=02;k7=98;y8=14;u1=87;a6=06;s5=p6-"
       "r9;w9=u1*6;?=u6",
       "81"},
      {"o5=o0-q4;g2=33;s7=o5*5;h1=27;x4=s3+o0+y6;d9=59;b1=o5-h1+d9;j2=q4-d9;e2=s7+h1+l6;y6=o5#10*"
       "09;k7=q4#79*05;y1=d4-y6;q4=97;d4=24;e0=d4+s3;o0=11;p6=55;k5=k7+l6-s7;w3=y6*6;s3=s7-j2;b5="
       "y6*9;l6=b1+b5;?=b1",
       "46"},
      {"e9=91;r6=c0#81*09;p5=98;y6=b6-f5;t1=70;m2=74;l2=p5!04;b6=t5-q2;s4=h2-x4-p5;c1=62;h2=w7!10;"
       "n1=q2-k6;i3=p9-p5;n8=p5*8;t5=k6+p9;w7=58;f5=76;d3=14;a2=28;x4=79;p9=x4*6;k6=t1+p9+q2;q8=w7-"
       "x4-k6;m9=75;c0=p9#07*09;q2=56;h1=73;s5=b6-w7;?=m2,k6",
       "74,00"},
      {"b2=72;h3=o5*2;i6=24;p1=a6+t8-b9;r8=45;b9=e4*9;c2=k6+t8;a6=38;y5=24;e4=b2+j9;h1=t8+h3;j9=d6-"
       "t8;e1=f5-d6+b9;t9=i6+d2-d6;u8=c2#83*05;x7=08;w9=f5#80*07;d2=p1#40*09;k6=o5*7;o6=80;t8=k6*7;"
       "b3=j9-w9;f5=x7+d6;o5=53;m2=86;c4=c2-w9;d6=73;a9=40;?=e4",
       "48"},
      {"n2=d3#69*07;u7=y9+l5+d3;g0=z0-m3-u7;m4=75;m3=e6-j6;j6=e6*2;y7=d3-e6;e9=y7+f8;p7=y9!06;d5="
       "02;l5=d5-n2;y9=24;d3=29;g1=j6+n2+d3;h0=e6-m3;e0=g1-e9;z0=77;q5=22;f8=33;a9=l5+j4;k0=60;e6="
       "43;j4=j6-q5-y7;?=j4,q5",
       "78,22"},
      {"j5=i8+l1;q5=g9*3;u0=g9#29*07;e0=21;x0=27;g9=67;r6=59;i8=89;q2=m5-r6;c4=z7+l1+i8;c9=q2+j5-"
       "r6;z0=j5+e0;p7=l3+j5-h7;z7=w1*2;l4=27;e5=u0+e0;h1=37;l3=03;c6=u4!06;l1=z7*2;u4=21;o4=91;w1="
       "i8*5;h7=g9+q2;m5=z0-r6+g9;?=z0",
       "90"},
  };
  return problems;
}

}  // namespace pliant
