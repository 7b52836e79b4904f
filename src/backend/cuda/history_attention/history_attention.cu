// One thread block a (history, KV head), in phases: logits of what takes part; masses of what was
// dropped; returns; the weighted sum; scores. Blocks of 32 tokens go to warps, and products with K
// and V to the 8-bit tensor cores: queries as three digits, weights as four, so that a sum is of
// integers. Bound: the bytes of the planes that are read, once; a multiprocessor alone reaches a
// few dozen GB/s, so that it takes many sequences or KV heads to fill the device. With few it is
// the latencies one behind the other that count: logits stay in shared memory where they fit, all
// that does not depend on anything is asked for at once, and slots of least use come out of sorted
// warps.
#include "backend/cuda/channel_code.cuh"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/head_dims.cuh"
#include "backend/cuda/history_attention/history_attention.h"
#include "backend/cuda/history_attention/logits.cuh"
#include "backend/cuda/history_attention/returns.cuh"
#include "backend/cuda/history_attention/values.cuh"
#include "backend/cuda/overlap.cuh"
#include "base/check.h"

namespace pliant::cuda {
namespace {

template <int D>
__device__ void Store(const HistoryWork<D>& w, int slots) {
  const HistoryAttentionArgs& a = w.a;
  const std::int64_t first =
      w.r.row * a.out_stride + static_cast<std::int64_t>(w.kv_head) * w.group * D;
#pragma unroll 1
  for (int i = threadIdx.x; i < w.group * D / 2; i += kHistoryThreads) {
    float2 sum = make_float2(0, 0);
#pragma unroll 2
    for (int slot = 0; slot < slots; ++slot) {
      const float2 one = reinterpret_cast<const float2*>(w.outputs + slot * w.group * D)[i];
      sum = make_float2(sum.x + one.x, sum.y + one.y);
    }
    const int channel = w.kv_head * D + 2 * i % D;
    const float x = Uncoded(a.value, channel, sum.x);
    const float y = Uncoded(a.value, channel + 1, sum.y);
    if (a.out_type == ElementType::kF32) {
      *reinterpret_cast<float2*>(static_cast<float*>(a.out) + first + 2 * i) = make_float2(x, y);
    } else {
      *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(a.out) + first + 2 * i) =
          PackBf16(x, y);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kHistoryThreads, 1)
    HistoryAttentionKernel(const __grid_constant__ HistoryAttentionArgs a) {
  extern __shared__ __align__(16) std::uint8_t memory[];
  HistoryShared<D>& shared = *reinterpret_cast<HistoryShared<D>*>(memory);
  LetNextStart();
  WaitForPrevious();
  static_assert(sizeof(HistoryRow) % 4 == 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(HistoryRow) / 4); i += kHistoryThreads) {
    reinterpret_cast<std::uint32_t*>(&shared.history)[i] =
        reinterpret_cast<const std::uint32_t*>(a.histories + blockIdx.y)[i];
  }
  __syncthreads();
  const HistoryRow& r = shared.history;
  if (r.rows != 1) return;
  HistoryWork<D> w{a, r, shared};
  w.kv_head = blockIdx.x;
  w.group = a.heads / a.kv_heads;
  w.chunks = (w.group + kChunkHeads - 1) / kChunkHeads;
  w.unit = a.layer * a.kv_heads + w.kv_head;
  w.warp = threadIdx.x >> 5, w.lane = threadIdx.x & 31;
  w.g = w.lane >> 2, w.t = w.lane & 3;
  w.part_blocks = r.kept_blocks + r.context / kBlockTokens + 1 - r.frontier;
  w.outputs = reinterpret_cast<float*>(memory + sizeof(shared));
  const std::size_t first_head =
      static_cast<std::size_t>(blockIdx.y) * a.heads + w.kv_head * w.group;
  w.staged = reinterpret_cast<std::uint8_t*>(w.outputs + kSumFloats);
  if (LogitBytes(a) <= kMostLogitBytes) {
    w.logits = reinterpret_cast<float*>(w.staged + a.staged_units * UnitStride(D));
    w.masses = w.logits + w.group * a.most_tokens;
  } else {
    w.logits = a.logits + first_head * a.most_tokens;
    w.masses = a.masses + first_head * (a.most_dropped / kReturnTokens);
  }
  w.pages = {a.pages + w.UnitAt(), a.page_bytes};
  LoadInputs(w);
  AskForUnits(w);
  CodeQueries(w);
  w.Await(kStageK);
#pragma unroll 1
  for (int i = w.warp; i < w.part_blocks; i += kHistoryWarps) BlockLogits(w, i);
  BringBack(w);
  w.Await(kStageV);
  Store(w, SumValues(w));
}

template <int D>
void Launch(HistoryAttentionArgs args, cudaStream_t stream) {
  constexpr int kFixedBytes = static_cast<int>(sizeof(HistoryShared<D>)) + kSumFloats * 4;
  static_assert(sizeof(HistoryShared<D>) % 16 == 0 && UnitStride(D) % 16 == 0);
  static const int most = [] {
    int device = 0, bytes = 0;
    PLIANT_CUDA_CHECK(cudaGetDevice(&device));
    PLIANT_CUDA_CHECK(
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    PLIANT_CUDA_CHECK(cudaFuncSetAttribute(HistoryAttentionKernel<D>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return bytes;
  }();
  const std::int64_t logits = LogitBytes(args) <= kMostLogitBytes ? LogitBytes(args) : 0;
  const std::int64_t wanted = std::int64_t{args.most_tokens} / kBlockTokens * 2 * kPlanes +
                              args.most_dropped / kBlockTokens;
  args.staged_units = static_cast<int>(
      std::clamp<std::int64_t>((most - kFixedBytes - logits) / UnitStride(D), 0, wanted));
  const auto bytes = static_cast<std::size_t>(kFixedBytes + logits +
                                              std::int64_t{args.staged_units} * UnitStride(D));
  LaunchOverlapped(true, HistoryAttentionKernel<D>, dim3(args.kv_heads, args.count),
                   dim3(kHistoryThreads), bytes, stream, args);
}

}  // namespace

void LaunchHistoryAttention(const HistoryAttentionArgs& args, cudaStream_t stream) {
  if (args.count == 0) return;
  ForHeadDim(args.head_dim, [&]<int D>() { Launch<D>(args, stream); });
}

}  // namespace pliant::cuda
