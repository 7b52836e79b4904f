// Room: backend/cuda. Element types of activations on the device, and where codes lie there. Any
// thread.
#pragma once

#include <cstddef>

namespace pliant::cuda {

enum class ElementType { kF32, kBf16 };

constexpr std::size_t ElementBytes(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }

/// Of a weight matrix; sixteen bits either way.
enum class WeightType { kBf16, kF16 };

/// fp16 ends at 65504: what a product with fp16 weights takes is divided by this, and its sums are
/// multiplied by it. Activations up to 4.2e6 fit; below 4e-3 they lose bits that bf16 weights'
/// products would have kept, at an absolute error of 2e-6.
inline constexpr float kHalfRange = 64.f;

/// A ChannelCode of one layer on the device, [kv_heads][head_dim] each.
struct ChannelPointers {
  const float* scale = nullptr;
  const float* center = nullptr;
};

}  // namespace pliant::cuda
