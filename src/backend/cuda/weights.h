// Room: backend/cuda. Weights on the device: matrices as bf16, vectors as f32. Owned by the engine
// thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device_memory.h"

namespace pliant::cuda {

struct DeviceMatrix {
  std::int64_t rows = 0, cols = 0;
  DeviceArray<std::uint16_t> data;  // bf16, row-major
};

/// Stacks the parts, dequantised and rounded to bf16. InvalidArgument for parts that lie about
/// themselves.
Result<DeviceMatrix> UploadMatrix(std::span<const HostMatrix> parts);

}  // namespace pliant::cuda
