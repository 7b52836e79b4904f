// Room: backend/cuda. Keys of one unit of a block as they were before RoPE, for taking note of
// them. Device code only; all threads of a block together.
#pragma once

#include "backend/cuda/history/rows.cuh"
#include "backend/cuda/history_changes/history_changes.h"

namespace pliant::cuda {

inline constexpr int kNoteThreads = 512;

/// In shared memory.
template <int D>
struct KeyRows {
  float keys[kBlockTokens][D + 1];
};

/// MixChannels, one thread each 32 channels of a token.
template <int D>
__device__ void MixKeys(KeyRows<D>& s, float factor) {
  for (int i = threadIdx.x; i < kBlockTokens * (D / kMixedChannels); i += kNoteThreads) {
    float* const row = s.keys[i / (D / kMixedChannels)] + i % (D / kMixedChannels) * kMixedChannels;
    float x[kMixedChannels];
#pragma unroll
    for (int c = 0; c < kMixedChannels; ++c) x[c] = row[c];
#pragma unroll
    for (int apart = 1; apart < kMixedChannels; apart *= 2) {
#pragma unroll
      for (int c = 0; c < kMixedChannels; ++c) {
        if ((c & apart) != 0) continue;
        const float a = x[c], b = x[c + apart];
        x[c] = __fadd_rn(a, b);
        x[c + apart] = __fsub_rn(a, b);
      }
    }
#pragma unroll
    for (int c = 0; c < kMixedChannels; ++c) row[c] = x[c] * factor;
  }
}

/// Keys of `block`, by the planes that a.keys names. Unfused, so that they are those of DecodeKeys
/// in retained_rows.cc bit for bit.
template <int D>
__device__ void DecodeKeys(const HistoryNoteArgs& a, std::int32_t block, KeyRows<D>& s) {
  const std::size_t unit_at = static_cast<std::size_t>(blockIdx.x) * UnitStride(D);
  const NotedKeys& places = a.keys[block - a.first_block];
  const std::uint8_t* const high = reinterpret_cast<const std::uint8_t*>(places.plane[0]) + unit_at;
  const std::uint8_t* const low = reinterpret_cast<const std::uint8_t*>(places.plane[1]) + unit_at;
  __syncthreads();
  for (int i = threadIdx.x; i < kBlockTokens * D / 8; i += kNoteThreads) {
    const int token = i / (D / 8), dim = i % (D / 8) * 8;
    const int at = KByte(D, token, dim);
    const std::uint32_t words[kPlanes] = {*reinterpret_cast<const std::uint32_t*>(high + at),
                                          *reinterpret_cast<const std::uint32_t*>(low + at),
                                          0x88888888u, 0};
    const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(high + ScaleByte(D, token));
    const float scale = __uint_as_float(bits << 16);
    const Codes codes = CodesOf(words);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      s.keys[token][dim + 2 * k] = scale * (codes.low[k] / 32768.f);
      s.keys[token][dim + 2 * k + 1] = scale * (codes.high[k] / 32768.f);
    }
  }
  __syncthreads();
  MixKeys<D>(s, kQueryMix);  // the inverse
  __syncthreads();
  const std::size_t first_channel = static_cast<std::size_t>(blockIdx.x) * D;
  for (int i = threadIdx.x; i < kBlockTokens * (D / 2); i += kNoteThreads) {
    const int token = i / (D / 2), pair = i % (D / 2);
    const auto uncoded = [&](int c) {
      return __fadd_rn(__fmul_rn(s.keys[token][c], a.key.scale[first_channel + c]),
                       a.key.center[first_channel + c]);
    };
    const float x = uncoded(pair), y = uncoded(pair + D / 2);
    double sine = 0, cosine = 1;
    if (pair < a.pairs)
      sincos(static_cast<double>(a.inv_freq[pair]) * (block * kBlockTokens + token), &sine,
             &cosine);
    const float c = static_cast<float>(cosine), n = static_cast<float>(sine);
    s.keys[token][pair] = __fadd_rn(__fmul_rn(x, c), __fmul_rn(y, n));
    s.keys[token][pair + D / 2] = __fsub_rn(__fmul_rn(y, c), __fmul_rn(x, n));
  }
  __syncthreads();
}

/// The sum of all keys of a first note, channel by channel in the order of the tokens, into
/// tables.key_sum.
template <int D>
__device__ void SumKeys(const HistoryNoteArgs& a, KeyRows<D>& s) {
  if (a.first_block != 0) return;
  double sum = 0;  // of channel threadIdx.x
  for (std::int32_t block = 0; block < a.blocks; ++block) {
    DecodeKeys<D>(a, block, s);
    for (int token = 0; threadIdx.x < D && token < kBlockTokens; ++token)
      sum += s.keys[token][threadIdx.x];
  }
  if (threadIdx.x < D)
    a.tables.key_sum[static_cast<std::size_t>(blockIdx.x) * D + threadIdx.x] = sum;
  __syncthreads();
}

}  // namespace pliant::cuda
