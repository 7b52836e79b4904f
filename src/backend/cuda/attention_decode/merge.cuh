// Room: backend/cuda, decode attention. Query rows that were cut: the partial results become one.
// Part of attention_decode.cu alone.
#pragma once

#include <cstdint>

#include "backend/cuda/attention_decode/kernel_args.cuh"
#include "backend/cuda/overlap.cuh"

namespace pliant::cuda {
namespace {

/// One thread block a (cut row, piece): the partials are weighted and added up, eight segments at a
/// time.
template <int D, int kSplit>
__global__ void __launch_bounds__(256) MergeKernel(const __grid_constant__ KernelArgs args) {
  constexpr int kTiles = D / 16 / kSplit, kValues = kHeadsPerChunk * D / kSplit, kWarps = 8;
  const DecodeArgs& a = args.a;
  LetNextStart();
  WaitForPrevious();  // also where there is nothing to do: this grid's end must mean attention's
  const CutRow cut = a.cut_rows[blockIdx.x];
  if (cut.count == 0) return;
  const int pieces = args.kv_heads * args.chunks_per_head * kSplit, piece = blockIdx.y;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const std::size_t stride = static_cast<std::size_t>(pieces) * PartialFloats<D, kSplit>();
  const float* const all = a.partials + cut.first * stride + piece * PartialFloats<D, kSplit>();
  float result[2 * kTiles] = {}, mass = 0.f, top = -INFINITY;
  for (int i = warp; i < cut.count; i += kWarps) {
    const float* const from = all + i * stride;
    const float2 own = *reinterpret_cast<const float2*>(from + kValues + 2 * t);
    float4 part[kTiles / 2];
#pragma unroll
    for (int c = 0; c < kTiles / 2; ++c)
      part[c] = reinterpret_cast<const float4*>(from)[c * 32 + lane];
    if (own.x == -INFINITY) continue;
    const float new_top = fmaxf(top, own.x);
    const float keep = Exp2(top - new_top), scale = Exp2(own.x - new_top);
    top = new_top;
    mass = fmaf(own.y, scale, mass * keep);
#pragma unroll
    for (int c = 0; c < kTiles / 2; ++c) {
      result[4 * c] = fmaf(part[c].x, scale, result[4 * c] * keep);
      result[4 * c + 1] = fmaf(part[c].y, scale, result[4 * c + 1] * keep);
      result[4 * c + 2] = fmaf(part[c].z, scale, result[4 * c + 2] * keep);
      result[4 * c + 3] = fmaf(part[c].w, scale, result[4 * c + 3] * keep);
    }
  }
  __shared__ float4 sums[kWarps][kTiles / 2][32];
  __shared__ float2 states[kWarps][32];
#pragma unroll
  for (int c = 0; c < kTiles / 2; ++c)
    sums[warp][c][lane] =
        make_float4(result[4 * c], result[4 * c + 1], result[4 * c + 2], result[4 * c + 3]);
  states[warp][lane] = make_float2(top, mass);
  __syncthreads();
  if (warp != 0) return;
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, states[w][lane].x);
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) result[i] = 0.f;
  mass = 0.f;
  for (int w = 0; w < kWarps; ++w) {
    const float2 own = states[w][lane];
    if (own.x == -INFINITY) continue;
    const float scale = Exp2(own.x - top);
    mass = fmaf(own.y, scale, mass);
#pragma unroll
    for (int c = 0; c < kTiles / 2; ++c) {
      const float4 v = sums[w][c][lane];
      result[4 * c] = fmaf(v.x, scale, result[4 * c]);
      result[4 * c + 1] = fmaf(v.y, scale, result[4 * c + 1]);
      result[4 * c + 2] = fmaf(v.z, scale, result[4 * c + 2]);
      result[4 * c + 3] = fmaf(v.w, scale, result[4 * c + 3]);
    }
  }
  const int chunk = piece / kSplit, kv_head = chunk / args.chunks_per_head;
  const int head = (chunk % args.chunks_per_head) * kHeadsPerChunk + t;
  if (head >= args.group) return;
  StoreResult<kTiles>(args, cut.row,
                      (kv_head * args.group + head) * D + piece % kSplit * (D / kSplit) + 2 * g,
                      mass, result);
}

}  // namespace
}  // namespace pliant::cuda
