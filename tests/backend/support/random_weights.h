// Random weights of every file type, for tests and benchmarks of packed matrices.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "backend/backend.h"
#include "backend/dequant.h"

namespace pliant::testing {

inline constexpr DType kAllTypes[] = {DType::kF32,  DType::kF16,  DType::kBF16, DType::kQ8_0,
                                      DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1,
                                      DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};

/// A matrix that owns its bytes.
struct OwnedMatrix {
  HostMatrix host;
  std::vector<std::byte> bytes;
  std::vector<std::int32_t> order;

  HostMatrix View() const {
    HostMatrix view = host;
    view.data = bytes;
    view.order = order;
    return view;
  }
  /// Row r (after `order`) in f32.
  std::vector<float> Row(std::int64_t r) const {
    const std::int64_t source = order.empty() ? r : order[r];
    std::vector<float> out(host.cols);
    DequantizeRow(host.type, bytes.data() + source * RowBytes(host.type, host.cols), out);
    return out;
  }
};

inline void PutHalf(std::byte* p, float value) {
  const std::uint16_t bits = FloatToF16(value);
  std::memcpy(p, &bits, sizeof bits);
}

/// Values about 0.1 in size with both signs; every bit pattern of the codes occurs.
inline OwnedMatrix RandomMatrix(DType type, std::int64_t rows, std::int64_t cols,
                                std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> unit(-1, 1);
  OwnedMatrix matrix;
  matrix.host.type = type;
  matrix.host.rows = rows;
  matrix.host.cols = cols;
  matrix.bytes.resize(rows * RowBytes(type, cols));
  const DTypeTraits traits = Traits(type);
  for (std::byte& byte : matrix.bytes) byte = static_cast<std::byte>(random());
  for (std::byte* p = matrix.bytes.data(); p < matrix.bytes.data() + matrix.bytes.size();
       p += traits.block_bytes) {
    const float d = 0.01f * (1.0f + 0.5f * unit(random));
    switch (type) {
      case DType::kF32: {
        const float value = 0.1f * unit(random);
        std::memcpy(p, &value, sizeof value);
        break;
      }
      case DType::kF16:
        PutHalf(p, 0.1f * unit(random));
        break;
      case DType::kBF16: {
        const std::uint16_t bits = FloatToBf16(0.1f * unit(random));
        std::memcpy(p, &bits, sizeof bits);
        break;
      }
      case DType::kQ8_0:
        PutHalf(p, d / 10);
        break;
      case DType::kQ4_0:
      case DType::kQ5_0:
        PutHalf(p, unit(random) < 0 ? -d : d);
        break;
      case DType::kQ4_1:
      case DType::kQ5_1:
        PutHalf(p, d);
        PutHalf(p + 2, -8 * d * (1 + 0.2f * unit(random)));
        break;
      case DType::kQ4_K:
      case DType::kQ5_K:
        PutHalf(p, d / 30);
        PutHalf(p + 2, d / 5);
        break;
      case DType::kQ6_K:
        PutHalf(p + 208, d / 200);
        break;
    }
  }
  return matrix;
}

}  // namespace pliant::testing
