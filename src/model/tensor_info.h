// Room: model. A tensor as a model file lists it. Plain values, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace pliant {

struct TensorInfo {
  std::string name;
  DType type = DType::kF32;
  std::string type_name;  // as the file calls it
  bool readable = true;  // false: a type of safetensors that no weight may have (I64, F8_E4M3, ...)
  std::vector<std::int64_t> shape;  // row-major: the last dimension is contiguous
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;  // from the start of its file
  int file = 0;              // which shard

  /// "[49152, 576]".
  std::string ShapeText() const {
    std::string text = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) {
      if (i > 0) text += ", ";
      text += std::to_string(shape[i]);
    }
    return text + "]";
  }
};

/// Largest number of elements a tensor may have; keeps every product of sizes far from overflow.
inline constexpr std::uint64_t kMaxTensorElements = std::uint64_t{1} << 42;

}  // namespace pliant
