#include "backend/cuda/rowwise/rowwise.h"

#include <algorithm>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/ptx.cuh"

namespace pliant::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void EmbedKernel(const std::uint32_t* table, const std::int32_t* tokens, int pairs, float2* out) {
  const std::int64_t row = blockIdx.x;
  const std::uint32_t* const from = table + static_cast<std::int64_t>(tokens[row]) * pairs;
  for (int i = threadIdx.x; i < pairs; i += kThreads) out[row * pairs + i] = make_float2(Bf16Low(from[i]), Bf16High(from[i]));
}

template <ElementType kOut>
__global__ void __launch_bounds__(kThreads) RmsNormKernel(const float* x, const std::int32_t* sources, const float* weight, float eps, int cols, void* out) {
  const std::int64_t row = blockIdx.x, source = sources == nullptr ? row : sources[row];
  const float* const from = x + source * cols;
  float squares = 0.f;
  for (int i = threadIdx.x; i < cols; i += kThreads) squares = fmaf(from[i], from[i], squares);
  for (int m = 16; m > 0; m >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, m);
  __shared__ float sums[kThreads / 32];
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = squares;
  __syncthreads();
  squares = 0.f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) squares += sums[i];
  const float inverse = 1.f / sqrtf(squares / cols + eps);
  for (int i = threadIdx.x; i < cols; i += kThreads) {
    const float y = from[i] * inverse * weight[i];
    if constexpr (kOut == ElementType::kF32) {
      static_cast<float*>(out)[row * cols + i] = y;
    } else {
      static_cast<__nv_bfloat16*>(out)[row * cols + i] = __float2bfloat16_rn(y);
    }
  }
}

__global__ void SiluMulKernel(const float* gate_up, int features, __nv_bfloat16* out) {
  const std::int64_t row = blockIdx.y;
  const float* const from = gate_up + row * 2 * features;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= features) return;
  const float gate = from[i];
  out[row * features + i] = __float2bfloat16_rn(gate / (1.f + __expf(-gate)) * from[features + i]);
}

__global__ void ToBf16Kernel(const float* from, std::int64_t count, __nv_bfloat16* to) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) to[i] = __float2bfloat16_rn(from[i]);
}

}  // namespace

void LaunchEmbed(const std::uint16_t* table, const std::int32_t* tokens, int rows, int cols, float* out, cudaStream_t stream) {
  if (rows == 0) return;
  EmbedKernel<<<rows, kThreads, 0, stream>>>(reinterpret_cast<const std::uint32_t*>(table), tokens, cols / 2, reinterpret_cast<float2*>(out));
  PLIANT_CUDA_CHECK_LAUNCH();
}

void LaunchRmsNorm(const float* x, const std::int32_t* sources, const float* weight, float eps, int rows, int cols, void* out, ElementType out_type,
                   cudaStream_t stream) {
  if (rows == 0) return;
  if (out_type == ElementType::kF32) {
    RmsNormKernel<ElementType::kF32><<<rows, kThreads, 0, stream>>>(x, sources, weight, eps, cols, out);
  } else {
    RmsNormKernel<ElementType::kBf16><<<rows, kThreads, 0, stream>>>(x, sources, weight, eps, cols, out);
  }
  PLIANT_CUDA_CHECK_LAUNCH();
}

void LaunchSiluMul(const float* gate_up, int rows, int features, std::uint16_t* out, cudaStream_t stream) {
  // A grid's y is limited to 65535.
  for (int first = 0; first < rows; first += 65535) {
    const dim3 grid((features + kThreads - 1) / kThreads, std::min(65535, rows - first));
    SiluMulKernel<<<grid, kThreads, 0, stream>>>(gate_up + static_cast<std::int64_t>(first) * 2 * features, features,
                                                 reinterpret_cast<__nv_bfloat16*>(out) + static_cast<std::int64_t>(first) * features);
    PLIANT_CUDA_CHECK_LAUNCH();
  }
}

void LaunchToBf16(const float* from, std::int64_t count, std::uint16_t* to, cudaStream_t stream) {
  if (count == 0) return;
  ToBf16Kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(from, count, reinterpret_cast<__nv_bfloat16*>(to));
  PLIANT_CUDA_CHECK_LAUNCH();
}

}  // namespace pliant::cuda
