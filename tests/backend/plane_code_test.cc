#include "backend/plane_code.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backend/dequant.h"

namespace pliant {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Planes of one row, with room around them to see a write that goes too far.
struct PlaneRows {
  explicit PlaneRows(std::size_t elements) {
    for (auto& plane : bytes) plane.assign(elements / 2 + 1, 0xee);
    for (int p = 0; p < kPlanes; ++p) rows[p] = bytes[p].data();
  }
  std::array<std::vector<std::uint8_t>, kPlanes> bytes;
  std::uint8_t* rows[kPlanes];
};

std::vector<float> RoundTrip(std::span<const float> row, int planes) {
  const std::uint16_t scale = RowScale(row);
  std::vector<std::uint16_t> u(row.size());
  EncodeRow(row, scale, u);
  PlaneRows store(row.size());
  SplitPlanes(u, planes, store.rows);
  JoinPlanes(store.rows, planes, u);
  std::vector<float> back(row.size());
  DecodeRow(u, scale, back);
  return back;
}

TEST(PlaneCode, EveryCodeSplitsAndJoinsAtEveryDepth) {
  std::vector<std::uint16_t> u(65536);
  for (int i = 0; i < 65536; ++i) u[i] = static_cast<std::uint16_t>(i);
  for (int planes = 0; planes <= kPlanes; ++planes) {
    PlaneRows store(u.size());
    SplitPlanes(u, planes, store.rows);
    for (const auto& plane : store.bytes) EXPECT_EQ(plane.back(), 0xee);
    std::vector<std::uint16_t> back(u.size());
    JoinPlanes(store.rows, planes, back);
    const int absent_bits = 16 - 4 * planes;
    for (int i = 0; i < 65536; ++i) {
      ASSERT_EQ(back[i], MidpointCode(u[i], planes));
      ASSERT_EQ(back[i] >> absent_bits, i >> absent_bits);  // the kept digits are kept
      const int error = std::abs(int{back[i]} - i);
      ASSERT_LE(error, planes == kPlanes ? 0 : 1 << (absent_bits - 1)) << "code " << i;
    }
  }
}

TEST(PlaneCode, DigitsLieWhereTheHeaderSays) {
  const std::vector<std::uint16_t> u = {0x1234, 0xabcd};
  PlaneRows store(2);
  SplitPlanes(u, kPlanes, store.rows);
  EXPECT_EQ(store.bytes[0][0], 0xa1);  // even dim low, odd dim high
  EXPECT_EQ(store.bytes[1][0], 0xb2);
  EXPECT_EQ(store.bytes[2][0], 0xc3);
  EXPECT_EQ(store.bytes[3][0], 0xd4);
}

TEST(PlaneCode, MixingSpreadsAChannelOverItsThirtyTwo) {
  for (int channel = 0; channel < 64; ++channel) {
    std::vector<float> row(64, 0.f);
    row[channel] = 3;
    MixChannels(row, kKeyMix);
    for (int i = 0; i < 64; ++i) {
      const bool same = i / kMixedChannels == channel / kMixedChannels;
      const bool minus = std::popcount(static_cast<unsigned>(i & channel & 31)) % 2 != 0;
      ASSERT_EQ(row[i], same ? (minus ? -0.75f : 0.75f) : 0.f) << channel << " in " << i;
    }
  }
}

TEST(PlaneCode, MixingKeepsProductsAndUndoesItself) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int dim : {32, 64, 96, 256}) {
    std::vector<float> key(dim), query(dim);
    for (float& x : key) x = normal(random);
    for (float& x : query) x = normal(random);
    const auto product = [&](const std::vector<float>& a, const std::vector<float>& b) {
      double sum = 0;
      for (int i = 0; i < dim; ++i) sum += double{a[i]} * b[i];
      return sum;
    };
    std::vector<float> mixed_key = key, mixed_query = query;
    MixChannels(mixed_key, kKeyMix);
    MixChannels(mixed_query, kQueryMix);
    EXPECT_NEAR(product(mixed_key, mixed_query), product(key, query), 1e-5 * dim);
    EXPECT_GT(std::fabs(product(mixed_key, query) - product(key, query)), 1e-2) << "it does mix";
    MixChannels(mixed_key, kQueryMix);
    for (int i = 0; i < dim; ++i) ASSERT_NEAR(mixed_key[i], key[i], 2e-6f);
  }
}

TEST(PlaneCode, ScaleIsTheAbsoluteMaximumRoundedUp) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 10000; ++i) {
    const float exponent = static_cast<float>(i % 60 - 30);
    const std::vector<float> row = {normal(random) * std::exp2(exponent),
                                    normal(random) * std::exp2(exponent)};
    const float largest = std::max(std::fabs(row[0]), std::fabs(row[1]));
    const std::uint16_t scale = RowScale(row);
    EXPECT_GE(Bf16ToFloat(scale), largest);
    if (scale > 0) {
      EXPECT_LT(Bf16ToFloat(static_cast<std::uint16_t>(scale - 1)), largest);
    }
  }
  EXPECT_EQ(RowScale(std::vector<float>{0.f, -0.f}), 0);
  EXPECT_EQ(Bf16ToFloat(RowScale(std::vector<float>{-1.f, 0.5f})), 1.f);
  EXPECT_EQ(Bf16ToFloat(RowScale(std::vector<float>{-kInf, 1.f})), kInf);
  EXPECT_EQ(Bf16ToFloat(RowScale(std::vector<float>{NAN, 1.f})), kInf);
  // Beyond the largest finite bf16 there is only infinity to round up to.
  EXPECT_EQ(Bf16ToFloat(RowScale(std::vector<float>{std::numeric_limits<float>::max()})), kInf);
}

TEST(PlaneCode, ErrorStaysWithinHalfAStepOfTheLastPlane) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<float> row(64);
    for (float& x : row) x = normal(random) * std::exp2(static_cast<float>(trial % 40 - 20));
    if (trial % 3 == 0) row[trial % 64] *= 1e4f;  // one huge element
    if (trial % 5 == 0) row[7] = 0;
    const float scale = Bf16ToFloat(RowScale(row));
    for (int planes = 1; planes <= kPlanes; ++planes) {
      const std::vector<float> back = RoundTrip(row, planes);
      // Half a digit, and half a code of the rounding to 16 bits; at the top end clamping to 32767
      // costs up to one code.
      const double half_digit = planes == kPlanes ? 0 : std::exp2(15 - 4 * planes);
      const double bound = scale / 32768.0 * (half_digit + 1.0001);
      for (int i = 0; i < 64; ++i) {
        ASSERT_LE(std::fabs(double{back[i]} - row[i]), bound)
            << "planes " << planes << " element " << i;
        if (planes == kPlanes && std::fabs(row[i]) < 0.999 * scale) {
          ASSERT_LE(std::fabs(double{back[i]} - row[i]), scale / 32768.0 * 0.5001);
        }
      }
    }
  }
}

TEST(PlaneCode, AdversarialRows) {
  EXPECT_THAT(RoundTrip(std::vector<float>(64, 0.f), 4), testing::Each(0.f));
  // A zero row's scale makes even the midpoint read as zero.
  EXPECT_THAT(RoundTrip(std::vector<float>(64, 0.f), 1), testing::Each(0.f));
  for (const float bad : {kInf, -kInf, NAN}) {
    std::vector<float> row(32, 1.f);
    row[5] = bad;
    for (int planes = 1; planes <= kPlanes; ++planes) {
      for (const float x : RoundTrip(row, planes)) EXPECT_FALSE(std::isfinite(x));
    }
  }
  // Denormals: the relative step of a bf16 denormal is coarse, its absolute step is not.
  std::vector<float> tiny(32, std::numeric_limits<float>::denorm_min() * 1000);
  tiny[0] = -1e-39f;
  const std::vector<float> back = RoundTrip(tiny, 4);
  for (int i = 0; i < 32; ++i) EXPECT_NEAR(back[i], tiny[i], 1e-43f);
  // The extreme codes: -scale and +scale are symmetric, 0 is exact.
  const std::vector<float> ends = {1.f, -1.f, 0.f, 0.5f};
  const std::vector<float> got = RoundTrip(ends, 4);
  EXPECT_EQ(got[0], 32767.f / 32768.f);
  EXPECT_EQ(got[1], -32767.f / 32768.f);
  EXPECT_EQ(got[2], 0.f);
  EXPECT_EQ(got[3], 0.5f);
}

/// Mean over rows of the signal-to-noise ratio in dB.
template <typename Code>
double MeanSnr(Code&& code) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  double sum = 0;
  constexpr int kRows = 2000;
  for (int r = 0; r < kRows; ++r) {
    std::vector<float> row(64);
    const float size = std::exp2(normal(random));
    for (float& x : row) x = normal(random) * size;
    const std::vector<float> back = code(row);
    double signal = 0, noise = 0;
    for (int i = 0; i < 64; ++i) {
      signal += double{row[i]} * row[i];
      noise += (double{back[i]} - row[i]) * (double{back[i]} - row[i]);
    }
    sum += 10 * std::log10(signal / noise);
  }
  return sum / kRows;
}

TEST(PlaneCode, SixteenBitsAreMoreFaithfulThanFp16) {
  const double planes = MeanSnr([](const std::vector<float>& row) { return RoundTrip(row, 4); });
  const double fp16 = MeanSnr([](const std::vector<float>& row) {
    std::vector<float> back(row.size());
    for (std::size_t i = 0; i < row.size(); ++i) back[i] = F16ToFloat(FloatToF16(row[i]));
    return back;
  });
  EXPECT_GE(planes, 87.0);
  EXPECT_NEAR(fp16, 74.0, 1.5);
  RecordProperty("snr_planes_db", std::to_string(planes));
  // Every plane is worth 4 bits: 24.08 dB.
  const double three = MeanSnr([](const std::vector<float>& row) { return RoundTrip(row, 3); });
  EXPECT_NEAR(planes - three, 24.08, 0.5);
}

TEST(PlaneCode, PageLayoutHasNoOverlap) {
  const KvGeometry geometry{3, 2, 64};
  std::vector<int> owner(geometry.PageBytes(), 0);
  for (int layer = 0; layer < 3; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (int token = 0; token < kBlockTokens; ++token) {
        for (std::size_t b = 0; b < geometry.RowBytes(); ++b) {
          ++owner.at(geometry.RowOffset(layer, head, token) + b);
        }
        for (int b = 0; b < 2; ++b) ++owner.at(geometry.ScaleOffset(layer, head, token) + b);
      }
    }
  }
  EXPECT_THAT(owner, testing::Each(1));
}

}  // namespace
}  // namespace pliant
