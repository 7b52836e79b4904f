// Pressure with the real engine and the CPU backend: cases A2 to A4 and I1 of the known faults,
// load that swings around the watermark, and tokens that must not change. Time is counted in steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>

#include "engine/support/step_lab.h"
#include "support/rounds.h"

namespace pliant {
namespace {

/// Plan, run and settle on the test's own thread.
class RealPressure : public ::testing::Test {
  void SetUp() override {
    if (kThreadSanitized) {
      GTEST_SKIP()
          << "takes ten minutes under ThreadSanitizer, and has no threads but the kernels' and "
             "the copies', which Engine's tests run as well";
    }
  }
};

StepLabOptions Options(KvPolicy policy, int blocks, int store_blocks) {
  StepLabOptions o;
  o.kv.policy = policy;
  o.kv.floor_bits = policy == KvPolicy::kPliant ? 4 : 8;
  o.kv.sink_tokens = o.kv.recent_tokens_base = 32;
  o.kv.recent_tokens_deep = 64;
  o.blocks = blocks;
  o.store_blocks = store_blocks;
  return o;
}

void ExpectAtRest(StepLab& lab) {
  for (int i = 0; i < 300; ++i) lab.Step();  // copies end
  const KvStats kv = lab.kv().Stats();
  const EngineStats engine = lab.Stats();
  EXPECT_EQ(engine.running + engine.waiting, 0);
  EXPECT_EQ(kv.pages_free + kv.pages_cached, kv.pages_total);
  EXPECT_EQ(kv.blocks, kv.blocks_cached);
  EXPECT_LE(kv.store_bytes_used, kv.store_bytes_total);
  lab.scheduler().Audit();
}

// A2: a pool for four sequences, twelve long decodes. Tokens come in every window, and nobody is
// taken out more than once a second.
TEST_F(RealPressure, NoLivelock) {
  for (const KvPolicy policy :
       {KvPolicy::kFull, KvPolicy::kOffload, KvPolicy::kElastic, KvPolicy::kPliant}) {
    SCOPED_TRACE(KvPolicyName(policy));
    StepLabOptions options = Options(policy, 40, policy == KvPolicy::kFull ? 0 : 300);
    options.faults.delay_polls = 2;
    StepLab lab(options);
    for (std::uint64_t i = 1; i <= 12; ++i) lab.Ask(i, StepLab::Prompt(100, i), 200);
    constexpr int kWindow = 40;  // of 400 steps, 2 s
    while (lab.live() > 0 && lab.turns() < 10'000) {
      const std::int64_t before = lab.produced();
      for (int i = 0; i < kWindow; ++i) lab.Step();
      if (lab.live() > 0) {
        ASSERT_GT(lab.produced(), before) << "no token in " << kWindow << " steps";
      }
    }
    ASSERT_EQ(lab.live(), 0);
    for (const auto& [id, answer] : lab.answers()) {
      EXPECT_TRUE(answer.error.ok()) << answer.error.message();
      EXPECT_EQ(answer.tokens.size(), 200u) << id;
      EXPECT_LE(static_cast<double>(answer.usage.preemptions), lab.seconds()) << id;
    }
    const SchedStats stats = lab.scheduler().Stats();
    const std::int64_t taken_out = stats.preemptions + stats.offloads;
    EXPECT_LE(taken_out, 2 * 12) << "of twelve requests";
    if (policy == KvPolicy::kFull || policy == KvPolicy::kOffload) {
      EXPECT_GT(taken_out, 0);
    }
    if (policy == KvPolicy::kElastic || policy == KvPolicy::kPliant) {
      EXPECT_GT(lab.kv().Stats().demotions, 0);
    }
    ExpectAtRest(lab);
  }
}

// A3: one long request and a steady stream of short ones. It finishes, and nobody is taken out
// while another that takes part was taken out less often.
TEST_F(RealPressure, TheLongOneFinishesAndVictimsTakeTurns) {
  for (const KvPolicy policy : {KvPolicy::kFull, KvPolicy::kOffload, KvPolicy::kElastic}) {
    SCOPED_TRACE(KvPolicyName(policy));
    StepLab lab(Options(policy, 16, policy == KvPolicy::kFull ? 0 : 100));
    lab.Ask(1, StepLab::Prompt(150, 1), 220);
    std::uint64_t next = 2, seen = 0;
    std::map<std::uint64_t, int> hits;
    while (!lab.answer(1).done && lab.turns() < 4000) {
      if (lab.live() < 6) {
        lab.Ask(next, StepLab::Prompt(50, next), 60);
        ++next;
      }
      const auto is_running = [&](std::uint64_t id) {
        return lab.scheduler().StateOf(RequestId(id)) == "running";
      };
      std::vector<std::uint64_t> before;
      for (std::uint64_t id = 1; id < next; ++id) {
        if (is_running(id)) before.push_back(id);
      }
      lab.Step();
      for (const Decision& d : lab.kv().log().Since(seen)) {
        if (d.reason != Reason::kPreempt && d.reason != Reason::kOffload) continue;
        const int victim = hits[d.request.value()]++;
        for (const std::uint64_t id : before) {
          if (id != d.request.value() && is_running(id)) {
            EXPECT_GE(hits[id], victim) << id << " stayed, " << d.request.value() << " went";
          }
        }
      }
      seen = lab.kv().log().total();
    }
    EXPECT_TRUE(lab.answer(1).done) << "starved for " << lab.turns() << " steps";
    EXPECT_LE(hits[1], 2);
    EXPECT_GT(next, 8u);
    ASSERT_TRUE(lab.Run(4000));
    ExpectAtRest(lab);
  }
}

using Tokens = std::map<std::uint64_t, std::vector<TokenId>>;

constexpr int kPrompts = Rounds(64, 48);

/// Fixed prompts, half of them exact. `squeeze`: part of the pool comes and goes.
Tokens FixedPrompts(StepLab& lab, bool squeeze) {
  for (std::uint64_t i = 1; i <= kPrompts; ++i)
    lab.Ask(i, StepLab::Prompt(70 + static_cast<std::int64_t>(i % 16) * 6, i), 48,
            i % 2 == 0 ? 16 : 0);
  for (int i = 0; i < 20'000 && lab.live() > 0; ++i) {
    if (squeeze && i % 25 == 0) lab.kv().Withhold(i % 50 == 0 ? lab.kv().pool().total() / 4 : 0);
    lab.Step();
  }
  lab.kv().Withhold(0);
  EXPECT_EQ(lab.live(), 0);
  Tokens tokens;
  for (const auto& [id, answer] : lab.answers()) {
    EXPECT_TRUE(answer.error.ok()) << answer.error.message();
    tokens[id] = answer.tokens;
  }
  return tokens;
}

// A4: a pool at 30 % of need, restores all the time, copies late, then steps late: every token of
// an exact request is right.
TEST_F(RealPressure, ExactTokensUnderConstantRestore) {
  StepLabOptions ample = Options(KvPolicy::kFull, kPrompts * 8, 0);
  ample.sched.max_running = 64;
  StepLab reference(ample);
  const Tokens expected = FixedPrompts(reference, false);
  struct Setting {
    const char* name;
    testing::Faults faults;
  };
  for (const Setting& setting :
       {Setting{"as it is", {}}, Setting{"late copies", {.delay_polls = 4}},
        Setting{"late steps", {.step_delay = 300'000}},
        Setting{"failing copies", {.fail_every_out = 4, .fail_every_in = 3}}}) {
    SCOPED_TRACE(setting.name);
    StepLabOptions tight = Options(KvPolicy::kPliant, kPrompts * 8 * 3 / 10 / 2,
                                   kPrompts * 8);  // requests of 4 to 7 blocks
    tight.sched.max_running = 64;
    tight.kv.dwell_steps = 0;
    tight.kv.low_watermark = 0.01;
    tight.kv.high_watermark = 0.02;
    tight.faults = setting.faults;
    StepLab lab(tight);
    const Tokens got = FixedPrompts(lab, true);
    for (std::uint64_t id = 2; id <= kPrompts; id += 2) {
      EXPECT_EQ(got.at(id), expected.at(id)) << id;
      EXPECT_EQ(lab.answer(id).usage.tokens_below_16_bits, 0) << id;
    }
    EXPECT_GT(lab.kv().Stats().restores, 30);
    EXPECT_GT(lab.kv().Stats().demotions, 30);
    ExpectAtRest(lab);
  }
}

// With pressure off every policy gives the tokens of policy full; with pressure on, those of exact
// requests (above).
TEST_F(RealPressure, AmpleMemoryGivesTheSameTokensUnderEveryPolicy) {
  std::map<KvPolicy, Tokens> tokens;
  for (const KvPolicy policy :
       {KvPolicy::kFull, KvPolicy::kOffload, KvPolicy::kElastic, KvPolicy::kPliant}) {
    StepLab lab(Options(policy, 16 * 8 * 2, policy == KvPolicy::kFull ? 0 : 200));
    for (std::uint64_t i = 1; i <= 16; ++i)
      lab.Ask(i, StepLab::Prompt(80 + static_cast<std::int64_t>(i) * 5, i), 64);
    ASSERT_TRUE(lab.Run(5000));
    for (const auto& [id, answer] : lab.answers()) tokens[policy][id] = answer.tokens;
    EXPECT_EQ(lab.kv().Stats().demotions, 0) << KvPolicyName(policy);
    EXPECT_EQ(lab.scheduler().Stats().preemptions + lab.scheduler().Stats().offloads, 0);
  }
  for (const auto& [policy, some] : tokens) {
    EXPECT_EQ(some, tokens[KvPolicy::kFull]) << KvPolicyName(policy);
  }
}

/// Steps that one request alone takes.
std::int64_t StepsOfOne(StepLab& lab, std::uint64_t id) {
  const std::int64_t before = lab.scheduler().Stats().steps;
  lab.Ask(id, StepLab::Prompt(200, id), 60);
  EXPECT_TRUE(lab.Run(2000));
  return lab.scheduler().Stats().steps - before;
}

// 10,000 steps of load that swings around the watermark: a block makes at most one round trip (five
// steps down, two up) in a dwell time. Then all blocks come back to 16 bits, and a request takes as
// many steps as before.
TEST_F(RealPressure, SwingingLoad) {
  constexpr int kSteps = Rounds(10'000, 1'500), kDwell = 64;
  StepLabOptions options = Options(KvPolicy::kPliant, 64, 400);
  options.kv.dwell_steps = kDwell;
  options.kv.horizon_steps = 4;
  options.kv.prefix_cache = false;
  options.sched.max_batch_tokens = 256;
  StepLab lab(options);
  const std::int64_t alone = StepsOfOne(lab, 1'000'000);
  struct Life {
    std::uint64_t first = 0, last = 0;
    std::int64_t moves = 0;
  };
  std::map<std::pair<std::uint32_t, std::uint64_t>, Life> lives;  // by block and request
  std::uint64_t next = 1, seen = lab.kv().log().total();
  for (int step = 0; step < kSteps; ++step) {
    while (lab.live() < 3) {
      lab.Ask(next, StepLab::Prompt(250, next), 400);
      ++next;
    }
    if (step % 7 == 0) lab.kv().Withhold(step % 14 == 0 ? 36 * 8 : 24 * 8);
    lab.Step();
    for (const Decision& d : lab.kv().log().Since(seen)) {
      if (d.reason != Reason::kDemoteBase && d.reason != Reason::kDemoteDeep &&
          d.reason != Reason::kRestore)
        continue;
      Life& life = lives[{d.block.value(), d.request.value()}];
      if (life.moves++ == 0) life.first = d.step;
      life.last = d.step;
    }
    seen = lab.kv().log().total();
  }
  std::int64_t moves = 0, most = 0;
  for (const auto& [key, life] : lives) {
    const std::int64_t dwells = static_cast<std::int64_t>(life.last - life.first) / kDwell + 1;
    EXPECT_LE(life.moves, 7 * dwells) << "block " << key.first << " of request " << key.second;
    moves += life.moves;
    most = std::max(most, life.moves);
  }
  EXPECT_GT(moves, 200) << "it did swing";
  EXPECT_GT(lab.kv().Stats().restores, 50);
  RecordProperty("moves", std::to_string(moves));
  RecordProperty("most_of_one_block", std::to_string(most));
  EXPECT_EQ(lab.scheduler().Stats().preemptions, 0);

  lab.Ask(next, StepLab::Prompt(250, next), 1000);  // one that outlives the overload
  for (int i = 0; i < 20; ++i) lab.Step();
  lab.kv().Withhold(0);  // the overload ends while requests run
  for (int i = 0; i < 4 * kDwell && lab.kv().lowered_blocks() > 0; ++i) lab.Step();
  EXPECT_EQ(lab.kv().lowered_blocks(), 0);
  EXPECT_GT(lab.live(), 0);
  ASSERT_TRUE(lab.Run(2000));
  EXPECT_EQ(StepsOfOne(lab, 1'000'001), alone);
  EXPECT_EQ(lab.answer(1'000'001).usage.lowest_k_bits, 16);
  ExpectAtRest(lab);
}

std::int64_t AnonymousBytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kib = 0;
    if (word == "RssAnon:" && status >> kib) return kib * 1024;
  }
  return 0;
}

// I1: 5,000 different prompts (2,000 without a store): what is kept for them levels off at the
// stated budgets, with none and with a small store.
TEST_F(RealPressure, HostMemoryLevelsOff) {
  for (const int store_blocks : {0, 40}) {
    SCOPED_TRACE(store_blocks);
    const std::uint64_t prompts = store_blocks > 0 ? Rounds(5000, 500) : Rounds(2000, 300);
    StepLab lab(Options(KvPolicy::kPliant, 48, store_blocks));
    std::int64_t early = 0;
    std::uint64_t next = 1;
    while (next <= prompts) {
      while (lab.live() < 6 && next <= prompts) {
        lab.Ask(next, StepLab::Prompt(34, next), 1);
        ++next;
      }
      lab.Step();
      if (next >= 1000 && early == 0) early = AnonymousBytes();
      if (next % 100 == 0) {
        const KvStats kv = lab.kv().Stats();
        ASSERT_LE(kv.store_bytes_used, kv.store_bytes_total);
        ASSERT_LE(kv.blocks, 48 * 4 + store_blocks * 8);
      }
    }
    ASSERT_TRUE(lab.Run(1000));
    const KvStats kv = lab.kv().Stats();
    EXPECT_EQ(lab.Stats().store_bytes_total, kv.store_bytes_total);
    EXPECT_EQ(kv.store_bytes_total > 0, store_blocks > 0);
    if (store_blocks > 0) {
      EXPECT_GT(kv.store_bytes_used, 0);
    }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose own memory grows
    // The test keeps every answer: some 400 bytes each.
    ASSERT_GT(early, 0);
    EXPECT_LT(AnonymousBytes() - early, 4000 * 1024);
#endif
    ExpectAtRest(lab);
  }
}

}  // namespace
}  // namespace pliant
