// Room: engine. The engine thread's work: plan, run, settle. Everything here belongs to that
// thread; EngineImpl (engine.cc) carries requests to it and answers from it.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"
#include "engine/engine.h"
#include "engine/output_stream.h"
#include "engine/sampler.h"
#include "model/model.h"
#include "sched/scheduler.h"

namespace pliant {

class StepLoop {
 public:
  StepLoop(Backend* backend, Model* model, const Tokenizer* tokenizer,
           std::unique_ptr<KvManager> kv, std::unique_ptr<Scheduler> scheduler, const Clock* clock,
           bool steps_ahead = true);
  ~StepLoop() { ForgetNext(); }

  /// Takes a request in; what is wrong with it is told to its sink.
  void Add(RequestId id, GenerateRequest request, EventSink sink, std::uint64_t random_seed);
  /// Ends a request with kCancelled; unknown ids are ignored.
  void Cancel(RequestId id);
  /// Ends every request with `status`.
  void FailAll(const Status& status);

  /// One plan, run, settle. Where a device works by itself, the next step is planned while this one
  /// runs, and this one is settled while the next one does. Returns how long to wait before the
  /// next call: 0 when a step ran, -1 when there is nothing to do until the next Add.
  Nanoseconds Step();

  std::size_t live() const { return live_.size(); }
  /// Requests that no step has worked on yet.
  std::size_t not_started() const { return not_started_; }
  EngineStats Stats() const;
  std::string KvReport() const;  // JSON

 private:
  struct Live {
    GenerateRequest request;
    EventSink sink;
    Sampler sampler;
    OutputStream output;
    std::int64_t produced = 0;
    bool started = false;
  };

  Status Run(const StepPlan& plan);
  void WhileRunning();
  void CountIdle(Nanoseconds waited);
  bool IsWanted(const StepPlan& plan) const;                      // somebody waits for its tokens
  void TakeTokens(const StepPlan& plan, const StepBatch& batch);  // into sampled_
  void SettleRun();                                               // run_, if it is not settled yet
  void ForgetNext();                                              // settles run_; gives next_ up
  void Fail(StepPlan plan, const Status& why);                    // a step that did not run
  void HandOver();                                                // deliveries_
  std::int64_t ValidTokens() const;  // token ids that the tokenizer and the model both know
  /// How the backend shall take each row's token.
  std::span<const RowSampling> PlanSampling(std::span<const RequestId> samplers);
  void ForbidEarlyEnd(Live& live) const;
  /// Taken by the backend; `logprobs` are looked at when the request asks for them.
  SampledToken TakeRow(RequestId id, TokenId token, const RowLogprobs* logprobs);
  SampledToken SampleRow(RequestId id, std::span<const float> logits);  // taken here
  SampledToken EndRow(RequestId id, Status error);
  SampledToken Deliver(RequestId id, Live& live, const TokenLogprob& sampled);
  /// Builds the event of a sampled token; returns whether the request is finished by it.
  bool Take(Live& live, const TokenLogprob& sampled, TokenEvent& event);
  void ReportPrefill(const StepPlan& plan);
  void HandleSchedulerEvents();
  void End(RequestId id, FinishReason reason, Status error, TokenEvent event = {});
  Usage UsageOf(RequestId id, const Live& live) const;

  Backend* backend_;
  Model* model_;
  const Tokenizer* tokenizer_;
  const Clock* clock_;
  std::unique_ptr<KvManager> kv_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unordered_map<RequestId, Live> live_;
  std::size_t not_started_ = 0;
  struct Ending {  // a request that ends with this step; told after Settle, when its facts are
                   // final
    RequestId id;
    FinishReason reason;
    Status error;
    TokenEvent event;
  };
  std::vector<Ending> endings_;
  struct Delivery {
    RequestId id;
    TokenEvent event;
  };
  std::vector<Delivery> deliveries_;
  const bool steps_ahead_;
  StepPlan run_, next_;        // has run, but is not settled; planned while that one ran
  bool device_works_ = false;  // steps run behind: tokens are handed over during the next one
  bool new_request_ = false;   // since next_ was planned, and nobody else waits to begin
  bool gone_ = false;          // somebody was cancelled since then
  Nanoseconds ran_at_ = 0;     // when the device ended the last step; 0: it is long ago
  std::vector<SampledToken> sampled_;  // by run_
  std::vector<RowSampling> sampling_;
  std::vector<LogitChange> changes_;  // of all rows in sampling_
  EngineStats counters_;              // only what the scheduler does not count
};

}  // namespace pliant
