// Room: backend/cuda. Row-wise ops around the products: embedding, RMSNorm, SiLU. Activations are
// f32 in the residual stream and in what products give, bf16 in what they take. Called by the
// thread that owns the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/cuda_types.h"

namespace pliant::cuda {

/// out[r] = table[tokens[r]], as f32.
void LaunchEmbed(const std::uint16_t* table, WeightType type, const std::int32_t* tokens, int rows,
                 int cols, float* out, cudaStream_t stream);

/// out[r] = x[i] / rms(x[i]) * weight, i = sources[r], or r without sources. x may be out when both
/// are f32 and sources is null.
void LaunchRmsNorm(const float* x, const std::int32_t* sources, const float* weight, float eps,
                   int rows, int cols, void* out, ElementType out_type, cudaStream_t stream);

/// gate_up [rows][2 features], gate first: out[rows][features] = silu(gate) * up, as bf16. Features
/// are a multiple of 4; of 8 when gate_up is bf16.
void LaunchSiluMul(const float* gate_up, int rows, int features, std::uint16_t* out,
                   cudaStream_t stream);
void LaunchSiluMul(const std::uint16_t* gate_up, int rows, int features, std::uint16_t* out,
                   cudaStream_t stream);

/// f32 to bf16, round to nearest even.
void LaunchToBf16(const float* from, std::int64_t count, std::uint16_t* to, cudaStream_t stream);

/// bf16 to fp16, divided by kHalfRange; what is beyond becomes infinite. `count` is even.
void LaunchToHalf(const std::uint16_t* from, std::int64_t count, std::uint16_t* to,
                  cudaStream_t stream);

}  // namespace pliant::cuda
