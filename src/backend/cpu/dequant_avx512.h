// Room: backend. Packed blocks to bf16 rows in AVX-512 registers, shared by the AMX and the AVX-512
// kernels. Include only in files of kernels; call only on machines of level kAvx512.
//
// A row of 32 4-bit codes costs five instructions: a multiply-add for its 16 possible values, an
// add that rounds them to bf16, a multishift and a mask that make byte indices of its codes, and a
// byte permute that looks the 32 values up. (The word permute
// and VCVTNE2PS2BF16 are fewer instructions but measured slower: they keep both vector ports busy.)
// So 4-bit weights round halves away from zero, the others to even.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "backend/cpu/packed_matrix.h"

#define PLIANT_TARGET_AVX512                                                      \
  __attribute__((                                                                 \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma," \
             "f16c")))
#define PLIANT_INLINE_AVX512 PLIANT_TARGET_AVX512 __attribute__((always_inline)) inline

/// For lambdas, after their parameters.
#define PLIANT_INLINE_LAMBDA_AVX512 PLIANT_TARGET_AVX512 __attribute__((always_inline))

namespace pliant::avx512 {

PLIANT_INLINE_AVX512 __m512i RoundPair(__m512 high, __m512 low) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/// Scales in f32 of 16 rows of a block, of columns 0-15 and of columns 16-31 (the same but for
/// Q6_K).
struct alignas(64) RowScales {
  float d[2][16];
  float m[16];
};

PLIANT_INLINE_AVX512 __m512 Halves(const std::byte* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PLIANT_INLINE_AVX512 __m512 UnsignedBytes(const std::byte* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
PLIANT_INLINE_AVX512 __m512 SignedBytes(const std::byte* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

/// For 16 rows of a block. Call it a block or more before DequantRows: values just stored are slow
/// to broadcast. Nothing to do for float formats.
template <PackedFormat kFormat>
PLIANT_INLINE_AVX512 void LoadScales(const std::byte* super, const std::byte* block, int half,
                                     RowScales& scales) {
  const int h = half;
  if constexpr (Traits(kFormat).code_bits > 8) {
    return;
  } else if constexpr (kFormat == PackedFormat::kQ6_K) {
    const __m512 d = Halves(super + 32 * h);
    _mm512_store_ps(scales.d[0], _mm512_mul_ps(d, SignedBytes(block + 16 * h)));
    _mm512_store_ps(scales.d[1], _mm512_mul_ps(d, SignedBytes(block + 32 + 16 * h)));
  } else if constexpr (Traits(kFormat).super_bytes != 0) {
    const __m512 m = _mm512_mul_ps(Halves(super + 64 + 32 * h), UnsignedBytes(block + 32 + 16 * h));
    _mm512_store_ps(scales.d[0],
                    _mm512_mul_ps(Halves(super + 32 * h), UnsignedBytes(block + 16 * h)));
    _mm512_store_ps(scales.m, _mm512_sub_ps(_mm512_setzero_ps(), m));
  } else {
    _mm512_store_ps(scales.d[0], Halves(block + 32 * h));
    if constexpr (Traits(kFormat).scale_bytes == 128) {
      _mm512_store_ps(scales.m, Halves(block + 64 + 32 * h));
    }
  }
}

template <PackedFormat kFormat>
inline constexpr bool kHasMin = kFormat == PackedFormat::kQ4_1 || kFormat == PackedFormat::kQ5_1 ||
                                kFormat == PackedFormat::kQ4_K || kFormat == PackedFormat::kQ5_K;

/// The 16 values that codes first .. first + 15 of a row stand for.
template <PackedFormat kFormat>
PLIANT_INLINE_AVX512 __m512 CodeValues(const RowScales& scales, int row, __m512 codes) {
  const __m512 d = _mm512_set1_ps(scales.d[0][row]);
  if constexpr (kHasMin<kFormat>) {
    return _mm512_fmadd_ps(d, codes, _mm512_set1_ps(scales.m[row]));
  } else {
    return _mm512_mul_ps(d, codes);
  }
}

PLIANT_INLINE_AVX512 __m512 CountFrom(int first) {
  const __m512 count = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_add_ps(count, _mm512_set1_ps(static_cast<float>(first)));
}

/// Bit positions that VPMULTISHIFTQB takes the bytes of a register from: both bytes of word k get
/// the eight bits of packed word k that start at bit `first` (counted round the quadword).
PLIANT_INLINE_AVX512 __m512i FieldsFrom(int first) {
  const __m512i words = _mm512_set1_epi64(0x3030202010100000);
  return _mm512_add_epi8(words, _mm512_set1_epi8(static_cast<char>(first)));
}

/// In the even bytes `even`, in the odd ones even + 1: the two bytes of a bf16 in a table.
PLIANT_INLINE_AVX512 __m512i BytePair(int even) {
  return _mm512_set1_epi16(static_cast<short>(even | (even + 1) << 8));
}

/// Rows 16 half .. of 4-bit codes.
template <PackedFormat kFormat, class Take>
PLIANT_INLINE_AVX512 void DequantDigits(const RowScales& scales, const std::byte* codes, int half,
                                        Take&& take) {
  const __m512 values = CountFrom(-Traits(kFormat).zero);
  const __m512i half_step = _mm512_set1_epi32(0x8000);
  // A table is 16 f32; the bf16 of code q lies in its bytes 4 q + 2 and 4 q + 3.
  const __m512i keep = _mm512_set1_epi8(0x3c);
  const __m512i pair = BytePair(2);
  const __m512i fields[4] = {FieldsFrom(-2), FieldsFrom(2), FieldsFrom(6), FieldsFrom(10)};
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m512i words = _mm512_loadu_si512(codes + (half * 4 + g) * 64);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * g + i;
      const __m512i table =
          _mm512_add_epi32(_mm512_castps_si512(CodeValues<kFormat>(scales, r, values)), half_step);
      // (fields & keep) | pair
      const __m512i index = _mm512_ternarylogic_epi32(
          _mm512_multishift_epi64_epi8(fields[i], words), keep, pair, 0xea);
      take(r, _mm512_permutexvar_epi8(index, table));
    }
  }
}

/// Rows 16 half .. of 5-bit codes.
template <PackedFormat kFormat, class Take>
PLIANT_INLINE_AVX512 void DequantFiveBits(const RowScales& scales, const std::byte* codes, int half,
                                          Take&& take) {
  const __m512 low_values = CountFrom(-Traits(kFormat).zero);
  const __m512 high_values = CountFrom(16 - Traits(kFormat).zero);
  // A table is 32 bf16, that of code q in bytes 2 q and 2 q + 1.
  const __m512i keep = _mm512_set1_epi8(0x1e);
  const __m512i pair = BytePair(0);
  const __m512i fifth = _mm512_set1_epi8(0x20);
  // Bits 16 half .. of the 32 words of fifth bits, as 32 words of 16 bits.
  const int shift = 16 * half;
  const std::byte* p = codes + 512;
  const __m512i bits = _mm512_inserti64x4(
      _mm512_castsi256_si512(
          _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(p), shift))),
      _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(p + 64), shift)), 1);
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    const __m512i words = _mm512_loadu_si512(codes + (half * 4 + r / 4) * 64);
    const __m512i table = RoundPair(CodeValues<kFormat>(scales, r, high_values),
                                    CodeValues<kFormat>(scales, r, low_values));
    const __m512i digit = _mm512_multishift_epi64_epi8(FieldsFrom(r % 4 * 4 - 1), words);
    const __m512i bit = _mm512_multishift_epi64_epi8(FieldsFrom(r - 5), bits);
    const __m512i index = _mm512_ternarylogic_epi32(
        bit, fifth, _mm512_ternarylogic_epi32(digit, keep, pair, 0xea), 0xea);
    take(r, _mm512_permutexvar_epi8(index, table));
  }
}

/// Rows 16 half .. of signed bytes.
template <PackedFormat kFormat, class Take>
PLIANT_INLINE_AVX512 void DequantBytes(const RowScales& scales, const std::byte* codes, int half,
                                       Take&& take) {
  constexpr int kSecond = kFormat == PackedFormat::kQ6_K ? 1 : 0;
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    const __m512 low = SignedBytes(codes + (half * 16 + r) * 32);
    const __m512 high = SignedBytes(codes + (half * 16 + r) * 32 + 16);
    take(r, RoundPair(_mm512_mul_ps(high, _mm512_set1_ps(scales.d[kSecond][r])),
                      _mm512_mul_ps(low, _mm512_set1_ps(scales.d[0][r]))));
  }
}

/// take(r, row) for rows 16 half + r, r = 0 .. 15, of a block as bf16: a register each, columns in
/// order. `scales` is what LoadScales gave for them.
template <PackedFormat kFormat, class Take>
PLIANT_INLINE_AVX512 void DequantEachRow(const RowScales& scales, const std::byte* block, int half,
                                         Take&& take) {
  constexpr PackedTraits kTraits = Traits(kFormat);
  const std::byte* codes = block + kTraits.scale_bytes;
  if constexpr (kTraits.code_bits == 16) {
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) take(r, _mm512_loadu_si512(codes + (half * 16 + r) * 64));
  } else if constexpr (kTraits.code_bits == 32) {
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      const std::byte* p = codes + (half * 16 + r) * 128;
      take(r, RoundPair(_mm512_loadu_ps(p + 64), _mm512_loadu_ps(p)));
    }
  } else if constexpr (kTraits.code_bits == 8) {
    DequantBytes<kFormat>(scales, codes, half, take);
  } else if constexpr (kTraits.code_bits == 5) {
    DequantFiveBits<kFormat>(scales, codes, half, take);
  } else {
    DequantDigits<kFormat>(scales, codes, half, take);
  }
}

/// The same, all at once.
template <PackedFormat kFormat>
PLIANT_INLINE_AVX512 void DequantRows(const RowScales& scales, const std::byte* block, int half,
                                      __m512i rows[16]) {
  DequantEachRow<kFormat>(scales, block, half,
                          [&](int r, __m512i row) PLIANT_INLINE_LAMBDA_AVX512 { rows[r] = row; });
}

/// The scales of the block at hand and of the next one, loaded a block ahead.
template <PackedFormat kFormat>
class ScaleQueue {
 public:
  /// Starts with block 0 of a panel.
  PLIANT_INLINE_AVX512 explicit ScaleQueue(const std::byte* panel) : panel_(panel) { Load(0); }
  /// The scales of `block` (both halves), after those of the block before; loads `block` + 1 when
  /// it is below `blocks`.
  PLIANT_INLINE_AVX512 const RowScales* Next(std::int64_t block, std::int64_t blocks) {
    if (block + 1 < blocks) Load(block + 1);
    // What was stored has to be read from memory: the compiler would else broadcast each scale from
    // a register with a permute, on the port that the look-ups need.
    const RowScales* p = scales_[block % 2];
    __asm__ volatile("" : "+r"(p) : : "memory");
    return p;
  }

 private:
  PLIANT_INLINE_AVX512 void Load(std::int64_t block) {
    const std::byte* super = panel_ + PackedSuperOffset(kFormat, block);
    const std::byte* from = panel_ + PackedBlockOffset(kFormat, block);
    LoadScales<kFormat>(super, from, 0, scales_[block % 2][0]);
    LoadScales<kFormat>(super, from, 1, scales_[block % 2][1]);
  }

  const std::byte* panel_;
  RowScales scales_[2][2];
};

/// Turns 16 registers of 16 dwords round: dword j of register i goes to dword i of register j.
PLIANT_INLINE_AVX512 void Transpose16(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // r[4 q + c] holds, in its 128-bit lane l, column 4 l + c of rows 4 q .. 4 q + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);       // lanes 0, 2 of rows 0-7
    const __m512i b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);       // lanes 1, 3
    const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);  // rows 8-15
    const __m512i e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

/// CALL(format) with a run-time format made a constant.
#define PLIANT_SWITCH_FORMAT(format, CALL) \
  switch (format) {                        \
    case PackedFormat::kQ4_0:              \
      CALL(PackedFormat::kQ4_0);           \
      break;                               \
    case PackedFormat::kQ4_1:              \
      CALL(PackedFormat::kQ4_1);           \
      break;                               \
    case PackedFormat::kQ4_K:              \
      CALL(PackedFormat::kQ4_K);           \
      break;                               \
    case PackedFormat::kQ5_0:              \
      CALL(PackedFormat::kQ5_0);           \
      break;                               \
    case PackedFormat::kQ5_1:              \
      CALL(PackedFormat::kQ5_1);           \
      break;                               \
    case PackedFormat::kQ5_K:              \
      CALL(PackedFormat::kQ5_K);           \
      break;                               \
    case PackedFormat::kQ8_0:              \
      CALL(PackedFormat::kQ8_0);           \
      break;                               \
    case PackedFormat::kQ6_K:              \
      CALL(PackedFormat::kQ6_K);           \
      break;                               \
    case PackedFormat::kBf16:              \
      CALL(PackedFormat::kBf16);           \
      break;                               \
    case PackedFormat::kF32:               \
      CALL(PackedFormat::kF32);            \
      break;                               \
  }

}  // namespace pliant::avx512

#endif  // x86-64
