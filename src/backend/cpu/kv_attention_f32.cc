// Room: backend. Attention in f32 for machines without AMX, and the merging of partial results for
// all. Blocks are decoded into scratch in the order in which digits come apart most cheaply
// (ForEachDim); the query is permuted the same way.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/kv_attention.h"
#include "backend/step_check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kv_attention_f32.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace pliant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using F32x4 = hn::FixedTag<float, 4>;

constexpr int kMaxColumns = 48;
constexpr int kNarrowColumns = 16;
constexpr float kNoLogit =
    -1e30f;  // below every real logit, and finite: differences of it are no NaN
constexpr float kLog2E = 1.44269504088896340736f;

/// Columns of one call, and one decoded block. All arrays are [.][head_dim] with the block's
/// permuted dims.
struct Scratch {
  alignas(64) float query[kMaxColumns * kMaxKvHeadDim];
  alignas(64) float key[kBlockTokens * kMaxKvHeadDim];
  alignas(64) float value[kBlockTokens * kMaxKvHeadDim];
  alignas(64) float sums[kMaxColumns * kMaxKvHeadDim];
  alignas(64) float maxima[kMaxColumns];
  alignas(64) float totals[kMaxColumns];
};

std::size_t ScratchBytes(int) { return sizeof(Scratch); }
bool Supports(int head_dim) { return head_dim % 32 == 0 && head_dim <= kMaxKvHeadDim; }

/// 2^x for x <= 0: relative error 3e-7; 0 below 2^-126; NaN for NaN. The polynomial is the Taylor
/// series of 2^f about 0 to degree 6
/// (|f| <= 1/2: truncation 1.2e-7 relative).
template <class V>
V Exp2(V x) {
  const hn::DFromV<V> d;
  const hn::RebindToSigned<decltype(d)> di;
  const auto tiny = hn::Lt(x, hn::Set(d, -126.0f));
  const auto clamped = hn::IfThenElse(tiny, hn::Set(d, -126.0f), x);
  const auto whole = hn::Round(clamped);
  const auto f = hn::Sub(clamped, whole);
  auto p = hn::Set(d, 1.5403530e-4f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.3333558e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.6181291e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.5504109e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.4022651e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.9314718e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::NearestInt(whole), hn::Set(di, 127)));
  return hn::IfThenZeroElse(tiny, hn::Mul(p, hn::BitCast(d, exponent)));
}

float Exp2One(float x) {
  const F32 d;
  return hn::GetLane(Exp2(hn::Set(d, x)));
}

/// A decoded row: chunks of four vectors, two of even dims, two of odd ones. Bytes are interleaved
/// within 16 of them, so that of 32 the second and third eight change places; what is left of a row
/// is done by shorter vectors. put(position, dim) for all.
template <class Put>
HWY_INLINE void ForEachDim(int dim, Put&& put) {
  int at = 0;
  const auto chunks = [&](auto d) HWY_ATTR {
    const int half = 2 * static_cast<int>(hn::Lanes(d));
    for (; at + 2 * half <= dim; at += 2 * half) {
      for (int j = 0; j < half; ++j) {
        const int byte = half == 32 ? (j & ~24) | (j & 8) << 1 | (j & 16) >> 1 : j;
        put(at + j, at + 2 * byte);
        put(at + half + j, at + 2 * byte + 1);
      }
    }
  };
  chunks(F32());
  chunks(hn::CappedTag<float, 8>());
}

/// What 2 Lanes(d) bytes of a row's planes from `offset` on say: codes - 32768.
template <class D>
struct Chunk {
  hn::VFromD<D> part[4];
};

template <int kResident, class D>
HWY_INLINE Chunk<D> DecodeChunk(D d, const std::uint8_t* const* rows, std::size_t offset) {
  const hn::Rebind<std::int16_t, D> d16;
  const hn::Rebind<std::int32_t, D> d32;
  const hn::Repartition<std::uint8_t, decltype(d16)> d8;
  const hn::Repartition<std::uint16_t, decltype(d16)> words;
  using V = hn::VFromD<decltype(d8)>;
  const V upper = hn::Set(d8, 0xf0u);
  // Absent planes read as the midpoint: an 8 in the first one's digit, 0 in the others'.
  const V absent = hn::Set(d8, 0x88u), zero = hn::Zero(d8);
  const auto plane = [&](int p) HWY_ATTR {
    return p < kResident ? hn::LoadU(d8, rows[p] + offset) : p == kResident ? absent : zero;
  };
  // A code's two bytes hold a digit of an even plane above one of an odd plane.
  const auto evens = [&](V a, V b) HWY_ATTR {
    const V up = hn::BitCast(d8, hn::ShiftLeft<4>(hn::BitCast(words, a)));
    return hn::OrAnd(hn::AndNot(upper, b), upper, up);
  };
  const auto odds = [&](V a, V b) HWY_ATTR {
    const V down = hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(words, b)));
    return hn::OrAnd(hn::AndNot(upper, down), upper, a);
  };
  const auto signed_floats = [&](V bytes) HWY_ATTR {
    return hn::ConvertTo(d, hn::PromoteTo(d32, hn::BitCast(d16, bytes)));
  };
  const V p0 = plane(0), p1 = plane(1), p2 = plane(2), p3 = plane(3);
  const V sign = hn::Set(d8, 0x80u);
  const V even_high = hn::Xor(evens(p0, p1), sign), even_low = evens(p2, p3);
  const V odd_high = hn::Xor(odds(p0, p1), sign), odd_low = odds(p2, p3);
  return {{signed_floats(hn::InterleaveLower(d8, even_low, even_high)),
           signed_floats(hn::InterleaveUpper(d8, even_low, even_high)),
           signed_floats(hn::InterleaveLower(d8, odd_low, odd_high)),
           signed_floats(hn::InterleaveUpper(d8, odd_low, odd_high))}};
}

/// One row of planes as DecodeChunk gives it: [head_dim], in ForEachDim's order.
template <int kResident>
void DecodeRowPermuted(int dim, const std::uint8_t* const* rows, std::size_t offset,
                       float* HWY_RESTRICT out) {
  int at = 0;
  const auto decode = [&](auto d) HWY_ATTR {
    const int lanes = static_cast<int>(hn::Lanes(d));
    for (; at + 4 * lanes <= dim; at += 4 * lanes) {
      const auto chunk = DecodeChunk<kResident>(d, rows, offset + at / 2);
      for (int i = 0; i < 4; ++i) hn::StoreU(chunk.part[i], d, out + at + i * lanes);
    }
  };
  decode(F32());
  decode(hn::CappedTag<float, 8>());
}

/// One side of one block: where its planes' rows lie, and what a code of each token counts.
struct Side {
  const std::uint8_t* rows[kPlanes] = {};
  int planes = 0;
  /// scale / 32768; NaN for infinite ones, which must show, and not be minus infinity in a softmax.
  alignas(64) float steps[kBlockTokens];

  Side(const AttentionHead& head, const std::array<PageId, kPlanes>& pages)
      : planes(ResidentPlanes(pages)) {
    for (int p = 0; p < planes; ++p) rows[p] = head.Rows(pages[p]);
    const std::uint16_t* scales = head.Scales(pages[0]);
    for (int t = 0; t < kBlockTokens; ++t) {
      const float step = Bf16ToFloat(scales[t]) / 32768.0f;
      steps[t] = step + (step - step);
    }
  }
};

/// CALL<planes> with the run-time number made a constant.
#define PLIANT_SWITCH_PLANES(planes, CALL) \
  switch (planes) {                        \
    case 1:                                \
      CALL(1);                             \
      break;                               \
    case 2:                                \
      CALL(2);                             \
      break;                               \
    case 3:                                \
      CALL(3);                             \
      break;                               \
    default:                               \
      CALL(4);                             \
      break;                               \
  }

/// Decodes the first `tokens` rows, without their steps.
void DecodeBlock(int dim, const Side& side, int tokens, float* out) {
  for (int t = 0; t < tokens; ++t) {
    const std::size_t offset = static_cast<std::size_t>(t) * dim / 2;
    float* to = out + static_cast<std::ptrdiff_t>(t) * dim;
#define PLIANT_DECODE(PLANES) DecodeRowPermuted<PLANES>(dim, side.rows, offset, to)
    PLIANT_SWITCH_PLANES(side.planes, PLIANT_DECODE)
#undef PLIANT_DECODE
  }
}

/// The sums of the lanes of four vectors, times `steps`.
template <class V>
HWY_INLINE void SumFour(V a0, V a1, V a2, V a3, const float* steps, float* to) {
  const F32 d;
  const hn::Repartition<double, F32> pairs;
  const F32x4 d4;
  alignas(64) float blocks[16];
  const auto s01 =
      hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, a0, a1), hn::InterleaveUpper(d, a0, a1)));
  const auto s23 =
      hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, a2, a3), hn::InterleaveUpper(d, a2, a3)));
  const auto sum = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, s01, s23)),
                           hn::BitCast(d, hn::InterleaveUpper(pairs, s01, s23)));
  hn::Store(sum, d, blocks);
  auto four = hn::Load(d4, blocks);
  for (int b = 4; b < static_cast<int>(hn::Lanes(d)); b += 4)
    four = hn::Add(four, hn::Load(d4, blocks + b));
  hn::Store(hn::Mul(four, hn::Load(d4, steps)), d4, to);
}

/// logits[t] = q . key[t] for 32 tokens, four at a time so that sums across lanes are shared.
void Dots(int dim, const float* HWY_RESTRICT q, const float* HWY_RESTRICT key,
          const float* HWY_RESTRICT steps, float* HWY_RESTRICT logits) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int t = 0; t < kBlockTokens; t += 4) {
    const float* k = key + static_cast<std::ptrdiff_t>(t) * dim;
    auto a0 = hn::Zero(d), a1 = hn::Zero(d), a2 = hn::Zero(d), a3 = hn::Zero(d);
    for (int i = 0; i < dim; i += lanes) {
      const auto v = hn::Load(d, q + i);
      a0 = hn::MulAdd(v, hn::Load(d, k + i), a0);
      a1 = hn::MulAdd(v, hn::Load(d, k + dim + i), a1);
      a2 = hn::MulAdd(v, hn::Load(d, k + 2 * dim + i), a2);
      a3 = hn::MulAdd(v, hn::Load(d, k + 3 * dim + i), a3);
    }
    SumFour(a0, a1, a2, a3, steps + t, logits + t);
  }
}

/// sums = sums * keep + sum over t < tokens of weights[t] * value[t]; a weight has the value's step
/// in it. Later rows are not read: they may hold anything, and 0 * NaN is NaN.
void Accumulate(int dim, int tokens, float keep, const float* HWY_RESTRICT weights,
                const float* HWY_RESTRICT value, float* HWY_RESTRICT sums) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < dim; i += 4 * lanes) {  // dim / lanes is even; the second pair may be missing
    const bool four = i + 2 * lanes < dim;
    const auto k = hn::Set(d, keep);
    auto a0 = hn::Mul(hn::Load(d, sums + i), k);
    auto a1 = hn::Mul(hn::Load(d, sums + i + lanes), k);
    if (four) {
      auto a2 = hn::Mul(hn::Load(d, sums + i + 2 * lanes), k);
      auto a3 = hn::Mul(hn::Load(d, sums + i + 3 * lanes), k);
      for (int t = 0; t < tokens; ++t) {
        const auto w = hn::Set(d, weights[t]);
        const float* v = value + static_cast<std::ptrdiff_t>(t) * dim + i;
        a0 = hn::MulAdd(w, hn::Load(d, v), a0);
        a1 = hn::MulAdd(w, hn::Load(d, v + lanes), a1);
        a2 = hn::MulAdd(w, hn::Load(d, v + 2 * lanes), a2);
        a3 = hn::MulAdd(w, hn::Load(d, v + 3 * lanes), a3);
      }
      hn::Store(a2, d, sums + i + 2 * lanes);
      hn::Store(a3, d, sums + i + 3 * lanes);
    } else {
      for (int t = 0; t < tokens; ++t) {
        const auto w = hn::Set(d, weights[t]);
        const float* v = value + static_cast<std::ptrdiff_t>(t) * dim + i;
        a0 = hn::MulAdd(w, hn::Load(d, v), a0);
        a1 = hn::MulAdd(w, hn::Load(d, v + lanes), a1);
      }
    }
    hn::Store(a0, d, sums + i);
    hn::Store(a1, d, sums + i + lanes);
  }
}

/// Where a block's weights and bases go, if they are wanted: those of column c
/// c * kSplitTokens and c * kSplitBlocks further.
struct Seen {
  float* weights = nullptr;
  float* bases = nullptr;
  explicit operator bool() const { return weights != nullptr; }
};

/// Softmax of one column over one block, of which it sees the first `visible` tokens: turns its
/// logits into weights times the values' steps. Returns what is to be kept of the sums so far.
float Weigh(int column, int visible, const float* value_steps, Scratch& s,
            float* HWY_RESTRICT logits, const Seen& seen) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int t = visible; t < kBlockTokens; ++t) logits[t] = -std::numeric_limits<float>::infinity();
  auto largest = hn::Set(d, s.maxima[column]);
  for (int t = 0; t < kBlockTokens; t += lanes) largest = hn::Max(largest, hn::Load(d, logits + t));
  const float maximum = hn::GetLane(hn::MaxOfLanes(d, largest));
  const auto base = hn::Set(d, maximum);
  auto total = hn::Zero(d);
  for (int t = 0; t < kBlockTokens; t += lanes) {
    const auto weight = Exp2(hn::Sub(hn::Load(d, logits + t), base));
    if (seen) hn::StoreU(weight, d, seen.weights + column * kSplitTokens + t);
    hn::Store(hn::Mul(weight, hn::Load(d, value_steps + t)), d, logits + t);
    total = hn::Add(total, weight);
  }
  const float keep = Exp2One(s.maxima[column] - maximum);
  if (seen) seen.bases[column * kSplitBlocks] = maximum;
  s.maxima[column] = maximum;
  s.totals[column] = s.totals[column] * keep + hn::GetLane(hn::SumOfLanes(d, total));
  return keep;
}

// ---- one row, few heads: keys and values go from their digits into sums without a stop in memory.
// Every sum is added up in the same order as by Dots and Accumulate.

constexpr int kFewColumns = 4;

bool TakesFewColumns(int dim, const QueryTile& tile) {
  // Sums and a chunk need 20 registers of the 32 that only AVX-512 has.
  return hn::Lanes(F32()) == 16 && dim % 64 == 0 && tile.rows == 1 && tile.Columns() <= kFewColumns;
}

/// logits[column][t] for the first `tokens` tokens, and up to three more.
template <int kColumns, int kResident>
void KeyDots(int dim, const Side& keys, int tokens, const float* HWY_RESTRICT query,
             float* HWY_RESTRICT logits) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int t = 0; t < tokens; t += 4) {
    hn::VFromD<F32> sums[kColumns][4];
    for (int c = 0; c < kColumns; ++c) {
      for (int i = 0; i < 4; ++i) sums[c][i] = hn::Zero(d);
    }
    for (int at = 0; at < dim; at += 4 * lanes) {
      for (int i = 0; i < 4; ++i) {
        const auto key =
            DecodeChunk<kResident>(d, keys.rows, (static_cast<std::size_t>(t + i) * dim + at) / 2);
        for (int c = 0; c < kColumns; ++c) {
          const float* q = query + c * dim + at;
          for (int v = 0; v < 4; ++v)
            sums[c][i] = hn::MulAdd(hn::Load(d, q + v * lanes), key.part[v], sums[c][i]);
        }
      }
    }
    for (int c = 0; c < kColumns; ++c) {
      SumFour(sums[c][0], sums[c][1], sums[c][2], sums[c][3], keys.steps + t,
              logits + c * kBlockTokens + t);
    }
  }
}

/// As Accumulate, for all columns: weights [columns][32], sums [columns][dim].
template <int kColumns, int kResident>
void ValueSums(int dim, const Side& values, int tokens, const float* keep,
               const float* HWY_RESTRICT weights, float* HWY_RESTRICT sums) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int at = 0; at < dim; at += 4 * lanes) {
    hn::VFromD<F32> sum[kColumns][4];
    for (int c = 0; c < kColumns; ++c) {
      for (int v = 0; v < 4; ++v)
        sum[c][v] = hn::Mul(hn::Load(d, sums + c * dim + at + v * lanes), hn::Set(d, keep[c]));
    }
    for (int t = 0; t < tokens; ++t) {
      const auto value =
          DecodeChunk<kResident>(d, values.rows, (static_cast<std::size_t>(t) * dim + at) / 2);
      for (int c = 0; c < kColumns; ++c) {
        const auto w = hn::Set(d, weights[c * kBlockTokens + t]);
        for (int v = 0; v < 4; ++v) sum[c][v] = hn::MulAdd(w, value.part[v], sum[c][v]);
      }
    }
    for (int c = 0; c < kColumns; ++c) {
      for (int v = 0; v < 4; ++v) hn::Store(sum[c][v], d, sums + c * dim + at + v * lanes);
    }
  }
}

/// One block; `tokens` of it are seen.
template <int kColumns>
void AttendFew(const AttentionHead& head, const BlockView& block, int tokens, Scratch& s,
               const Seen& seen) {
  const int dim = head.head_dim;
  alignas(64) float logits[kColumns * kBlockTokens];
  const Side keys(head, block.k);
#define PLIANT_KEY_DOTS(PLANES) KeyDots<kColumns, PLANES>(dim, keys, tokens, s.query, logits)
  PLIANT_SWITCH_PLANES(keys.planes, PLIANT_KEY_DOTS)
#undef PLIANT_KEY_DOTS
  const Side values(head, block.v);
  float keep[kColumns];
  for (int c = 0; c < kColumns; ++c) {
    keep[c] = Weigh(c, tokens, values.steps, s, logits + c * kBlockTokens, seen);
  }
#define PLIANT_VALUE_SUMS(PLANES) \
  ValueSums<kColumns, PLANES>(dim, values, tokens, keep, logits, s.sums)
  PLIANT_SWITCH_PLANES(values.planes, PLIANT_VALUE_SUMS)
#undef PLIANT_VALUE_SUMS
}

void AttendFewColumns(const AttentionHead& head, const QueryTile& tile, const BlockView& block,
                      int tokens, Scratch& s, const Seen& seen) {
  switch (tile.Columns()) {
    case 1:
      return AttendFew<1>(head, block, tokens, s, seen);
    case 2:
      return AttendFew<2>(head, block, tokens, s, seen);
    case 3:
      return AttendFew<3>(head, block, tokens, s, seen);
    default:
      return AttendFew<kFewColumns>(head, block, tokens, s, seen);
  }
}

// ---- any tile

/// One decoded block.
void AttendBlock(const AttentionHead& head, const QueryTile& tile, int at, int tokens, Scratch& s,
                 const Seen& seen) {
  const int dim = head.head_dim;
  const BlockView& block = head.blocks[at / kBlockTokens];
  const Side keys(head, block.k);
  DecodeBlock(dim, keys, tokens, s.key);
  alignas(64) float logits[kBlockTokens];
  const Side values(head, block.v);
  DecodeBlock(dim, values, tokens, s.value);
  for (int column = 0; column < tile.Columns(); ++column) {
    const int position = tile.first_position + column / tile.group;
    const int visible = std::min(tokens, position + 1 - at);
    if (visible <= 0) continue;
    Dots(dim, s.query + column * dim, s.key, keys.steps, logits);
    const float keep = Weigh(column, visible, values.steps, s, logits, seen);
    Accumulate(dim, visible, keep, logits, s.value, s.sums + column * dim);
  }
}

void LoadQueries(const QueryTile& tile, int dim, Scratch& s) {
  const float factor = tile.softmax_scale * kLog2E;
  for (int column = 0; column < tile.Columns(); ++column) {
    const float* q = tile.query + column / tile.group * tile.query_stride +
                     static_cast<std::ptrdiff_t>(column % tile.group) * dim;
    float* to = s.query + column * dim;
    ForEachDim(dim, [&](int position, int from) HWY_ATTR { to[position] = q[from] * factor; });
    s.maxima[column] = kNoLogit;
    s.totals[column] = 0;
    std::fill_n(s.sums + column * dim, dim, 0.0f);
  }
}

void Attend(const AttentionHead& head, const QueryTile& tile, int first, int end, float* partials,
            std::byte* scratch) {
  Scratch& s = *reinterpret_cast<Scratch*>(scratch);
  const int dim = head.head_dim;
  LoadQueries(tile, dim, s);
  const bool few = TakesFewColumns(dim, tile);
  for (int at = first; at < end; at += kBlockTokens) {
    const BlockView& block = head.blocks[at / kBlockTokens];
    if (!block.k[0].valid() || !block.v[0].valid()) continue;
    const int tokens = std::min(kBlockTokens, end - at);
    Seen seen;
    if (tile.weights != nullptr)
      seen = {tile.weights + (at - first), tile.bases + (at - first) / kBlockTokens};
    if (few) {
      AttendFewColumns(head, tile, block, tokens, s, seen);
    } else {
      AttendBlock(head, tile, at, tokens, s, seen);
    }
  }
  for (int column = 0; column < tile.Columns(); ++column) {
    float* to = partials + column * PartialFloats(dim);
    const float* sums = s.sums + column * dim;
    ForEachDim(dim, [&](int position, int back) HWY_ATTR { to[back] = sums[position]; });
    to[dim] = s.maxima[column];
    to[dim + 1] = s.totals[column];
  }
}

void Merge(int dim, int columns, const float* part, float* total) {
  const F32 d;
  for (int column = 0; column < columns; ++column) {
    const float* from = part + column * PartialFloats(dim);
    float* to = total + column * PartialFloats(dim);
    const float maximum = std::max(from[dim], to[dim]);
    const float keep = Exp2One(to[dim] - maximum);
    const float add = Exp2One(from[dim] - maximum);
    for (int i = 0; i < dim; i += static_cast<int>(hn::Lanes(d))) {
      const auto kept = hn::Mul(hn::LoadU(d, to + i), hn::Set(d, keep));
      hn::StoreU(hn::MulAdd(hn::LoadU(d, from + i), hn::Set(d, add), kept), d, to + i);
    }
    to[dim] = maximum;
    to[dim + 1] = to[dim + 1] * keep + from[dim + 1] * add;
  }
}

void Finish(int dim, const QueryTile& tile, const float* total) {
  const F32 d;
  for (int column = 0; column < tile.Columns(); ++column) {
    const float* from = total + column * PartialFloats(dim);
    float* to = tile.out + column / tile.group * tile.out_stride +
                static_cast<std::ptrdiff_t>(column % tile.group) * dim;
    const auto inverse = hn::Set(d, 1.0f / from[dim + 1]);
    const ChannelRow& code = tile.value_code;
    for (int i = 0; i < dim; i += static_cast<int>(hn::Lanes(d))) {
      auto mean = hn::Mul(hn::LoadU(d, from + i), inverse);
      if (code.scale != nullptr) {
        mean = hn::MulAdd(mean, hn::LoadU(d, code.scale + i), hn::LoadU(d, code.center + i));
      }
      hn::StoreU(mean, d, to + i);
    }
  }
}

constexpr AttentionKernel kAttention = {
    kMaxColumns, kNarrowColumns, /*total_unit=*/1, /*exports_weights=*/true, ScratchBytes,
    Supports,    Attend};
constexpr PartialKernel kPartial = {Merge, Finish};
const AttentionKernel& Attention() { return kAttention; }
const PartialKernel& Partial() { return kPartial; }

}  // namespace HWY_NAMESPACE
}  // namespace pliant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/cpu_dispatch.h"

namespace pliant {

const AttentionKernel& F32AttentionKernel(CpuLevel level) {
  PLIANT_RETURN_BY_LEVEL(level, Attention);
}

const PartialKernel& ChoosePartialKernel(CpuLevel level) { PLIANT_RETURN_BY_LEVEL(level, Partial); }

const AttentionKernel& ChooseAttentionKernel(CpuLevel level, int head_dim) {
#if defined(__x86_64__)
  if (level >= CpuLevel::kAmx && AmxAttentionKernel().supports(head_dim))
    return AmxAttentionKernel();
#endif
  (void)head_dim;
  return F32AttentionKernel(level);
}

}  // namespace pliant
#endif  // HWY_ONCE
