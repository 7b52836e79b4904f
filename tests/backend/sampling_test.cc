// The scalar oracle of sampling, against a plain statement of its rules, and the reference
// backend's op.
#include "backend/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backend/backend.h"

namespace pliant {
namespace {

std::vector<float> RandomLogits(std::mt19937& random, int n) {
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(n);
  for (float& x : logits) x = std::round(normal(random) * 8) / 8;  // some ties
  return logits;
}

/// The rules word by word, in double, with a full sort.
std::int32_t Plainly(const std::vector<float>& logits, const RowSampling& how) {
  struct One {
    double weight;
    std::int32_t id;
  };
  const float peak = *std::max_element(logits.begin(), logits.end());
  std::vector<One> all;
  for (std::size_t i = 0; i < logits.size(); ++i)
    all.push_back(
        {std::exp((double{logits[i]} - peak) / how.temperature), static_cast<std::int32_t>(i)});
  std::sort(all.begin(), all.end(), [](const One& a, const One& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
  });
  std::erase_if(all, [&](const One& one) { return one.weight < how.min_p; });
  if (how.top_k > 0 && static_cast<std::size_t>(how.top_k) < all.size()) all.resize(how.top_k);
  const auto total = [&] {
    double sum = 0;
    for (const One& one : all) sum += one.weight;
    return sum;
  };
  if (how.top_p < 1) {
    const double needed = how.top_p * total();
    double kept = 0;
    std::size_t count = 0;
    while (count < all.size() && (count == 0 || kept < needed)) kept += all[count++].weight;
    all.resize(count);
  }
  std::sort(all.begin(), all.end(), [](const One& a, const One& b) { return a.id < b.id; });
  const double goal = how.uniform * total();
  double passed = 0;
  for (const One& one : all) {
    passed += one.weight;
    if (passed > goal) return one.id;
  }
  return all.back().id;
}

TEST(Sampling, ChangesAreMadeInOrderAndToTokensOfTheRowAlone) {
  std::vector<float> logits = {4, -4, 1, 2, 3};
  const float never = -std::numeric_limits<float>::infinity();
  const std::vector<LogitChange> changes = {{.id = 0, .penalty = 2, .subtract = 0.5f, .add = 0.25f},
                                            {.id = 1, .penalty = 2, .subtract = 0.5f},
                                            {.id = 2, .add = 9},
                                            {.id = 3, .add = never},
                                            {.id = -1, .add = 99},
                                            {.id = 5, .add = 99}};
  ChangeLogits(logits, changes);
  EXPECT_EQ(logits, (std::vector<float>{1.75f, -8.5f, 10, never, 3}));
}

TEST(Sampling, ChangedRowsTakeWhatTheChangesLeave) {
  RowSampler sampler;
  const float never = -std::numeric_limits<float>::infinity();
  const std::vector<LogitChange> best = {{.id = 1, .add = never}};
  EXPECT_EQ(SampleLogits(std::vector<float>{1, 5, 3}, RowSampling{}, sampler, best), 2);
  const std::vector<LogitChange> all = {{.id = 0, .add = never}, {.id = 1, .add = never}};
  EXPECT_EQ(SampleLogits(std::vector<float>{1, 5}, RowSampling{}, sampler, all), kNoToken);
  // A faulty logit is a fault even where it is forbidden.
  EXPECT_EQ(SampleLogits(std::vector<float>{1, std::nanf(""), 3}, RowSampling{}, sampler, best),
            kNoToken);
}

TEST(Sampling, FollowsItsRules) {
  std::mt19937 random(7);
  RowSampler sampler;
  int different = 0;
  for (int i = 0; i < 400; ++i) {
    const std::vector<float> logits = RandomLogits(random, 1 + static_cast<int>(random() % 700));
    const RowSampling how{
        .uniform = (random() >> 5) * 0x1p-27,
        .temperature = 0.25f + static_cast<float>(random() % 8) / 4,
        .top_p = i % 3 == 0 ? 1.f : 0.05f + static_cast<float>(random() % 90) / 100,
        .min_p = i % 4 == 0 ? 0.03f : 0.f,
        .top_k = i % 2 == 0 ? 0 : 1 + static_cast<std::int32_t>(random() % 60)};
    different += SampleLogits(logits, how, sampler) != Plainly(logits, how);
  }
  EXPECT_LE(different, 2);  // floats against doubles, at a boundary
}

TEST(Sampling, LogprobsAreOfTheRowAsTheModelGaveIt) {
  const float never = -std::numeric_limits<float>::infinity();
  const std::vector<float> logits = {1, 3, 0, 2, never, 2};
  const double sum = std::exp(1.0) + std::exp(3.0) + 1 + 2 * std::exp(2.0);
  RowSampler sampler;
  const std::vector<LogitChange> changes = {{.id = 2, .add = 100}, {.id = 1, .add = never}};
  RowLogprobs logprobs;
  logprobs.count = -7;
  EXPECT_EQ(SampleLogits(logits, {}, sampler, changes, &logprobs), 2);
  EXPECT_EQ(logprobs.count, -7);  // not asked for
  EXPECT_EQ(SampleLogits(logits, {.logprobs = 3}, sampler, changes, &logprobs), 2);
  EXPECT_NEAR(logprobs.chosen, -std::log(sum), 1e-6);
  ASSERT_EQ(logprobs.count, 3);
  const int ids[] = {1, 3, 5};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(logprobs.ids[i], ids[i]);
    EXPECT_NEAR(logprobs.values[i], (i == 0 ? 3 : 2) - std::log(sum), 1e-6);
  }
  SampleLogits(logits, {.logprobs = kMostTopLogprobs}, sampler, {}, &logprobs);
  ASSERT_EQ(logprobs.count, 6);
  EXPECT_EQ(logprobs.ids[5], 4);
  EXPECT_EQ(logprobs.values[5], never);
}

TEST(Sampling, GreedyTakesTheLowestIdOfTheLargest) {
  RowSampler sampler;
  EXPECT_EQ(SampleLogits(std::vector<float>{1, 3, 3, 2}, RowSampling{}, sampler), 1);
}

TEST(Sampling, RowsThatAreNotFiniteGiveNoToken) {
  RowSampler sampler;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float temperature : {0.f, 1.f}) {
    const RowSampling how{.temperature = temperature};
    EXPECT_EQ(SampleLogits(std::vector<float>{1, std::nanf(""), 3}, how, sampler), kNoToken);
    EXPECT_EQ(SampleLogits(std::vector<float>{1, infinity, 3}, how, sampler), kNoToken);
    EXPECT_EQ(SampleLogits(std::vector<float>{-infinity, -infinity}, how, sampler), kNoToken);
    EXPECT_EQ(SampleLogits(std::vector<float>{-infinity, -2}, how, sampler), 1);
  }
}

TEST(Sampling, TheReferenceBackendTakesTokensAndKeepsTheRowsOfTheHost) {
  // Embedding rows are unit vectors and so is the output matrix: token t's logits peak at t.
  constexpr int kWords = 8;
  std::vector<float> identity(kWords * kWords, 0.f);
  for (int i = 0; i < kWords; ++i) identity[static_cast<std::size_t>(i) * kWords + i] = 1.f;
  auto backend = MakeReferenceBackend();
  HostMatrix matrix;
  matrix.rows = matrix.cols = kWords;
  matrix.data = std::as_bytes(std::span(identity));
  const MatrixId table = *backend->AddMatrix({&matrix, 1});
  const VectorId ones = *backend->AddVector(std::vector<float>(kWords, 1.f));
  const TensorId x = *backend->AddTensor(3, kWords);
  ASSERT_TRUE(backend->AllocatePages({.layers = 1, .kv_heads = 1, .head_dim = 32}, 8).ok());
  ASSERT_TRUE(backend->SamplesTokens());
  const std::vector<std::int32_t> tokens = {5, 2, 7}, positions = {0, 1, 2}, logit_rows = {0, 1, 2};
  BlockView view;
  for (int p = 0; p < kPlanes; ++p) view.k[p] = PageId(p), view.v[p] = PageId(kPlanes + p);
  const SequenceSlice slice{0, 3, 0, 0, 1};
  const std::vector<RowSampling> sampling = {{}, {.on_host = 1}, {}};
  StepBatch batch{tokens, positions, {&slice, 1}, {&view, 1}, logit_rows, sampling, 7};
  ASSERT_TRUE(backend->BeginStep(batch).ok());
  backend->Embed(table, x);
  backend->Logits(x, ones, 0.f, table);
  ASSERT_TRUE(backend->EndStep().ok());
  ASSERT_EQ(backend->SampledTokens().size(), 3u);
  EXPECT_EQ(backend->SampledTokens()[0], 5);
  EXPECT_EQ(backend->SampledTokens()[2],
            0);  // 7 is beyond the tokens that may be taken; all others are equal
  ASSERT_EQ(backend->LogitRows().size(), static_cast<std::size_t>(kWords));
  EXPECT_GT(backend->LogitRows()[2], 1.f);
  // The third row's changes: token 3 is worth more.
  const std::vector<LogitChange> changes = {{.id = 5, .add = -99}, {.id = 3, .add = 1}};
  const std::vector<RowSampling> changed = {
      {.logprobs = 0}, {}, {.first_change = 1, .changes = 1, .logprobs = 2}};
  batch.sampling = changed;
  batch.changes = changes;
  ASSERT_TRUE(backend->BeginStep(batch).ok());
  backend->Embed(table, x);
  backend->Logits(x, ones, 0.f, table);
  ASSERT_TRUE(backend->EndStep().ok());
  EXPECT_EQ(backend->SampledTokens()[0], 5);
  EXPECT_EQ(backend->SampledTokens()[2], 3);
  const std::span<const RowLogprobs> logprobs = backend->SampledLogprobs();
  ASSERT_EQ(logprobs.size(), 3u);
  EXPECT_EQ(logprobs[0].count, 0);
  // Embedded rows are normed to a length of sqrt(kWords): the token itself against six others.
  const double peak = std::sqrt(double{kWords});
  EXPECT_NEAR(logprobs[0].chosen, peak - std::log(std::exp(peak) + 6), 1e-6);
  EXPECT_NEAR(logprobs[2].chosen, -std::log(7.0), 1e-6);  // its own token is beyond those counted
  EXPECT_EQ(logprobs[2].count, 2);
  EXPECT_EQ(logprobs[2].ids[0], 0);
  EXPECT_EQ(logprobs[2].ids[1], 1);
  for (const RowSampling& beyond : std::vector<RowSampling>{{.first_change = 2, .changes = 1},
                                                            {.first_change = -1, .changes = 1},
                                                            {.first_change = 1, .changes = -1},
                                                            {.first_change = 1, .changes = 2}}) {
    const std::vector<RowSampling> rows = {{}, beyond, {}};
    batch.sampling = rows;
    EXPECT_EQ(backend->BeginStep(batch).code(), StatusCode::kInvalidArgument);
  }
  for (const std::int32_t beyond : {-2, kMostTopLogprobs + 1}) {
    const std::vector<RowSampling> rows = {{}, {.logprobs = beyond}, {}};
    batch.sampling = rows;
    EXPECT_EQ(backend->BeginStep(batch).code(), StatusCode::kInvalidArgument);
  }
  batch.sampling = changed;
  batch.sampled_columns = 0;
  EXPECT_EQ(backend->BeginStep(batch).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace pliant
