// Room: backend. Row-wise f32 ops of the CPU backend, vectorised with Highway. Pure, any thread:
// each call works on rows [begin, end). A row's result does not depend on the range it is in.
#pragma once

#include <cstdint>

#include "backend/cpu/cpu_level.h"

namespace pliant {

struct CpuOps {
  /// out = x / sqrt(mean(x^2) + eps) * weight for one row of `cols`. x may be out.
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t cols, float* out);
  /// out[i] = silu(gate[i]) * up[i] for i < count; silu(g) = g / (1 + exp(-g)). An element's result
  /// does not depend on its place.
  void (*silu_mul)(const float* gate, const float* up, std::int64_t count, float* out);
};

const CpuOps& ChooseCpuOps(CpuLevel level);

}  // namespace pliant
