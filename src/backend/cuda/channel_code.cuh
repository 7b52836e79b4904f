// Room: backend/cuda. V's static code (KvCode in backend.h), undone in the last step of attention.
#pragma once

#include "backend/cuda/cuda_types.h"

namespace pliant::cuda {

/// The weighted mean `x` of stored values in `channel` (of a layer), as the mean of V. No pointers:
/// scale 1, center 0.
__device__ __forceinline__ float Uncoded(const ChannelPointers& code, int channel, float x) {
  return code.scale == nullptr ? x : fmaf(x, code.scale[channel], code.center[channel]);
}

}  // namespace pliant::cuda
