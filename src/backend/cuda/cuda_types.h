// Room: backend/cuda. Element types of activations on the device, and where codes lie there. Any
// thread.
#pragma once

#include <cstddef>

namespace pliant::cuda {

enum class ElementType { kF32, kBf16 };

constexpr std::size_t ElementBytes(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }

/// A ChannelCode of one layer on the device, [kv_heads][head_dim] each.
struct ChannelPointers {
  const float* scale = nullptr;
  const float* center = nullptr;
};

}  // namespace pliant::cuda
