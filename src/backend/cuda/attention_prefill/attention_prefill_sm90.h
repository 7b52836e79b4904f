// Room: backend/cuda. The form of prefill attention for sm_90a (wgmma and the tensor copy engine).
// Called through attention_prefill.h only.
#pragma once

#include "backend/cuda/attention_prefill/attention_prefill.h"

namespace pliant::cuda {

inline constexpr int kWarpgroupTileRows = 128;

/// Has the current device it, for this head dimension? A multi-device process has equal devices.
bool HasWarpgroupPrefill(int head_dim);
void LaunchWarpgroupPrefill(const PrefillArgs& args, cudaStream_t stream);

}  // namespace pliant::cuda
