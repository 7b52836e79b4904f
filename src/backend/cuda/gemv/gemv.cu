#include "backend/cuda/gemv/gemv.h"
#include "backend/cuda/overlap.cuh"
#include "backend/cuda/ptx.cuh"

namespace pliant::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kLoads = 4;  // 16-byte loads of weights a lane has under way, twice

template <WeightType kType>
__device__ __forceinline__ float DotPair(std::uint32_t w, std::uint32_t x, float sum) {
  const float2 weight = WeightPair<kType>(w);
  return fmaf(weight.y, Bf16High(x), fmaf(weight.x, Bf16Low(x), sum));
}
template <WeightType kType>
__device__ __forceinline__ float Dot(uint4 w, uint4 x, float sum) {
  sum = DotPair<kType>(w.x, x.x, sum);
  sum = DotPair<kType>(w.y, x.y, sum);
  sum = DotPair<kType>(w.z, x.z, sum);
  return DotPair<kType>(w.w, x.w, sum);
}

/// One warp an output. The first weights are on their way before the kernel that makes x has ended.
template <WeightType kType>
__global__ void __launch_bounds__(kThreads, 2)
    GemvKernel(const std::uint16_t* x, const std::uint16_t* weight, const float* bias, int n,
               int words, float* out, bool accumulate) {
  extern __shared__ __align__(16) uint4 shared_x[];
  const int lane = threadIdx.x & 31, row = blockIdx.x * kWarps + (threadIdx.x >> 5);
  const uint4* const from =
      reinterpret_cast<const uint4*>(weight) + static_cast<std::int64_t>(min(row, n - 1)) * words;
  uint4 now[kLoads];
  const auto load = [&](uint4(&to)[kLoads], int first) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = first + 32 * i + lane;
      to[i] = at < words ? __ldcs(from + at) : make_uint4(0, 0, 0, 0);
    }
  };
  load(now, 0);
  LetNextStart();
  WaitForPrevious();
  for (int i = threadIdx.x; i < words; i += kThreads)
    shared_x[i] = __ldcg(reinterpret_cast<const uint4*>(x) + i);
  __syncthreads();
  float sums[kLoads] = {};
  for (int first = 0; first < words; first += 32 * kLoads) {
    uint4 next[kLoads];
    load(next, first + 32 * kLoads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = first + 32 * i + lane;
      if (at < words) sums[i] = Dot<kType>(now[i], shared_x[at], sums[i]);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) now[i] = next[i];
  }
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, m);
  if (lane != 0 || row >= n) return;
  if (bias != nullptr) sum += bias[row];
  out[row] = accumulate ? out[row] + sum : sum;
}

}  // namespace

void LaunchGemv(const std::uint16_t* x, const std::uint16_t* weight, WeightType type,
                const float* bias, std::int64_t n, std::int64_t k, float* out, bool accumulate,
                cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((n + kWarps - 1) / kWarps));
  const auto kernel =
      type == WeightType::kF16 ? GemvKernel<WeightType::kF16> : GemvKernel<WeightType::kBf16>;
  LaunchOverlapped(true, kernel, grid, dim3(kThreads), static_cast<std::size_t>(k) * 2, stream, x,
                   weight, bias, static_cast<int>(n), static_cast<int>(k / 8), out, accumulate);
}

}  // namespace pliant::cuda
