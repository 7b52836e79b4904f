// The sampling kernel against backend/sampling.h: the same token, unless the draw falls within
// rounding of a boundary of the distribution.
#include "backend/cuda/sampling/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"

namespace pliant {
namespace {

using cuda::DeviceArray;

class CudaSampling : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::DeviceAvailable()) GTEST_SKIP() << "no CUDA device";
  }
};

std::vector<std::int32_t> OnDevice(const std::vector<float>& logits, std::int64_t stride,
                                   int columns, const std::vector<RowSampling>& how,
                                   std::vector<LogitChange> changes = {},
                                   std::vector<RowLogprobs>* logprobs = nullptr) {
  auto data = DeviceArray<float>::Make(logits.size(), "logits").value();
  auto rows = DeviceArray<RowSampling>::Make(how.size(), "rows").value();
  auto tokens = DeviceArray<std::int32_t>::Make(how.size(), "tokens").value();
  if (changes.empty()) changes.push_back({});
  auto change_data = DeviceArray<LogitChange>::Make(changes.size(), "changes").value();
  cuda::Upload<LogitChange>(changes, change_data.data());
  cuda::Upload<float>(logits, data.data());
  cuda::Upload<RowSampling>(how, rows.data());
  std::vector<std::int32_t> out(how.size(), -77);
  cuda::Upload<std::int32_t>(out, tokens.data());
  // As the backend has it: written to the host's memory by the kernel.
  auto own = cuda::PinnedArray<RowLogprobs>::Make(how.size(), "logprobs").value();
  for (std::size_t i = 0; i < how.size(); ++i) own[i] = {.chosen = 1, .count = -77};
  cuda::LaunchSample(data.data(), stride, columns, static_cast<int>(how.size()), rows.data(),
                     change_data.data(), tokens.data(), own.data(), nullptr);
  PLIANT_CUDA_CHECK(cudaDeviceSynchronize());
  if (logprobs != nullptr) logprobs->assign(own.data(), own.data() + how.size());
  cuda::Download<std::int32_t>(tokens.data(), out);
  return out;
}

std::vector<float> RandomRow(std::mt19937& random, int n, float spread, bool coarse) {
  std::normal_distribution<float> normal(0.f, spread);
  std::vector<float> row(n);
  for (float& x : row) {
    x = normal(random);
    if (coarse) x = std::round(x * 2) / 2;  // many ties
    if (random() % 64 == 0) x = -std::numeric_limits<float>::infinity();
  }
  return row;
}

/// A draw moved by so little gives the device's token too: then the device is right within
/// rounding.
bool Near(const std::vector<float>& row, RowSampling how, std::int32_t token) {
  RowSampler sampler;
  for (const double nudge : {-2e-6, 2e-6}) {
    RowSampling moved = how;
    moved.uniform = std::clamp(how.uniform + nudge, 0.0, 1 - 0x1p-53);
    if (SampleLogits(row, moved, sampler) == token) return true;
  }
  for (const float nudge : {1 - 2e-6f, 1 + 2e-6f}) {  // top_p's own boundary
    RowSampling moved = how;
    moved.top_p = std::min(how.top_p * nudge, 0.9999999f);
    if (how.top_p < 1 && SampleLogits(row, moved, sampler) == token) return true;
  }
  return false;
}

void Compare(int columns, std::int64_t stride, float spread, bool coarse, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> logits;
  std::vector<std::vector<float>> rows;
  std::vector<RowSampling> how;
  for (const float temperature : {0.f, 0.3f, 1.f, 1.7f})
    for (const int top_k : {0, 1, 7, 50, 1 << 20})
      for (const float top_p : {1.f, 0.95f, 0.5f, 0.f})
        for (const float min_p : {0.f, 0.05f}) {
          rows.push_back(RandomRow(random, columns, spread, coarse));
          std::vector<float> padded = rows.back();
          padded.resize(stride, 1e9f);  // beyond the vocabulary: never taken
          logits.insert(logits.end(), padded.begin(), padded.end());
          how.push_back({.uniform = (random() >> 5) * 0x1p-27,
                         .temperature = temperature,
                         .top_p = top_p,
                         .min_p = min_p,
                         .top_k = top_k});
        }
  const auto tokens = OnDevice(logits, stride, columns, how);
  RowSampler sampler;
  int near = 0;
  for (std::size_t r = 0; r < how.size(); ++r) {
    const std::int32_t want = SampleLogits(rows[r], how[r], sampler);
    if (tokens[r] == want) continue;
    ++near;
    EXPECT_TRUE(how[r].temperature > 0 && Near(rows[r], how[r], tokens[r]))
        << "row " << r << ": " << tokens[r] << ", expected " << want << "; temperature "
        << how[r].temperature << " top_k " << how[r].top_k << " top_p " << how[r].top_p << " min_p "
        << how[r].min_p << " uniform " << how[r].uniform;
  }
  EXPECT_LE(near, 3) << "draws within rounding of a boundary are rare";
}

TEST_F(CudaSampling, MatchesTheOracle) {
  Compare(1000, 1003, 2.f, false, 1);
  Compare(128256, 128256, 2.f, false, 2);
  Compare(37, 40, 1.f, false, 3);
}
TEST_F(CudaSampling, MatchesTheOracleWithManyTies) { Compare(5000, 5001, 2.f, true, 4); }
TEST_F(CudaSampling, MatchesTheOracleOnFlatRows) { Compare(50000, 50000, 0.01f, false, 5); }

/// Greedy rows, whose token any wrong change would show, and drawn ones.
TEST_F(CudaSampling, ChangedRowsMatchTheOracle) {
  constexpr int kColumns = 5000, kRows = 40;
  std::mt19937 random(8);
  std::vector<float> logits;
  std::vector<std::vector<float>> rows;
  std::vector<RowSampling> how;
  std::vector<LogitChange> changes;
  for (int r = 0; r < kRows; ++r) {
    rows.push_back(RandomRow(random, kColumns, 2, false));
    logits.insert(logits.end(), rows.back().begin(), rows.back().end());
    std::vector<int> ids(kColumns);
    for (int i = 0; i < kColumns; ++i) ids[i] = i;
    std::shuffle(ids.begin(), ids.end(), random);
    ids.resize(r % 4 == 3 ? 0 : 1 + random() % 3000);
    // The largest logit changes in any case: else most changes would not show.
    const int top =
        static_cast<int>(std::max_element(rows[r].begin(), rows[r].end()) - rows[r].begin());
    if (!ids.empty() && std::find(ids.begin(), ids.end(), top) == ids.end()) ids.push_back(top);
    how.push_back({.uniform = (random() >> 5) * 0x1p-27,
                   .temperature = r % 2 == 0 ? 0.f : 0.8f,
                   .first_change = static_cast<std::int32_t>(changes.size()),
                   .changes = static_cast<std::int32_t>(ids.size() + (ids.empty() ? 0 : 2))});
    if (ids.empty()) continue;
    changes.push_back({.id = -1, .add = 100.f});  // neither is a token of the row
    changes.push_back({.id = kColumns, .add = 100.f});
    for (const int id : ids)
      changes.push_back({.id = id,
                         .penalty = 1.f + static_cast<float>(random() % 8) / 8,
                         .subtract = static_cast<float>(random() % 16) / 7,
                         .add = random() % 5 == 0 ? -std::numeric_limits<float>::infinity()
                                                  : static_cast<float>(random() % 9) / 3 - 1.3f});
  }
  const auto tokens = OnDevice(logits, kColumns, kColumns, how, changes);
  RowSampler sampler;
  int changed = 0;
  for (int r = 0; r < kRows; ++r) {
    const auto own = std::span(changes).subspan(how[r].first_change, how[r].changes);
    const std::int32_t want = SampleLogits(rows[r], how[r], sampler, own);
    changed += want != SampleLogits(rows[r], how[r], sampler);
    std::vector<float> after = rows[r];
    ChangeLogits(after, own);
    EXPECT_TRUE(tokens[r] == want || (how[r].temperature > 0 && Near(after, how[r], tokens[r])))
        << "row " << r << ": " << tokens[r] << ", expected " << want;
  }
  EXPECT_GT(changed, kRows / 4);
  // All tokens forbidden: none is invented.
  std::vector<LogitChange> all;
  for (int i = 0; i < kColumns; ++i)
    all.push_back({.id = i, .add = -std::numeric_limits<float>::infinity()});
  EXPECT_EQ(
      OnDevice(rows[0], kColumns, kColumns, {{.temperature = 1, .changes = kColumns}}, all)[0],
      kNoToken);
}

/// Greedy and drawn rows, changed and not, with ties, holes of -inf, rows shorter than what is
/// asked for, and rows whose best tokens all belong to one thread.
TEST_F(CudaSampling, LogprobsMatchTheOracle) {
  for (const int columns : {5, 1000, 3001, 128256}) {
    const int rows_count = columns > 100000 ? 6 : 24;
    std::mt19937 random(static_cast<unsigned>(columns));
    std::vector<float> logits;
    std::vector<std::vector<float>> rows;
    std::vector<RowSampling> how;
    std::vector<LogitChange> changes;
    for (int r = 0; r < rows_count; ++r) {
      rows.push_back(RandomRow(random, columns, r % 5 == 4 ? 0.01f : 2.f, r % 3 == 1));
      if (r % 6 == 5) {
        for (int i = 7; i < columns; i += 1024) rows[r][i] = 20.f - static_cast<float>(i % 4096);
      }
      rows[r][0] = 1.5f;  // never all -inf
      logits.insert(logits.end(), rows[r].begin(), rows[r].end());
      how.push_back({.uniform = (random() >> 5) * 0x1p-27,
                     .temperature = r % 2 == 0 ? 0.f : 0.9f,
                     .first_change = static_cast<std::int32_t>(changes.size()),
                     .logprobs = r % 7 == 6 ? -1 : std::min(r, kMostTopLogprobs)});
      if (r % 4 != 2) continue;
      for (int i = 0; i < columns; i += 1 + columns / 2000)
        changes.push_back(
            {.id = i, .penalty = 1.5f, .subtract = 0.25f, .add = i % 3 == 0 ? 9.f : 0.f});
      how.back().changes = static_cast<std::int32_t>(changes.size()) - how.back().first_change;
    }
    std::vector<RowLogprobs> got;
    const auto tokens = OnDevice(logits, columns, columns, how, changes, &got);
    for (int r = 0; r < rows_count; ++r) {
      SCOPED_TRACE(std::to_string(columns) + " columns, row " + std::to_string(r));
      if (how[r].logprobs < 0) {
        EXPECT_EQ(got[r].count, -77);
        continue;
      }
      ASSERT_GE(tokens[r], 0);
      const RowLogprobs want = LogprobsOf(rows[r], tokens[r], how[r].logprobs);
      EXPECT_NEAR(got[r].chosen, want.chosen, 2e-6f * (1 + std::abs(want.chosen)));
      ASSERT_EQ(got[r].count, want.count);
      for (int i = 0; i < want.count; ++i) {
        EXPECT_EQ(got[r].ids[i], want.ids[i]) << i;
        if (std::isinf(want.values[i]))
          EXPECT_EQ(got[r].values[i], want.values[i]) << i;
        else
          EXPECT_NEAR(got[r].values[i], want.values[i], 2e-6f * (1 + std::abs(want.values[i])))
              << i;
      }
    }
  }
}

TEST_F(CudaSampling, FaultyRowsGiveNoTokenAndHostRowsAreLeftAlone) {
  constexpr int kColumns = 3000;
  std::mt19937 random(6);
  std::vector<float> logits;
  std::vector<RowSampling> how(6, RowSampling{.uniform = 0.5, .temperature = 1});
  for (int r = 0; r < 6; ++r) {
    std::vector<float> row = RandomRow(random, kColumns, 1, false);
    if (r == 0) row[2999] = std::nanf("");
    if (r == 1) row[17] = std::numeric_limits<float>::infinity();
    if (r == 2) row.assign(kColumns, -std::numeric_limits<float>::infinity());
    if (r == 5) row.assign(kColumns, -std::numeric_limits<float>::infinity()), row[2047] = -5;
    logits.insert(logits.end(), row.begin(), row.end());
  }
  how[3].on_host = 1;
  how[0].temperature = 0;
  const auto tokens = OnDevice(logits, kColumns, kColumns, how);
  EXPECT_EQ(tokens[0], kNoToken);
  EXPECT_EQ(tokens[1], kNoToken);
  EXPECT_EQ(tokens[2], kNoToken);
  EXPECT_EQ(tokens[3], -77);
  EXPECT_GE(tokens[4], 0);
  EXPECT_EQ(tokens[5], 2047);
}

}  // namespace
}  // namespace pliant
