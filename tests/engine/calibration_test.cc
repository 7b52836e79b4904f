#include "engine/calibration.h"

#include <gtest/gtest.h>

#include <cmath>

namespace pliant {
namespace {

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
