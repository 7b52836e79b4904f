#include "engine/calibration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "support/faulty_backend.h"
#include "support/rounds.h"

namespace pliant {
namespace {

/// Keeps the code that is set.
class CodeCatcher final : public testing::BackendDecorator {
 public:
  using BackendDecorator::BackendDecorator;
  Status SetKvCode(const KvCode& set) override {
    code = set;
    return inner_.SetKvCode(set);
  }
  KvCode code;
};

/// The code of the shipped model, from a fresh load.
KvCode Calibrated(int threads, int max_rows) {
  auto model = Model::Open(std::string(PLIANT_TEST_DATA) + "/models/reckoner-q8_0.gguf").value();
  const auto tokenizer = Tokenizer::Create(model->ReadVocabulary().value()).value();
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = threads}).value();
  EXPECT_TRUE(model->Load(*backend, max_rows, 1, {}).ok());
  constexpr std::uint32_t kPages = 32 * 2 * kPlanes;
  EXPECT_TRUE(backend->AllocatePages(model->config().Kv(), kPages).ok());
  CodeCatcher catcher(*backend);
  EXPECT_TRUE(Calibrate(catcher, *model, *tokenizer, kPages, max_rows).ok());
  return catcher.code;
}

TEST(Calibration, IsBitForBitTheSameEachTimeAndForAnyNumberOfThreads) {
  const KvCode once = Calibrated(1, 512);
  ASSERT_FALSE(once.key.scale.empty());
  ASSERT_FALSE(once.value.scale.empty());
  for (const std::vector<float>& values : {once.key.scale, once.key.center, once.value.scale}) {
    EXPECT_NE(*std::min_element(values.begin(), values.end()),
              *std::max_element(values.begin(), values.end()));
  }
  if (!kSanitized) {  // each takes a minute under a sanitizer; what follows runs the same code
    EXPECT_TRUE(Calibrated(1, 512) == once);
    EXPECT_TRUE(Calibrated(2, 512) == once);
  }
  EXPECT_TRUE(Calibrated(3, 512) == once);
  EXPECT_TRUE(Calibrated(2, 96) == once) << "in other chunks";
}

/// Every channel between -1 and 1, queries and values alike.
ChannelStatistics Even(std::size_t channels) {
  return {std::vector<float>(channels, -1.0f), std::vector<float>(channels, 1.0f),
          std::vector<double>(channels, 1.0), std::vector<double>(channels, 8.0)};
}

TEST(Calibration, RopePairsShareTheLargerRange) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 2, .head_dim = 32};
  ChannelStatistics statistics = Even(64);
  statistics.key_max[3] = 9;         // head 0, pair (3, 19): -1 to 9
  statistics.key_min[32 + 17] = -7;  // head 1, pair (1, 17): -7 to 1
  const ChannelCode code = KeyCodeFor(geometry, statistics);
  EXPECT_EQ(code.scale[3], 1);
  EXPECT_EQ(code.scale[19], 1);
  EXPECT_NEAR(code.scale[4], std::sqrt(1.0 / 5), 1e-6);
  EXPECT_EQ(code.center[3], 4);
  EXPECT_EQ(code.center[19], 0);
  EXPECT_EQ(code.scale[32 + 1], 1);
  EXPECT_EQ(code.scale[32 + 17], 1);
  EXPECT_EQ(code.center[32 + 17], -3);
  EXPECT_NEAR(code.scale[32 + 4], std::sqrt(1.0 / 4), 1e-6);
}

TEST(Calibration, ChannelsThatQueriesUseMoreGetAFinerStep) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 1, .head_dim = 32};
  ChannelStatistics statistics = Even(32);
  statistics.query_energy[2] = statistics.query_energy[18] = 256;
  statistics.query_energy[5] = statistics.query_energy[21] = 0;  // bounded: 1e-4 of the mean
  const ChannelCode code = KeyCodeFor(geometry, statistics);
  EXPECT_NEAR(code.scale[2] / code.scale[4], 0.25, 1e-6);
  const double mean = (28 * 1.0 + 2 * 256) / 32;
  EXPECT_NEAR(code.scale[4] / code.scale[5], std::pow(1e-4 * mean, 1.0 / 4), 1e-6);
}

/// Mean square error of logits with keys read from one plane, where queries use some channels more.
double LogitNoise(const std::vector<float>& scale, bool mixed) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  double squares = 0;
  constexpr int kRows = 2000;
  for (int r = 0; r < kRows; ++r) {
    std::vector<float> key(32), query(32), read(32);
    double before = 0, after = 0;
    for (int c = 0; c < 32; ++c) {
      const int pair = c % 16;
      key[c] = normal(random) * std::exp2(-0.1f * static_cast<float>(pair));
      query[c] = normal(random) * std::exp2(0.5f * static_cast<float>(pair - 8));
      before += double{key[c]} * query[c];
      key[c] /= scale[c];
      query[c] *= scale[c];
    }
    if (mixed) {
      MixChannels(key, kKeyMix);
      MixChannels(query, kQueryMix);
    }
    const std::uint16_t row_scale = RowScale(key);
    std::vector<std::uint16_t> u(32);
    EncodeRow(key, row_scale, u);
    for (std::uint16_t& code : u) code = MidpointCode(code, 1);
    DecodeRow(u, row_scale, read);
    for (int c = 0; c < 32; ++c) after += double{read[c]} * query[c];
    squares += (after - before) * (after - before);
  }
  return squares / kRows;
}

TEST(Calibration, MixedKeysWithTheirScaleLoseLess) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 1, .head_dim = 32};
  ChannelStatistics statistics = Even(32);
  std::vector<float> range(32);
  for (int c = 0; c < 32; ++c) {
    const int pair = c % 16;
    range[c] = 2.5f * std::exp2(-0.1f * static_cast<float>(pair));
    statistics.key_max[c] = range[c];
    statistics.key_min[c] = -range[c];
    statistics.query_energy[c] = std::exp2(1.0 * (pair - 8));
  }
  const std::vector<float> scale = KeyCodeFor(geometry, statistics).scale;
  const double plain = LogitNoise(range, /*mixed=*/false), mixed = LogitNoise(scale, true);
  EXPECT_LT(mixed, 0.6 * plain);
  EXPECT_LT(mixed, 0.85 * LogitNoise(scale, false)) << "the scale counts on the mix";
}

TEST(Calibration, SilentOrBrokenChannelsGetOne) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 2, .head_dim = 32};
  ChannelStatistics statistics = Even(64);
  for (const int c : {0, 16}) statistics.key_min[c] = statistics.key_max[c] = 5;  // never moved
  statistics.key_max[5] = std::nanf("");
  statistics.key_max[6] = INFINITY;
  statistics.key_min[7] = INFINITY;  // never written
  statistics.key_max[7] = -INFINITY;
  statistics.key_min[23] = INFINITY;
  statistics.key_max[23] = -INFINITY;
  statistics.query_energy[32] = std::nan("");  // of the whole second head
  const ChannelCode code = KeyCodeFor(geometry, statistics);
  for (const float s : code.scale) EXPECT_TRUE(std::isfinite(s) && s > 0);
  for (const int c : {0, 16, 6, 7, 23, 40}) {
    EXPECT_EQ(code.scale[c], 1) << c;
    EXPECT_EQ(code.center[c], 0) << c;
  }
  for (const float c : code.center) EXPECT_TRUE(std::isfinite(c));
}

TEST(Calibration, ValuesAreScaledByTheirRootMeanSquare) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 2, .head_dim = 32};
  ChannelStatistics statistics = Even(64);
  statistics.value_energy[3] = 8 * 16;
  statistics.value_energy[5] = 0;  // silent, beside others that are not
  const ChannelCode code = ValueCodeFor(geometry, statistics);
  EXPECT_EQ(code.scale[3], 1);
  EXPECT_EQ(code.scale[4], 0.25f);
  EXPECT_EQ(code.scale[5], kLeastValueScale);
  EXPECT_EQ(code.scale[32], 1) << "heads are apart";
  for (const float c : code.center) EXPECT_EQ(c, 0);
}

TEST(Calibration, BrokenChannelsOfValuesGetOne) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 2, .head_dim = 32};
  ChannelStatistics statistics = Even(64);
  statistics.value_energy[2] = std::nan("");
  statistics.value_energy[3] = INFINITY;
  statistics.value_energy[4] = 1e300;
  std::fill_n(statistics.value_energy.begin() + 32, 32, 0.0);  // a silent head
  const ChannelCode code = ValueCodeFor(geometry, statistics);
  for (const float s : code.scale) EXPECT_TRUE(std::isfinite(s) && s >= kLeastValueScale && s <= 1);
  for (const int c : {2, 3, 4, 32, 63}) EXPECT_EQ(code.scale[c], 1) << c;
}

}  // namespace
}  // namespace pliant
