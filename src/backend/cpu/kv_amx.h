// Room: backend. What the two AMX attention kernels (few columns, many columns) share: how a step
// of 128 tokens is described, how the query becomes integers, and the arithmetic that must be the
// same to the bit in both. Internal to kv_attention_amx*.cc.
//
// Notation. A code is 256 hi + lo - 32768 with hi, lo unsigned bytes; hi is kept as hi - 128
// (signed, XOR 0x80), lo as it is. A query element is 256 qh + ql, both signed bytes; a weight is
// 256 ph + pl, both unsigned. A product is then
//   65536 (h h) + 256 (h l + l h) + l l.
// The first two are exact 32-bit sums over tiles. In the last, lo is taken for its mean, 128, which
// makes it a constant of the query (or the weights): the error is of the size of their rounding to
// 16 bits, and a third of the tile sums and stores is saved. In units of 256 a result is
//   (hh << 8) + x + constant.
// With 8 bits resident lo reads as 128 everywhere: there is no lo pass, and the constant, (sum of
// query or weights) >> 1, is exact. With 4 bits lo reads as 0 and the low digit of hi as 8; the
// constant stays, so that a block gives the same bits whatever the blocks beside it have.
//
// The logarithm of V's scale is added to the logit: the maximum of a step is then the maximum of
// what V's codes are weighted by, a weight is exp2 of the difference in 16 bits, and the sum of
// weights takes one over the scale.
#pragma once

#if defined(__x86_64__)

// GCC 12 takes the undefined pass-through operands of its own intrinsics for a use of uninitialised
// values.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backend/cpu/kv_attention.h"

#define PLIANT_KV_AMX                                                                          \
  __attribute__((                                                                              \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,amx-tile,amx-" \
             "int8")))
#define PLIANT_KV_AMX_INLINE PLIANT_KV_AMX inline __attribute__((always_inline))
// The tile intrinsics do not tell the compiler what memory they read.
#define PLIANT_KV_FENCE() __asm__ volatile("" ::: "memory")

namespace pliant::kv_amx {

inline constexpr int kStep = 128;  // tokens of one step of the online softmax; divides kSplitTokens
inline constexpr int kHalf = 64;   // tokens of one tile row of V
inline constexpr int kStepBlocks = kStep / kBlockTokens;
inline constexpr int kTile = 1024;  // bytes
inline constexpr int kVector = 16;  // columns, or tokens, of a vector
inline constexpr float kNoLogit = -1e30f;
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kQueryLevels = 32512.0f;  // 127 * 256: hi stays within a signed byte
/// log2 of the largest integer weight, a little below 65536.
inline constexpr float kWeightBits = 15.9999f;
/// Units of a sum over weights and codes, divided out at the end of a split.
inline constexpr float kOutputUnit = 256.0f / 32768.0f;

/// Where a side of a step's blocks lies, plane by plane. An absent plane points to constant rows.
struct PlaneSource {
  const std::uint8_t* rows[kStepBlocks][kPlanes];
  /// 1 or 2: every block has exactly so many planes; 4: lo is computed for all.
  int depth;
};

/// Place of a depth (1, 2 or 4) in a table.
constexpr int DepthIndex(int depth) { return depth / 2; }

/// The scales of a step's tokens as the kernels use them. Tokens that are not there have log_value
/// -inf and the rest 0; rows that are not finite have NaN.
struct alignas(64) StepScales {
  float key[kStep];
  float log_value[kStep];      // log2 of V's scale, at least -100
  float inverse_value[kStep];  // 2^-log_value
};

/// Tile palette 1 with every tile 16 rows of 64 bytes, and flush-to-zero arithmetic, for the life
/// of the object.
class TileScope {
 public:
  PLIANT_KV_AMX TileScope() : mxcsr_(_mm_getcsr()) {
    alignas(64) std::uint8_t config[64] = {};
    config[0] = 1;
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = 64;  // bytes a row, little endian 16 bits
      config[48 + i] = 16;
    }
    // The intrinsic claims to read only the first 8 bytes.
    __asm__ volatile("" : : "m"(config) : "memory");
    _tile_loadconfig(config);
    constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
    _mm_setcsr(mxcsr_ | kFlushToZero | kDenormalsAreZero);
  }
  PLIANT_KV_AMX ~TileScope() {
    _tile_release();
    _mm_setcsr(mxcsr_);
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  unsigned mxcsr_;
};

/// The tile unit goes to sleep when no product comes for about half a microsecond, and the next one
/// then waits 0.3 us for it (measured on Emerald Rapids). Long stretches of vector work call this
/// every 0.2 us: a product whose result, in tile kDest, nobody reads. Tiles 4 and 6 (for kDest 5: 6
/// and 7) are only read.
template <int kDest>
PLIANT_KV_AMX_INLINE void KeepTilesAwake() {
  static_assert(kDest == 3 || kDest == 5 || kDest == 7);
  if constexpr (kDest == 3) _tile_dpbssd(3, 4, 6);
  if constexpr (kDest == 5) _tile_dpbssd(5, 6, 7);
  if constexpr (kDest == 7) _tile_dpbssd(7, 4, 6);
}

/// 2^x for x < 128, relative error 1.5e-7; exactly 1 for 0, 0 for -inf, NaN for NaN. Minimax
/// polynomial of 2^f on [0, 1) with p(0) = 1.
PLIANT_KV_AMX_INLINE __m512 Exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.00186713008f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0090170303f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0557999131f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24016445f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693151312f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}

/// Logit (log2 units, with V's scale) of integer sums.
PLIANT_KV_AMX_INLINE __m512 Logit(__m512i sum, __m512 key_scale, __m512 query_scale,
                                  __m512 log_value) {
  return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), key_scale), query_scale, log_value);
}

/// Running maximum, sum and output factors of 16 columns (or of a few) when a step comes in.
struct Rescale {
  __m512 keep;  // of what there is
  __m512 add;   // of the step
};
PLIANT_KV_AMX_INLINE Rescale Advance(__m512 step_maximum, __m512 step_total, float* maximum,
                                     float* total) {
  const __m512 before = _mm512_loadu_ps(maximum);
  const __m512 after = _mm512_max_ps(step_maximum, before);
  const Rescale factors = {Exp2(_mm512_sub_ps(before, after)),
                           Exp2(_mm512_sub_ps(step_maximum, after))};
  _mm512_storeu_ps(maximum, after);
  _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), factors.keep,
                                          _mm512_mul_ps(step_total, factors.add)));
  return factors;
}

/// 16 x 16 transposition of 32-bit elements.
PLIANT_KV_AMX_INLINE void Transpose16(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

/// A query column as integers: hi and lo bytes in the order in which keys are unpacked, and what
/// turns sums into logits.
template <int kDim>
struct alignas(64) QueryColumn {
  std::int8_t hi[kDim];
  std::int8_t lo[kDim];
  std::int32_t constant[3];  // what x starts from, by DepthIndex
  float scale;               // NaN for a query that is not finite
};

/// Chunk and offset of unpacked dims: 64-byte chunks hold the even dims of a row, then its odd dims
/// (head dim 64: 32 and 32 in one chunk; 128: one chunk each; 256: the same for each half).
template <int kDim>
PLIANT_KV_AMX void QuantizeQuery(const float* q, float softmax_scale, QueryColumn<kDim>& column) {
  __m512 largest = _mm512_setzero_ps();
  __m512 finite = _mm512_setzero_ps();  // 0 * x: NaN as soon as one x is not finite
  for (int i = 0; i < kDim; i += kVector) {
    const __m512 v = _mm512_loadu_ps(q + i);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(v));
    finite = _mm512_fmadd_ps(v, _mm512_setzero_ps(), finite);
  }
  const float absmax = _mm512_reduce_max_ps(largest);
  const bool usable = _mm512_reduce_add_ps(finite) == 0.0f;
  // A row so small that its inverse is infinite is a row of zeros.
  const float inverse = usable && absmax > 1e-30f ? kQueryLevels / absmax : 0.0f;
  column.scale =
      usable
          ? (inverse == 0 ? 0.0f
                          : absmax / kQueryLevels * (softmax_scale * kLog2E) * (256.0f / 32768.0f))
          : std::nanf("");
  alignas(64) std::int16_t codes[kDim];
  __m512i sum = _mm512_setzero_si512();
  __m512i low_sum = _mm512_setzero_si512();
  for (int i = 0; i < kDim; i += kVector) {
    const __m512 v = usable ? _mm512_loadu_ps(q + i) : _mm512_setzero_ps();
    const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inverse)));
    sum = _mm512_add_epi32(sum, code);
    _mm256_store_si256(reinterpret_cast<__m256i*>(codes + i), _mm512_cvtepi32_epi16(code));
  }
  for (int j = 0; j < kDim / 2; j += kVector) {
    const __m512i pair = _mm512_load_si512(codes + 2 * j);
    const __m512i parts[2] = {_mm512_srai_epi32(_mm512_slli_epi32(pair, 16), 16),
                              _mm512_srai_epi32(pair, 16)};
    for (int odd = 0; odd < 2; ++odd) {
      const int at = kDim == 64 ? odd * 32 + j : j / 64 * 128 + odd * 64 + j % 64;
      const __m512i lo = _mm512_srai_epi32(_mm512_slli_epi32(parts[odd], 24), 24);
      low_sum = _mm512_add_epi32(low_sum, lo);
      const __m512i hi = _mm512_srai_epi32(_mm512_sub_epi32(parts[odd], lo), 8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(column.lo + at), _mm512_cvtepi32_epi8(lo));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(column.hi + at), _mm512_cvtepi32_epi8(hi));
    }
  }
  const std::int32_t low = _mm512_reduce_add_epi32(low_sum) >> 1;
  column.constant[DepthIndex(1)] = low;
  column.constant[DepthIndex(2)] = _mm512_reduce_add_epi32(sum) >> 1;
  column.constant[DepthIndex(kPlanes)] = low;
}

/// A right operand: [dim / 4][column 16][4 dims] from 16 rows of 64 bytes.
PLIANT_KV_AMX_INLINE void StoreQueryTile(const std::int8_t* const rows[16], std::byte* tile) {
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(rows[i]);
  Transpose16(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 64 * i, r[i]);
}

/// Fills `key` and `value` for the step at token `first` of the sequence; tokens at or beyond `end`
/// and blocks that lack K or V count as absent. Returns false when nothing of the step is there.
bool DescribeStep(const AttentionHead& head, int first, int end, PlaneSource& key,
                  PlaneSource& value);
/// The scales of the same step.
void LoadScales(const AttentionHead& head, int first, int end, StepScales& scales);

/// Brings the planes of the step ahead into the second-level cache, a few lines at a time, so that
/// memory works through all phases of a step and not only while planes are unpacked. Only the first
/// two of a group of lines are asked for: the hardware's own prefetcher goes on from there, and it
/// does not take the fill buffers that the kernel's own first-level misses need.
class Prefetcher {
 public:
  /// Takes on the resident planes of a step; what was left of the one before is dropped.
  void Start(const AttentionHead& head, int first, int end);
  /// Goes on by a group. A step unpacks at least 64 * head_dim / 64 times two lines a plane, and
  /// this is called as often.
  PLIANT_KV_AMX_INLINE void Issue() {
    if (chunk_ == chunks_) return;
    const std::uint8_t* at = rows_[chunk_] + offset_;
    _mm_prefetch(at, _MM_HINT_T1);
    _mm_prefetch(at + 64, _MM_HINT_T1);
    offset_ += 64 * lines_;
    if (offset_ == chunk_bytes_) {
      offset_ = 0;
      ++chunk_;
    }
  }
  PLIANT_KV_AMX_INLINE void IssueAll() {
    while (chunk_ != chunks_) Issue();
  }

 private:
  const std::uint8_t* rows_[2 * kStepBlocks * kPlanes];
  int chunks_ = 0;
  int chunk_ = 0;
  int chunk_bytes_ = 0;
  int offset_ = 0;
  int lines_ = 2;
};

/// Scratch of the two kernels and their results as AttentionKernel::attend gives them.
std::size_t NarrowScratchBytes(int head_dim);
std::size_t WideScratchBytes(int head_dim);
void AttendNarrow(const AttentionHead& head, const QueryTile& tile, int first, int end,
                  float* partials, std::byte* scratch);
void AttendWide(const AttentionHead& head, const QueryTile& tile, int first, int end,
                float* partials, std::byte* scratch);

inline constexpr int kNarrowColumns = 8;
inline constexpr int kWideColumns = 192;

}  // namespace pliant::kv_amx

#endif  // x86_64
