// Runs a Scheduler and a KvManager over a machine (machine.h) as an engine would, and checks every
// plan and every byte on the way.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kv/kv_manager.h"
#include "sched/scheduler.h"
#include "sched/support/fake_backend.h"
#include "sched/support/machine.h"
#include "support/faulty_backend.h"

namespace pliant::testing {

struct DriverOptions {
  KvOptions kv;
  SchedulerOptions sched{
      .max_batch_tokens = 64, .max_running = 64, .max_waiting = 256, .max_context = 4096};
  Faults faults;
  std::int64_t pages = 0;        // when set: kv.memory_bytes for so many pages
  std::int64_t store_pages = 0;  // when set: a RAM store of so many pages
  bool constant_hash = false;    // every prefix hash collides
  bool reference = false;        // a real model on the reference backend
  int wanted_percent = 3;        // of dropped pages, that a row of a request with a capacity misses
  // Step N + 1 is planned while step N is in flight (PlanNext), and step N settled while step N + 1
  // is; a step runs as late as possible. The scheduler is told of the time that leaves
  // (WhileRunning). Every second request that comes makes the driver plan anew instead.
  bool ahead = false;
  Nanoseconds step_time = 1'000'000;
  bool check_bytes =
      true;  // false: for long runs that are about time only; no audit after each step either
};

class Driver {
 public:
  explicit Driver(DriverOptions options);
  ~Driver();

  using Client = testing::Client;
  struct Ask {
    std::vector<std::int32_t> prompt;
    std::int64_t max_new = 1;
    int min_bits = 0;
    int priority = 0;
    std::string salt;
    std::int64_t stop_after = 0;
    Capacity capacity{};
  };
  Status Add(std::uint64_t id, const Ask& ask);
  void Cancel(std::uint64_t id);
  /// One turn of the engine's loop. False: there was nothing to run (the clock moves on all the
  /// same).
  bool Step();
  /// Steps until nothing is left, at most `most` times. True when all ended.
  bool Run(int most = 20000);
  /// Settles what is in flight.
  void Drain();
  /// The step fails in place of running.
  bool AbandonStep();

  Client& client(std::uint64_t id) { return clients_.at(id); }
  /// Its tokens are those of an ample pool.
  bool Exact(std::uint64_t id) { return machine_->Exact(clients_.at(id), kv_->ceiling()); }
  std::map<std::uint64_t, Client>& clients() { return clients_; }
  Scheduler& scheduler() { return *scheduler_; }
  KvManager& kv() { return *kv_; }
  FaultyBackend& backend() { return *faulty_; }
  ManualClock& clock() { return clock_; }
  std::uint64_t Count(Reason reason) const { return kv_->log().Count(reason); }
  std::int64_t live() const;
  std::int64_t steps_run() const { return steps_run_; }
  /// Steps that were planned while the one before them was in flight.
  std::int64_t steps_ahead() const { return steps_ahead_; }

 private:
  std::vector<SampledToken> Forward(const StepPlan& plan);
  void RunAhead(StepPlan plan);
  void SettleRun();
  void ForgetNext();
  void TakeEvents();
  Part PartOf(const StepBatch& batch, std::size_t index, const StepPlan::Entry& entry,
              std::set<std::uint32_t>* written);

  DriverOptions options_;
  ManualClock clock_;
  std::unique_ptr<Machine> machine_;
  std::unique_ptr<FaultyBackend> faulty_;
  std::unique_ptr<KvManager> kv_;
  std::unique_ptr<Scheduler> scheduler_;
  std::map<std::uint64_t, Client> clients_;
  // Has run, but is not settled; and the step after it, if that is planned.
  StepPlan run_, next_;
  std::vector<SampledToken> sampled_;         // by run_
  std::vector<std::uint64_t> sampled_below_;  // clients, by run_, with blocks below 16 bits
  std::int64_t steps_run_ = 0, steps_ahead_ = 0;
};

/// n tokens that depend on `seed` only.
std::vector<std::int32_t> Tokens(std::int64_t n, std::uint64_t seed);

}  // namespace pliant::testing
