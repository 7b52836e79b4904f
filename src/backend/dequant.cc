// Room: backend. Scalar dequantisation of every weight type. Pure, any thread.
#include "backend/dequant.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "backend/plane_code.h"
#include "base/check.h"

namespace pliant {
namespace {

// Model files are little-endian and unaligned.
static_assert(std::endian::native == std::endian::little, "weights are read in place");

std::uint8_t Byte(const std::byte* p) { return std::to_integer<std::uint8_t>(*p); }
std::int8_t SignedByte(const std::byte* p) { return static_cast<std::int8_t>(Byte(p)); }

float HalfAt(const std::byte* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return F16ToFloat(bits);
}

// Element i of a 32-element block lies in byte i % 16 of its nibbles: low digit for the first 16,
// high digit for the rest.
int Nibble(const std::byte* nibbles, int i) {
  const int byte = Byte(nibbles + i % 16);
  return i < 16 ? byte & 15 : byte >> 4;
}

int HighBit(const std::byte* bits, int i) { return (Byte(bits + i / 8) >> (i % 8)) & 1; }

// Q8_0: half d, 32 signed bytes. value = d q.
void BlockQ8_0(const std::byte* block, float* out) {
  const float d = HalfAt(block);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(SignedByte(block + 2 + i));
}

// Q4_0: half d, 16 bytes of nibbles. value = d (q - 8).
void BlockQ4_0(const std::byte* block, float* out) {
  const float d = HalfAt(block);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(Nibble(block + 2, i) - 8);
}

// Q4_1: half d, half m, nibbles. value = d q + m.
void BlockQ4_1(const std::byte* block, float* out) {
  const float d = HalfAt(block);
  const float m = HalfAt(block + 2);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(Nibble(block + 4, i)) + m;
}

// Q5_0: half d, 32 fifth bits, nibbles. value = d (q - 16).
void BlockQ5_0(const std::byte* block, float* out) {
  const float d = HalfAt(block);
  for (int i = 0; i < 32; ++i) {
    const int q = Nibble(block + 6, i) | HighBit(block + 2, i) << 4;
    out[i] = d * static_cast<float>(q - 16);
  }
}

// Q5_1: half d, half m, 32 fifth bits, nibbles. value = d q + m.
void BlockQ5_1(const std::byte* block, float* out) {
  const float d = HalfAt(block);
  const float m = HalfAt(block + 2);
  for (int i = 0; i < 32; ++i) {
    const int q = Nibble(block + 8, i) | HighBit(block + 4, i) << 4;
    out[i] = d * static_cast<float>(q) + m;
  }
}

struct ScaleMin {
  int scale;
  int min;
};

// Q4_K and Q5_K pack eight 6-bit scales and eight 6-bit minima into 12 bytes: the first four of
// each whole in the low 6 bits of bytes 0-3 and 4-7; of the last four the low digits in bytes 8-11
// (scale low, min high), the top two bits above the first four.
ScaleMin UnpackScaleMin(const std::byte* packed, int group) {
  if (group < 4) return {Byte(packed + group) & 63, Byte(packed + group + 4) & 63};
  const int digits = Byte(packed + group + 4);
  return {(digits & 15) | (Byte(packed + group - 4) >> 6) << 4,
          digits >> 4 | (Byte(packed + group) >> 6) << 4};
}

// Q4_K: half d, half dmin, 12 bytes of scales, 128 bytes of nibbles. Eight groups of 32 elements;
// groups 2c and 2c+1 share the 32 bytes c, low and high digit. value = d scale q - dmin min. Q5_K
// adds 32 bytes before the nibbles: bit g of byte i is the fifth bit of element i of group g.
void BlockQ45_K(const std::byte* block, bool fifth_bit, float* out) {
  const float d = HalfAt(block);
  const float dmin = HalfAt(block + 2);
  const std::byte* high = block + 16;
  const std::byte* nibbles = block + (fifth_bit ? 48 : 16);
  for (int group = 0; group < 8; ++group) {
    const auto [scale, min] = UnpackScaleMin(block + 4, group);
    const float step = d * static_cast<float>(scale);
    const float offset = dmin * static_cast<float>(min);
    for (int i = 0; i < 32; ++i) {
      const int byte = Byte(nibbles + group / 2 * 32 + i);
      int q = group % 2 == 0 ? byte & 15 : byte >> 4;
      if (fifth_bit) q |= ((Byte(high + i) >> group) & 1) << 4;
      out[group * 32 + i] = step * static_cast<float>(q) - offset;
    }
  }
}

// Q6_K: 128 bytes of low digits, 64 bytes of top bit pairs, 16 signed scales, half d. Two halves of
// 128 elements; in a half, quarter k (32 elements) has its digits in byte (k % 2) * 32 + i, low for
// k < 2, and its pair at bits 2k of byte i. A scale serves 16 elements. value = d scale (q - 32).
void BlockQ6_K(const std::byte* block, float* out) {
  const float d = HalfAt(block + 208);
  for (int half = 0; half < 2; ++half) {
    const std::byte* low = block + half * 64;
    const std::byte* high = block + 128 + half * 32;
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int i = 0; i < 32; ++i) {
        const int byte = Byte(low + quarter % 2 * 32 + i);
        const int digit = quarter < 2 ? byte & 15 : byte >> 4;
        const int q = digit | ((Byte(high + i) >> (2 * quarter)) & 3) << 4;
        const int scale = SignedByte(block + 192 + half * 8 + quarter * 2 + i / 16);
        out[half * 128 + quarter * 32 + i] =
            d * static_cast<float>(scale) * static_cast<float>(q - 32);
      }
    }
  }
}

void Block(DType type, const std::byte* block, float* out) {
  switch (type) {
    case DType::kQ8_0:
      return BlockQ8_0(block, out);
    case DType::kQ4_0:
      return BlockQ4_0(block, out);
    case DType::kQ4_1:
      return BlockQ4_1(block, out);
    case DType::kQ5_0:
      return BlockQ5_0(block, out);
    case DType::kQ5_1:
      return BlockQ5_1(block, out);
    case DType::kQ4_K:
      return BlockQ45_K(block, false, out);
    case DType::kQ5_K:
      return BlockQ45_K(block, true, out);
    case DType::kQ6_K:
      return BlockQ6_K(block, out);
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
      break;
  }
  PLIANT_CHECK(false, "not a block type");
}

}  // namespace

void DequantizeRow(DType type, const std::byte* row, std::span<float> out) {
  switch (type) {
    case DType::kF32:
      if (!out.empty()) std::memcpy(out.data(), row, out.size_bytes());
      return;
    case DType::kF16:
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = HalfAt(row + 2 * i);
      return;
    case DType::kBF16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, row + 2 * i, sizeof bits);
        out[i] = Bf16ToFloat(bits);
      }
      return;
    default:
      break;
  }
  const DTypeTraits traits = Traits(type);
  const std::size_t elements = traits.block_elements;
  PLIANT_CHECK(out.size() % elements == 0, "a row of a block type holds whole blocks");
  for (std::size_t b = 0; b < out.size() / elements; ++b) {
    Block(type, row + b * traits.block_bytes, out.data() + b * elements);
  }
}

float F16ToFloat(unsigned short bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 31u;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 31) {  // infinity, or NaN with its payload
    return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  }
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

unsigned short FloatToF16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN stays NaN, made quiet
    return static_cast<unsigned short>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and up round to infinity
    return static_cast<unsigned short>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal, in units of 2^-24
    if (magnitude < 0x33000000u) return static_cast<unsigned short>(sign);  // below half a unit
    const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t shift = 126 - (magnitude >> 23);  // 14 .. 24
    const std::uint32_t half = 1u << (shift - 1);
    const std::uint32_t kept = mantissa >> shift;
    const std::uint32_t rest = mantissa & ((1u << shift) - 1);
    const std::uint32_t up = rest > half || (rest == half && (kept & 1u)) ? 1u : 0u;
    return static_cast<unsigned short>(sign | (kept + up));
  }
  // A carry out of the mantissa moves into the exponent, as it should.
  const std::uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<unsigned short>(sign | rounded >> 13);
}

}  // namespace pliant
