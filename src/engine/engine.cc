#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <limits>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/size.h"
#include "engine/calibration.h"
#include "engine/engine_factory.h"
#include "engine/step_loop.h"
#include "engine/warm_up.h"

namespace pliant {
namespace {

constexpr Nanoseconds kOldStats = 100'000'000;

// Carries requests to the engine thread and keeps what other threads may ask for: a copy of the
// stats, and the queue's length.
class EngineImpl final : public Engine {
 public:
  EngineImpl(std::unique_ptr<Backend> backend, std::unique_ptr<StepLoop> loop,
             std::int64_t max_context, std::size_t max_waiting)
      : backend_(std::move(backend)),
        loop_(std::move(loop)),
        max_context_(max_context),
        max_waiting_(max_waiting),
        random_(std::random_device{}()) {
    stats_ = loop_->Stats();
    thread_ = std::thread([this] { Main(); });
  }

  ~EngineImpl() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = draining_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  Result<RequestId> Submit(GenerateRequest request, EventSink sink) override {
    if (request.prompt.empty()) return InvalidArgument("the prompt has no tokens");
    if (request.stop.max_tokens < 1) return InvalidArgument("max_tokens must be at least 1");
    const std::int64_t prompt = static_cast<std::int64_t>(request.prompt.size());
    if (prompt > max_context_ || request.stop.max_tokens > max_context_ - prompt) {
      return TooLarge("the prompt has " + std::to_string(prompt) + " tokens and max_tokens is " +
                      std::to_string(request.stop.max_tokens) +
                      ", but a request may have at most " + std::to_string(max_context_) +
                      " in all");
    }
    const std::lock_guard lock(mutex_);
    if (draining_) return Unavailable("the server is shutting down");
    if (not_started_ + adds_.size() >= max_waiting_) {
      ++rejected_;
      return ResourceExhausted("the queue is full (" + std::to_string(max_waiting_) +
                               " requests are waiting)");
    }
    const RequestId id(next_id_++);
    adds_.push_back({id, std::move(request), std::move(sink), random_()});
    ++live_;
    wake_.notify_all();
    return id;
  }

  void Cancel(RequestId id) override {
    const std::lock_guard lock(mutex_);
    cancels_.push_back(id);
    wake_.notify_all();
  }

  EngineStats Stats() const override {
    const std::lock_guard lock(mutex_);
    stats_wanted_ = true;
    EngineStats stats = stats_;
    stats.waiting += static_cast<std::int64_t>(adds_.size());
    stats.requests_rejected += rejected_;
    return stats;
  }

  Result<std::string> KvReportJson() override {
    std::promise<std::string> promise;
    std::future<std::string> report = promise.get_future();
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return Unavailable("the server is shutting down");
      reports_.push_back(std::move(promise));
      wake_.notify_all();
    }
    return report.get();
  }

  bool Drain(double seconds) override {
    std::unique_lock lock(mutex_);
    draining_ = true;
    const auto none_left = [this] { return live_ == 0; };
    if (drained_.wait_for(lock, std::chrono::duration<double>(seconds), none_left)) return true;
    cancel_all_ = true;
    wake_.notify_all();
    drained_.wait(lock, none_left);
    return false;
  }

  std::int64_t MaxContext() const override { return max_context_; }

 private:
  struct Pending {
    RequestId id;
    GenerateRequest request;
    EventSink sink;
    std::uint64_t seed;
  };

  void Main() {
    while (TakeMessages()) {
      const Nanoseconds wait = loop_->Step();
      Publish(wait);
    }
    const Status why = Unavailable("the server is shutting down");
    std::deque<Pending> never_added;
    {
      const std::lock_guard lock(mutex_);
      never_added.swap(adds_);
    }
    loop_->FailAll(why);
    for (Pending& add : never_added) {
      TokenEvent event;
      event.finish = FinishReason::kError;
      event.error = why;
      event.usage.prompt_tokens = static_cast<std::int64_t>(add.request.prompt.size());
      add.sink(add.id, std::move(event));
    }
    Publish(-1);
    const std::lock_guard lock(mutex_);
    for (std::promise<std::string>& report : reports_) report.set_value(loop_->KvReport());
    reports_.clear();
  }

  // Waits as long as the last step said, or until a message comes. Returns false when it is time to
  // stop.
  bool TakeMessages() {
    std::deque<Pending> adds;
    std::vector<RequestId> cancels;
    std::vector<std::promise<std::string>> reports;
    bool cancel_all = false;
    {
      std::unique_lock lock(mutex_);
      const auto message = [this] {
        return stop_ || cancel_all_ || !adds_.empty() || !cancels_.empty() || !reports_.empty();
      };
      if (wait_ < 0) {
        wake_.wait(lock, message);
      } else if (wait_ > 0) {
        wake_.wait_for(lock, std::chrono::nanoseconds(wait_), message);
      }
      if (stop_) return false;
      adds.swap(adds_);
      cancels.swap(cancels_);
      reports.swap(reports_);
      cancel_all = std::exchange(cancel_all_, false);
      not_started_ += adds.size();  // until Publish counts them
    }
    for (Pending& add : adds) {
      loop_->Add(add.id, std::move(add.request), std::move(add.sink), add.seed);
    }
    for (const RequestId id : cancels) loop_->Cancel(id);
    if (cancel_all) loop_->FailAll(Unavailable("the server is shutting down"));
    for (std::promise<std::string>& report : reports) report.set_value(loop_->KvReport());
    return true;
  }

  // Statistics are summed up for others only when somebody has read the last ones, when they are
  // old, and before the thread sleeps: at rest they are exact, and no step pays for a copy that
  // nobody looks at.
  void Publish(Nanoseconds wait) {
    const Nanoseconds now = clock_.Now();
    const bool due = wait != 0 || stats_wanted_.exchange(false) || now - stats_at_ > kOldStats;
    std::optional<EngineStats> stats;
    if (due) stats = loop_->Stats();
    const std::lock_guard lock(mutex_);
    if (stats) {
      stats_ = *stats;
      stats_at_ = now;
    }
    wait_ = wait;
    not_started_ = loop_->not_started();
    live_ = loop_->live() + adds_.size();
    if (live_ == 0) drained_.notify_all();
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<StepLoop> loop_;
  const std::int64_t max_context_;
  const std::size_t max_waiting_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_, drained_;
  std::deque<Pending> adds_;
  std::vector<RequestId> cancels_;
  std::vector<std::promise<std::string>> reports_;
  EngineStats stats_;
  std::mt19937_64 random_;
  std::uint64_t next_id_ = 1;
  std::size_t not_started_ = 0, live_ = 0;
  std::int64_t rejected_ = 0;
  bool stop_ = false, draining_ = false, cancel_all_ = false;

  mutable std::atomic<bool> stats_wanted_{false};
  Nanoseconds wait_ = -1, stats_at_ = 0;  // engine thread only
  const Clock& clock_ = SystemClock::Instance();
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options,
                                           std::unique_ptr<Backend> backend, Model* model,
                                           const Tokenizer* tokenizer) {
  const SystemClock& clock = SystemClock::Instance();
  const KvGeometry geometry = model->config().Kv();
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<KvManager> kv,
                          KvManager::Create(*backend, geometry, options.kv, clock));
  const auto pages = static_cast<std::uint32_t>(kv->Stats().pages_total);
  const int rows = options.sched.max_batch_tokens;
  if (options.calibrate) {
    PLIANT_RETURN_IF_ERROR(Calibrate(*backend, *model, *tokenizer, pages, rows)
                               .WithContext("calibrating the KV cache"));
  }
  PLIANT_RETURN_IF_ERROR(WarmUp(*backend, *model, pages, rows).WithContext("warming up"));
  SchedulerOptions sched = options.sched;
  if (sched.max_context == 0) sched.max_context = model->config().context_length;
  const std::size_t max_waiting = static_cast<std::size_t>(sched.max_waiting);
  // The bound on waiting requests is kept at Submit, where the client can be told; preempted ones
  // must never be refused.
  sched.max_waiting = std::numeric_limits<std::int32_t>::max();
  const std::int32_t heads = model->config().heads;
  sched.history_heads = backend->RetainsHistory(heads) ? heads : 0;
  if (sched.history.default_capacity.kind != Capacity::Kind::kFull && sched.history_heads == 0) {
    return Unimplemented(
        "--kv-capacity other than full: this backend and model cannot tell what a request looks "
        "at");
  }
  if (sched.history.retention.returns && options.kv.store.kind == StoreSpec::Kind::kFile &&
      !backend->ReturnsFromAnyStore()) {
    if (sched.history.default_capacity.kind != Capacity::Kind::kFull) {
      return InvalidArgument(
          "--kv-capacity with returns on this device wants --exact-store ram:SIZE, not a file");
    }
    sched.history_heads = 0;
  }
  auto scheduler = std::make_unique<Scheduler>(sched, *kv, clock);
  const std::int64_t max_context = scheduler->MaxContext();
  auto loop = std::make_unique<StepLoop>(backend.get(), model, tokenizer, std::move(kv),
                                         std::move(scheduler), &clock, options.steps_ahead);
  return std::unique_ptr<Engine>(
      std::make_unique<EngineImpl>(std::move(backend), std::move(loop), max_context, max_waiting));
}

}  // namespace pliant
