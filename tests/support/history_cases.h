// What every backend that keeps histories with a capacity is put through (history_lab.h).
#pragma once

#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "support/history_lab.h"
#include "support/rounds.h"

namespace pliant::testing {

inline constexpr LabShape kLabShapes[] = {{4, 2, 64, 2},  {9, 3, 64, 1}, {4, 1, 128, 1},
                                          {2, 2, 256, 1}, {8, 1, 64, 1}, {2, 1, 32, 2}};
/// Sizes of queries: logits of about 1, and of about 4, which want pages back.
inline constexpr float kSmall = 1.5f, kLarge = 6;

/// Blocks of a history are dropped; of some the planes leave the device, of some they stay.
inline void DropAndLeave(HistoryLab& lab, int s, bool into_new) {
  lab.Drop(s, into_new);
  if (!lab[s].want->options().returns) return;  // nothing is left of it
  const int block = lab[s].want->frontier() - 1;
  if (block % 3 == 1) lab.Leave(s, block, {1, 0});
  if (block % 3 == 2) lab.ReadFromHost(s, block);
}

/// Two sequences with histories and one without in each step.
inline void LeaveAndReturn(std::unique_ptr<Backend> backend, const LabShape& shape) {
  SCOPED_TRACE(::testing::Message() << shape.heads << " heads, dim " << shape.dim);
  const LabPlanes planes = shape.kv_heads == 2 ? LabPlanes{2, 2} : LabPlanes{4, 4};
  HistoryLab lab(std::move(backend), shape, {.return_weight = 0.2f}, planes);
  const int a = lab.Add(), b = lab.Add(), plain = lab.Add(false);
  ASSERT_TRUE(lab.backend()->RetainsHistory(shape.heads));
  lab.Step({100, 33, 40}, kSmall);
  lab.Step({1, 70, 1}, kSmall);
  lab.Step({110, 1, 1}, kSmall);  // 211, 104 and 42 tokens
  for (const int s : {a, b}) lab.Note(s);
  lab.Step({1, 1, 1}, kSmall);  // nothing is dropped yet
  for (int i = 0; i < 4; ++i) DropAndLeave(lab, a, i < 2);
  DropAndLeave(lab, b, true);
  DropAndLeave(lab, b, false);
  const int steps = Rounds(45, 12);
  for (int i = 0; i < steps; ++i) {
    lab.Step({1, i % 5 != 0, i % 4 == 0 ? 3 : 1}, i % 3 == 0 ? kLarge : kSmall);
    if (::testing::Test::HasFailure()) return;
    for (const int s : {a, b}) {
      if (lab[s].context % kBlockTokens != 0 || lab[s].FullBlocks() == lab[s].got->noted())
        continue;
      lab.Note(s);
      DropAndLeave(lab, s, s == b);
    }
  }
  EXPECT_GT(lab[a].got->returned_pages() + lab[b].got->returned_pages(), 3);
  EXPECT_LT(lab.undecided(), 0.05 * lab.rows());
  EXPECT_EQ(lab[a].got->dropped_tokens(), lab[a].want->dropped_tokens());
  EXPECT_EQ(lab[plain].context, 43 + steps + 2 * ((steps + 3) / 4));
}

/// A prompt's rows add to the scores, in whatever chunks they come; older blocks have lost planes.
inline void PromptInChunks(std::unique_ptr<Backend> backend, const LabShape& shape, int tokens) {
  SCOPED_TRACE(::testing::Message() << shape.heads << " heads, dim " << shape.dim);
  HistoryLab lab(std::move(backend), shape, {}, {}, 900, tokens);
  const int a = lab.Add(), b = lab.Add(), plain = lab.Add(false);
  const int rest = tokens - 210;
  const std::vector<int> chunks[] = {{1, 64, 0}, {38, 1, 7}, {1, 2, 1}, {170, 31, 50}};
  for (const auto& rows : chunks) {
    lab.Step(rows, kSmall);
    if (::testing::Test::HasFailure()) return;
  }
  // Some at 12 bits, some at 8 or 4; not all of a tile, so that kernels see them mixed.
  lab.Leave(a, 1, {3, 3});
  lab.Leave(a, 2, {2, 2});
  lab.Leave(a, 4, {4, 1});
  lab.Leave(b, 0, {1, 1});
  lab.Step({rest, 65, 1}, kLarge);
  lab.Step({1, 0, 5}, kSmall);
  if (::testing::Test::HasFailure()) return;
  ASSERT_EQ(lab[a].context, tokens + 1);
  EXPECT_EQ(lab[plain].context, 64);
  for (const int s : {a, b}) {
    for (int unit = 0; unit < lab[s].want->units(); ++unit) {
      const auto read = HistoryLab::Read(*lab[s].got, unit, lab[s].context);
      // What a row looks at sums to one.
      EXPECT_NEAR(std::accumulate(read.score.begin(), read.score.end(), 0.0), lab[s].context, 0.1);
    }
  }
}

/// So long that a kernel has several parts to work, of kept blocks and of whole ones.
inline void ManyBlocks(std::unique_ptr<Backend> backend, int kept = 20) {
  HistoryLab lab(std::move(backend), {4, 2, 64, 1}, {.return_weight = 0.2f}, {1, 1},
                 1200 + 10 * kept, 800);
  const int a = lab.Add();
  for (int tokens = 0; tokens < 1800 + 30 * kept; tokens += 800) lab.Step({800}, kSmall, false);
  lab.Note(a);
  for (int i = 0; i < 16 + kept; ++i) DropAndLeave(lab, a, i < kept);
  for (int i = 0; i < 6 && !::testing::Test::HasFailure(); ++i) lab.Step({1}, kLarge);
  EXPECT_GT(lab[a].got->returned_pages(), 0);
}

/// What cannot be read is lost, and the row goes on.
inline void LostPages(std::unique_ptr<Backend> backend) {
  HistoryLab lab(std::move(backend), {4, 2, 64, 1}, {.return_weight = 0.1f}, {4, 4});
  const int a = lab.Add();
  lab.Step({200}, kSmall);
  lab.Note(a);
  for (int i = 0; i < 5; ++i) lab.Drop(a, i < 2);
  for (int block = 0; block < 5; ++block) lab.Leave(a, block, {1, 0}, block == 2);
  const auto kept = [&] {
    std::vector<std::vector<std::int32_t>> tokens;
    for (int unit = 0; unit < lab[a].want->units(); ++unit)
      tokens.push_back(HistoryLab::Read(*lab[a].got, unit, 1).kept_token);
    return tokens;
  };
  const auto before = kept();
  for (int i = 0; i < 12 && !::testing::Test::HasFailure(); ++i) lab.Step({1}, kLarge);
  EXPECT_GT(lab[a].got->lost_pages(), 0);
  const auto after = kept();
  for (std::size_t unit = 0; unit < after.size(); ++unit) {
    for (const std::int32_t token : after[unit])
      EXPECT_TRUE(token / kBlockTokens == 2 || std::ranges::count(before[unit], token) == 1)
          << "back from nowhere: " << token;
  }
}

/// Kept blocks are made anew in other pages, and go on as before.
inline void Refilled(std::unique_ptr<Backend> backend, LabPlanes planes) {
  HistoryLab lab(std::move(backend), {4, 2, 64, 2}, {.return_weight = 0.2f}, planes);
  const int a = lab.Add();
  lab.Step({230}, kSmall);
  lab.Note(a);
  lab.Refill(a);  // there is nothing yet
  for (int i = 0; i < 5; ++i) DropAndLeave(lab, a, i < 2);
  for (int i = 0; i < 9 && !::testing::Test::HasFailure(); ++i) {
    lab.Step({1}, i % 2 == 0 ? kLarge : kSmall);
    if (i % 4 == 3) lab.Refill(a);
  }
  EXPECT_GT(lab[a].got->returned_pages(), 0);
}

/// Weights of both signs for every channel, none too large for their sum to tell something.
inline std::shared_ptr<const GrowthWeights> SomeGrowthWeights(const LabShape& shape) {
  GrowthWeights weights{.layers = shape.layers, .heads = shape.heads, .head_dim = shape.dim};
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 0.3f);
  for (std::vector<float>* part : {&weights.short_mean, &weights.long_mean}) {
    part->resize(static_cast<std::size_t>(shape.layers) * shape.heads * shape.dim);
    for (float& value : *part) value = normal(random);
  }
  weights.bias = 0.25f;
  return std::make_shared<const GrowthWeights>(std::move(weights));
}

/// Steps of which a device may make graphs: of histories alone and with others beside them, while
/// tables and kept blocks grow.
inline void SampledSteps(std::unique_ptr<Backend> backend, bool returns = true) {
  RetentionOptions options{.returns = returns, .return_weight = 0.2f, .query_means = !returns};
  if (!returns) options.growth_weights = SomeGrowthWeights({4, 2, 64, 2});
  HistoryLab lab(std::move(backend), {4, 2, 64, 2}, options, {2, 2});
  const int a = lab.Add(), b = lab.Add();
  lab.Add(false);
  lab.Step({200, 150, 40}, kSmall);
  lab.Note(a);
  lab.Note(b);
  lab.Sample();
  for (int i = 0; i < 4; ++i) DropAndLeave(lab, a, i < 2);
  for (int i = 0; i < 40 && !::testing::Test::HasFailure(); ++i) {
    lab.Step({1, 1, i % 10 < 5}, kLarge);
    if (i == 12 || i == 16) DropAndLeave(lab, b, true);
    if (i % 8 == 7 && lab[a].got->frontier() < lab[a].got->noted()) DropAndLeave(lab, a, i == 7);
    if (i == 20 && returns) lab.Refill(a);
    for (const int s : {a, b}) {
      if (lab[s].FullBlocks() > lab[s].got->noted()) lab.Note(s);
    }
  }
  if (returns) {
    EXPECT_GT(lab[a].got->returned_pages(), 3);
  } else {
    EXPECT_GT(lab.query_signals(), 3);
    EXPECT_GT(lab[a].got->QuerySignal(), 0);
  }
  EXPECT_GT(lab.compared_tokens(), 20);
}

/// What is dropped is gone: likeness is told exactly, and the queries' means are kept. Tables grow
/// before and after the first drop, and what they hold of whole tokens comes around.
inline void DroppedForGood(std::unique_ptr<Backend> backend, const LabShape& shape,
                           float redundancy = 16, bool squared = true, bool learned = false) {
  SCOPED_TRACE(::testing::Message() << shape.heads << " heads, dim " << shape.dim);
  RetentionOptions options{
      .returns = false, .redundancy = redundancy, .squared = squared, .query_means = true};
  if (learned) options.growth_weights = SomeGrowthWeights(shape);
  HistoryLab lab(std::move(backend), shape, options, {2, 2});
  const int a = lab.Add(), b = lab.Add(), plain = lab.Add(false);
  lab.Step({100, 33, 40}, kSmall);
  lab.Step({1, 36, 1}, kSmall);
  lab.Step({110, 1, 0}, kSmall);  // 211 and 70 tokens
  for (const int s : {a, b}) lab.Note(s);
  for (int i = 0; i < 4; ++i) lab.Drop(a, i < 2);
  lab.Drop(b, true);
  for (int i = 0; i < 120 && !::testing::Test::HasFailure(); ++i) {
    lab.Step({1, 1, i % 9 == 0}, i % 3 == 0 ? kLarge : kSmall);
    for (const int s : {a, b}) {
      if (lab[s].FullBlocks() == lab[s].got->noted()) continue;
      lab.Note(s);
      if (s == a || i > 110) lab.Drop(s, s == b);  // b grows to six whole blocks first
    }
  }
  if (::testing::Test::HasFailure()) return;
  EXPECT_EQ(lab[a].context, 331);
  EXPECT_EQ(lab[a].got->returned_pages() + lab[b].got->returned_pages(), 0);
  EXPECT_GT(lab.query_signals(), 12);
  EXPECT_GT(lab[a].got->QuerySignal(), 0);
  EXPECT_EQ(lab[a].got->kept_blocks(), 2);
  EXPECT_EQ(lab[plain].context, 41 + 14);
}

/// Whole blocks at 12 and at 8 bits, their originals in host memory: what is noted, dropped and
/// brought back is exact.
inline void MixedPrecision(std::unique_ptr<Backend> backend, const LabShape& shape) {
  HistoryLab lab(std::move(backend), shape, {.return_weight = 0.2f}, {4, 4});
  const int a = lab.Add(), b = lab.Add();
  lab.Step({300, 90}, kSmall);
  lab.Leave(a, 1, {1, 1});  // before its keys are noted: two planes of K are read
  lab.Leave(a, 3, {2, 2});
  lab.Leave(b, 0, {3, 3});
  lab.Note(a);
  lab.Note(b);
  for (const int block : {2, 5, 7}) lab.Leave(a, block, {3, 3});
  lab.Leave(a, 6, {2, 2});
  for (int i = 0; i < 5; ++i) {
    lab.Drop(a, i < 2);
    if (i != 2) lab.Leave(a, i, {1, 0});
  }
  lab.Drop(b, true);
  for (int i = 0; i < 20 && !::testing::Test::HasFailure(); ++i)
    lab.Step({1, 1}, i % 2 == 0 ? kLarge : kSmall);
  EXPECT_GT(lab[a].got->returned_pages(), 0);
  EXPECT_LT(lab.undecided(), 0.1 * lab.rows());
}

}  // namespace pliant::testing
