// Room: backend/cuda. Where a nibble and a scale lie in a plane page on the GPU. The bytes of a
// page are those of KvGeometry (plane_code.h), its order is made for the attention kernel: one
// (layer, head) unit is
//   [rows: 32 tokens * head_dim / 2 bytes][32 bf16 scales; meaningful in plane 0 only]
// so that one bulk copy brings a unit with its scales, and so that 8-bit tensor core operands are
// read from shared memory without conflicts and without a transposition:
//   K  row of a token as in plane_code.h (byte j: dim 2j low, 2j + 1 high); with head_dim 256 its
//   16-byte chunks are XORed by 4
//      in odd tokens.
//   V  four tokens of a group (token & 7 equal) form a 32-bit word: byte token >> 3, low nibble dim
//   2p, high nibble 2p + 1.
//      A group's words, p = 8 i + g, lie as [i / 4][g xor 2 (group / 2)][i % 4].
// The scales of a unit lie as [token & 7][token >> 3]. Pure functions, host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/plane_code.h"
#include "base/host_device.h"

namespace pliant::cuda {

inline constexpr int kScaleBytes = kBlockTokens * 2;  // of one unit

/// Bytes from one (layer, head) unit of a page to the next.
PLIANT_HOST_DEVICE constexpr int UnitStride(int head_dim) {
  return kBlockTokens * head_dim / 2 + kScaleBytes;
}

/// Byte of a unit that holds dim `dim` of token `token` of K; odd dims are the high nibble.
PLIANT_HOST_DEVICE constexpr int KByte(int head_dim, int token, int dim) {
  const int swizzle = head_dim == 256 ? (token & 1) << 6 : 0;
  return token * (head_dim / 2) + ((dim >> 1) ^ swizzle);
}

/// The same for V.
PLIANT_HOST_DEVICE constexpr int VByte(int head_dim, int token, int dim) {
  const int group = token & 7, pair = dim >> 1, i = pair >> 3, g = pair & 7;
  const int run = head_dim >= 64 ? 4 : 2;  // i's that lie together
  const int chunk = (i / run) * 8 + (g ^ (2 * (group >> 1)));
  return group * (head_dim * 2) + (chunk * run + i % run) * 4 + (token >> 3);
}

/// Byte of a unit (its rows included) that holds the bf16 scale of `token`.
PLIANT_HOST_DEVICE constexpr int ScaleByte(int head_dim, int token) {
  return kBlockTokens * head_dim / 2 + ((token & 7) * 4 + (token >> 3)) * 2;
}

/// Byte of a page at which the unit of (layer, head) starts.
PLIANT_HOST_DEVICE constexpr std::size_t UnitOffset(int kv_heads, int head_dim, int layer,
                                                    int head) {
  return (static_cast<std::size_t>(layer) * kv_heads + head) * UnitStride(head_dim);
}

}  // namespace pliant::cuda
