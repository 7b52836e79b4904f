// Room: backend/cuda. The backend of NVIDIA GPUs. Threads and order as backend.h says: one owner
// thread; ops are enqueued on one stream, EndStep waits for it.
//
// Numbers: weights bf16; what a product takes is bf16, what it gives f32 (cuBLASLt, f32 sums); the
// residual stream, Q, K and V before their code, norms and attention f32. Prefill attention reads K
// and V as fp16, decode attention reads the planes themselves.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace pliant {

struct CudaOptions {
  int device = 0;
  bool graphs = true;  // decode steps as CUDA graphs
};

/// Unavailable when there is no usable CUDA device.
Result<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options);

}  // namespace pliant
