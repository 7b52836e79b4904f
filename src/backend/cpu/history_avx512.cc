#include "backend/cpu/history_avx512.h"

// GCC 12 warns of its own _mm512_undefined_*() placeholders once they are inlined.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#define PLIANT_TARGET_VNNI \
  __attribute__((          \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vpopcntdq,avx2,fma,popcnt")))
#define PLIANT_INLINE_VNNI PLIANT_TARGET_VNNI __attribute__((always_inline)) inline
/// For lambdas, after their parameters.
#define PLIANT_VNNI_LAMBDA PLIANT_TARGET_VNNI __attribute__((always_inline))

namespace pliant::avx512 {
namespace {

/// 32 bytes of each of two rows.
PLIANT_INLINE_VNNI __m512i TwoTokens(const std::uint8_t* row, int row_bytes) {
  if (row_bytes == 32) return _mm512_loadu_si512(row);
  const auto* first = reinterpret_cast<const __m256i*>(row);
  const auto* second = reinterpret_cast<const __m256i*>(row + row_bytes);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(first)),
                            _mm256_loadu_si256(second), 1);
}

/// Four codes, for all lanes.
PLIANT_INLINE_VNNI __m512i FourCodes(const std::int8_t* codes) {
  std::int32_t four;
  std::memcpy(&four, codes, sizeof(four));
  return _mm512_set1_epi32(four);
}

/// One dword of the rows of 16 tokens in each.
struct Dwords {
  __m512i at[4];
};

/// The dwords of 16 bytes of rows; m[i]: those of tokens 4 i .. 4 i + 3. Lane 4 l + i is of token
/// 4 i + l.
PLIANT_INLINE_VNNI Dwords Transpose(__m512i m0, __m512i m1, __m512i m2, __m512i m3) {
  const __m512i a = _mm512_unpacklo_epi32(m0, m1), b = _mm512_unpackhi_epi32(m0, m1);
  const __m512i c = _mm512_unpacklo_epi32(m2, m3), d = _mm512_unpackhi_epi32(m2, m3);
  return {{_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
           _mm512_unpackhi_epi64(b, d)}};
}

/// Products of 16 tokens with the codes of kSome columns.
template <int kSome>
struct Sums {
  __m512i low[kSome], high[kSome];  // high: 16 times what it should be

  /// Four bytes of each row, from byte `at` on.
  PLIANT_INLINE_VNNI void Add(__m512i bytes, const std::int8_t* const* codes_low,
                              const std::int8_t* const* codes_high, int at) {
    const __m512i digits_low = _mm512_and_si512(bytes, _mm512_set1_epi8(0x0f));
    const __m512i digits_high = _mm512_and_si512(bytes, _mm512_set1_epi8(-0x10));
    for (int c = 0; c < kSome; ++c) {
      low[c] = _mm512_dpbusd_epi32(low[c], digits_low, FourCodes(codes_low[c] + at));
      high[c] = _mm512_dpbusd_epi32(high[c], digits_high, FourCodes(codes_high[c] + at));
    }
  }
};

/// The rows of 16 tokens are transposed, so that a lane is a token.
template <int kSome>
PLIANT_TARGET_VNNI void Watch(const std::uint8_t* rows, int dim, const std::int8_t* const* low,
                              const std::int8_t* const* high, std::int32_t (*to)[kBlockTokens]) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const int row_bytes = dim / 2;
  for (int first = 0; first < kBlockTokens; first += 16) {
    Sums<kSome> sums;
    for (int c = 0; c < kSome; ++c) sums.low[c] = sums.high[c] = _mm512_setzero_si512();
    for (int piece = 0; piece < row_bytes; piece += 32) {
      const std::uint8_t* row = rows + first * row_bytes + piece;
      __m512i two[8];  // rows
      for (int i = 0; i < 8; ++i) two[i] = TwoTokens(row + 2 * i * row_bytes, row_bytes);
      const auto add = [&](const Dwords& dwords, int at) PLIANT_VNNI_LAMBDA {
        sums.Add(dwords.at[0], low, high, at);
        sums.Add(dwords.at[1], low, high, at + 4);
        sums.Add(dwords.at[2], low, high, at + 8);
        sums.Add(dwords.at[3], low, high, at + 12);
      };
      add(Transpose(_mm512_shuffle_i32x4(two[0], two[1], 0x88),
                    _mm512_shuffle_i32x4(two[2], two[3], 0x88),
                    _mm512_shuffle_i32x4(two[4], two[5], 0x88),
                    _mm512_shuffle_i32x4(two[6], two[7], 0x88)),
          piece);
      add(Transpose(_mm512_shuffle_i32x4(two[0], two[1], 0xdd),
                    _mm512_shuffle_i32x4(two[2], two[3], 0xdd),
                    _mm512_shuffle_i32x4(two[4], two[5], 0xdd),
                    _mm512_shuffle_i32x4(two[6], two[7], 0xdd)),
          piece + 16);
    }
    for (int c = 0; c < kSome; ++c) {
      const __m512i sum = _mm512_add_epi32(sums.low[c], _mm512_srai_epi32(sums.high[c], 4));
      _mm512_store_si512(to[c] + first, _mm512_permutexvar_epi32(order, sum));
    }
  }
}

/// 32 rows of codes by fours, a lane a row; sums begin at what the offset of unsigned codes adds.
struct LaterCodes {
  alignas(64) std::int32_t fours[kMostCodes / 4][kBlockTokens];
  __m512i start[2], norms[2];
};

/// kRows rows at once, so that sums need not wait for each other.
template <int kRows>
PLIANT_TARGET_VNNI void NearestOf(int fours, const std::int8_t* rows, int from,
                                  const LaterCodes& later, float* nearest) {
  __m512i sums[kRows][2];
  for (int r = 0; r < kRows; ++r) sums[r][0] = later.start[0], sums[r][1] = later.start[1];
  for (int j = 0; j < fours; ++j) {
    const __m512i a = _mm512_load_si512(later.fours[j]);
    const __m512i b = _mm512_load_si512(later.fours[j] + 16);
    for (int r = 0; r < kRows; ++r) {
      const __m512i own =
          _mm512_xor_si512(FourCodes(rows + (r * fours + j) * 4), _mm512_set1_epi8(-128));
      sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], own, a);
      sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], own, b);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const int first = from + r;
    const std::uint32_t asked = first <= 0 ? ~0u : first >= kBlockTokens ? 0u : ~0u << first;
    const __m512 a =
        _mm512_maskz_mul_ps(static_cast<__mmask16>(asked), _mm512_cvtepi32_ps(sums[r][0]),
                            _mm512_castsi512_ps(later.norms[0]));
    const __m512 b =
        _mm512_maskz_mul_ps(static_cast<__mmask16>(asked >> 16), _mm512_cvtepi32_ps(sums[r][1]),
                            _mm512_castsi512_ps(later.norms[1]));
    nearest[r] = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_setzero_ps()));
  }
}

}  // namespace

void WatchRows(const std::uint8_t* rows, int dim, int columns, const std::int8_t* const* low,
               const std::int8_t* const* high, std::int32_t (*sums)[kBlockTokens]) {
  switch (columns) {
    case 1:
      return Watch<1>(rows, dim, low, high, sums);
    case 2:
      return Watch<2>(rows, dim, low, high, sums);
    case 3:
      return Watch<3>(rows, dim, low, high, sums);
    default:
      return Watch<kWatchColumns>(rows, dim, low, high, sums);
  }
}

PLIANT_TARGET_VNNI void FewestSigns(int count, const std::uint64_t* rows, int later_count,
                                    const std::uint64_t* later, std::int32_t* fewest) {
  int done = 0;
  constexpr int kAhead = 64;
  for (; done + 16 <= count; done += 16) {
    _mm_prefetch(reinterpret_cast<const char*>(rows + done + kAhead), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(rows + done + kAhead + 8), _MM_HINT_T0);
    const __m512i a = _mm512_loadu_si512(rows + done), b = _mm512_loadu_si512(rows + done + 8);
    __m512i least_a = _mm512_set1_epi64(64), least_b = least_a;
    for (int j = 0; j < later_count; ++j) {
      const __m512i other = _mm512_set1_epi64(static_cast<long long>(later[j]));
      const __m512i differ_a = _mm512_popcnt_epi64(_mm512_xor_si512(a, other));
      const __m512i differ_b = _mm512_popcnt_epi64(_mm512_xor_si512(b, other));
      least_a = _mm512_min_epu64(least_a, differ_a);
      least_b = _mm512_min_epu64(least_b, differ_b);
    }
    auto* to = reinterpret_cast<__m256i*>(fewest + done);
    _mm256_storeu_si256(to, _mm512_cvtepi64_epi32(least_a));
    _mm256_storeu_si256(to + 1, _mm512_cvtepi64_epi32(least_b));
  }
  for (; done < count; ++done) {  // few: the later ones side by side
    const __m512i row = _mm512_set1_epi64(static_cast<long long>(rows[done]));
    __m512i least = _mm512_set1_epi64(64);
    for (int j = 0; j < later_count; j += 8) {
      const auto some =
          static_cast<__mmask8>(later_count - j >= 8 ? 0xff : (1 << (later_count - j)) - 1);
      const __m512i differ =
          _mm512_popcnt_epi64(_mm512_xor_si512(_mm512_maskz_loadu_epi64(some, later + j), row));
      least = _mm512_mask_min_epu64(least, some, least, differ);
    }
    fewest[done] = static_cast<std::int32_t>(_mm512_reduce_min_epu64(least));
  }
}

PLIANT_TARGET_VNNI void NearestCodes(int dim, int count, const std::int8_t* rows, int from,
                                     const std::int8_t* later, const float* norms, float* nearest) {
  const int fours = dim / 4;
  LaterCodes turned;
  for (int t = 0; t < kBlockTokens; ++t) {
    for (int j = 0; j < fours; ++j)
      std::memcpy(&turned.fours[j][t], later + t * dim + 4 * j, sizeof(std::int32_t));
  }
  for (int half = 0; half < 2; ++half) {
    __m512i sum = _mm512_setzero_si512();  // 128 times the codes of a row: own codes have an offset
    for (int j = 0; j < fours; ++j) {
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128),
                                _mm512_load_si512(turned.fours[j] + 16 * half));
    }
    turned.start[half] = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
    turned.norms[half] = _mm512_loadu_si512(norms + 16 * half);
  }
  int done = 0;
  for (; done + 4 <= count; done += 4)
    NearestOf<4>(fours, rows + done * dim, from + done, turned, nearest + done);
  for (; done < count; ++done)
    NearestOf<1>(fours, rows + done * dim, from + done, turned, nearest + done);
}

}  // namespace pliant::avx512

#endif  // defined(__x86_64__)
