// Room: backend/cuda. A weight matrix times one row, at the speed of memory: cuBLASLt's kernels for
// one row read it at about 80 %. Called by the thread that owns the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/cuda_types.h"

namespace pliant::cuda {

/// Can LaunchGemv work rows of k? (16-byte loads, and the row fits shared memory.)
constexpr bool GemvFits(std::int64_t k) { return k % 8 == 0 && k * 2 <= 48 * 1024; }

/// out[n] = weight [n][k] x[k] (+ bias[n]); with `accumulate`, out += that. x bf16, weight of
/// `type`, both 16-byte aligned; bias (or null) and out f32; sums f32.
void LaunchGemv(const std::uint16_t* x, const std::uint16_t* weight, WeightType type,
                const float* bias, std::int64_t n, std::int64_t k, float* out, bool accumulate,
                cudaStream_t stream);

}  // namespace pliant::cuda
