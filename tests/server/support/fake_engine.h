// An Engine without a model: a thread of its own answers every request from a script, one token a
// tick. It keeps the contract of engine.h (bounded queue, cancel, drain, one last event), so what
// the server does with it is what it does with the real one.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace pliant::testing {

struct FakeEngineOptions {
  std::int64_t context = 4096;
  std::size_t max_running = 64;
  std::size_t max_waiting = 1024;
  std::chrono::microseconds tick{200};
};

class FakeEngine final : public Engine {
 public:
  /// What a request is answered with. Text comes from the tokenizer; the default repeats "hello ".
  struct Script {
    std::vector<TokenId> tokens;  // then stop (eos); max_tokens cuts it
    Status error;                 // not ok: ends with this after the tokens
    bool silent = false;          // never says anything until cancelled
  };
  using ScriptFn = std::function<Script(const GenerateRequest&)>;

  explicit FakeEngine(const Tokenizer* tokenizer, FakeEngineOptions options = {});
  ~FakeEngine() override;

  void SetScript(ScriptFn script);
  /// While held, queued requests are not started.
  void HoldQueue(bool hold);
  /// The requests as submitted.
  std::vector<GenerateRequest> Submitted() const;
  void SetStats(const EngineStats& base);  // added to what Stats reports

  Result<RequestId> Submit(GenerateRequest request, EventSink sink) override;
  void Cancel(RequestId id) override;
  EngineStats Stats() const override;
  Result<std::string> KvReportJson() override { return std::string(R"({"requests": []})"); }
  bool Drain(double seconds) override;
  std::int64_t MaxContext() const override { return options_.context; }

 private:
  struct Job {
    RequestId id;
    GenerateRequest request;
    EventSink sink;
    Script script;
    std::size_t next = 0;
    std::string text;
    bool cancelled = false;
  };
  void Loop();
  bool Step(Job* job);  // whether it has ended
  void End(Job* job, TokenEvent event, FinishReason reason);

  const Tokenizer* tokenizer_;
  FakeEngineOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  ScriptFn script_;
  std::deque<Job> waiting_;
  std::deque<Job> running_;
  std::vector<GenerateRequest> submitted_;
  EngineStats base_;
  std::uint64_t next_id_ = 1;
  bool hold_ = false, stop_ = false, draining_ = false;
  std::thread thread_;
};

}  // namespace pliant::testing
