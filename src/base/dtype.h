// Room: base. Element types of tensors in model files. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pliant {

/// Types a weight may be stored in. Quantised ones group 32 (Q*_0/1) or 256 (Q*_K) elements of a row into a block.
enum class DType : std::uint8_t {
  kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K,
};

struct DTypeTraits {
  std::string_view name;
  int block_elements;  // elements of a block; a row's length must be a multiple
  int block_bytes;     // bytes of a block
};

constexpr DTypeTraits Traits(DType type) {
  switch (type) {
    case DType::kF32: return {"F32", 1, 4};
    case DType::kF16: return {"F16", 1, 2};
    case DType::kBF16: return {"BF16", 1, 2};
    case DType::kQ8_0: return {"Q8_0", 32, 34};
    case DType::kQ4_0: return {"Q4_0", 32, 18};
    case DType::kQ4_1: return {"Q4_1", 32, 20};
    case DType::kQ5_0: return {"Q5_0", 32, 22};
    case DType::kQ5_1: return {"Q5_1", 32, 24};
    case DType::kQ4_K: return {"Q4_K", 256, 144};
    case DType::kQ5_K: return {"Q5_K", 256, 176};
    case DType::kQ6_K: return {"Q6_K", 256, 210};
  }
  return {"?", 1, 0};
}

/// Bytes of a row of `elements`, which must be a multiple of the block size.
constexpr std::size_t RowBytes(DType type, std::size_t elements) {
  const DTypeTraits t = Traits(type);
  return elements / t.block_elements * t.block_bytes;
}

}  // namespace pliant
