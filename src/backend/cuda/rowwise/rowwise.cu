#include <algorithm>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/overlap.cuh"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/rowwise/rowwise.h"

namespace pliant::cuda {
namespace {

constexpr int kThreads = 256;

template <WeightType kType>
__global__ void EmbedKernel(const std::uint32_t* table, const std::int32_t* tokens, int pairs,
                            float2* out) {
  const std::int64_t row = blockIdx.x;
  const std::uint32_t* const from = table + static_cast<std::int64_t>(tokens[row]) * pairs;
  for (int i = threadIdx.x; i < pairs; i += kThreads)
    out[row * pairs + i] = WeightPair<kType>(from[i]);
}

constexpr int kNormThreads = 512,
              kNormWords = 4;  // up to 4 * 4 * 512 columns stay in registers between the two passes

template <ElementType kOut>
__device__ __forceinline__ void StoreFour(void* out, std::int64_t at, float4 v) {
  if constexpr (kOut == ElementType::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(out) + at) = v;
  } else {
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(out) + at) =
        make_uint2(PackBf16(v.x, v.y), PackBf16(v.z, v.w));
  }
}

/// Columns a multiple of 4. Longer rows than the registers hold are read twice.
template <ElementType kOut>
__global__ void __launch_bounds__(kNormThreads)
    RmsNormKernel(const float* x, const std::int32_t* sources, const float* weight, float eps,
                  int cols, void* out) {
  LetNextStart();
  WaitForPrevious();
  const std::int64_t row = blockIdx.x, source = sources == nullptr ? row : sources[row];
  const float4* const from = reinterpret_cast<const float4*>(x + source * cols);
  const float4* const scale = reinterpret_cast<const float4*>(weight);
  const int words = cols / 4;
  float4 held[kNormWords];
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kNormWords; ++i) {
    const int at = threadIdx.x + i * kNormThreads;
    held[i] = at < words ? from[at] : make_float4(0.f, 0.f, 0.f, 0.f);
  }
#pragma unroll
  for (int i = 0; i < kNormWords; ++i)
    squares += held[i].x * held[i].x + held[i].y * held[i].y + held[i].z * held[i].z +
               held[i].w * held[i].w;
  for (int at = threadIdx.x + kNormWords * kNormThreads; at < words; at += kNormThreads) {
    const float4 v = from[at];
    squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  for (int m = 16; m > 0; m >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, m);
  __shared__ float sums[kNormThreads / 32];
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = squares;
  __syncthreads();
  squares = 0.f;
#pragma unroll
  for (int i = 0; i < kNormThreads / 32; ++i) squares += sums[i];
  const float inverse = 1.f / sqrtf(squares / cols + eps);
  auto finish = [&](int at, float4 v) {
    const float4 w = scale[at];
    StoreFour<kOut>(out, row * cols + 4 * at,
                    make_float4(v.x * inverse * w.x, v.y * inverse * w.y, v.z * inverse * w.z,
                                v.w * inverse * w.w));
  };
#pragma unroll
  for (int i = 0; i < kNormWords; ++i) {
    const int at = threadIdx.x + i * kNormThreads;
    if (at < words) finish(at, held[i]);
  }
  for (int at = threadIdx.x + kNormWords * kNormThreads; at < words; at += kNormThreads)
    finish(at, from[at]);
}

__device__ __forceinline__ float SiluTimes(float gate, float up) {
  return gate / (1.f + __expf(-gate)) * up;
}

/// Features a multiple of 4.
__global__ void SiluMulKernel(const float* gate_up, int features, std::uint16_t* out) {
  LetNextStart();
  WaitForPrevious();
  const std::int64_t row = blockIdx.y;
  const int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= features) return;
  const float4 g = *reinterpret_cast<const float4*>(gate_up + row * 2 * features + i);
  const float4 u = *reinterpret_cast<const float4*>(gate_up + row * 2 * features + features + i);
  StoreFour<ElementType::kBf16>(out, row * features + i,
                                make_float4(SiluTimes(g.x, u.x), SiluTimes(g.y, u.y),
                                            SiluTimes(g.z, u.z), SiluTimes(g.w, u.w)));
}

__device__ __forceinline__ std::uint32_t SiluTimesPair(std::uint32_t gate, std::uint32_t up) {
  return PackBf16(SiluTimes(Bf16Low(gate), Bf16Low(up)), SiluTimes(Bf16High(gate), Bf16High(up)));
}

/// Features a multiple of 8.
__global__ void SiluMulBf16Kernel(const std::uint16_t* gate_up, int features, std::uint16_t* out) {
  const std::int64_t row = blockIdx.y;
  const int i = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= features) return;
  const uint4 g = *reinterpret_cast<const uint4*>(gate_up + row * 2 * features + i);
  const uint4 u = *reinterpret_cast<const uint4*>(gate_up + row * 2 * features + features + i);
  *reinterpret_cast<uint4*>(out + row * features + i) =
      make_uint4(SiluTimesPair(g.x, u.x), SiluTimesPair(g.y, u.y), SiluTimesPair(g.z, u.z),
                 SiluTimesPair(g.w, u.w));
}

__global__ void ToHalfKernel(const std::uint32_t* from, std::int64_t pairs, __half2* to) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i >= pairs) return;
  constexpr float kBy = 1.f / kHalfRange;
  to[i] = __floats2half2_rn(Bf16Low(from[i]) * kBy, Bf16High(from[i]) * kBy);
}

__global__ void ToBf16Kernel(const float* from, std::int64_t count, __nv_bfloat16* to) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) to[i] = __float2bfloat16_rn(from[i]);
}

}  // namespace

void LaunchEmbed(const std::uint16_t* table, WeightType type, const std::int32_t* tokens, int rows,
                 int cols, float* out, cudaStream_t stream) {
  if (rows == 0) return;
  const auto kernel =
      type == WeightType::kF16 ? EmbedKernel<WeightType::kF16> : EmbedKernel<WeightType::kBf16>;
  kernel<<<rows, kThreads, 0, stream>>>(reinterpret_cast<const std::uint32_t*>(table), tokens,
                                        cols / 2, reinterpret_cast<float2*>(out));
  PLIANT_CUDA_CHECK_LAUNCH();
}

void LaunchRmsNorm(const float* x, const std::int32_t* sources, const float* weight, float eps,
                   int rows, int cols, void* out, ElementType out_type, cudaStream_t stream) {
  if (rows == 0) return;
  if (out_type == ElementType::kF32) {
    LaunchOverlapped(rows <= kMostOverlappedRows, RmsNormKernel<ElementType::kF32>, dim3(rows),
                     dim3(kNormThreads), 0, stream, x, sources, weight, eps, cols, out);
  } else {
    LaunchOverlapped(rows <= kMostOverlappedRows, RmsNormKernel<ElementType::kBf16>, dim3(rows),
                     dim3(kNormThreads), 0, stream, x, sources, weight, eps, cols, out);
  }
}

void LaunchSiluMul(const float* gate_up, int rows, int features, std::uint16_t* out,
                   cudaStream_t stream) {
  // A grid's y is limited to 65535.
  for (int first = 0; first < rows; first += 65535) {
    const dim3 grid((features / 4 + kThreads - 1) / kThreads, std::min(65535, rows - first));
    LaunchOverlapped(rows <= kMostOverlappedRows, SiluMulKernel, grid, dim3(kThreads), 0, stream,
                     gate_up + static_cast<std::int64_t>(first) * 2 * features, features,
                     out + static_cast<std::int64_t>(first) * features);
  }
}

void LaunchSiluMul(const std::uint16_t* gate_up, int rows, int features, std::uint16_t* out,
                   cudaStream_t stream) {
  for (int first = 0; first < rows; first += 65535) {
    const dim3 grid((features / 8 + kThreads - 1) / kThreads, std::min(65535, rows - first));
    SiluMulBf16Kernel<<<grid, kThreads, 0, stream>>>(
        gate_up + static_cast<std::int64_t>(first) * 2 * features, features,
        out + static_cast<std::int64_t>(first) * features);
    PLIANT_CUDA_CHECK_LAUNCH();
  }
}

void LaunchToHalf(const std::uint16_t* from, std::int64_t count, std::uint16_t* to,
                  cudaStream_t stream) {
  if (count == 0) return;
  const std::int64_t pairs = count / 2;
  ToHalfKernel<<<static_cast<unsigned>((pairs + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      reinterpret_cast<const std::uint32_t*>(from), pairs, reinterpret_cast<__half2*>(to));
  PLIANT_CUDA_CHECK_LAUNCH();
}

void LaunchToBf16(const float* from, std::int64_t count, std::uint16_t* to, cudaStream_t stream) {
  if (count == 0) return;
  ToBf16Kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      from, count, reinterpret_cast<__nv_bfloat16*>(to));
  PLIANT_CUDA_CHECK_LAUNCH();
}

}  // namespace pliant::cuda
