#include "sched/scheduler.h"

#include <gtest/gtest.h>

#include "sched/support/driver.h"

namespace pliant {
namespace {

using testing::Driver;
using testing::DriverOptions;
using testing::Tokens;

DriverOptions Full(std::int64_t pages) {
  DriverOptions o;
  o.kv.policy = KvPolicy::kFull;
  o.pages = pages;
  return o;
}

void ExpectClean(Driver& d) {
  const KvStats kv = d.kv().Stats();
  const SchedStats s = d.scheduler().Stats();
  EXPECT_EQ(kv.pages_free + kv.pages_cached, kv.pages_total);
  EXPECT_EQ(s.running + s.waiting + s.loading + s.offloaded, 0);
  EXPECT_FALSE(d.scheduler().HasWork());
}

TEST(Scheduler, OneRequestRunsToItsLength) {
  Driver d(Full(8 * 64));
  ASSERT_TRUE(d.Add(1, {.prompt = Tokens(100, 1), .max_new = 40}).ok());
  ASSERT_TRUE(d.Run());
  EXPECT_EQ(d.client(1).output.size(), 40u);
  EXPECT_TRUE(d.client(1).error.ok());
  // Chunks of 64 and 36 rows, then a token a step.
  EXPECT_EQ(d.steps_run(), 2 + 39);
  ExpectClean(d);
}

TEST(Scheduler, RefusesWhatCanNeverFit) {
  DriverOptions o = Full(8 * 8);
  o.sched.max_context = 200;
  o.sched.max_waiting = 2;
  Driver d(o);
  EXPECT_EQ(d.Add(1, {.prompt = {}}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(d.Add(1, {.prompt = {1}, .max_new = 0}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(d.Add(1, {.prompt = {1}, .min_bits = 7}).code(), StatusCode::kInvalidArgument);
  Status s = d.Add(1, {.prompt = Tokens(150, 1), .max_new = 51});
  EXPECT_EQ(s.code(), StatusCode::kTooLarge);
  EXPECT_NE(s.message().find("200"), std::string::npos) << s.message();
  EXPECT_EQ(d.Add(1, {.prompt = {1}, .max_new = std::numeric_limits<std::int64_t>::max()}).code(),
            StatusCode::kTooLarge);
  EXPECT_TRUE(d.Add(1, {.prompt = {1}}).ok());
  EXPECT_EQ(d.scheduler().Add({RequestId(1), {1}, 1}).code(),
            StatusCode::kInvalidArgument);  // the id is in use
  EXPECT_TRUE(d.Add(2, {.prompt = {1}}).ok());
  EXPECT_EQ(d.Add(3, {.prompt = {1}}).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(d.Run());
  EXPECT_EQ(d.scheduler().Stats().rejected, 7);
}

TEST(Scheduler, RefusesWhatIsLargerThanThePool) {
  Driver d(Full(8 * 4));  // 128 tokens
  Status s = d.Add(1, {.prompt = Tokens(100, 1), .max_new = 30});
  EXPECT_EQ(s.code(), StatusCode::kTooLarge);
  EXPECT_NE(s.message().find("128"), std::string::npos) << s.message();
  // The last token is never computed: 129 fit.
  EXPECT_TRUE(d.Add(1, {.prompt = Tokens(100, 1), .max_new = 29}).ok());
  EXPECT_TRUE(d.Run());
  EXPECT_EQ(d.client(1).output.size(), 29u);
  EXPECT_EQ(d.scheduler().MaxContext(), 129);
}

TEST(Scheduler, DecodesGoOnWhileALongPromptIsComputed) {
  Driver d(Full(8 * 256));
  ASSERT_TRUE(d.Add(1, {.prompt = Tokens(8, 1), .max_new = 30}).ok());
  d.Step();
  ASSERT_TRUE(d.Add(2, {.prompt = Tokens(1000, 2), .max_new = 2}).ok());
  for (int i = 0; i < 10; ++i) {
    const std::size_t before = d.client(1).output.size();
    d.Step();
    EXPECT_EQ(d.client(1).output.size(), before + 1);
  }
  EXPECT_TRUE(d.client(2).output.empty());
  EXPECT_TRUE(d.Run());
}

TEST(Scheduler, PromptsGoOnWhileDecodesFillTheStep) {
  DriverOptions o = Full(8 * 512);
  o.sched.max_batch_tokens = 16;
  Driver d(o);
  for (std::uint64_t i = 1; i <= 24; ++i)
    ASSERT_TRUE(d.Add(i, {.prompt = Tokens(4, i), .max_new = 200}).ok());
  for (int i = 0; i < 30; ++i) d.Step();
  ASSERT_TRUE(d.Add(99, {.prompt = Tokens(64, 99), .max_new = 2}).ok());
  for (int i = 0; i < 20; ++i) d.Step();
  EXPECT_FALSE(d.client(99).output.empty());
  // And no decode was left behind: every one got its turns.
  std::size_t least = 1000, most = 0;
  for (std::uint64_t i = 1; i <= 24; ++i) {
    least = std::min(least, d.client(i).output.size());
    most = std::max(most, d.client(i).output.size());
  }
  EXPECT_LE(most - least, 12u);
  EXPECT_TRUE(d.Run());
}

TEST(Scheduler, BatchedOutputEqualsOneAtATime) {
  std::vector<std::vector<std::int32_t>> alone;
  for (std::uint64_t i = 1; i <= 8; ++i) {
    Driver d(Full(8 * 64));
    ASSERT_TRUE(
        d.Add(i, {.prompt = Tokens(10 + 17 * static_cast<std::int64_t>(i), i), .max_new = 50})
            .ok());
    ASSERT_TRUE(d.Run());
    alone.push_back(d.client(i).output);
  }
  Driver d(Full(8 * 24));  // too small for all: preemptions on the way
  for (std::uint64_t i = 1; i <= 8; ++i) {
    ASSERT_TRUE(
        d.Add(i, {.prompt = Tokens(10 + 17 * static_cast<std::int64_t>(i), i), .max_new = 50})
            .ok());
  }
  ASSERT_TRUE(d.Run());
  for (std::uint64_t i = 1; i <= 8; ++i) EXPECT_EQ(d.client(i).output, alone[i - 1]) << i;
  ExpectClean(d);
}

TEST(Scheduler, PreemptsAndRecomputesWhenThePoolIsFull) {
  Driver d(Full(8 * 12));
  for (std::uint64_t i = 1; i <= 4; ++i)
    ASSERT_TRUE(d.Add(i, {.prompt = Tokens(40, i), .max_new = 200}).ok());
  ASSERT_TRUE(d.Run());
  EXPECT_GT(d.scheduler().Stats().preemptions, 0);
  for (std::uint64_t i = 1; i <= 4; ++i) EXPECT_EQ(d.client(i).output.size(), 200u);
  ExpectClean(d);
}

TEST(Scheduler, CancelInEveryStateFreesEverything) {
  for (int at = 0; at < 40; ++at) {
    Driver d(Full(8 * 12));
    for (std::uint64_t i = 1; i <= 6; ++i)
      ASSERT_TRUE(d.Add(i, {.prompt = Tokens(70, i), .max_new = 60}).ok());
    for (int i = 0; i < at; ++i) d.Step();
    for (std::uint64_t i = 1; i <= 6; ++i) d.Cancel(i);
    d.Step();
    ExpectClean(d);
    EXPECT_EQ(d.scheduler().Stats().cancelled + d.scheduler().Stats().finished, 6);
  }
}

TEST(Scheduler, CancelWhileTheStepIsInFlight) {
  DriverOptions o = Full(8 * 12);
  o.ahead = true;
  Driver d(o);
  for (std::uint64_t i = 1; i <= 3; ++i)
    ASSERT_TRUE(d.Add(i, {.prompt = Tokens(90, i), .max_new = 60}).ok());
  d.Step();
  d.Step();
  d.Cancel(2);  // its first chunk is in flight
  EXPECT_GT(d.kv().Stats().pages_fenced, 0);
  ASSERT_TRUE(d.Run());
  EXPECT_EQ(d.client(1).output.size(), 60u);
  ExpectClean(d);
}

/// Steps from the end of a request until the one that waits for its pages has its first token.
int StepsUntilTheHeadRuns(bool ahead) {
  DriverOptions o = Full(8 * 12);
  o.kv.prefix_cache = false;
  o.ahead = ahead;
  Driver d(o);
  const auto add = [&](std::uint64_t id, std::int64_t prompt, std::int64_t max_new) {
    EXPECT_TRUE(d.Add(id, {.prompt = Tokens(prompt, id), .max_new = max_new}).ok());
  };
  add(1, 100, 200);
  add(3, 150, 20);
  for (int i = 0; i < 8; ++i) d.Step();
  add(5, 120, 20);
  while (!d.client(3).done) d.Step();
  EXPECT_TRUE(d.client(5).output.empty()) << "it was to wait";
  int steps = 0;
  while (d.client(5).output.empty() && steps < 100) d.Step(), ++steps;
  EXPECT_TRUE(d.Run());
  return steps;
}

TEST(Scheduler, TheHeadOfTheQueueRunsAStepAfterPagesCameBack) {
  const int late = StepsUntilTheHeadRuns(false), ahead = StepsUntilTheHeadRuns(true);
  EXPECT_LE(ahead, late + 2);  // pages are back when the step in flight has ended; its plan is made
}

TEST(Scheduler, StepsThatWereGivenUpAreNotCounted) {
  Driver d(Full(8 * 64));
  ASSERT_TRUE(d.Add(1, {.prompt = Tokens(100, 1), .max_new = 5}).ok());
  while (d.live() > 0) {
    d.AbandonStep();
    d.Step();
  }
  EXPECT_EQ(d.scheduler().Stats().steps, d.steps_run());
}

TEST(Scheduler, AnAbandonedStepLeavesNoTrace) {
  Driver d(Full(8 * 64)), plain(Full(8 * 64));
  for (Driver* x : {&d, &plain}) {
    ASSERT_TRUE(x->Add(1, {.prompt = Tokens(100, 1), .max_new = 40}).ok());
    ASSERT_TRUE(x->Add(2, {.prompt = Tokens(30, 2), .max_new = 40}).ok());
  }
  for (int i = 0; i < 30; ++i) {
    d.AbandonStep();
    d.Step();
  }
  ASSERT_TRUE(d.Run());
  ASSERT_TRUE(plain.Run());
  EXPECT_EQ(d.client(1).output, plain.client(1).output);
  EXPECT_EQ(d.client(2).output, plain.client(2).output);
}

TEST(Scheduler, PriorityThenArrivalDecidesAdmission) {
  DriverOptions o = Full(8 * 64);
  o.sched.max_running = 1;
  Driver d(o);
  for (std::uint64_t i = 1; i <= 4; ++i) {
    ASSERT_TRUE(d.Add(i, {.prompt = Tokens(10, i), .max_new = 3, .priority = i == 3 ? 5 : 0}).ok());
  }
  std::vector<std::uint64_t> order;
  while (d.live() > 0) {
    d.Step();
    for (auto& [id, c] : d.clients()) {
      if (c.done && std::find(order.begin(), order.end(), id) == order.end()) order.push_back(id);
    }
  }
  EXPECT_EQ(order, (std::vector<std::uint64_t>{3, 1, 2, 4}));
}

// ---- prefix cache
// -------------------------------------------------------------------------------------------------------------

TEST(PrefixReuse, WholeBlocksOnlyAndNeverTheWholePrompt) {
  Driver d(Full(8 * 64));
  const auto base = Tokens(300, 7);
  ASSERT_TRUE(d.Add(1, {.prompt = base, .max_new = 1}).ok());
  ASSERT_TRUE(d.Run());
  std::uint64_t id = 10;
  for (std::int64_t k : {1, 31, 32, 33, 63, 64, 65, 96, 299, 300}) {
    auto prompt = std::vector<std::int32_t>(base.begin(), base.begin() + k);
    ASSERT_TRUE(d.Add(++id, {.prompt = prompt, .max_new = 1}).ok());
    ASSERT_TRUE(d.Run());
    EXPECT_EQ(d.client(id).facts->cached_tokens, (k - 1) / 32 * 32) << k;
  }
  // Two prompts equal for k tokens, then different.
  for (std::int64_t k : {31, 32, 33, 64}) {
    auto prompt = std::vector<std::int32_t>(base.begin(), base.begin() + k);
    for (std::int32_t t : Tokens(100, 1000 + static_cast<std::uint64_t>(k))) prompt.push_back(t);
    ASSERT_TRUE(d.Add(++id, {.prompt = prompt, .max_new = 4}).ok());
    ASSERT_TRUE(d.Run());
    EXPECT_EQ(d.client(id).facts->cached_tokens, k / 32 * 32) << k;
  }
  const SchedStats s = d.scheduler().Stats();
  EXPECT_GT(s.prefix_hit_tokens, 0);
  EXPECT_LE(s.prefix_hit_tokens, s.prefix_lookup_tokens);
}

TEST(PrefixReuse, CollidingHashesNeverServeWrongBlocks) {
  DriverOptions o = Full(8 * 128);
  o.constant_hash = true;
  Driver d(o);
  const auto base = Tokens(100, 7);
  for (std::uint64_t i = 1; i <= 12; ++i) {
    auto prompt = i % 3 == 0 ? base : Tokens(100, i);
    // Equal second blocks after different first ones: only the chain tells them apart.
    if (i % 3 == 1) std::copy(base.begin() + 32, base.begin() + 64, prompt.begin() + 32);
    ASSERT_TRUE(d.Add(i, {.prompt = prompt, .max_new = 40, .salt = i % 2 == 0 ? "a" : "b"}).ok());
    ASSERT_TRUE(d.Run());
  }
  EXPECT_EQ(d.client(9).facts->cached_tokens, 96);  // as 3, the same salt
  EXPECT_EQ(d.client(6).facts->cached_tokens, 0);   // the other salt
  EXPECT_EQ(d.client(4).facts->cached_tokens, 0);
}

TEST(PrefixReuse, SaltsDoNotShare) {
  Driver d(Full(8 * 64));
  ASSERT_TRUE(d.Add(1, {.prompt = Tokens(100, 7), .max_new = 1, .salt = "alice"}).ok());
  ASSERT_TRUE(d.Run());
  ASSERT_TRUE(d.Add(2, {.prompt = Tokens(100, 7), .max_new = 1, .salt = "bob"}).ok());
  ASSERT_TRUE(d.Add(3, {.prompt = Tokens(100, 7), .max_new = 1}).ok());
  ASSERT_TRUE(d.Run());
  EXPECT_EQ(d.client(2).facts->cached_tokens, 0);
  EXPECT_EQ(d.client(3).facts->cached_tokens, 0);
  ASSERT_TRUE(d.Add(4, {.prompt = Tokens(100, 7), .max_new = 1, .salt = "alice"}).ok());
  ASSERT_TRUE(d.Run());
  EXPECT_EQ(d.client(4).facts->cached_tokens, 96);
}

TEST(PrefixReuse, AnAbortedPromptPublishesOnlyWhatIsComplete) {
  for (int at = 1; at <= 12; ++at) {
    Driver d(Full(8 * 64));
    DriverOptions o = Full(8 * 64);
    ASSERT_TRUE(d.Add(1, {.prompt = Tokens(600, 3), .max_new = 4}).ok());
    for (int i = 0; i < at; ++i) d.Step();
    d.Cancel(1);
    ASSERT_TRUE(d.Add(2, {.prompt = Tokens(600, 3), .max_new = 40}).ok());
    ASSERT_TRUE(d.Run());  // the driver compares every byte that is read
    EXPECT_LE(d.client(2).facts->cached_tokens, at * 64);
    Driver fresh(o);
    ASSERT_TRUE(fresh.Add(2, {.prompt = Tokens(600, 3), .max_new = 40}).ok());
    ASSERT_TRUE(fresh.Run());
    EXPECT_EQ(d.client(2).output, fresh.client(2).output);
  }
}

TEST(PrefixReuse, TwoAtOnceComputeTheSamePrefix) {
  Driver d(Full(8 * 64));
  ASSERT_TRUE(d.Add(1, {.prompt = Tokens(100, 3), .max_new = 50}).ok());
  ASSERT_TRUE(d.Add(2, {.prompt = Tokens(100, 3), .max_new = 50}).ok());
  ASSERT_TRUE(d.Run());
  EXPECT_EQ(d.client(1).output, d.client(2).output);
  // 149 tokens are computed, 4 whole blocks; the twins of the second request were not kept.
  EXPECT_EQ(d.kv().Stats().blocks_cached, 4);
  ExpectClean(d);
}

TEST(PrefixReuse, TheLeastRecentlyUsedGoFirst) {
  Driver d(Full(8 * 8));
  ASSERT_TRUE(d.Add(1, {.prompt = Tokens(97, 1), .max_new = 1}).ok());
  ASSERT_TRUE(d.Run());
  ASSERT_TRUE(d.Add(2, {.prompt = Tokens(97, 2), .max_new = 1}).ok());
  ASSERT_TRUE(d.Run());
  ASSERT_TRUE(d.Add(3, {.prompt = Tokens(97, 1), .max_new = 1}).ok());  // touches the first
  ASSERT_TRUE(d.Run());
  EXPECT_EQ(d.client(3).facts->cached_tokens, 96);
  ASSERT_TRUE(
      d.Add(4, {.prompt = Tokens(97, 4), .max_new = 1}).ok());  // needs room: the second's go
  ASSERT_TRUE(d.Run());
  ASSERT_TRUE(d.Add(5, {.prompt = Tokens(97, 1), .max_new = 1}).ok());
  ASSERT_TRUE(d.Run());
  EXPECT_EQ(d.client(5).facts->cached_tokens, 96);
  EXPECT_GT(d.Count(Reason::kCacheEvict), 0u);
}

}  // namespace
}  // namespace pliant
