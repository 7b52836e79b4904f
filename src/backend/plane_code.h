// Room: backend. The KV code of DESIGN.md section 2: 16-bit fixed point cut into four planes of one hex digit. This header is
// the one place that knows the bits of a page; the functions are the scalar oracle. Pure functions, any thread.
//
// value = center[c] + channel[c] * row[c], where channel and center are static, for K and for V (ChannelCode in backend.h), and
// row[c] = scale[token, head] * code / 32768, code a signed 16-bit integer in [-32767, 32767]; for K this is the row of mixed channels
// (MixChannels).
// Stored offset-binary: u = code + 32768, plane 0 is the top hex digit of u. A plane that is absent reads as its midpoint.
//
// A page holds one plane of one block of K or of V for all layers and KV heads (the reference and CPU layout; a GPU backend may
// swizzle inside its own pages, kv/ treats pages as opaque bytes):
//   rows   [layer][kv head][token 32][head_dim / 2] bytes, byte j: dim 2j in the low nibble, dim 2j+1 in the high nibble
//   scales [layer][kv head][token 32] bf16; meaningful in plane 0 only, so the scale lives exactly as long as the block does
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pliant {

inline constexpr int kBlockTokens = 32;
inline constexpr int kPlanes = 4;        // planes of a full (TARGET) K or V
inline constexpr int kBitsPerPlane = 4;

/// The shape of a model's KV cache.
struct KvGeometry {
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;  // even, a multiple of 32

  /// Bytes of the rows of one (layer, head) of a page.
  constexpr std::size_t UnitBytes() const {
    return static_cast<std::size_t>(kBlockTokens) * head_dim / 2;
  }
  constexpr std::size_t Units() const { return static_cast<std::size_t>(layers) * kv_heads; }
  constexpr std::size_t RowBytes() const { return static_cast<std::size_t>(head_dim) / 2; }
  /// Byte offset of a token's row inside a page.
  constexpr std::size_t RowOffset(int layer, int head, int token) const {
    return (static_cast<std::size_t>(layer) * kv_heads + head) * UnitBytes() + token * RowBytes();
  }
  /// Byte offset of a token's scale inside a plane-0 page.
  constexpr std::size_t ScaleOffset(int layer, int head, int token) const {
    return Units() * UnitBytes() +
           ((static_cast<std::size_t>(layer) * kv_heads + head) * kBlockTokens + token) * 2;
  }
  /// Bytes of one plane page.
  constexpr std::size_t PageBytes() const { return Units() * (UnitBytes() + kBlockTokens * 2); }
  /// Bytes of one token of context at the given planes of K and V (scales included: a page carries room for them in every plane).
  constexpr std::size_t BytesPerToken(int k_planes, int v_planes) const {
    return PageBytes() * (k_planes + v_planes) / kBlockTokens;
  }
  friend bool operator==(const KvGeometry&, const KvGeometry&) = default;
};

/// bf16 bits to float.
inline float Bf16ToFloat(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}
/// Round to nearest even; NaN stays NaN.
inline std::uint16_t FloatToBf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Channels of K are mixed before they are coded, each kMixedChannels neighbours by a Walsh-Hadamard
/// transform: a row's largest magnitude then comes from all of its channels, and the noise of the
/// code falls on all alike, so that a channel's scale is free to follow what queries use. The query
/// is mixed the same way, which leaves every product of the two as it was.
inline constexpr int kMixedChannels = 32;
/// Powers of two, near the orthonormal 32^-1/2, whose product is 1 / 32.
inline constexpr float kKeyMix = 1.0f / 4;
inline constexpr float kQueryMix = 1.0f / 8;

/// The transform of each kMixedChannels of `row`, times `factor`. Its own inverse for factors whose
/// product is 1 / 32. Stages join elements 1, 2, 4, 8 and 16 apart, in this order, as (a + b, a -
/// b), so that vector code gets the same bits.
void MixChannels(std::span<float> row, float factor);

/// The scale of a row: its absolute maximum as bf16, rounded up so that no code passes 32767. 0 for a row of zeros; a row that
/// holds a non-finite value gives bf16 infinity (the row then decodes to non-finite values and the request is stopped).
std::uint16_t RowScale(std::span<const float> row);

/// codes[i] = round(row[i] / scale * 32768) as offset-binary u in [1, 65535]; a zero scale gives 32768 for all.
void EncodeRow(std::span<const float> row, std::uint16_t scale_bf16, std::span<std::uint16_t> u);

/// Splits offset-binary codes into the row of each of the first `planes` planes (head_dim / 2 bytes each).
void SplitPlanes(std::span<const std::uint16_t> u, int planes, std::uint8_t* const rows[kPlanes]);

/// Joins the first `planes` planes back; absent digits read as the midpoint (half a step of the last resident digit).
void JoinPlanes(const std::uint8_t* const rows[kPlanes], int planes, std::span<std::uint16_t> u);

/// row[i] = scale * (u[i] - 32768) / 32768. The channel's scale and center are the caller's.
void DecodeRow(std::span<const std::uint16_t> u, std::uint16_t scale_bf16, std::span<float> row);

/// What an offset-binary code is read as when only the first `planes` digits are there.
constexpr std::uint16_t MidpointCode(std::uint16_t u, int planes) {
  if (planes >= kPlanes) return u;
  const int absent_bits = (kPlanes - planes) * kBitsPerPlane;
  const std::uint32_t kept = planes == 0 ? 0u : (u >> absent_bits) << absent_bits;
  return static_cast<std::uint16_t>(kept | (1u << (absent_bits - 1)));
}

}  // namespace pliant
