// Room: backend/cuda. What the kernels of histories share: logits of a block's tokens, and rows
// that move from an original block to a kept one. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/history/history_tables.h"
#include "backend/cuda/page_layout.h"

namespace pliant::cuda {

inline constexpr int kMostGroup = kMostHistoryGroup;
inline constexpr std::uint32_t kAbsentPage = 0xffffffffu;

/// One unit of a cache: where it lies in each page.
struct UnitPages {
  const std::uint8_t* base;  // of page 0
  std::size_t page_bytes;
  __device__ const std::uint8_t* At(std::uint32_t page) const { return base + page * page_bytes; }
};

/// Planes of K or V of one unit of one block; those that are absent are null.
struct UnitPlanes {
  const std::uint8_t* plane[kPlanes];
  __device__ UnitPlanes(const UnitPages& pages, const std::uint32_t* ids) {
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) plane[p] = ids[p] == kAbsentPage ? nullptr : pages.At(ids[p]);
  }
  /// The 32-bit word at `byte` of each plane; the first absent one reads as the midpoint.
  __device__ void Words(int byte, std::uint32_t (&words)[kPlanes]) const {
    std::uint32_t absent = 0x88888888u;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      if (plane[p] != nullptr) {
        words[p] = *reinterpret_cast<const std::uint32_t*>(plane[p] + byte);
      } else {
        words[p] = absent;
        absent = 0;
      }
    }
  }
  template <int D>
  __device__ float Scale(int token) const {
    const std::uint32_t bits =
        *reinterpret_cast<const std::uint16_t*>(plane[0] + ScaleByte(D, token));
    return __uint_as_float(bits << 16);
  }
};

/// The codes, less their bias, of the low digits of a word's four bytes and of the high ones.
struct Codes {
  float low[4], high[4];
};
__device__ __forceinline__ Codes CodesOf(const std::uint32_t (&words)[kPlanes]) {
  // Two planes make bytes, two bytes a code u, and that the float 2^23 + u, all exact.
  constexpr std::uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u, kFloat = 0x4b000000u;
  const std::uint32_t upper[2] = {(words[0] & kLow) << 4 | (words[1] & kLow),
                                  (words[0] & kHigh) | (words[1] >> 4 & kLow)};
  const std::uint32_t lower[2] = {(words[2] & kLow) << 4 | (words[3] & kLow),
                                  (words[2] & kHigh) | (words[3] >> 4 & kLow)};
  const auto value = [](std::uint32_t lower, std::uint32_t upper, std::uint32_t first) {
    // Bytes: low, high of the code, then those of the float.
    const std::uint32_t code = __byte_perm(lower, upper, first);
    return __uint_as_float(__byte_perm(code, kFloat, 0x7610)) - (8388608.f + 32768.f);
  };
  Codes codes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t first = static_cast<std::uint32_t>(i | (4 + i) << 4);
    codes.low[i] = value(lower[0], upper[0], first);
    codes.high[i] = value(lower[1], upper[1], first);
  }
  return codes;
}

/// Products of `group` queries [group][D] with the key of `token`, times `scale`, by a warp, a word
/// of 8 dims to a lane; all lanes get the results.
template <int D>
__device__ __forceinline__ void KeyLogitsOfWarp(const UnitPlanes& k, int token,
                                                const float* queries, int group, float scale,
                                                float (&logits)[kMostGroup]) {
  const int dim = static_cast<int>(threadIdx.x & 31) * 8;
  const float factor = k.Scale<D>(token) * (scale / 32768.f);
#pragma unroll
  for (int h = 0; h < kMostGroup; ++h) logits[h] = 0;
  if (dim < D) {
    std::uint32_t words[kPlanes];
    k.Words(KByte(D, token, dim), words);
    const Codes code = CodesOf(words);
#pragma unroll
    for (int h = 0; h < kMostGroup; ++h) {
      if (h >= group) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 q = *reinterpret_cast<const float2*>(queries + h * D + dim + 2 * i);
        logits[h] += q.x * code.low[i] + q.y * code.high[i];
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kMostGroup; ++h) {
    if (h >= group) break;
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) logits[h] += __shfl_xor_sync(0xffffffffu, logits[h], m);
    logits[h] *= factor;
  }
}

/// A token's original rows go to a slot.
struct Move {
  std::int32_t token, slot;
};

/// Can the first `k` planes of K and `v` of V of an original be read?
__device__ __forceinline__ bool Readable(const BlockPlaces& places, int k, int v) {
  bool all = true;
  for (int p = 0; p < kPlanes; ++p) {
    all = all && (p >= k || places.plane[p] != 0);
    all = all && (p >= v || places.plane[kPlanes + p] != 0);
  }
  return all;
}

/// Planes that the kept blocks, all alike, have.
__device__ __forceinline__ int PlanesOf(const std::uint32_t* ids) {
  int planes = 0;
  while (planes < kPlanes && ids[planes] != kAbsentPage) ++planes;
  return planes;
}

/// No second copy of a kept block's units.
struct NoCopy {
  __device__ std::uint8_t* operator()(int /*block*/, int /*plane*/) const { return nullptr; }
};

/// All threads of a block move rows of one unit: of the planes that the kept blocks have, [slots /
/// 32][8] page ids. `unit_offset`: where the unit lies in a page. `also`(kept block, plane):
/// another copy of that unit, or null.
template <int D, typename Also = NoCopy>
__device__ void CopyRows(const Move* moves, int count, const HistoryTables& tables,
                         const std::uint32_t* kept, std::uint8_t* pages, std::size_t page_bytes,
                         std::size_t unit_offset, Also also = {}) {
  const int k = PlanesOf(kept), v = PlanesOf(kept + kPlanes);
  const auto from = [&](const Move& move, int plane) {
    return reinterpret_cast<const std::uint8_t*>(
               tables.places[tables.At(move.token) / kBlockTokens].plane[plane]) +
           unit_offset;
  };
  const auto put = [&](const Move& move, int plane, int byte, auto value) {
    const std::uint32_t page = kept[move.slot / kBlockTokens * 2 * kPlanes + plane];
    using T = decltype(value);
    *reinterpret_cast<T*>(pages + page * page_bytes + unit_offset + byte) = value;
    if (std::uint8_t* const copy = also(move.slot / kBlockTokens, plane); copy != nullptr)
      *reinterpret_cast<T*>(copy + byte) = value;
  };
  constexpr int kWords = D / 8;  // of a row of K
#pragma unroll 1
  for (int i = threadIdx.x; i < count * k * kWords; i += blockDim.x) {
    const Move move = moves[i / (k * kWords)];
    const int plane = i / kWords % k, dim = i % kWords * 8;
    put(move, plane, KByte(D, move.slot % kBlockTokens, dim),
        *reinterpret_cast<const std::uint32_t*>(from(move, plane) +
                                                KByte(D, move.token % kBlockTokens, dim)));
  }
  constexpr int kPairs = D / 2;
  for (int i = threadIdx.x; i < count * v * kPairs; i += blockDim.x) {
    const Move move = moves[i / (v * kPairs)];
    const int plane = kPlanes + i / kPairs % v, dim = i % kPairs * 2;
    put(move, plane, VByte(D, move.slot % kBlockTokens, dim),
        from(move, plane)[VByte(D, move.token % kBlockTokens, dim)]);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < count * 2; i += blockDim.x) {
    const Move move = moves[i / 2];
    const int plane = i % 2 * kPlanes;
    put(move, plane, ScaleByte(D, move.slot % kBlockTokens),
        *reinterpret_cast<const std::uint16_t*>(from(move, plane) +
                                                ScaleByte(D, move.token % kBlockTokens)));
  }
}

// ---- the order of use: least first, older first among equals (RetainedHistory::Use)

using UseKey = unsigned long long;
constexpr UseKey kNoKey = ~0ull;

__device__ __forceinline__ UseKey KeyOf(float use, std::int32_t token) {
  const float sound = use >= 0 ? use : 0.f;  // no NaN, no -0
  return static_cast<UseKey>(__float_as_uint(sound + 0.f)) << 32 |
         static_cast<std::uint32_t>(token);
}
__device__ __forceinline__ float UseOf(float score, float weight) {
  return __fmul_rn(score, weight);
}
__device__ __forceinline__ std::int32_t TokenOf(UseKey key) {
  return static_cast<std::int32_t>(key & 0xffffffffu);
}

/// The least key of a block of threads; all get it. `scratch`: [warps].
__device__ __forceinline__ UseKey LeastOf(UseKey key, UseKey* scratch) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) key = min(key, __shfl_xor_sync(0xffffffffu, key, m));
  __syncthreads();  // the scratch may be in use
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = key;
  __syncthreads();
  key = scratch[0];
  for (int w = 1; w < static_cast<int>(blockDim.x >> 5); ++w) key = min(key, scratch[w]);
  return key;
}

/// Sorts the keys of a warp, least first, and what goes with them: a bitonic network.
__device__ __forceinline__ void SortWarp(UseKey& key, int& with) {
  const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
  for (int run = 2; run <= 32; run *= 2) {
#pragma unroll
    for (int apart = run / 2; apart > 0; apart /= 2) {
      const UseKey other = __shfl_xor_sync(0xffffffffu, key, apart);
      const int other_with = __shfl_xor_sync(0xffffffffu, with, apart);
      const bool ascending = (lane & run) == 0, first = (lane & apart) == 0;
      if (ascending == first ? other < key : key < other) key = other, with = other_with;
    }
  }
}

/// How many of kCount keys, in order, are less than `key`.
template <int kCount>
__device__ __forceinline__ int CountLess(const UseKey (&keys)[kCount], UseKey key) {
  static_assert((kCount & (kCount - 1)) == 0);
  int less = 0;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) less += keys[less + half - 1] < key ? half : 0;
  return less + (keys[less] < key ? 1 : 0);
}

}  // namespace pliant::cuda
