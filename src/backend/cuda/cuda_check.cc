#include "backend/cuda/cuda_check.h"

#include <cstdio>
#include <cstdlib>

namespace pliant::cuda {

void CudaFailed(const char* file, int line, const char* call, cudaError_t error) {
  std::fprintf(stderr, "%s:%d: CUDA call failed: %s: %s: %s\n", file, line, call,
               cudaGetErrorName(error), cudaGetErrorString(error));
  std::fflush(stderr);
  std::abort();
}

bool DeviceAvailable() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) cudaGetLastError();  // clears the error, which is not ours to die of
  return error == cudaSuccess && count > 0;
}

}  // namespace pliant::cuda
