#include "backend/cuda/device_memory.h"

#include <string>

namespace pliant::cuda {
namespace internal {

Result<void*> Allocate(MemoryKind kind, std::size_t bytes, std::string_view what) {
  if (bytes == 0) return static_cast<void*>(nullptr);
  void* pointer = nullptr;
  const cudaError_t error = kind == MemoryKind::kDevice
                                ? cudaMalloc(&pointer, bytes)
                                : cudaHostAlloc(&pointer, bytes, cudaHostAllocDefault);
  if (error == cudaSuccess) return pointer;
  cudaGetLastError();
  if (error != cudaErrorMemoryAllocation) {
    CudaFailed(__FILE__, __LINE__, kind == MemoryKind::kDevice ? "cudaMalloc" : "cudaHostAlloc",
               error);
  }
  std::string message(what);
  message += ": asked for " + std::to_string(bytes >> 20) + " MiB of " +
             (kind == MemoryKind::kDevice ? "device" : "pinned host") + " memory";
  if (kind == MemoryKind::kDevice) {
    std::size_t free = 0, total = 0;
    PLIANT_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    message +=
        "; " + std::to_string(free >> 20) + " of " + std::to_string(total >> 20) + " MiB are free";
  }
  return OutOfMemory(std::move(message));
}

void Release(MemoryKind kind, void* pointer) noexcept {
  if (pointer == nullptr) return;
  // At process end the driver may be gone already; that is not an error worth dying of.
  if (kind == MemoryKind::kDevice) {
    cudaFree(pointer);
  } else {
    cudaFreeHost(pointer);
  }
}

}  // namespace internal

bool Event::Done() const {
  const cudaError_t state = cudaEventQuery(event_);
  if (state == cudaErrorNotReady) return false;
  PLIANT_CUDA_CHECK(state);
  return true;
}

}  // namespace pliant::cuda
