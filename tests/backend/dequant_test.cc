// Dequantisation against golden vectors of the Python `gguf` package, and the half conversions
// against their definitions.
#include "backend/dequant.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "backend/plane_code.h"

namespace pliant {
namespace {

constexpr DType kAllTypes[] = {DType::kF32,  DType::kF16,  DType::kBF16, DType::kQ8_0,
                               DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1,
                               DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};

TEST(DequantTest, EveryTypeEqualsTheGgufPackageBitForBit) {
  std::ifstream file(PLIANT_TEST_DATA "/backend/dequant_golden.bin", std::ios::binary);
  ASSERT_TRUE(file.is_open());
  const std::string golden((std::istreambuf_iterator<char>(file)),
                           std::istreambuf_iterator<char>());
  std::size_t at = 0;
  for (const DType type : kAllTypes) {
    ASSERT_LE(at + 16, golden.size());
    const std::string name(golden.data() + at);
    ASSERT_EQ(name, Traits(type).name);
    std::uint32_t elements, bytes;
    std::memcpy(&elements, golden.data() + at + 8, 4);
    std::memcpy(&bytes, golden.data() + at + 12, 4);
    at += 16;
    ASSERT_EQ(bytes, RowBytes(type, elements)) << name;
    ASSERT_LE(at + bytes + 4 * elements, golden.size());
    std::vector<float> expected(elements), got(elements, -1.0f);
    std::memcpy(expected.data(), golden.data() + at + bytes, 4 * elements);
    DequantizeRow(type, reinterpret_cast<const std::byte*>(golden.data() + at), got);
    for (std::size_t i = 0; i < elements; ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(expected[i]))
          << name << " element " << i << ": " << got[i] << ", expected " << expected[i];
    }
    at += bytes + 4 * elements;
  }
  EXPECT_EQ(at, golden.size());
}

// A half's value by its definition, apart from the code under test.
double HalfByDefinition(unsigned bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  if (exponent == 31) {
    return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(DequantTest, AllHalvesConvertExactlyAndBack) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const float value = F16ToFloat(static_cast<unsigned short>(bits));
    const double expected = HalfByDefinition(bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      EXPECT_TRUE(std::isnan(F16ToFloat(FloatToF16(value)))) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), expected) << bits;
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    ASSERT_EQ(FloatToF16(value), bits) << value;
  }
}

TEST(DequantTest, FloatsRoundToTheNearestHalfTiesToEven) {
  for (unsigned bits = 0; bits < 0x7c00; ++bits) {
    const double low = HalfByDefinition(bits);
    const double high = bits == 0x7bff ? 65536.0 : HalfByDefinition(bits + 1);
    const auto middle = static_cast<float>((low + high) / 2);
    const float below = std::nextafterf(middle, 0.0f);
    const float above = std::nextafterf(middle, 1e9f);
    ASSERT_EQ(FloatToF16(below), bits);
    ASSERT_EQ(FloatToF16(above), bits + 1);
    ASSERT_EQ(FloatToF16(middle), bits % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(FloatToF16(-above), (bits + 1) | 0x8000u);
  }
  EXPECT_EQ(FloatToF16(std::numeric_limits<float>::infinity()), 0x7c00);
  EXPECT_EQ(FloatToF16(-1e30f), 0xfc00);
  EXPECT_EQ(FloatToF16(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(DequantTest, Bf16RoundsToNearestEven) {
  EXPECT_EQ(FloatToBf16(1.0f), 0x3f80);
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // tie, even below
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f818000u)), 0x3f82);  // tie, even above
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::nanf("")))));
}

}  // namespace
}  // namespace pliant
