// Row-wise ops of the CPU backend against plain loops in double.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backend/cpu/ops.h"

namespace pliant {
namespace {

std::vector<CpuLevel> MachineLevels() {
  std::vector<CpuLevel> levels;
  for (const CpuLevel level : {CpuLevel::kPlain, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (level <= MachineLevel()) levels.push_back(level);
  }
  return levels;
}

TEST(CpuOps, RmsNormMatchesTheDefinition) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const CpuLevel level : MachineLevels()) {
    for (const int cols : {1, 7, 16, 100, 576, 1001}) {
      std::vector<float> x(cols), weight(cols), out(cols);
      for (float& v : x) v = 3 * normal(random);
      for (float& v : weight) v = normal(random);
      double squares = 0;
      for (const float v : x) squares += double{v} * v;
      const double scale = 1 / std::sqrt(squares / cols + 1e-5);
      ChooseCpuOps(level).rms_norm(x.data(), weight.data(), 1e-5f, cols, out.data());
      std::vector<float> in_place = x;
      ChooseCpuOps(level).rms_norm(in_place.data(), weight.data(), 1e-5f, cols, in_place.data());
      for (int i = 0; i < cols; ++i) {
        const double want = x[i] * scale * weight[i];
        ASSERT_NEAR(out[i], want, 1e-6 * (1 + std::abs(want))) << CpuLevelName(level) << cols;
        ASSERT_EQ(in_place[i], out[i]);
      }
    }
  }
}

TEST(CpuOps, SiluMulMatchesTheDefinitionOverTheWholeRange) {
  for (const CpuLevel level : MachineLevels()) {
    constexpr int kCols = 40003;
    std::vector<float> gate_up(2 * kCols), out(kCols);
    for (int i = 0; i < kCols; ++i) {
      gate_up[i] = -200.0f + 0.01f * static_cast<float>(i);
      gate_up[kCols + i] = 1.5f;
    }
    ChooseCpuOps(level).silu_mul(gate_up.data(), gate_up.data() + kCols, kCols, out.data());
    for (int i = 0; i < kCols; ++i) {
      const double g = gate_up[i];
      const double want = g / (1 + std::exp(-g)) * 1.5;
      ASSERT_NEAR(out[i], want, 1e-6 * std::abs(want) + 1e-30) << CpuLevelName(level) << " " << g;
    }
  }
}

TEST(CpuOps, NonFiniteStaysNonFinite) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (const CpuLevel level : MachineLevels()) {
    std::vector<float> gate_up(64, 1.0f), out(32);
    gate_up[0] = nan;
    gate_up[1] = inf;
    gate_up[32 + 2] = nan;
    gate_up[31] = nan;
    ChooseCpuOps(level).silu_mul(gate_up.data(), gate_up.data() + 32, 32, out.data());
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_FALSE(std::isfinite(out[1]));
    EXPECT_TRUE(std::isnan(out[2]));
    EXPECT_TRUE(std::isnan(out[31]));
    EXPECT_TRUE(std::isfinite(out[3]));
    std::vector<float> x(33, 1.0f), weight(33, 1.0f), normed(33);
    x[32] = nan;
    ChooseCpuOps(level).rms_norm(x.data(), weight.data(), 1e-5f, 33, normed.data());
    EXPECT_TRUE(std::isnan(normed[0]));
  }
}

}  // namespace
}  // namespace pliant
