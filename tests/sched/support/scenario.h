// The scenario language of tests/scenarios/*.kvtest: one command a line, # starts a comment.
//
//   pool N blocks | pool N pages       memory, in blocks at 16 bits or in plane pages (once, first)
//   store N blocks                     an exact store in RAM that takes N whole blocks
//   policy full|offload|elastic|pliant
//   set KEY VALUE ...                  ceiling floor sink recent_base recent_deep low high horizon
//   dwell restore_rate batch
//                                      running waiting context cache(0|1) always(0|1) collide(0|1)
//                                      step_us
//   fault KEY VALUE ...                delay out in: polls a copy takes; every n-th copy out, in
//   fails. Also later, on the way ahead                              steps are planned before the
//   one in flight is settled admit NAME prompt=N [seed=S] [max=N] [bits=B] [priority=P] [salt=X]
//   [stop=N] [share=K]
//                                      tokens come from the seed (default: of the name); share=K:
//                                      the first K come from seed 0
//   refuse NAME CODE prompt=N ...      as admit, but it must fail with this status word
//   step N / run [N]                   N turns of the engine's loop / until all requests ended, at
//   most N turns until NAME STATE [N]               steps until `expect NAME STATE` holds, at most
//   N turns (default 2000) cancel NAME pressure N blocks|pages            withhold so much of the
//   pool from now on; 0: give it back corrupt                            spoil everything that is
//   in the exact store expect WHAT [OP VALUE]             OP: == != < <= > >=. WHAT:
//       NAME waiting|loading|running|offloaded|done|failed|cancelled|exact
//       tokens NAME, cached NAME, below NAME, lowest NAME (as 8/4), preemptions NAME, offloads
//       NAME, demotions NAME, restores NAME blocks K/V | blocks stored | blocks cached, pages
//       free|cached|fenced|used, bytes store|kv events REASON, running, waiting, offloaded, steps,
//       lowered (blocks in use below the ceiling)
//   expect! ...                        holds under hostile settings too
//
// The driver checks every byte that is read, and the audit runs after every step, in every
// scenario.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sched/support/driver.h"

namespace pliant::testing {

/// Changes to a scenario's options under which its bytes, its exact requests and its end must still
/// be right.
struct Hostile {
  std::string name;
  std::function<void(DriverOptions&)> change;  // empty: as written
  bool reference = false;                      // on the reference backend, with a real model
};
const std::vector<Hostile>& HostileSettings();

/// Runs one scenario file; every failure is a gtest failure that names file and line.
class Scenario {
 public:
  Scenario(std::string path, const Hostile& hostile) : path_(std::move(path)), hostile_(hostile) {}
  void Run();

 private:
  using Words = std::vector<std::string>;
  void Command(const Words& words);
  void Settings(const Words& words);
  void Admit(const Words& words, bool refuse);
  void Expect(const Words& words);
  bool Holds(const Words& words, std::string* seen);
  std::string StateOf(const std::string& name);
  std::int64_t Value(const Words& words, std::size_t* used);
  bool Exact(const std::string& name);
  Driver& driver();
  void Finish();

  std::string path_;
  const Hostile& hostile_;
  DriverOptions options_;
  std::unique_ptr<Driver> driver_;
  std::map<std::string, std::uint64_t> names_;
  std::map<std::string, bool> refused_;
};

}  // namespace pliant::testing
