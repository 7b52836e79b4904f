// What stands behind the scheduler in a test: a backend, and what a step does to its pages. The
// driver checks the plan; a machine checks and writes the bytes, and says which token comes out.
// Two of them: pages that only tell whose they are (fast), and a real model on the reference
// backend.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "kv/kv_manager.h"
#include "sched/sched_request.h"
#include "sched/step_plan.h"

namespace pliant::testing {

/// One request as the test knows it.
struct Client {
  std::vector<std::int32_t> prompt, output;
  std::vector<std::uint64_t> chain;  // chain[p]: hash of salt and tokens 0 .. p
  std::string salt;
  int min_bits = 0;
  Level floor = 0;
  bool capacity = false;        // of its history is not all
  std::int64_t stop_after = 0;  // finish (as a stop string would) after so many tokens; 0: never
  bool done = false, cancelled = false;
  Status error;
  std::optional<RequestKvFacts> facts;
  std::int64_t sampled_below = 0;
};

/// One request's part in a step.
struct Part {
  std::uint64_t id = 0;
  const Client* client = nullptr;
  SequenceSlice slice;
  std::span<const BlockView> blocks;
  std::span<const BlockView> kept;  // with a history
  Level ceiling = 0;
  Level worst = 0;           // of its blocks; the lowest of all where a block takes no part
  Level worst_read = 0;      // of those that take part
  std::uint64_t states = 0;  // digest of the levels of its blocks
  bool samples = false;
  std::int64_t preemptions = 0;  // so far: after one the request's blocks are others
  Level mark = 0;  // the ceiling; out: lowest precision that any of its context was computed with
};

class Machine {
 public:
  virtual ~Machine() = default;
  /// Of the pages that a request with a capacity dropped, so many return in a step. (The reference
  /// machine's model decides itself.)
  int wanted_percent = 3;
  virtual Backend& backend() = 0;
  virtual KvGeometry geometry() const = 0;
  /// Fails the test when a resident byte of a context is not what this very sequence (or one with
  /// the same prefix, salt and mark) wrote; then writes the new rows. One token for each part that
  /// samples.
  virtual std::vector<std::int32_t> Run(const StepPlan& plan, std::span<Part> parts,
                                        bool check_bytes) = 0;
  /// The client's tokens are those of an ample pool, with the whole context at the ceiling.
  virtual bool Exact(const Client& client, Level ceiling) = 0;
};

std::unique_ptr<Machine> MakeFakeMachine();
/// A two-layer model with random weights on the reference backend. A token is a hash of all its
/// logits' bits: one bit that differs anywhere in the context changes it.
std::unique_ptr<Machine> MakeReferenceMachine();

std::uint64_t Mix(std::uint64_t x);

/// The token that the fake machine samples after a prefix when its whole context is in place at the
/// ceiling.
std::int32_t ExactToken(std::uint64_t chain);

}  // namespace pliant::testing
