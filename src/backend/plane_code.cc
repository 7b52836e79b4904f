#include "backend/plane_code.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace pliant {
namespace {

constexpr std::uint16_t kBf16Infinity = 0x7f80;
constexpr std::uint32_t kF32Infinity = 0x7f800000u;
constexpr int kCodeBias = 32768;

/// Bits of a plane's digit inside an offset-binary code.
constexpr int DigitShift(int plane) { return (kPlanes - 1 - plane) * kBitsPerPlane; }

}  // namespace

void MixChannels(std::span<float> row, float factor) {
  PLIANT_CHECK(row.size() % kMixedChannels == 0, "a row is a multiple of 32 channels");
  for (std::size_t first = 0; first < row.size(); first += kMixedChannels) {
    float* x = row.data() + first;
    for (int apart = 1; apart < kMixedChannels; apart *= 2) {
      for (int i = 0; i < kMixedChannels; i += 2 * apart) {
        for (int j = i; j < i + apart; ++j) {
          const float a = x[j], b = x[j + apart];
          x[j] = a + b;
          x[j + apart] = a - b;
        }
      }
    }
    for (int i = 0; i < kMixedChannels; ++i) x[i] *= factor;
  }
}

std::uint16_t RowScale(std::span<const float> row) {
  // Magnitudes of floats order like their bits, and NaN lies above infinity.
  std::uint32_t largest = 0;
  for (const float value : row) {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(value) & 0x7fffffffu);
  }
  if (largest >= kF32Infinity) return kBf16Infinity;
  // Rounding up may carry into the exponent; past the largest bf16 it gives infinity, which is what
  // it means.
  return static_cast<std::uint16_t>((largest + 0xffffu) >> 16);
}

void EncodeRow(std::span<const float> row, std::uint16_t scale_bf16, std::span<std::uint16_t> u) {
  PLIANT_CHECK(row.size() == u.size(), "a row and its codes have the same length");
  const float scale = Bf16ToFloat(scale_bf16);
  for (std::size_t i = 0; i < row.size(); ++i) {
    // The quotient is one correctly rounded f32 division and 32768 a power of two, so that vector
    // code gets the same bits.
    const float code = row[i] / scale * 32768.0f;
    if (!std::isfinite(code)) {  // 0 / 0 of a zero row, or a row that is not finite
      u[i] = kCodeBias;
      continue;
    }
    const int rounded =
        static_cast<int>(std::nearbyint(std::fmin(std::fmax(code, -32767.0f), 32767.0f)));
    u[i] = static_cast<std::uint16_t>(rounded + kCodeBias);
  }
}

void SplitPlanes(std::span<const std::uint16_t> u, int planes, std::uint8_t* const rows[kPlanes]) {
  PLIANT_CHECK(planes >= 0 && planes <= kPlanes && u.size() % 2 == 0, "planes 0..4 of an even row");
  for (int plane = 0; plane < planes; ++plane) {
    const int shift = DigitShift(plane);
    for (std::size_t j = 0; j < u.size() / 2; ++j) {
      const int low = (u[2 * j] >> shift) & 0xf;
      const int high = (u[2 * j + 1] >> shift) & 0xf;
      rows[plane][j] = static_cast<std::uint8_t>(low | high << 4);
    }
  }
}

void JoinPlanes(const std::uint8_t* const rows[kPlanes], int planes, std::span<std::uint16_t> u) {
  PLIANT_CHECK(planes >= 0 && planes <= kPlanes && u.size() % 2 == 0, "planes 0..4 of an even row");
  for (std::size_t i = 0; i < u.size(); ++i) {
    unsigned code = 0;
    for (int plane = 0; plane < planes; ++plane) {
      const unsigned digit = (rows[plane][i / 2] >> (i % 2 * 4)) & 0xf;
      code |= digit << DigitShift(plane);
    }
    u[i] = MidpointCode(static_cast<std::uint16_t>(code), planes);
  }
}

void DecodeRow(std::span<const std::uint16_t> u, std::uint16_t scale_bf16, std::span<float> row) {
  PLIANT_CHECK(row.size() == u.size(), "a row and its codes have the same length");
  const float scale = Bf16ToFloat(scale_bf16);
  for (std::size_t i = 0; i < u.size(); ++i) {
    row[i] = scale * (static_cast<float>(static_cast<int>(u[i]) - kCodeBias) / 32768.0f);
  }
}

}  // namespace pliant
