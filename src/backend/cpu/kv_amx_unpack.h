// Room: backend. From plane rows to the byte tiles of the AMX kernels. Even and odd dims come apart
// as the low and high nibbles of the packed rows; every layout below is chosen so that they need
// not be put back together. Internal to kv_attention_amx*.cc.
#pragma once

#if defined(__x86_64__)

#include "backend/cpu/kv_amx.h"

namespace pliant::kv_amx {

/// A tile of K or V for hi, and one for lo at a fixed distance behind it.
struct TileBuffer {
  std::byte* hi;
  std::byte* lo;
};

/// hi ^ 0x80 needs the top bit of each of plane 0's digits flipped.
PLIANT_KV_AMX_INLINE __m512i FlipTop(__m512i digits) {
  return _mm512_xor_si512(digits, _mm512_set1_epi8(static_cast<char>(0x88)));
}
/// The even dims' bytes of two planes, `upper` holding the high digit.
PLIANT_KV_AMX_INLINE __m512i EvenBytes(__m512i upper, __m512i lower) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(0xf0)),
                                   _mm512_slli_epi16(upper, 4), lower, 0xca);
}
PLIANT_KV_AMX_INLINE __m512i OddBytes(__m512i upper, __m512i lower) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(0xf0)), upper,
                                   _mm512_srli_epi16(lower, 4), 0xca);
}
PLIANT_KV_AMX_INLINE __m512i MidDigits() { return _mm512_set1_epi8(static_cast<char>(0x88)); }

// kAwake, where there is one: a tile that may be overwritten (KeepTilesAwake).

// ---- K: left operands [token 16][64 unpacked dims]
// --------------------------------------------------------------------------------
//
// Token n of a half lies in tile (n / 4) % 4, row 4 (n / 16) + n % 4: the four tokens that a vector
// of the softmax needs next to each other are then the same row of four tiles
// (kv_attention_amx_narrow.cc).

/// Stores unpacked bytes of one 64-byte line of K; `to` is the first token's row in its tile. For
/// head dim 64 a line holds two tokens, else line `line` of a token fills two chunks.
template <int kDim>
PLIANT_KV_AMX_INLINE void StoreKeyLine(__m512i even, __m512i odd, int line, std::byte* to) {
  if constexpr (kDim == 64) {
    _mm512_store_si512(to, _mm512_shuffle_i64x2(even, odd, 0x44));
    _mm512_store_si512(to + 64, _mm512_shuffle_i64x2(even, odd, 0xee));
  } else {
    _mm512_store_si512(to + 2 * line * kTile, even);
    _mm512_store_si512(to + (2 * line + 1) * kTile, odd);
  }
}

/// Unpacks one block's K into the tiles of half a step of which it is block `b`. Prefetches on the
/// way.
template <int kDim, int kDepth, int kAwake>
PLIANT_KV_AMX_INLINE void UnpackKeyBlock(const std::uint8_t* const rows[kPlanes], Prefetcher& ahead,
                                         int b, TileBuffer tiles) {
  constexpr int kChunks = kDim / 64;
  constexpr int kQuadBytes = 4 * kDim / 2;
  constexpr int kLineTokens = kDim == 64 ? 2 : 1;
  constexpr int kTokenLines = kDim == 64 ? 1 : kDim / 128;
  // Locals: the stores below could otherwise change the pointers, for all the compiler knows.
  const std::uint8_t *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
  for (int quad = 0; quad < kBlockTokens / 4; ++quad) {
    if (quad % (256 / kDim) == 0) KeepTilesAwake<kAwake>();
    const std::ptrdiff_t to = (quad & 3) * kChunks * kTile + 4 * (2 * b + (quad >> 2)) * 64;
#pragma GCC unroll 8
    for (int i = 0; i < 4 / kLineTokens * kTokenLines; ++i) {
      const std::ptrdiff_t at = quad * kQuadBytes + 64 * i;
      const std::ptrdiff_t row = to + i / kTokenLines * kLineTokens * 64;
      const int line = i % kTokenLines;
      if (i % 2 == 0) ahead.Issue();
      const __m512i p0 = FlipTop(_mm512_loadu_si512(r0 + at));
      const __m512i p1 = kDepth == 1 ? MidDigits() : _mm512_loadu_si512(r1 + at);
      StoreKeyLine<kDim>(EvenBytes(p0, p1), OddBytes(p0, p1), line, tiles.hi + row);
      if constexpr (kDepth == kPlanes) {
        const __m512i p2 = _mm512_loadu_si512(r2 + at);
        const __m512i p3 = _mm512_loadu_si512(r3 + at);
        StoreKeyLine<kDim>(EvenBytes(p2, p3), OddBytes(p2, p3), line, tiles.lo + row);
      }
    }
  }
}

template <int kDim, int kDepth, int kAwake>
PLIANT_KV_AMX_INLINE void UnpackKeys(const PlaneSource& source, Prefetcher& ahead, int half,
                                     TileBuffer tiles) {
  for (int b = 0; b < 2; ++b) {
    UnpackKeyBlock<kDim, kDepth, kAwake>(source.rows[2 * half + b], ahead, b, tiles);
  }
}

// ---- V for few columns: right operands [quad 16][dim 16][4 tokens]
//
// Quad 4k + t of a half (tokens 16k + 4t ..) is row 4t + k: the order in which packing leaves the
// weights. A step is unpacked in spans of a few dims, so that the tiles stay in the first-level
// cache whatever the head dim.

/// Tiles of one half in a span: a pair (even, odd dims) for head dim 64, two pairs beyond.
template <int kDim>
inline constexpr int kSpanTiles = kDim == 64 ? 2 : 4;
template <int kDim>
inline constexpr int kSpans = kDim / 16 / kSpanTiles<kDim>;

/// The dim that column `column` of V tile `tile` (over all spans) holds.
template <int kDim>
constexpr int ValueDim(int tile, int column) {
  const int odd = tile % 2;
  if (kDim == 64) return 2 * (16 * (tile / 2) + column) + odd;
  return 2 * (64 * (tile / 8) + 16 * (column / 4) + 4 * (tile / 2 % 4) + column % 4) + odd;
}

/// The span's bytes of four neighbouring tokens, next to each other: one vector for each pair of
/// tiles.
template <int kDim>
PLIANT_KV_AMX_INLINE void InterleaveQuad(const std::uint8_t* row, int span, __m512i* out) {
  constexpr std::ptrdiff_t kRow = kDim / 2;
  if constexpr (kDim == 64) {
    // Tokens (0, 1) and (2, 3) lie in one line each.
    const __m512i index = _mm512_set_epi8(
        111, 79, 47, 15, 110, 78, 46, 14, 109, 77, 45, 13, 108, 76, 44, 12, 107, 75, 43, 11, 106,
        74, 42, 10, 105, 73, 41, 9, 104, 72, 40, 8, 103, 71, 39, 7, 102, 70, 38, 6, 101, 69, 37, 5,
        100, 68, 36, 4, 99, 67, 35, 3, 98, 66, 34, 2, 97, 65, 33, 1, 96, 64, 32, 0);
    out[0] = _mm512_permutex2var_epi8(
        _mm512_loadu_si512(row),
        _mm512_add_epi8(index, _mm512_set1_epi8(static_cast<char>(16 * span))),
        _mm512_loadu_si512(row + 2 * kRow));
  } else {
    row += span / 2 * 64;
    const __m512i r0 = _mm512_loadu_si512(row);
    const __m512i r1 = _mm512_loadu_si512(row + kRow);
    const __m512i r2 = _mm512_loadu_si512(row + 2 * kRow);
    const __m512i r3 = _mm512_loadu_si512(row + 3 * kRow);
    const bool low = span % 2 == 0;
    const __m512i r01 = low ? _mm512_unpacklo_epi8(r0, r1) : _mm512_unpackhi_epi8(r0, r1);
    const __m512i r23 = low ? _mm512_unpacklo_epi8(r2, r3) : _mm512_unpackhi_epi8(r2, r3);
    out[0] = _mm512_unpacklo_epi16(r01, r23);
    out[1] = _mm512_unpackhi_epi16(r01, r23);
  }
}

/// Unpacks span `span` of a step: tile i of half h at (2 i + h) * kTile.
template <int kDim, int kDepth, int kAwake>
PLIANT_KV_AMX_INLINE void UnpackValueSpan(const PlaneSource& source, Prefetcher& ahead, int span,
                                          TileBuffer tiles) {
  constexpr int kPairs = kSpanTiles<kDim> / 2;
  constexpr int kQuadBytes = 4 * kDim / 2;
  for (int block = 0; block < kStepBlocks; ++block) {
    const std::uint8_t* from[kPlanes] = {source.rows[block][0], source.rows[block][1],
                                         source.rows[block][2], source.rows[block][3]};
    const std::ptrdiff_t half = block / 2 * kTile;
    KeepTilesAwake<kAwake>();
    for (int quad = 0; quad < kBlockTokens / 4; ++quad) {
      ahead.Issue();
      __m512i planes[kDepth][kPairs];
#pragma GCC unroll 4
      for (int p = 0; p < kDepth; ++p) {
        InterleaveQuad<kDim>(from[p] + quad * kQuadBytes, span, planes[p]);
      }
      const std::ptrdiff_t row = half + (4 * (quad & 3) + 2 * (block & 1) + (quad >> 2)) * 64;
#pragma GCC unroll 2
      for (int i = 0; i < kPairs; ++i) {
        const std::ptrdiff_t even = row + 4 * i * kTile;
        const std::ptrdiff_t odd = even + 2 * kTile;
        const __m512i p0 = FlipTop(planes[0][i]);
        const __m512i p1 = kDepth == 1 ? MidDigits() : planes[kDepth == 1 ? 0 : 1][i];
        _mm512_store_si512(tiles.hi + even, EvenBytes(p0, p1));
        _mm512_store_si512(tiles.hi + odd, OddBytes(p0, p1));
        if constexpr (kDepth == kPlanes) {
          _mm512_store_si512(tiles.lo + even, EvenBytes(planes[2][i], planes[3][i]));
          _mm512_store_si512(tiles.lo + odd, OddBytes(planes[2][i], planes[3][i]));
        }
      }
    }
  }
}

// ---- V for many columns: left operands [dim 16][token 64]
// --------------------------------------------------------------------------

/// The dim that row `row` of transposed V tile `tile` holds.
constexpr int TransposedDim(int tile, int row) { return 2 * (16 * (tile / 2) + row) + tile % 2; }

/// Transposes 16 x 16 bytes in each 128-bit lane.
PLIANT_KV_AMX_INLINE void TransposeBytes(__m512i r[16]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_epi8(r[i], r[i + 8]);
      t[2 * i + 1] = _mm512_unpackhi_epi8(r[i], r[i + 8]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
  }
}

/// 64 tokens of the 16 packed bytes at `byte`, as 16 rows of 64 bytes.
template <int kDim>
PLIANT_KV_AMX_INLINE void TransposePlane(const PlaneSource& source, int half, int plane, int byte,
                                         std::byte* out) {
  constexpr std::ptrdiff_t kRow = kDim / 2;
  const std::uint8_t* first = source.rows[2 * half][plane] + byte;
  const std::uint8_t* second = source.rows[2 * half + 1][plane] + byte;
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    // Lane l: token 16 l + i.
    const auto* a = reinterpret_cast<const __m128i*>(first + i * kRow);
    const auto* b = reinterpret_cast<const __m128i*>(first + (16 + i) * kRow);
    const auto* c = reinterpret_cast<const __m128i*>(second + i * kRow);
    const auto* d = reinterpret_cast<const __m128i*>(second + (16 + i) * kRow);
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128(a));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128(b));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128(c));
    r[i] = _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_loadu_si128(d));
  }
  TransposeBytes(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(out + 64 * i, r[i]);
}

/// Transposes half `half`; `planes` is scratch of kPlanes tiles.
template <int kDim, int kDepth, int kAwake>
PLIANT_KV_AMX_INLINE void UnpackValuesTransposed(const PlaneSource& source, int half,
                                                 std::byte* planes, TileBuffer tiles) {
  for (int part = 0; part < kDim / 32; ++part) {  // 16 packed bytes: 32 dims, two tiles
    for (int p = 0; p < kDepth; ++p) {
      KeepTilesAwake<kAwake>();
      TransposePlane<kDim>(source, half, p, 16 * part, planes + p * kTile);
    }
    for (int i = 0; i < 16; ++i) {
      const std::ptrdiff_t to = 2 * part * kTile + 64 * i;
      const __m512i p0 = FlipTop(_mm512_load_si512(planes + 64 * i));
      const __m512i p1 = kDepth == 1 ? MidDigits() : _mm512_load_si512(planes + kTile + 64 * i);
      _mm512_store_si512(tiles.hi + to, EvenBytes(p0, p1));
      _mm512_store_si512(tiles.hi + to + kTile, OddBytes(p0, p1));
      if constexpr (kDepth == kPlanes) {
        const __m512i p2 = _mm512_load_si512(planes + 2 * kTile + 64 * i);
        const __m512i p3 = _mm512_load_si512(planes + 3 * kTile + 64 * i);
        _mm512_store_si512(tiles.lo + to, EvenBytes(p2, p3));
        _mm512_store_si512(tiles.lo + to + kTile, OddBytes(p2, p3));
      }
    }
  }
}

}  // namespace pliant::kv_amx

#endif  // x86_64
