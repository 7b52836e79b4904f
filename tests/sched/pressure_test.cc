// Faults seen in other servers (A2 to A4, I1) and promises about time: no livelock, no swinging, a
// clean pool after overload.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "sched/support/driver.h"
#include "support/rounds.h"

namespace pliant {
namespace {

using testing::Driver;
using testing::DriverOptions;
using testing::Tokens;

DriverOptions Options(KvPolicy policy, std::int64_t blocks, std::int64_t store_blocks) {
  DriverOptions o;
  o.kv.policy = policy;
  o.kv.floor_bits = policy == KvPolicy::kPliant ? 4 : 8;
  o.kv.sink_tokens = o.kv.recent_tokens_base = 32;
  o.kv.recent_tokens_deep = 64;
  o.pages = blocks * 8;
  o.store_pages = store_blocks * 8;
  return o;
}

// A2: tokens in every window of steps, few measures a request, with steps planned ahead, for each
// policy.
TEST(Pressure, NoLivelock) {
  for (KvPolicy policy :
       {KvPolicy::kFull, KvPolicy::kOffload, KvPolicy::kElastic, KvPolicy::kPliant}) {
    SCOPED_TRACE(KvPolicyName(policy));
    DriverOptions o = Options(policy, 32, 400);
    o.ahead = true;
    o.faults.delay_polls = 3;
    Driver d(o);
    for (std::uint64_t i = 1; i <= 12; ++i)
      ASSERT_TRUE(d.Add(i, {.prompt = Tokens(60, i), .max_new = 190}).ok());
    std::int64_t before = 0;
    int steps = 0;
    while (d.live() > 0 && steps < 6000) {
      for (int i = 0; i < 40; ++i, ++steps) d.Step();
      const std::int64_t now = d.scheduler().Stats().generated_tokens;
      if (d.live() > 0) {
        EXPECT_GT(now, before) << "no token in 40 turns";
      }
      before = now;
    }
    EXPECT_EQ(d.live(), 0);
    for (auto& [id, c] : d.clients()) {
      EXPECT_EQ(c.output.size(), 190u) << id;
      EXPECT_LE(c.facts->preemptions + c.facts->offloads, 4) << id;
    }
  }
}

// A3: a stream of short equal-priority requests does not starve the long one.
TEST(Pressure, TheLongOneFinishesInAStreamOfShortOnes) {
  for (KvPolicy policy : {KvPolicy::kFull, KvPolicy::kOffload, KvPolicy::kElastic}) {
    SCOPED_TRACE(KvPolicyName(policy));
    Driver d(Options(policy, 16, 100));
    ASSERT_TRUE(d.Add(1, {.prompt = Tokens(150, 1), .max_new = 250}).ok());
    std::uint64_t next = 2;
    int turns = 0;
    while (!d.client(1).done && turns < 3000) {
      if (d.live() < 8) {
        ASSERT_TRUE(d.Add(next, {.prompt = Tokens(50, next), .max_new = 30}).ok());
        ++next;
      }
      d.Step();
      ++turns;
    }
    EXPECT_TRUE(d.client(1).done) << "starved for " << turns << " turns";
    EXPECT_LE(d.client(1).facts->preemptions + d.client(1).facts->offloads, 2);
    ASSERT_TRUE(d.Run());
  }
}

// A4: a pool at 30 % of need, restores all the time, copies late or the steps late: every exact
// token is right.
TEST(Pressure, ExactUnderConstantRestore) {
  for (int delay : {0, 1, 5}) {
    for (bool ahead : {false, true}) {
      DriverOptions o = Options(KvPolicy::kPliant, 40, 600);
      o.kv.dwell_steps = 0;
      o.kv.high_watermark = 0.02;
      o.kv.low_watermark = 0.01;
      o.faults.delay_polls = delay;
      o.ahead = ahead;
      Driver d(o);
      for (std::uint64_t i = 1; i <= 16; ++i) {
        ASSERT_TRUE(d.Add(i, {.prompt = Tokens(80 + static_cast<std::int64_t>(i) * 7, i),
                              .max_new = 100,
                              .min_bits = i % 3 == 0 ? 16 : 0})
                        .ok());
      }
      for (int turn = 0; turn < 400; ++turn) {
        if (turn % 40 == 0) d.kv().Withhold(turn % 80 == 0 ? 100 : 0);
        d.Step();
      }
      d.kv().Withhold(0);
      ASSERT_TRUE(d.Run());
      for (auto& [id, c] : d.clients()) {
        if (id % 3 != 0) continue;
        for (std::size_t t = 0; t < c.output.size(); ++t)
          ASSERT_EQ(c.output[t], testing::ExactToken(c.chain[c.prompt.size() - 1 + t]));
      }
      EXPECT_GT(d.kv().Stats().restores, 50);
    }
  }
}

// The same through a file store with its own thread: what is on its way is never touched, and every
// exact token is right.
TEST(Pressure, ExactThroughAFileStore) {
  DriverOptions o = Options(KvPolicy::kPliant, 40, 0);
  o.kv.store = {StoreSpec::Kind::kFile,
                ::testing::TempDir() + "pliant_pressure_" + std::to_string(getpid()), 4800 * 576};
  o.kv.dwell_steps = 0;
  o.kv.high_watermark = 0.02;
  Driver d(o);
  for (std::uint64_t i = 1; i <= 16; ++i) {
    const auto n = static_cast<std::int64_t>(i);
    ASSERT_TRUE(
        d.Add(i, {.prompt = Tokens(80 + n * 7, i), .max_new = 100, .min_bits = i % 3 == 0 ? 16 : 0})
            .ok());
  }
  for (int turn = 0; turn < 300; ++turn) {
    if (turn % 40 == 0) d.kv().Withhold(turn % 80 == 0 ? 100 : 0);
    d.Step();
  }
  d.kv().Withhold(0);
  ASSERT_TRUE(d.Run(200'000));
  for (auto& [id, c] : d.clients()) {
    if (id % 3 != 0) continue;
    for (std::size_t t = 0; t < c.output.size(); ++t) {
      ASSERT_EQ(c.output[t], testing::ExactToken(c.chain[c.prompt.size() - 1 + t]));
    }
  }
  EXPECT_GT(d.kv().Stats().write_ahead_bytes, 0);
}

// With pressure off, tokens are those of policy full.
TEST(Pressure, AmpleMemoryChangesNothing) {
  std::map<std::uint64_t, std::vector<std::int32_t>> outputs[2];
  for (int pass = 0; pass < 2; ++pass) {
    Driver d(Options(pass == 0 ? KvPolicy::kFull : KvPolicy::kPliant, 400, 400));
    for (std::uint64_t i = 1; i <= 8; ++i)
      ASSERT_TRUE(d.Add(i, {.prompt = Tokens(100, i), .max_new = 100}).ok());
    ASSERT_TRUE(d.Run());
    for (auto& [id, c] : d.clients()) outputs[pass][id] = c.output;
    EXPECT_EQ(d.kv().Stats().demotions, 0);
  }
  EXPECT_EQ(outputs[0], outputs[1]);
}

// Memory that swings around the watermark: a block moves at most twice in each dwell time and
// level, over 10,000 steps; and once the swinging stops, every block is whole again.
TEST(Pressure, SwingingLoadDoesNotMakeBlocksSwing) {
  constexpr int kSteps = Rounds(10'000, 2'000), kDwell = 100;
  DriverOptions o = Options(KvPolicy::kPliant, 64, 400);
  o.kv.dwell_steps = kDwell;
  o.kv.horizon_steps = 4;
  o.sched.max_context = 1 << 20;
  o.sched.max_batch_tokens = 512;
  o.kv.prefix_cache = false;
  Driver d(o);
  std::uint64_t next = 1;
  std::map<std::uint32_t, std::int64_t> moves;  // by block
  std::uint64_t seen = 0;
  for (int step = 0; step < kSteps; ++step) {
    while (d.live() < 3) {
      ASSERT_TRUE(d.Add(next, {.prompt = Tokens(250, next), .max_new = 200}).ok());
      ++next;
    }
    if (step % 7 == 0) d.kv().Withhold(step % 14 == 0 ? 40 * 8 : 30 * 8);
    d.Step();
    for (const Decision& x : d.kv().log().Since(seen)) {
      if (x.reason == Reason::kDemoteBase || x.reason == Reason::kDemoteDeep ||
          x.reason == Reason::kRestore)
        ++moves[x.block.value()];
    }
    seen = d.kv().log().total();
  }
  // A round trip has at most five steps down and two up, and cannot begin again before the dwell
  // time is over; ids of blocks are used again for the next request, which is why the bound is by
  // time and not by request.
  std::int64_t most = 0;
  for (auto& [id, n] : moves) most = std::max(most, n);
  const std::int64_t lives = static_cast<std::int64_t>(next);
  EXPECT_LE(most, 7 * (kSteps / kDwell + lives));
  std::int64_t sum = 0;
  for (auto& [id, n] : moves) sum += n;
  EXPECT_GT(sum, 100);  // it did move
  // In the mean, blocks move less than twice in a dwell time.
  EXPECT_LE(sum, 2 * static_cast<std::int64_t>(moves.size()) * (kSteps / kDwell));
  d.kv().Withhold(0);
  ASSERT_TRUE(d.Add(next, {.prompt = Tokens(250, next), .max_new = 600}).ok());
  for (int i = 0; i < 3 * kDwell + 250; ++i) d.Step();
  EXPECT_EQ(d.kv().lowered_blocks(), 0);
  ASSERT_TRUE(d.Run());
}

// After overload throughput is what it was before: the same work takes as many steps.
TEST(Pressure, OverloadLeavesNothingBehind) {
  Driver d(Options(KvPolicy::kPliant, 48, 400));
  const auto quiet = [&](std::uint64_t id) {
    const std::int64_t before = d.steps_run();
    EXPECT_TRUE(d.Add(id, {.prompt = Tokens(200, id), .max_new = 50}).ok());
    EXPECT_TRUE(d.Run());
    return d.steps_run() - before;
  };
  const std::int64_t before = quiet(1);
  for (std::uint64_t i = 100; i < 130; ++i)
    ASSERT_TRUE(d.Add(i, {.prompt = Tokens(200, i), .max_new = 100}).ok());
  ASSERT_TRUE(d.Run());
  EXPECT_GT(d.kv().Stats().demotions, 0);
  EXPECT_EQ(quiet(2), before);
  EXPECT_EQ(d.client(2).facts->lowest_k_bits, 16);
}

// I1: thousands of different prompts: host memory stays within its budget, blocks and queues do not
// pile up, and budget 0 works.
TEST(Pressure, HostMemoryStaysWithinItsBudget) {
  for (std::int64_t store : {0, 3, 60}) {
    DriverOptions o = Options(KvPolicy::kPliant, 24, store);
    Driver d(o);
    std::uint64_t next = 1;
    for (int i = 0; i < 1500; ++i) {
      ASSERT_TRUE(d.Add(next, {.prompt = Tokens(100, next), .max_new = 2}).ok());
      ++next;
      d.Step();
      d.Step();
    }
    ASSERT_TRUE(d.Run());
    const KvStats s = d.kv().Stats();
    EXPECT_LE(s.store_bytes_used, store * 8 * s.page_bytes);
    EXPECT_LE(s.blocks, 24 * 4 + store * 8);
    EXPECT_EQ(s.pages_free + s.pages_cached, s.pages_total);
  }
}

// H1, J1: nothing is lost on any way out.
TEST(Pressure, AThousandCancelledRequests) {
  DriverOptions o = Options(KvPolicy::kPliant, 24, 100);
  o.ahead = true;
  o.faults.delay_polls = 2;
  Driver d(o);
  for (std::uint64_t i = 1; i <= 1000; ++i) {
    ASSERT_TRUE(d.Add(i, {.prompt = Tokens(20 + static_cast<std::int64_t>(i * 37 % 150), i % 11),
                          .max_new = 100})
                    .ok());
    for (std::uint64_t s = 0; s < i * 7919 % 5; ++s) d.Step();
    if (i > 16) d.Cancel(i - 16);
  }
  for (std::uint64_t i = 985; i <= 1000; ++i) d.Cancel(i);
  for (int i = 0; i < 100; ++i) d.Step();
  EXPECT_FALSE(d.scheduler().HasWork());
  const KvStats s = d.kv().Stats();
  EXPECT_EQ(s.pages_free + s.pages_cached, s.pages_total);
  for (std::uint64_t i = 2001; i <= 2008; ++i)
    ASSERT_TRUE(d.Add(i, {.prompt = Tokens(30, i), .max_new = 10}).ok());
  ASSERT_TRUE(d.Run(200));
}

// The elastic point in numbers: a pool for about six sequences, 24 at once. Time is counted in
// steps.
TEST(Pressure, ElasticServesWhereFullQueues) {
  std::map<KvPolicy, double> ttft;
  std::map<KvPolicy, std::int64_t> taken_out;
  for (KvPolicy policy :
       {KvPolicy::kFull, KvPolicy::kOffload, KvPolicy::kElastic, KvPolicy::kPliant}) {
    DriverOptions o = Options(policy, 6 * 22, 2000);
    o.kv.sink_tokens = o.kv.recent_tokens_base = 64;
    o.kv.recent_tokens_deep = 128;
    o.sched.max_batch_tokens = 512;
    o.check_bytes = false;
    Driver d(o);
    std::map<std::uint64_t, int> born, first;
    std::uint64_t next = 1;
    for (int step = 0; step < 1500; ++step) {
      // A new request each 26 steps: about 10 live at a time when nobody has to queue.
      if (step % 26 == 0 && next <= 60) {
        ASSERT_TRUE(d.Add(next, {.prompt = Tokens(450, next), .max_new = 250}).ok());
        born[next++] = step;
      }
      d.Step();
      for (auto& [id, c] : d.clients()) {
        if (!c.output.empty() && !first.contains(id)) first[id] = step;
      }
    }
    ASSERT_TRUE(d.Run());
    double sum = 0;
    for (auto& [id, at] : born) sum += (first.contains(id) ? first[id] : 1500) - at + 1;
    ttft[policy] = sum / static_cast<double>(born.size());
    taken_out[policy] = d.scheduler().Stats().preemptions + d.scheduler().Stats().offloads;
  }
  RecordProperty("ttft_full", std::to_string(ttft[KvPolicy::kFull]));
  RecordProperty("ttft_elastic", std::to_string(ttft[KvPolicy::kElastic]));
  RecordProperty("ttft_pliant", std::to_string(ttft[KvPolicy::kPliant]));
  EXPECT_GE(ttft[KvPolicy::kFull], 4 * ttft[KvPolicy::kElastic])
      << ttft[KvPolicy::kFull] << " " << ttft[KvPolicy::kOffload] << " " << ttft[KvPolicy::kElastic]
      << " " << ttft[KvPolicy::kPliant];
  EXPECT_GE(ttft[KvPolicy::kFull], 4 * ttft[KvPolicy::kPliant]);
  EXPECT_EQ(taken_out[KvPolicy::kElastic], 0);
  EXPECT_EQ(taken_out[KvPolicy::kPliant], 0);
}

}  // namespace
}  // namespace pliant
