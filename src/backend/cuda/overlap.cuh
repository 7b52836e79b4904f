// Room: backend/cuda. Programmatic dependent launch: a kernel's first blocks may start, and do what
// does not depend on the kernel before (load weights, set up), while that one still runs.
//
// Every kernel launched by LaunchOverlapped calls WaitForPrevious in every thread that does
// anything, before it touches what another kernel writes or reads, and before any block of it can
// end: then the end of a kernel means the end of all before it. Below sm_90 both are nothing.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "backend/cuda/cuda_check.h"

namespace pliant::cuda {

/// The next kernel's blocks may start from here on, as far as there is room for them.
__device__ __forceinline__ void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// All kernels before have ended and what they wrote can be seen.
__device__ __forceinline__ void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Does the current device know programmatic launches?
inline bool DeviceOverlaps() {
  static const bool overlaps = [] {
    int device = 0, major = 0;
    PLIANT_CUDA_CHECK(cudaGetDevice(&device));
    PLIANT_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
  }();
  return overlaps;
}

/// With `overlap` false an ordinary launch.
template <typename... Parameters, typename... Arguments>
void LaunchOverlapped(bool overlap, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                      std::size_t shared, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap && DeviceOverlaps() ? 1 : 0;
  PLIANT_CUDA_CHECK(cudaLaunchKernelEx(
      &config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...));
}

/// Steps of more rows than this gain nothing from it.
inline constexpr int kMostOverlappedRows = 512;

}  // namespace pliant::cuda
