// Requests whose history has a capacity, with a real model: who asked for it and who did not, that
// copies, company and repetition change no token, and that nothing is left behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "engine/support/test_model.h"
#include "model/growth_weights.h"
#include "support/rounds.h"

namespace pliant {
namespace {

TestEngineOptions PliantOptions() {
  TestEngineOptions options;
  options.policy = KvPolicy::kPliant;
  options.store = {.kind = StoreSpec::Kind::kRam, .path = "", .bytes = 64u << 20};
  options.prefix_cache = false;
  return options;
}

GenerateRequest WithCapacity(const TestModel& model, std::size_t problem, Capacity capacity,
                             std::int64_t tokens = Rounds(160, 40)) {
  GenerateRequest request =
      TestModel::Greedy(model.Problem(SmallProblems().at(problem).first), tokens);
  request.kv.capacity = capacity;
  return request;
}

constexpr Capacity kFull{Capacity::Kind::kFull, 0};
constexpr Capacity kSmall{Capacity::Kind::kFixed, 192};

/// Copies of a request that is gone may take a moment more.
void ExpectAtRest(TestModel& model) {
  EngineStats stats = StatsNow(*model.engine);
  for (int i = 0; i < 1000 && stats.pages_free != stats.pages_total; ++i)
    stats = StatsNow(*model.engine);
  EXPECT_EQ(stats.running + stats.waiting + stats.with_capacity + stats.blocks_dropped, 0);
  EXPECT_EQ(stats.pages_free, stats.pages_total);
}

TEST(EngineCapacity, WithoutOneNothingChanges) {
  TestModel full;  // policy full, no store
  TestModel pliant(PliantOptions());
  const Collector::Answer expected = full.Ask(WithCapacity(full, 0, {}));
  EXPECT_EQ(pliant.Ask(WithCapacity(pliant, 0, {})).tokens, expected.tokens);
  EXPECT_EQ(pliant.Ask(WithCapacity(pliant, 0, kFull)).tokens, expected.tokens);
  // So large that nothing leaves: the history is watched, and that alone changes no bit either.
  const Collector::Answer large =
      pliant.Ask(WithCapacity(pliant, 0, {Capacity::Kind::kFixed, 100'000}));
  EXPECT_EQ(large.tokens, expected.tokens);
  EXPECT_EQ(large.usage.dropped, 0);
  EXPECT_EQ(large.usage.held_pages, large.usage.whole_pages);
  ExpectAtRest(pliant);
}

TEST(EngineCapacity, WhatLeavesComesBackAndTokensDoNotDependOnCompany) {
  TestModel model(PliantOptions());
  const Collector::Answer alone = model.Ask(WithCapacity(model, 0, kSmall));
  ASSERT_TRUE(alone.error.ok()) << alone.error.message();
  EXPECT_GT(alone.usage.dropped, 0);
  EXPECT_GT(alone.usage.returned, 0);
  EXPECT_LT(alone.usage.held_pages, alone.usage.whole_pages);
  EXPECT_EQ(model.Ask(WithCapacity(model, 0, kSmall)).tokens, alone.tokens);
  std::vector<GenerateRequest> requests;
  for (std::size_t i = 0; i < 6; ++i)
    requests.push_back(WithCapacity(model, i, i % 2 == 0 ? kSmall : kFull));
  const std::vector<Collector::Answer> answers = model.AskAll(std::move(requests));
  EXPECT_EQ(answers[0].tokens, alone.tokens);
  for (std::size_t i = 0; i < answers.size(); ++i) {
    EXPECT_TRUE(answers[i].error.ok());
    EXPECT_EQ(answers[i].usage.dropped > 0, i % 2 == 0) << i;
  }
  ExpectAtRest(model);
}

TEST(EngineCapacity, PoliciesThatDropForGood) {
  for (const KvPolicy policy : {KvPolicy::kBudget, KvPolicy::kGrowPage}) {
    SCOPED_TRACE(KvPolicyName(policy));
    TestEngineOptions options;
    options.policy = policy;
    options.prefix_cache = false;
    options.history.start_blocks = 6;
    options.history.retention.returns = false;
    options.history.growth = GrowthSignal::kDivergence;
    options.history.grow_above = 0.025f;
    options.history.default_capacity =
        policy == KvPolicy::kBudget ? kSmall : Capacity{Capacity::Kind::kGrow, 0};
    TestModel model(options);
    const Collector::Answer answer = model.Ask(WithCapacity(model, 0, {}));
    ASSERT_TRUE(answer.error.ok()) << answer.error.message();
    EXPECT_GT(answer.usage.dropped, 0);
    EXPECT_EQ(answer.usage.returned, 0);
    EXPECT_LT(answer.usage.held_pages, answer.usage.whole_pages);
    const EngineStats stats = StatsNow(*model.engine);
    EXPECT_EQ(stats.drops, answer.usage.dropped);
    ExpectAtRest(model);
  }
}

TEST(EngineCapacity, GrowsAsWeightsFittedToTheModelSay) {
  TestEngineOptions options;
  options.policy = KvPolicy::kGrowPage;
  options.prefix_cache = false;
  const auto weights = OpenGrowthWeights(PLIANT_TEST_DATA "/models/reckoner-growth.safetensors",
                                         Model::Open(options.model_path).value()->config());
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  options.history = GrowingBy(DroppingForGood({}), *weights);
  options.history.default_capacity = Capacity{Capacity::Kind::kGrow, 0};
  options.history.start_from_prompt = false;
  options.history.start_blocks = 6;
  for (const float above : {1e-6f, 1 - 1e-6f}) {
    SCOPED_TRACE(above);
    options.history.grow_above = above;
    TestModel model(options);
    const Collector::Answer answer = model.Ask(WithCapacity(model, 0, {}, 160));
    ASSERT_TRUE(answer.error.ok()) << answer.error.message();
    const EngineStats stats = StatsNow(*model.engine);
    // Chances, some above a half and some below.
    EXPECT_GT(std::accumulate(stats.signals.begin() + 8, stats.signals.end(), 0L), 0);
    EXPECT_GT(std::accumulate(stats.signals.begin(), stats.signals.begin() + 8, 0L), 0);
    EXPECT_EQ(stats.capacity_growths > 0, above < 0.5f);
    ExpectAtRest(model);
  }
}

TEST(EngineCapacity, ReportedWhileItLasts) {
  TestModel model(PliantOptions());
  Collector collector;
  const Result<RequestId> id =
      model.engine->Submit(WithCapacity(model, 0, kSmall, 600), collector.Sink());
  ASSERT_TRUE(id.ok());
  collector.WaitTokens(*id, Rounds(120, 20));
  const Result<std::string> report = model.engine->KvReportJson();
  ASSERT_TRUE(report.ok());
  EXPECT_NE(report->find("\"capacity_blocks\":6"), std::string::npos) << *report;
  EXPECT_NE(report->find("\"returned_pages\""), std::string::npos);
  model.engine->Cancel(*id);
  collector.Wait(*id);
  ExpectAtRest(model);
}

}  // namespace
}  // namespace pliant
