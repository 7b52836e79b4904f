// Room: backend/cuda. Planes as operands of the 8-bit tensor cores: what attention kernels read of
// a unit, and how queries become digits. Device code only.
//
// Lane (g, t) = (lane / 4, lane % 4). A product with K is 16 tokens by 32 dims, rows g and g + 8 of
// the lane; it reads the dims KDim(step, t) .. + 7 of its rows, even dims as the lower half of the
// product's depth and odd ones as the upper one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/page_layout.h"
#include "backend/cuda/ptx.cuh"

namespace pliant::cuda {

/// |q| of the largest element as an integer; three balanced base-256 digits reach 8355711.
inline constexpr float kQueryRange = 8.3e6f;

/// Two planes joined into bytes: `even` holds the even dims, `odd` the odd ones. One plane: the low
/// digit is zero.
__device__ __forceinline__ std::uint32_t EvenBytes(std::uint32_t high, std::uint32_t low) {
  return ((high << 4) & 0xf0f0f0f0u) | (low & 0x0f0f0f0fu);
}
__device__ __forceinline__ std::uint32_t OddBytes(std::uint32_t high, std::uint32_t low) {
  return (high & 0xf0f0f0f0u) | ((low >> 4) & 0x0f0f0f0fu);
}

/// Words that a lane needs of a row of K: for step w, dims KDim(w, t) .. + 7.
template <int D>
__device__ __forceinline__ constexpr int KDim(int w, int t) {
  return D == 256 ? 32 * (4 * (w >> 2) + t) + 8 * (w & 3) : (D / 4) * t + 8 * w;
}

/// Reads kWords consecutive words of shared memory.
template <int kWords>
__device__ __forceinline__ void ReadWords(const std::uint8_t* p, std::uint32_t* to) {
  if constexpr (kWords >= 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *reinterpret_cast<const std::uint32_t*>(p);
  }
}

/// The lane's words of one row of K.
template <int D>
__device__ __forceinline__ void ReadKRow(const std::uint8_t* unit, int token, int t,
                                         std::uint32_t (&to)[D / 32]) {
  const std::uint8_t* row = unit + token * (D / 2);
  if constexpr (D == 256) {
    const int swizzle = (token & 1) << 2;
    ReadWords<4>(row + ((t ^ swizzle) << 4), to);
    ReadWords<4>(row + (((4 + t) ^ swizzle) << 4), to + 4);
  } else {
    ReadWords<D / 32>(row + t * (D / 8), to);
  }
}

/// The three balanced base-256 digits of an element of a query: value = (d2 * 256 + d1) * 256 + d0,
/// each in -128 .. 127.
struct QueryDigits {
  int d0, d1, d2;
  explicit __device__ QueryDigits(int value) {
    d0 = static_cast<std::int8_t>(value);
    const int rest = (value - d0) >> 8;
    d1 = static_cast<std::int8_t>(rest);
    d2 = (rest - d1) >> 8;
  }
};

}  // namespace pliant::cuda
