// Steps that are planned while the one before runs: the engine over a backend that works by itself.
// Tokens, ends and memory must be those of an engine that plans each step after the last one.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

#include "engine/support/test_model.h"
#include "support/rounds.h"

namespace pliant {
namespace {

TestEngineOptions Ahead() {
  TestEngineOptions options;
  options.calibrate = false;
  options.backend_samples = true;
  return options;
}

TestEngineOptions Plain() {
  TestEngineOptions options = Ahead();
  options.backend_samples = false;
  return options;
}

std::vector<GenerateRequest> Problems(const TestModel& model, std::size_t count,
                                      std::int64_t max_tokens) {
  std::vector<GenerateRequest> requests;
  for (std::size_t i = 0; i < count; ++i)
    requests.push_back(TestModel::Greedy(model.Problem(SmallProblems()[i].first), max_tokens));
  return requests;
}

/// Ends of every kind, some of which nobody can know while the step before runs.
std::vector<GenerateRequest> ManyEnds(const TestModel& model) {
  std::vector<GenerateRequest> requests = Problems(model, 8, 90);
  requests[0].stop.max_tokens = 1;
  requests[1].stop.max_tokens = 33;
  requests[2].stop.strings = {"="};
  requests[3].stop.token_ids = {requests[3].prompt[5]};
  requests[4].stop.min_tokens = 20;
  requests[4].stop.strings = {"1", "2"};
  requests[5].sampling.temperature = 1.5f;
  requests[5].sampling.seed = 7;
  requests[6].sampling.frequency_penalty = 0.7f;  // each token changes the next row
  requests[7].sampling.repetition_penalty = 1.2f;
  return requests;
}

void ExpectSame(const std::vector<Collector::Answer>& got,
                const std::vector<Collector::Answer>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    EXPECT_EQ(got[i].text, want[i].text) << i;
    EXPECT_EQ(got[i].finish, want[i].finish) << i;
    EXPECT_EQ(got[i].stop_match, want[i].stop_match) << i;
    EXPECT_EQ(got[i].usage.completion_tokens, want[i].usage.completion_tokens) << i;
  }
}

TEST(StepsAhead, EveryEndIsTheSame) {
  TestModel plain(Plain()), ahead(Ahead());
  ExpectSame(ahead.AskAll(ManyEnds(ahead)), plain.AskAll(ManyEnds(plain)));
  ExpectIdle(*ahead.engine);
  const EngineStats stats = StatsNow(*ahead.engine);
  EXPECT_GT(stats.steps_ahead, stats.steps / 2);
  EXPECT_EQ(StatsNow(*plain.engine).steps_ahead, 0);
}

TEST(StepsAhead, PromptsInChunksBesideDecodes) {
  TestEngineOptions options = Ahead();
  options.max_batch_tokens = 24;
  TestModel plain(Plain()), ahead(options);
  ExpectSame(ahead.AskAll(ManyEnds(ahead)), plain.AskAll(ManyEnds(plain)));
  ExpectIdle(*ahead.engine);
  EXPECT_GT(StatsNow(*ahead.engine).steps_ahead, 0);
}

/// A pool for about two of the problems: with 16 bits to keep requests must take turns, with less
/// they bend.
TestEngineOptions Tight(const TestModel& ample, int min_bits) {
  const EngineStats stats = ample.engine->Stats();
  TestEngineOptions options = Ahead();
  options.kv_bytes =
      static_cast<std::uint64_t>(stats.kv_bytes_total / stats.pages_total) * 2 * kPlanes * 45;
  options.policy = KvPolicy::kPliant;
  options.store.kind = StoreSpec::Kind::kRam;
  options.store.bytes = 64u << 20;
  options.floor_bits = min_bits;
  return options;
}

TEST(StepsAhead, UnderPressureExactRequestsStayExact) {
  constexpr std::size_t kRequests = Rounds(8, 4);
  TestModel ample(Plain());
  const auto want = ample.AskAll(Problems(ample, kRequests, 300));
  TestModel tight(Tight(ample, 8));
  std::vector<GenerateRequest> requests = Problems(tight, kRequests, 300);
  for (GenerateRequest& request : requests) request.kv.min_bits = 16;
  const auto got = tight.AskAll(std::move(requests));
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(got[i].error.ok()) << got[i].error.ToString();
    EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
  }
  ExpectIdle(*tight.engine);
  EXPECT_GT(StatsNow(*tight.engine).steps_ahead, 0);
}

TEST(StepsAhead, BlocksBendWhileStepsRun) {
  constexpr std::size_t kRequests = Rounds(8, 4);
  TestModel ample(Plain());
  TestModel tight(Tight(ample, 8));
  for (const auto& answer : tight.AskAll(Problems(tight, kRequests, 300)))
    EXPECT_TRUE(answer.error.ok()) << answer.error.ToString();
  const EngineStats stats = StatsNow(*tight.engine);
  EXPECT_GT(stats.demotions, 0);
  EXPECT_GT(stats.tokens_below_16_bits, 0);
  EXPECT_GT(stats.steps_ahead, stats.steps / 2);
  ExpectIdle(*tight.engine);
}

/// What a history holds is decided on with nothing in flight, once in 32 tokens of each.
TEST(StepsAhead, HistoriesDropAndReturn) {
  constexpr std::size_t kRequests = Rounds(5, 3);
  const auto with_history = [](TestEngineOptions options) {
    options.policy = KvPolicy::kPliant;
    options.store.kind = StoreSpec::Kind::kRam;
    options.store.bytes = 64u << 20;
    return options;
  };
  TestModel plain(with_history(Plain())), ahead(with_history(Ahead()));
  const auto ask = [](TestModel& model) {
    std::vector<GenerateRequest> requests = Problems(model, kRequests, 400);
    for (std::size_t i = 0; i + 1 < requests.size(); ++i)
      requests[i].kv.capacity = {Capacity::Kind::kGrow, 0};
    return model.AskAll(std::move(requests));
  };
  ExpectSame(ask(ahead), ask(plain));
  ExpectIdle(*ahead.engine);
  const EngineStats stats = StatsNow(*ahead.engine);
  EXPECT_GT(stats.drops, 0);
  EXPECT_GT(stats.returned_pages, 0);
  EXPECT_GT(stats.steps_ahead, stats.steps / 2);
}

TEST(StepsAhead, CancelFreesEverythingAtAnyTime) {
  TestModel model(Ahead());
  const std::vector<TokenId> prompt = model.Problem(SmallProblems()[1].first);
  const auto want = model.Ask(TestModel::Greedy(prompt, 40)).tokens;
  std::mt19937 rng(11);
  for (int round = 0; round < Rounds(20, 6); ++round) {
    Collector collector;
    const RequestId stays =
        model.engine->Submit(TestModel::Greedy(prompt, 40), collector.Sink()).value();
    const RequestId goes =
        model.engine->Submit(TestModel::Greedy(prompt, 200), collector.Sink()).value();
    std::this_thread::sleep_for(std::chrono::microseconds(rng() % 20000));
    model.engine->Cancel(goes);
    EXPECT_EQ(collector.Wait(goes).finish, FinishReason::kCancelled);
    EXPECT_EQ(collector.Wait(stays).tokens, want);
  }
  ExpectIdle(*model.engine);
}

TEST(StepsAhead, AStepThatFailsEndsItsOwnRequestsOnly) {
  TestModel model(Ahead());
  const std::vector<TokenId> prompt = model.Problem(SmallProblems()[1].first);
  const auto want = model.Ask(TestModel::Greedy(prompt, 40)).tokens;
  for (int at = 1; at < 12; ++at) {
    model.sampling->fail_step = at;
    const Collector::Answer failed = model.Ask(TestModel::Greedy(prompt, 40));
    EXPECT_EQ(failed.finish, FinishReason::kError) << at;
    EXPECT_EQ(failed.error.code(), StatusCode::kOutOfMemory);
    EXPECT_TRUE(std::equal(failed.tokens.begin(), failed.tokens.end(), want.begin())) << at;
    EXPECT_EQ(model.Ask(TestModel::Greedy(prompt, 40)).tokens, want) << at;
  }
  ExpectIdle(*model.engine);
}

TEST(StepsAhead, ShuttingDownInTheMiddleLosesNothingElse) {
  for (int round = 0; round < 5; ++round) {
    Collector collector;
    TestModel model(Ahead());
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(model.engine
                      ->Submit(TestModel::Greedy(model.Problem(SmallProblems()[i].first), 200),
                               collector.Sink())
                      .ok());
    }
    collector.WaitTokens(RequestId(1), static_cast<std::size_t>(round));
    model.engine.reset();
    for (int i = 1; i <= 3; ++i)
      EXPECT_EQ(collector.Wait(RequestId(i)).error.code(), StatusCode::kUnavailable);
  }
}

}  // namespace
}  // namespace pliant
