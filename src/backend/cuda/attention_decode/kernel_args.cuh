// Room: backend/cuda, decode attention. What its kernels are launched with, and how a result is
// stored. Part of attention_decode.cu alone.
#pragma once

#include <cstdint>

#include "backend/cuda/attention_decode/attention_decode.h"
#include "backend/cuda/channel_code.cuh"
#include "backend/cuda/page_layout.h"
#include "backend/cuda/ptx.cuh"

namespace pliant::cuda {
namespace {

constexpr std::uint32_t kAll = 0xffffffffu;

struct KernelArgs {
  DecodeArgs a;
  DecodeLaunch launch;
  int kv_heads;
  int group;
  int chunks_per_head;

  /// A slot can hold the queries of all heads of a group of warps.
  constexpr bool QueryInRing(int head_dim) const {
    return group * head_dim * 4 <= 2 * UnitStride(head_dim);
  }
};

/// Floats of one piece of a partial: values, then (top, mass) of each head.
template <int D, int kSplit>
__device__ constexpr int PartialFloats() {
  return kHeadsPerChunk * D / kSplit + 2 * kHeadsPerChunk;
}

/// Writes a lane's values, over its mass and with V's code undone, to row `row` from dim `first` of
/// query head `head` of a KV head on.
template <int D, int kTiles>
__device__ __forceinline__ void StoreResult(const KernelArgs& args, int row, int kv_head, int head,
                                            int first, float mass,
                                            const float (&result)[2 * kTiles]) {
  // mass > 0 for every row with a token that takes part; without one the output is zero, not 0 / 0.
  const float scale = mass == 0.f ? 0.f : (256.f / 32768.f) / mass;
  const std::int64_t at = row * args.a.out_stride + (kv_head * args.group + head) * D + first;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int channel = kv_head * D + first + 16 * i;
    const float x = Uncoded(args.a.value, channel, result[2 * i] * scale);
    const float y = Uncoded(args.a.value, channel + 1, result[2 * i + 1] * scale);
    if (args.a.out_type == ElementType::kF32) {
      *reinterpret_cast<float2*>(static_cast<float*>(args.a.out) + at + 16 * i) = make_float2(x, y);
    } else {
      *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(args.a.out) + at + 16 * i) =
          PackBf16(x, y);
    }
  }
}

}  // namespace
}  // namespace pliant::cuda
