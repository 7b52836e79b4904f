// Room: backend/cuda. Element types of activations on the device. Any thread.
#pragma once

#include <cstddef>

namespace pliant::cuda {

enum class ElementType { kF32, kBf16 };

constexpr std::size_t ElementBytes(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }

}  // namespace pliant::cuda
