// Room: sched. The inside of Scheduler. Owned by the engine thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kv/controller.h"
#include "kv/history.h"
#include "sched/scheduler.h"

namespace pliant {

struct Request {
  enum class State {
    kWaiting,     // in the queue, holds nothing
    kLoading,     // its blocks are on their way to the device
    kRunning,     // takes part in steps
    kOffloading,  // its blocks are on their way to the store
    kOffloaded,   // in the queue, its blocks in the store
  };
  RequestId id;
  std::uint64_t arrival = 0;
  int priority = 0;
  Level floor = 0;
  std::string salt;
  std::vector<std::int32_t> tokens;  // prompt, then what was sampled
  std::int64_t prompt_tokens = 0, max_new = 0;

  State state = State::kWaiting;
  Sequence* sequence = nullptr;
  std::int32_t hits = 0;  // offloaded or preempted so often
  bool was_admitted = false;
  bool short_of_pages = false;  // its load waits for pages

  // With a capacity.
  std::optional<History> history;
  bool returns = false;              // dropped tokens come back
  std::int32_t capacity_blocks = 0;  // to begin with
  bool grows = false;
  std::int64_t returned_seen = 0, lost_seen = 0;  // of the sequence's history

  // Its parts in the steps in flight, oldest first: one, or two while a step planned by PlanNext
  // runs before the one ahead of it is settled.
  struct Flight {
    std::uint64_t step = 0;  // 0: none
    std::int32_t rows = 0;
    bool samples = false;
    Level context = 0;
  };
  std::array<Flight, 2> flights;

  RequestKvFacts facts;

  std::int64_t computed() const { return sequence != nullptr ? sequence->computed : 0; }
  std::int64_t generated() const {
    return static_cast<std::int64_t>(tokens.size()) - prompt_tokens;
  }
  bool in_flight() const { return flights[0].step != 0; }
  // What a plan goes by: where the steps in flight will leave the request. Of a token that they
  // sample only its place is known.
  std::int64_t rows_in_flight() const { return flights[0].rows + flights[1].rows; }
  std::int64_t tokens_to_come() const { return flights[0].samples + flights[1].samples; }
  std::int64_t planned() const { return computed() + rows_in_flight(); }
  std::int64_t remaining() const {
    return static_cast<std::int64_t>(tokens.size()) + tokens_to_come() - planned();
  }
  std::int64_t left_to_generate() const { return max_new - generated() - tokens_to_come(); }

  void Depart(const Flight& flight) { flights[in_flight() ? 1 : 0] = flight; }
  /// Takes the part in `step` out; nothing when it has none.
  std::optional<Flight> Land(std::uint64_t step) {
    for (std::size_t i = 0; i < flights.size(); ++i) {
      if (flights[i].step != step) continue;
      const Flight flight = flights[i];
      if (i == 0) flights[0] = flights[1];
      flights[1] = Flight();
      return flight;
    }
    return std::nullopt;
  }
};

struct Scheduler::Impl {
  Impl(const SchedulerOptions& o, KvManager& k, const Clock& c)
      : options(o), kv(k), clock(c), controller(k) {}

  /// Higher priority first, then earlier arrival: the order of the queue, of the batch, and
  /// (backwards) of victims.
  struct Order {
    bool operator()(const Request* a, const Request* b) const {
      return a->priority != b->priority ? a->priority > b->priority : a->arrival < b->arrival;
    }
  };
  struct Grant {
    Request* request;
    std::int32_t rows;
  };
  /// What the running requests of a plan need, in pages.
  struct Needs {
    std::int64_t decodes = 0;   // for this step's decodes: they come first
    std::int64_t now = 0;       // decodes, prefill chunks and loads
    std::int64_t ahead = 0;     // decodes within the horizon
    std::int64_t promised = 0;  // later chunks of prompts that are being computed
  };

  // plan.cc
  StepPlan Plan(bool next);
  int PagesToExtend(const Request& r, std::int64_t rows) const {
    return kv.PagesToExtend(*r.sequence, r.rows_in_flight() + rows);
  }
  void MoveLoads();
  void MoveOffloads();
  void PlanRunning();
  void CollectRunning(Needs& needs);
  std::int64_t GrantRunning();  // pages that decodes lack
  bool RelieveShortage(std::int64_t lacking);
  void PlanAdmissions();
  bool TryAdmit(Request& head);
  bool AdmitOffloaded(Request& head, bool alone);
  bool AdmitWaiting(Request& head, bool alone);
  void StartLoad(Request& r);
  void PlanRestores();
  bool BreakDeadlock();
  void Build(StepPlan& plan);
  // capacity.cc
  Status SetCapacity(Request& r, Capacity capacity) const;
  void StartHistory(Request& r);  // it begins anew
  void MindCapacities();
  /// What its history holds must be decided on, which is done between steps.
  bool HistoryWaits(const Request& r) const;
  bool DropOver(Request& r);  // what its capacity does not hold; false: an original is lost
  void AddHistory(Request& r, SequenceSlice& slice, StepPlan& plan);
  void SettleHistory(Request& r);
  std::int64_t Headroom(const Request& r) const;

  // scheduler.cc
  Request* Find(RequestId id) const;
  void Log(Reason reason, const Request& r, int pages = 0);
  Request* ChooseVictim(const std::vector<Request*>& among) const;
  void TakeOut(Request& victim, Reason preempt_reason);
  void Requeue(Request& r);  // gives up its blocks; it will recompute
  void DropSequence(Request& r);
  void End(Request& r, Reason reason);
  void Fail(Request& r, Status error);
  void Unlist(Request& r);
  void Run(Request& r);
  static void EraseFrom(std::vector<Request*>& list, const Request& r);
  void NoteContext(Request& r, Level context, bool sampled);

  const SchedulerOptions options;
  KvManager& kv;
  const Clock& clock;
  Controller controller;

  std::unordered_map<RequestId, std::unique_ptr<Request>> requests;
  std::set<Request*, Order> queue;  // waiting and offloaded
  std::vector<Request*> running;    // in Order
  std::vector<Request*> loading, offloading;
  std::uint64_t arrivals = 0, steps = 0, settled = 0;

  // Of the plan being made.
  std::vector<Request*> decodes, prefills;
  std::vector<Grant> grants;
  Needs needs;
  std::int32_t rows_left = 0;
  bool next = false;            // PlanNext: a step is in flight
  std::int64_t coming = 0;      // pages that are free when that step ends
  bool soon = false;            // the head of the queue fits then
  bool under_pressure = false;  // a running request got no pages, or one was taken out
  bool held = false;            // the head of the queue waits for pages
  bool admitted = false;        // somebody left the queue

  std::size_t rotation = 0;        // where decodes start when not all fit
  std::int32_t stalled_plans = 0;  // in a row
  // The head of the queue that did not fit is tried again when something was freed, or after a few
  // steps.
  RequestId held_id;
  std::uint64_t held_until = 0, held_frees = 0, frees = 0;

  bool saves_come_later = false;  // WhileRunning was called since the last Plan
  std::vector<SchedEvent> events;
  std::vector<std::pair<RequestId, RequestKvFacts>> ended;  // since the last Plan
  SchedStats stats;
  StepPlan spare;  // its vectors are used again
};

}  // namespace pliant
