// Room: backend/cuda. A CUDA error ends the process naming the call: a device in an error state
// cannot be trusted to produce right tokens. The one exception is running out of memory while
// allocating (device_memory.h), which is a Status. Any thread.
#pragma once

#include <cuda_runtime_api.h>

namespace pliant::cuda {

/// Prints "file:line: CUDA call failed: call: name: text" to standard error and aborts.
[[noreturn]] void CudaFailed(const char* file, int line, const char* call, cudaError_t error);

/// True when the environment has a usable device; never fails.
bool DeviceAvailable();

}  // namespace pliant::cuda

/// Runs a CUDA runtime call and stops the process when it fails.
#define PLIANT_CUDA_CHECK(call)                                             \
  do {                                                                      \
    const cudaError_t pliant_error_ = (call);                               \
    if (pliant_error_ != cudaSuccess) [[unlikely]]                          \
      ::pliant::cuda::CudaFailed(__FILE__, __LINE__, #call, pliant_error_); \
  } while (false)

/// After a kernel launch: a refused launch is caught here, a faulting kernel at the next
/// synchronising call.
#define PLIANT_CUDA_CHECK_LAUNCH() PLIANT_CUDA_CHECK(cudaGetLastError())
