// Room: backend/cuda, decode attention. Query rows that were cut: the partial results become one.
// Part of attention_decode.cu alone.
#pragma once

#include <cstdint>

#include "backend/cuda/attention_decode/kernel_args.cuh"
#include "backend/cuda/overlap.cuh"

namespace pliant::cuda {
namespace {

/// One thread block a (cut row, piece): a quarter of its threads takes every fourth partial, each
/// thread four neighbouring values; the quarters are then joined. Small enough in shared memory and
/// registers to stand ready beside the attention kernel's last blocks.
template <int D, int kSplit>
__global__ void __launch_bounds__(D / kSplit * 4, 1)
    MergeKernel(const __grid_constant__ KernelArgs args) {
  constexpr int kTiles = D / 16 / kSplit, kValues = kHeadsPerChunk * D / kSplit;
  constexpr int kQuarter = kValues / 4, kQuarters = 4;
  const DecodeArgs& a = args.a;
  LetNextStart();
  // Before the wait: attention's launch has waited for the plan already.
  const CutRow cut = a.cut_rows[blockIdx.x];
  WaitForPrevious();  // also where there is nothing to do: this grid's end must mean attention's
  if (cut.count == 0) return;
  const int pieces = args.kv_heads * args.chunks_per_head * kSplit, piece = blockIdx.y;
  const int quarter = threadIdx.x / kQuarter, own = threadIdx.x % kQuarter;
  const int lane = own & 31, g = lane >> 2, t = lane & 3;
  const std::size_t stride = static_cast<std::size_t>(pieces) * PartialFloats<D, kSplit>();
  const float* const all = a.partials + cut.first * stride + piece * PartialFloats<D, kSplit>();
  float4 sum = {};
  float mass = 0.f, top = -INFINITY;
  const auto add = [&](float4 v, float own_top, float own_mass) {
    if (own_top == -INFINITY) return;
    const float new_top = fmaxf(top, own_top);
    const float keep = Exp2(top - new_top), scale = Exp2(own_top - new_top);
    top = new_top;
    mass = fmaf(own_mass, scale, mass * keep);
    sum.x = fmaf(v.x, scale, sum.x * keep);
    sum.y = fmaf(v.y, scale, sum.y * keep);
    sum.z = fmaf(v.z, scale, sum.z * keep);
    sum.w = fmaf(v.w, scale, sum.w * keep);
  };
  constexpr int kBatch = 5;  // partials on their way at once
  for (int first = quarter; first < cut.count; first += kQuarters * kBatch) {
    float2 states[kBatch];
    float4 values[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int i = first + n * kQuarters;
      states[n] = make_float2(-INFINITY, 0.f);
      if (i >= cut.count) continue;
      const float* const from = all + i * stride;
      states[n] = *reinterpret_cast<const float2*>(from + kValues + 2 * t);
      values[n] = reinterpret_cast<const float4*>(from)[own];
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) add(values[n], states[n].x, states[n].y);
  }
  __shared__ float4 sums[kQuarters - 1][kQuarter];
  __shared__ float2 states[kQuarters - 1][kQuarter];
  if (quarter > 0) {
    sums[quarter - 1][own] = sum;
    states[quarter - 1][own] = make_float2(top, mass);
  }
  __syncthreads();
  if (quarter > 0) return;
#pragma unroll
  for (int q = 0; q < kQuarters - 1; ++q) add(sums[q][own], states[q][own].x, states[q][own].y);
  const int chunk = piece / kSplit, kv_head = chunk / args.chunks_per_head;
  const int head = (chunk % args.chunks_per_head) * kHeadsPerChunk + t;
  if (head >= args.group) return;
  const float result[4] = {sum.x, sum.y, sum.z, sum.w};
  StoreResult<D, 2>(args, cut.row, kv_head, head,
                    piece % kSplit * (D / kSplit) + own / 32 * 32 + 2 * g, mass, result);
}

}  // namespace
}  // namespace pliant::cuda
