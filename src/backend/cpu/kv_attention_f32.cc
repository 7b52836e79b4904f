// Room: backend. Attention in f32 for machines without AMX, and the merging of partial results for
// all. Blocks are decoded into scratch in the order in which digits come apart most cheaply
// (ByteAt); the query is permuted the same way.
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
using I32 = hn::Rebind<std::int32_t, F32>;
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

/// Whose dims stand at position j and dim / 2 + j of a decoded row: those of byte ByteAt(half, j)
/// of its planes, the even one and the odd one. Bytes are interleaved within 16 of them, so that of
/// 32 the second and third eight change places; what is left of a row is done by 16.
int ByteAt(int half, int j) {
  const bool wide = hn::Lanes(F32()) == 16 && j < half / 32 * 32;
  return wide ? (j & ~24) | (j & 8) << 1 | (j & 16) >> 1 : j;
}

/// Decodes 2 Lanes(d) bytes of a row's planes from `offset` on: even dims to `even`, odd ones to
/// `odd`, times `step`.
template <int kResident, class D>
HWY_INLINE void DecodeBytes(D d, const std::uint8_t* const* rows, std::size_t offset, float step,
                            float* HWY_RESTRICT even, float* HWY_RESTRICT odd) {
  const hn::Rebind<std::int16_t, D> d16;
  const hn::Rebind<std::int32_t, D> d32;
  const hn::Repartition<std::uint8_t, decltype(d16)> d8;
  const hn::Repartition<std::uint16_t, decltype(d16)> words;
  using V = hn::VFromD<decltype(d8)>;
  const auto up = [&](V v)
                      HWY_ATTR { return hn::BitCast(d8, hn::ShiftLeft<4>(hn::BitCast(words, v))); };
  const auto down = [&](V v) HWY_ATTR {
    return hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(words, v)));
  };
  const V upper = hn::Set(d8, 0xf0u);
  // Absent planes read as the midpoint: an 8 in the first one's digit, 0 in the others'.
  const V absent = hn::Set(d8, 0x88u), zero = hn::Zero(d8);
  const auto plane = [&](int p) HWY_ATTR {
    return p < kResident ? hn::LoadU(d8, rows[p] + offset) : p == kResident ? absent : zero;
  };
  // A code's two bytes hold a digit of an even plane above one of an odd plane.
  const auto evens = [&](V a, V b)
                         HWY_ATTR { return hn::OrAnd(hn::AndNot(upper, b), upper, up(a)); };
  const auto odds = [&](V a, V b)
                        HWY_ATTR { return hn::OrAnd(hn::AndNot(upper, down(b)), upper, a); };
  const auto finish = [&](V high, V low, float* to) HWY_ATTR {
    high = hn::Xor(high, hn::Set(d8, 0x80u));  // - 32768, as a signed word
    const auto put = [&](auto bytes, float* at) HWY_ATTR {
      const auto value = hn::PromoteTo(d32, hn::BitCast(d16, bytes));
      hn::StoreU(hn::Mul(hn::ConvertTo(d, value), hn::Set(d, step)), d, at);
    };
    put(hn::InterleaveLower(d8, low, high), to);
    put(hn::InterleaveUpper(d8, low, high), to + hn::Lanes(d));
  };
  const V p0 = plane(0), p1 = plane(1), p2 = plane(2), p3 = plane(3);
  finish(evens(p0, p1), evens(p2, p3), even);
  finish(odds(p0, p1), odds(p2, p3), odd);
}

/// Decodes one row of planes, times `scale` / 32768: [head_dim], in the order that ByteAt tells.
template <int kResident>
void DecodeRowPermuted(int dim, const std::uint8_t* const* rows, std::size_t offset, float scale,
                       float* HWY_RESTRICT out) {
  const F32 d;
  const float step = scale / 32768.0f;
  const int half = dim / 2;
  const int bytes = 2 * static_cast<int>(hn::Lanes(d));
  int j = 0;
  for (; j + bytes <= half; j += bytes)
    DecodeBytes<kResident>(d, rows, offset + j, step, out + j, out + half + j);
  const hn::CappedTag<float, 8> narrow;
  for (; j < half; j += 2 * static_cast<int>(hn::Lanes(narrow)))
    DecodeBytes<kResident>(narrow, rows, offset + j, step, out + j, out + half + j);
}

/// Decodes the first `tokens` rows of one side of a block.
void DecodeBlock(const AttentionHead& head, const std::array<PageId, kPlanes>& pages, int tokens,
                 float* out) {
  const int planes = ResidentPlanes(pages);
  const std::uint8_t* rows[kPlanes] = {};
  for (int p = 0; p < planes; ++p) rows[p] = head.Rows(pages[p]);
  const std::uint16_t* scales = head.Scales(pages[0]);
  const int dim = head.head_dim;
  for (int t = 0; t < tokens; ++t) {
    const std::size_t offset = static_cast<std::size_t>(t) * dim / 2;
    const float scale = Bf16ToFloat(scales[t]);
    float* to = out + static_cast<std::ptrdiff_t>(t) * dim;
    switch (planes) {
      case 1:
        DecodeRowPermuted<1>(dim, rows, offset, scale, to);
        break;
      case 2:
        DecodeRowPermuted<2>(dim, rows, offset, scale, to);
        break;
      case 3:
        DecodeRowPermuted<3>(dim, rows, offset, scale, to);
        break;
      default:
        DecodeRowPermuted<4>(dim, rows, offset, scale, to);
        break;
    }
  }
}

/// logits[t] = q . key[t] for 32 tokens, four at a time so that sums across lanes are shared.
void Dots(int dim, const float* HWY_RESTRICT q, const float* HWY_RESTRICT key,
          float* HWY_RESTRICT logits) {
  const F32 d;
  const hn::Repartition<double, F32> pairs;
  const F32x4 d4;
  const int lanes = static_cast<int>(hn::Lanes(d));
  alignas(64) float blocks[16];
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
    const auto s01 =
        hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, a0, a1), hn::InterleaveUpper(d, a0, a1)));
    const auto s23 =
        hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, a2, a3), hn::InterleaveUpper(d, a2, a3)));
    const auto sum = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, s01, s23)),
                             hn::BitCast(d, hn::InterleaveUpper(pairs, s01, s23)));
    hn::Store(sum, d, blocks);
    auto four = hn::Load(d4, blocks);
    for (int b = 4; b < lanes; b += 4) four = hn::Add(four, hn::Load(d4, blocks + b));
    hn::Store(four, d4, logits + t);
  }
}

/// sums = sums * keep + sum over t < tokens of weights[t] * value[t]. Later rows are not read: they
/// may hold anything, and 0 * NaN is NaN.
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

/// One column over one decoded block of which it sees the first `visible` tokens. Its logits go to
/// `seen` if there is such.
void AttendColumn(int dim, int column, int visible, Scratch& s, float* seen) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  alignas(64) float logits[kBlockTokens];
  Dots(dim, s.query + column * dim, s.key, logits);
  for (int t = visible; t < kBlockTokens; ++t) logits[t] = -std::numeric_limits<float>::infinity();
  if (seen != nullptr) std::copy_n(logits, kBlockTokens, seen);
  auto largest = hn::Set(d, s.maxima[column]);
  for (int t = 0; t < kBlockTokens; t += lanes) largest = hn::Max(largest, hn::Load(d, logits + t));
  const float maximum = hn::GetLane(hn::MaxOfLanes(d, largest));
  const auto base = hn::Set(d, maximum);
  auto total = hn::Zero(d);
  for (int t = 0; t < kBlockTokens; t += lanes) {
    const auto weight = Exp2(hn::Sub(hn::Load(d, logits + t), base));
    hn::Store(weight, d, logits + t);
    total = hn::Add(total, weight);
  }
  const float keep = Exp2One(s.maxima[column] - maximum);
  s.maxima[column] = maximum;
  s.totals[column] = s.totals[column] * keep + hn::GetLane(hn::SumOfLanes(d, total));
  Accumulate(dim, visible, keep, logits, s.value, s.sums + column * dim);
}

void LoadQueries(const QueryTile& tile, int dim, Scratch& s) {
  const float factor = tile.softmax_scale * kLog2E;
  for (int column = 0; column < tile.Columns(); ++column) {
    const float* q = tile.query + column / tile.group * tile.query_stride +
                     static_cast<std::ptrdiff_t>(column % tile.group) * dim;
    float* to = s.query + column * dim;
    for (int j = 0; j < dim / 2; ++j) {
      const int byte = ByteAt(dim / 2, j);
      to[j] = q[2 * byte] * factor;
      to[dim / 2 + j] = q[2 * byte + 1] * factor;
    }
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
  for (int at = first; at < end; at += kBlockTokens) {
    const BlockView& block = head.blocks[at / kBlockTokens];
    if (!block.k[0].valid() || (!block.v[0].valid() && !head.keys_only)) continue;
    const int tokens = std::min(kBlockTokens, end - at);
    float* seen = tile.logits == nullptr ? nullptr : tile.logits + (at - first);
    DecodeBlock(head, block.k, tokens, s.key);
    if (head.keys_only) {
      for (int column = 0; column < tile.Columns(); ++column) {
        alignas(64) float logits[kBlockTokens];
        Dots(dim, s.query + column * dim, s.key, logits);
        std::copy_n(logits, kBlockTokens, seen + column * kSplitTokens);
      }
      continue;
    }
    DecodeBlock(head, block.v, tokens, s.value);
    for (int column = 0; column < tile.Columns(); ++column) {
      const int position = tile.first_position + column / tile.group;
      const int visible = std::min(tokens, position + 1 - at);
      if (visible <= 0) continue;
      AttendColumn(dim, column, visible, s,
                   seen == nullptr ? nullptr : seen + column * kSplitTokens);
    }
  }
  if (head.keys_only) return;
  for (int column = 0; column < tile.Columns(); ++column) {
    float* to = partials + column * PartialFloats(dim);
    const float* sums = s.sums + column * dim;
    for (int j = 0; j < dim / 2; ++j) {
      const int byte = ByteAt(dim / 2, j);
      to[2 * byte] = sums[j];
      to[2 * byte + 1] = sums[dim / 2 + j];
    }
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

constexpr AttentionKernel kAttention = {kMaxColumns,  kNarrowColumns, /*total_unit=*/1,
                                        ScratchBytes, Supports,       Attend};
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
