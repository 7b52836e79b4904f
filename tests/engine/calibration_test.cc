#include "engine/calibration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/faulty_backend.h"

namespace pliant {
namespace {

/// Keeps the scales that are set.
class ScaleCatcher final : public testing::BackendDecorator {
 public:
  using BackendDecorator::BackendDecorator;
  Status SetChannelScales(std::span<const float> channel) override {
    scales.assign(channel.begin(), channel.end());
    return inner_.SetChannelScales(channel);
  }
  std::vector<float> scales;
};

/// The scales of the shipped model, from a fresh load.
std::vector<float> CalibratedScales(int threads, int max_rows) {
  auto model = Model::Open(std::string(PLIANT_TEST_DATA) + "/models/reckoner-q8_0.gguf").value();
  const auto tokenizer = Tokenizer::Create(model->ReadVocabulary().value()).value();
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = threads}).value();
  EXPECT_TRUE(model->Load(*backend, max_rows, 1, {}).ok());
  constexpr std::uint32_t kPages = 32 * 2 * kPlanes;
  EXPECT_TRUE(backend->AllocatePages(model->config().Kv(), kPages).ok());
  ScaleCatcher catcher(*backend);
  EXPECT_TRUE(Calibrate(catcher, *model, *tokenizer, kPages, max_rows).ok());
  return catcher.scales;
}

TEST(Calibration, IsBitForBitTheSameEachTimeAndForAnyNumberOfThreads) {
  const std::vector<float> once = CalibratedScales(1, 512);
  ASSERT_FALSE(once.empty());
  EXPECT_NE(*std::min_element(once.begin(), once.end()),
            *std::max_element(once.begin(), once.end()));
  EXPECT_EQ(CalibratedScales(1, 512), once);
  EXPECT_EQ(CalibratedScales(2, 512), once);
  EXPECT_EQ(CalibratedScales(3, 512), once);
  EXPECT_EQ(CalibratedScales(2, 96), once) << "in other chunks";
}

TEST(Calibration, RopePairsShareTheLargerMaximum) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 2, .head_dim = 32};
  std::vector<float> maxima(64, 1.0f);
  maxima[3] = 5;        // head 0, pair (3, 19)
  maxima[32 + 17] = 7;  // head 1, pair (1, 17)
  const std::vector<float> scales = ChannelScales(geometry, maxima);
  EXPECT_EQ(scales[3], 5);
  EXPECT_EQ(scales[19], 5);
  EXPECT_EQ(scales[32 + 1], 7);
  EXPECT_EQ(scales[32 + 17], 7);
  EXPECT_EQ(scales[4], 1);
}

TEST(Calibration, SilentOrBrokenChannelsGetOne) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 1, .head_dim = 32};
  std::vector<float> maxima(32, 2.0f);
  maxima[0] = maxima[16] = 0;
  maxima[5] = std::nanf("");
  maxima[6] = INFINITY;
  const std::vector<float> scales = ChannelScales(geometry, maxima);
  for (const float s : scales) EXPECT_TRUE(std::isfinite(s) && s > 0);
  EXPECT_EQ(scales[0], 1);
  EXPECT_EQ(scales[16], 1);
  EXPECT_EQ(scales[6], 1);
}

}  // namespace
}  // namespace pliant
