// watched_keys.h, in vectors. Digits of 4 bits times query codes of 8: with VPDPBUSD four products
// go into a sum of 32 bits; else pairs of products fit 16 bits (15 * 127 * 2), and so do the sums
// of eight pairs.
#include "backend/cpu/kv_watch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/history_avx512.h"
#include "backend/step_check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kv_watch.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace pliant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using U8 = hn::CappedTag<std::uint8_t, 64>;
using I16 = hn::Repartition<std::int16_t, U8>;
using I32 = hn::Repartition<std::int32_t, U8>;

constexpr int kColumns = 4;  // at once
constexpr float kUnit = 1.44269504088896340736f / 16;
constexpr int kMostRow = kMaxKvHeadDim / 2;

/// Codes of some columns: of the elements in the lower and the upper halves of the bytes of rows,
/// one row behind the other, to 64 bytes behind the first.
struct Queries {
  alignas(64) std::int8_t low[kColumns][kMostRow + 64], high[kColumns][kMostRow + 64];
  std::int32_t offset[kColumns];  // 15 * the sum of codes
  float step[kColumns];
};

/// 32 codes: those of even elements, and the others.
HWY_INLINE void Part(const std::int8_t* HWY_RESTRICT codes, std::int8_t* HWY_RESTRICT even,
                     std::int8_t* HWY_RESTRICT odd) {
  const hn::CappedTag<std::int16_t, 16> d;
  const hn::Rebind<std::int8_t, decltype(d)> d8;
  for (int i = 0; i < 16; i += static_cast<int>(hn::Lanes(d))) {
    const auto pairs =
        hn::BitCast(d, hn::LoadU(hn::Repartition<std::int8_t, decltype(d)>(), codes + 2 * i));
    hn::StoreU(hn::DemoteTo(d8, hn::ShiftRight<8>(hn::ShiftLeft<8>(pairs))), d8, even + i);
    hn::StoreU(hn::DemoteTo(d8, hn::ShiftRight<8>(pairs)), d8, odd + i);
  }
}

/// As CodeWatchingQuery; steps in units of logits.
void CodeQueries(const QueryTile& tile, int dim, int first, int columns, Queries& q) {
  const F32 d;
  const hn::Rebind<std::int32_t, F32> d32;
  const hn::Rebind<std::int8_t, F32> d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  alignas(64) std::int8_t codes[kMaxKvHeadDim];
  for (int c = 0; c < columns; ++c) {
    const float* row = tile.query + static_cast<std::ptrdiff_t>(first + c) * dim;
    auto largest = hn::Zero(d);
    for (int i = 0; i < dim; i += lanes) largest = hn::Max(largest, hn::Abs(hn::LoadU(d, row + i)));
    const float most = hn::GetLane(hn::MaxOfLanes(d, largest));
    const auto inverse = hn::Set(d, most > 0 ? 127.0f / most : 0.0f);
    auto sum = hn::Zero(d32);
    for (int i = 0; i < dim; i += lanes) {
      const auto code = hn::NearestInt(hn::Mul(hn::LoadU(d, row + i), inverse));
      sum = hn::Add(sum, code);
      hn::Store(hn::DemoteTo(d8, code), d8, codes + i);
    }
    q.step[c] = most * (1 / 127.0f) * tile.softmax_scale * kUnit;
    q.offset[c] = 15 * hn::GetLane(hn::SumOfLanes(d32, sum));
    for (int i = 0; i < dim / 2; i += 16) Part(codes + 2 * i, q.low[c] + i, q.high[c] + i);
    for (std::int8_t* half : {q.low[c], q.high[c]}) {
      for (int at = dim / 2; at < dim / 2 + 64; at += 16)
        std::memcpy(half + at, half + at - dim / 2, 16);
    }
  }
}

/// Sums of two neighbouring products of digits and codes.
template <class V>
HWY_INLINE hn::VFromD<I16> Pairs(V digits, hn::VFromD<hn::Repartition<std::int8_t, U8>> codes) {
#if HWY_TARGET == HWY_AVX3
  return hn::VFromD<I16>{_mm512_maddubs_epi16(digits.raw, codes.raw)};
#elif HWY_TARGET == HWY_AVX2
  return hn::VFromD<I16>{_mm256_maddubs_epi16(digits.raw, codes.raw)};
#elif HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3
  return hn::VFromD<I16>{_mm_maddubs_epi16(digits.raw, codes.raw)};
#else
  const I16 d;
  const auto n = hn::BitCast(d, digits), q = hn::BitCast(d, codes);
  const auto even = hn::Mul(hn::And(n, hn::Set(d, 255)), hn::ShiftRight<8>(hn::ShiftLeft<8>(q)));
  return hn::Add(even, hn::Mul(hn::ShiftRight<8>(n), hn::ShiftRight<8>(q)));
#endif
}

/// The sums of a vector of bytes of rows with one column's codes at `at`.
HWY_INLINE hn::VFromD<I16> Products(hn::VFromD<U8> low, hn::VFromD<U8> high, const Queries& q,
                                    int column, int at) {
  const hn::Repartition<std::int8_t, U8> d;
  return hn::Add(Pairs(low, hn::LoadU(d, q.low[column] + at)),
                 Pairs(high, hn::LoadU(d, q.high[column] + at)));
}

/// Of four vectors the sums over each 16 bytes: lane i of block b is vector i's block b.
HWY_INLINE hn::VFromD<I32> SumBlocks(hn::VFromD<I16> a, hn::VFromD<I16> b, hn::VFromD<I16> c,
                                     hn::VFromD<I16> e) {
  const I16 d16;
  const I32 d;
  const hn::Repartition<std::int64_t, U8> d64;
  const auto wide = [&](auto v) HWY_ATTR { return hn::BitCast(d, v); };
  const auto ab = hn::Add(hn::BitCast(d16, hn::InterleaveLower(d, wide(a), wide(b))),
                          hn::BitCast(d16, hn::InterleaveUpper(d, wide(a), wide(b))));
  const auto ce = hn::Add(hn::BitCast(d16, hn::InterleaveLower(d, wide(c), wide(e))),
                          hn::BitCast(d16, hn::InterleaveUpper(d, wide(c), wide(e))));
  const auto ab64 = hn::BitCast(d64, ab), ce64 = hn::BitCast(d64, ce);
  const auto sums = hn::Add(hn::BitCast(d16, hn::InterleaveLower(d64, ab64, ce64)),
                            hn::BitCast(d16, hn::InterleaveUpper(d64, ab64, ce64)));
  const auto both = hn::BitCast(d, sums);
  return hn::Add(hn::ShiftRight<16>(both), hn::ShiftRight<16>(hn::ShiftLeft<16>(both)));
}

/// sums[column][token] of one block's rows, for rows of any length.
void AnyRows(const std::uint8_t* rows, int dim, const Queries& q, int columns,
             std::int32_t (*sums)[kBlockTokens]) {
  const U8 d8;
  const I32 d;
  const auto nibble = hn::Set(d8, 15);
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(U8())), kBlocks = kLanes / 16;
  const int row_bytes = dim / 2, pieces = row_bytes / 16;
  for (int c = 0; c < columns; ++c) std::fill_n(sums[c], kBlockTokens, 0);
  alignas(64) std::int32_t some[4 * kBlocks];
  for (int at = 0; at < kBlockTokens * row_bytes; at += 4 * kLanes) {
    hn::VFromD<U8> low[4], high[4];
    for (int i = 0; i < 4; ++i) {
      const auto bytes = hn::LoadU(d8, rows + at + i * kLanes);
      low[i] = hn::And(bytes, nibble);
      high[i] = hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(I16(), bytes))), nibble);
    }
    for (int c = 0; c < columns; ++c) {
      hn::VFromD<I16> part[4];
      for (int i = 0; i < 4; ++i) {
        part[i] = Products(low[i], high[i], q, c, (at + i * kLanes) % row_bytes);
      }
      hn::Store(SumBlocks(part[0], part[1], part[2], part[3]), d, some);
      for (int i = 0; i < 4 * kBlocks; ++i)
        sums[c][(at / 16 + i) / pieces] += some[i % kBlocks * 4 + i / kBlocks];
    }
  }
}

/// Asks for the block at `at`, if that is before `end`. Pages lie wherever they lie, so what the
/// hardware fetches ahead by itself stops at the end of each.
void AskForKeys(const AttentionHead& head, int at, int end) {
  if (at >= end) return;
  const PageId page = head.blocks[at / kBlockTokens].k[0];
  if (!page.valid()) return;
  const int bytes = kBlockTokens * head.head_dim / 2;
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(head.Rows(page) + line);
  __builtin_prefetch(head.Scales(page));
}

HWY_INLINE void LoadScales(const std::uint16_t* codes, float* HWY_RESTRICT scales) {
  const F32 d;
  const hn::Rebind<std::uint32_t, F32> d32;
  const hn::Rebind<std::uint16_t, F32> d16;
  for (int t = 0; t < kBlockTokens; t += static_cast<int>(hn::Lanes(d))) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, codes + t)));
    const auto scale = hn::BitCast(d, bits);
    // NaN for infinite scales: that such a row was read shows elsewhere.
    hn::Store(hn::Add(scale, hn::Sub(scale, scale)), d, scales + t);
  }
}

HWY_INLINE void SumRows(const std::uint8_t* rows, int dim, const Queries& q, int columns,
                        std::int32_t (*sums)[kBlockTokens]) {
#if HWY_TARGET == HWY_AVX3
  if (dim % 64 == 0) {
    const std::int8_t *low[kColumns], *high[kColumns];
    for (int c = 0; c < columns; ++c) {
      low[c] = q.low[c];
      high[c] = q.high[c];
    }
    return avx512::WatchRows(rows, dim, columns, low, high, sums);
  }
#endif
  AnyRows(rows, dim, q, columns, sums);
}

void Watch(const AttentionHead& head, const QueryTile& tile, int first, int end, float* logits) {
  const F32 d;
  const I32 d32;
  const int dim = head.head_dim, lanes = static_cast<int>(hn::Lanes(d));
  Queries q;
  alignas(64) std::int32_t sums[kColumns][kBlockTokens];
  alignas(64) float scales[kBlockTokens];
  const auto* const soon = reinterpret_cast<const std::byte*>(tile.soon);
  const std::ptrdiff_t soon_bytes = tile.soon_count * static_cast<std::ptrdiff_t>(sizeof(float));
  const std::ptrdiff_t soon_each =
      soon_bytes / ((end - first) / kBlockTokens) / 64 * 64 + 64;  // with a block
  std::ptrdiff_t asked = 0;
  for (int column = 0; column < tile.Columns(); column += kColumns) {
    const int columns = std::min(kColumns, tile.Columns() - column);
    if (column == 0) AskForKeys(head, first, end);
    CodeQueries(tile, dim, column, columns, q);
    for (int at = first; at < end; at += kBlockTokens) {
      float* to = logits + static_cast<std::ptrdiff_t>(column) * kSplitTokens + (at - first);
      const PageId page = head.blocks[at / kBlockTokens].k[0];
      if (column == 0) {
        AskForKeys(head, at + kBlockTokens, end);
        const std::ptrdiff_t until = std::min(asked + soon_each, soon_bytes);
        for (; asked < until; asked += 64) __builtin_prefetch(soon + asked, 1);
      }
      if (!page.valid()) {
        for (int c = 0; c < columns; ++c)
          std::fill_n(to + c * kSplitTokens, kBlockTokens, -std::numeric_limits<float>::infinity());
        continue;
      }
      LoadScales(head.Scales(page), scales);
      SumRows(head.Rows(page), dim, q, columns, sums);
      for (int c = 0; c < columns; ++c) {
        for (int t = 0; t < kBlockTokens; t += lanes) {
          const auto twice = hn::ShiftLeft<1>(hn::Load(d32, sums[c] + t));
          const auto product = hn::ConvertTo(d, hn::Sub(twice, hn::Set(d32, q.offset[c])));
          const auto unit = hn::Mul(hn::Load(d, scales + t), hn::Set(d, q.step[c]));
          hn::StoreU(hn::Mul(product, unit), d, to + c * kSplitTokens + t);
        }
      }
    }
  }
}

WatchKernel Watching() { return Watch; }

}  // namespace HWY_NAMESPACE
}  // namespace pliant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/cpu_dispatch.h"

namespace pliant {

WatchKernel ChooseWatchKernel(CpuLevel level) { PLIANT_RETURN_BY_LEVEL(level, Watching); }

}  // namespace pliant
#endif  // HWY_ONCE
