// Room: backend/cuda. Weights on the device: matrices as bf16, or as fp16 where the file has that;
// vectors as f32. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/cuda_types.h"
#include "backend/cuda/device_memory.h"

namespace pliant::cuda {

struct DeviceMatrix {
  std::int64_t rows = 0, cols = 0;
  WeightType type = WeightType::kBf16;
  DeviceArray<std::uint16_t> data;  // row-major
};

/// Stacks the parts: fp16 ones as they are, others dequantised and rounded to bf16; where fp16 is
/// mixed with others, all to bf16. InvalidArgument for parts that lie about
/// themselves.
Result<DeviceMatrix> UploadMatrix(std::span<const HostMatrix> parts);

}  // namespace pliant::cuda
