// Room: backend. From one row of a fused projection to the cache: norms, RoPE, the K/V code, the
// rows of the planes. Pure functions of a row, so that a row's bytes depend on nothing else in the
// batch; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/cpu/cpu_level.h"
#include "backend/plane_code.h"

namespace pliant {

/// What all rows of one call share. Spans of [head_dim] or empty.
struct KvWriteShape {
  int head_dim = 0;
  std::span<const float> q_norm;
  std::span<const float> k_norm;
  float norm_eps = 0;
};

/// Where one head's row of K or V goes: a row in each resident plane, and its scale beside plane 0.
struct KvRowTarget {
  int planes = 0;
  std::uint8_t* rows[kPlanes] = {};
  std::uint16_t* scale = nullptr;
};

/// The part of a ChannelCode for one (layer, KV head), [head_dim] each; null: scale 1, center 0.
struct ChannelRow {
  const float* scale = nullptr;
  const float* center = nullptr;
};

struct KvWriteKernel {
  /// x = rope(norm(x)), with the norm of queries or of keys. cosine, sine: [head_dim / 2].
  void (*query)(const KvWriteShape& shape, const float* cosine, const float* sine, float* x);
  void (*key)(const KvWriteShape& shape, const float* cosine, const float* sine, float* x);
  /// x = the mix of x * channel (or of x): what meets coded keys.
  void (*code_query)(int head_dim, const float* channel, float* x);
  /// Writes (x - center) / scale into `target`, bit for bit what plane_code.h would; of keys the
  /// mix.
  void (*store_key)(int head_dim, ChannelRow code, const float* x, const KvRowTarget& target);
  void (*store_value)(int head_dim, ChannelRow code, const float* x, const KvRowTarget& target);
};

const KvWriteKernel& ChooseKvWriteKernel(CpuLevel level);

}  // namespace pliant
