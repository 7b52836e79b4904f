#include "backend/cpu/kv_keys.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "backend/cpu/history_avx512.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kv_keys.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/mix_channels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pliant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using I32 = hn::Rebind<std::int32_t, F32>;
using Bytes = hn::Rebind<std::uint8_t, F32>;

constexpr int kMostDim = 256;

/// A row of both planes: 8-bit codes, in order.
void JoinBytes(int dim, const std::uint8_t* HWY_RESTRICT high, const std::uint8_t* HWY_RESTRICT low,
               std::uint8_t* HWY_RESTRICT codes) {
  const hn::FixedTag<std::uint8_t, 16> d;
  const hn::Repartition<std::uint16_t, decltype(d)> wide;
  const auto upper = hn::Set(d, 0xf0u);
  for (int i = 0; i < dim / 2; i += 16) {
    const auto a = hn::LoadU(d, high + i), b = hn::LoadU(d, low + i);
    const auto up = hn::BitCast(d, hn::ShiftLeft<4>(hn::BitCast(wide, a)));
    const auto down = hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(wide, b)));
    const auto even = hn::OrAnd(hn::AndNot(upper, b), upper, up);
    const auto odd = hn::OrAnd(hn::AndNot(upper, down), upper, a);
    hn::StoreU(hn::InterleaveLower(d, even, odd), d, codes + 2 * i);
    hn::StoreU(hn::InterleaveUpper(d, even, odd), d, codes + 2 * i + 16);
  }
}

/// For heads of kDim, a row of which stays in registers.
template <int kDim>
void DecodeRows(const CodedKeys& coded, float* HWY_RESTRICT keys) {
  const F32 d;
  const I32 d32;
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32())), kVectors = kDim / kLanes;
  constexpr int kMixed = kMixedChannels / kLanes, kHalf = kVectors / 2;
  alignas(64) std::uint8_t codes[kDim];
  for (int t = 0; t < kBlockTokens; ++t, keys += kDim) {
    JoinBytes(kDim, coded.rows[0] + t * (kDim / 2), coded.rows[1] + t * (kDim / 2), codes);
    std::uint16_t scale;
    std::memcpy(&scale, coded.scales + t * sizeof(scale), sizeof(scale));
    // The code is read as its midpoint, (256 code + 128 - 32768) / 32768 of the scale: exact.
    const auto step = hn::Set(d, Bf16ToFloat(scale));
    hn::VFromD<F32> row[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      const auto code =
          hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(Bytes(), codes + i * kLanes)));
      row[i] = hn::Mul(step, hn::Mul(hn::Sub(code, hn::Set(d, 127.5f)), hn::Set(d, 1.0f / 128)));
    }
    for (int i = 0; i < kVectors; i += kMixed) MixVectors(d, kQueryMix, row + i);  // the inverse
    for (int i = 0; coded.channel_scale != nullptr && i < kVectors; ++i) {
      const auto scaled = hn::Mul(row[i], hn::LoadU(d, coded.channel_scale + i * kLanes));
      row[i] = hn::Add(scaled, hn::LoadU(d, coded.channel_center + i * kLanes));
    }
    const float* cosines = coded.cosine + static_cast<std::ptrdiff_t>(t) * (kDim / 2);
    const float* sines = coded.sine + static_cast<std::ptrdiff_t>(t) * (kDim / 2);
    for (int i = 0; i < kHalf; ++i) {
      const auto cosine = hn::LoadU(d, cosines + i * kLanes);
      const auto sine = hn::LoadU(d, sines + i * kLanes);
      const auto a = row[i], b = row[i + kHalf];
      hn::StoreU(hn::MulAdd(b, sine, hn::Mul(a, cosine)), d, keys + i * kLanes);
      hn::StoreU(hn::NegMulAdd(a, sine, hn::Mul(b, cosine)), d, keys + (i + kHalf) * kLanes);
    }
  }
}

void DecodeAnyRows(const CodedKeys& coded, float* HWY_RESTRICT keys) {
  const F32 d;
  const I32 d32;
  const int dim = coded.head_dim, half = dim / 2, lanes = static_cast<int>(hn::Lanes(d));
  alignas(64) std::uint8_t codes[kMostDim];
  for (int t = 0; t < kBlockTokens; ++t) {
    float* row = keys + static_cast<std::ptrdiff_t>(t) * dim;
    JoinBytes(dim, coded.rows[0] + t * half, coded.rows[1] + t * half, codes);
    std::uint16_t scale;
    std::memcpy(&scale, coded.scales + t * sizeof(scale), sizeof(scale));
    // The code is read as its midpoint, (256 code + 128 - 32768) / 32768 of the scale: exact.
    const auto step = hn::Set(d, Bf16ToFloat(scale));
    for (int i = 0; i < dim; i += lanes) {
      const auto code = hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(Bytes(), codes + i)));
      const auto value = hn::Mul(hn::Sub(code, hn::Set(d, 127.5f)), hn::Set(d, 1.0f / 128));
      hn::StoreU(hn::Mul(step, value), d, row + i);
    }
    Mix(d, dim, kQueryMix, row);  // the inverse
    for (int i = 0; coded.channel_scale != nullptr && i < dim; i += lanes) {
      const auto scaled = hn::Mul(hn::LoadU(d, row + i), hn::LoadU(d, coded.channel_scale + i));
      hn::StoreU(hn::Add(scaled, hn::LoadU(d, coded.channel_center + i)), d, row + i);
    }
    const float* cosines = coded.cosine + static_cast<std::ptrdiff_t>(t) * half;
    const float* sines = coded.sine + static_cast<std::ptrdiff_t>(t) * half;
    for (int i = 0; i < half; i += lanes) {
      const auto cosine = hn::LoadU(d, cosines + i), sine = hn::LoadU(d, sines + i);
      const auto a = hn::LoadU(d, row + i), b = hn::LoadU(d, row + half + i);
      hn::StoreU(hn::MulAdd(b, sine, hn::Mul(a, cosine)), d, row + i);
      hn::StoreU(hn::NegMulAdd(a, sine, hn::Mul(b, cosine)), d, row + half + i);
    }
  }
}

void Decode(const CodedKeys& coded, float* HWY_RESTRICT keys) {
  switch (coded.head_dim) {
    case 64:
      return DecodeRows<64>(coded, keys);
    case 128:
      return DecodeRows<128>(coded, keys);
    default:
      return DecodeAnyRows(coded, keys);
  }
}

void Signs(int rows, int dim, const float* HWY_RESTRICT keys, const float* HWY_RESTRICT mean,
           std::uint64_t* HWY_RESTRICT signs) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d)), words = (dim + 63) / 64;
  for (int t = 0; t < rows; ++t, keys += dim, signs += words) {
    for (int w = 0; w < words; ++w) {
      std::uint64_t word = 0;
      const int count = std::min(64, dim - 64 * w);
      for (int c = 0; c < count; c += lanes) {
        std::uint8_t bytes[8] = {};
        const auto key = hn::LoadU(d, keys + 64 * w + c);
        hn::StoreMaskBits(d, hn::Gt(key, hn::LoadU(d, mean + 64 * w + c)), bytes);
        std::uint64_t bits;
        std::memcpy(&bits, bytes, sizeof(bits));
        word |= bits << c;
      }
      signs[w] = word;
    }
  }
}

void Fewest(int words, int count, const std::uint64_t* rows, int later_count,
            const std::uint64_t* later, std::int32_t* fewest) {
#if HWY_TARGET == HWY_AVX3
  if (words == 1) return avx512::FewestSigns(count, rows, later_count, later, fewest);
#endif
  ScalarKeyKernel().fewest(words, count, rows, later_count, later, fewest);
}

void Nearest(int dim, int count, const std::int8_t* rows, int from, const std::int8_t* later,
             const float* norms, float* nearest) {
#if HWY_TARGET == HWY_AVX3
  if (dim % 4 == 0 && dim <= avx512::kMostCodes)
    return avx512::NearestCodes(dim, count, rows, from, later, norms, nearest);
#endif
  ScalarKeyKernel().nearest(dim, count, rows, from, later, norms, nearest);
}

/// Of the tokens [at, at + Lanes) of a table.
template <class D>
HWY_INLINE hn::VFromD<D> UsesAt(D d32, const UseTable& table, int at) {
  const F32 d;
  const auto use = hn::Mul(hn::LoadU(d, table.score + at), hn::LoadU(d, table.weight + at));
  const auto bits = hn::BitCast(d32, hn::IfThenElseZero(hn::Gt(use, hn::Zero(d)), use));
  const auto token = hn::LoadU(d32, table.token + at);
  const auto never = hn::Or(hn::Lt(token, hn::Set(d32, table.never_before)),
                            hn::AndNot(hn::Lt(token, hn::Set(d32, table.never_from)),
                                       hn::Lt(token, hn::Set(d32, table.never_to))));
  return hn::IfThenElse(never, hn::Set(d32, kEndlessUse), bits);
}

struct Bound {
  std::int32_t value;
  int below;  // how many are not above it
};

/// A bound that `count` of the numbers, none of which is negative, are not above, and no more than
/// must be: found by halving.
Bound BoundOf(int size, int count, const std::int32_t* HWY_RESTRICT numbers) {
  const I32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto below = [&](std::int32_t bound) HWY_ATTR {
    const auto limit = hn::Set(d, bound);
    auto above = hn::Zero(d);  // less one each
    for (int at = 0; at < size; at += lanes)
      above = hn::Add(above, hn::VecFromMask(d, hn::Gt(hn::LoadU(d, numbers + at), limit)));
    return size + hn::GetLane(hn::SumOfLanes(d, above));
  };
  Bound enough = {0, below(0)};  // often: what is repeated is of no use
  if (enough.below >= count) return enough;
  std::int32_t few = 0;
  enough = {kEndlessUse, size};
  while (enough.value - few > 1 && enough.below != count) {
    const std::int32_t value = few + (enough.value - few) / 2;
    const int there = below(value);
    if (there < count) {
      few = value;
    } else {
      enough = {value, there};
    }
  }
  return enough;
}

/// The places of numbers not above `bound`, in order; `places` may be where the numbers are.
int PlacesBelow(int size, std::int32_t bound, const std::int32_t* numbers, std::int32_t* places) {
  const I32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  int found = 0;
  for (int at = 0; at < size; at += lanes) {
    std::uint8_t bytes[8] = {};
    const auto above = hn::Gt(hn::LoadU(d, numbers + at), hn::Set(d, bound));
    hn::StoreMaskBits(d, hn::Not(above), bytes);
    std::uint64_t bits;
    std::memcpy(&bits, bytes, sizeof(bits));
    for (; bits != 0; bits &= bits - 1) places[found++] = at + std::countr_zero(bits);
  }
  return found;
}

void LeastUseful(const UseTable& table, int count, std::int32_t* uses, std::int32_t* places) {
  const I32 d;
  const int size = table.tokens, lanes = static_cast<int>(hn::Lanes(d));
  if (size % lanes != 0) return ScalarKeyKernel().least_useful(table, count, uses, places);
  for (int at = 0; at < size; at += lanes) hn::StoreU(UsesAt(d, table, at), d, uses + at);
  const Bound bound = BoundOf(size, count, uses);
  if (bound.below == count) {
    PlacesBelow(size, bound.value, uses, places);
    return;
  }
  // Of those at the bound, so many as are wanted, by token: what is below it is put before all.
  const auto limit = hn::Set(d, bound.value);
  for (int at = 0; at < size; at += lanes) {
    const auto use = hn::LoadU(d, uses + at);
    const auto equal =
        hn::IfThenElse(hn::Eq(use, limit), hn::LoadU(d, table.token + at), hn::Set(d, kEndlessUse));
    hn::StoreU(hn::IfThenZeroElse(hn::Lt(use, limit), equal), d, places + at);
  }
  PlacesBelow(size, BoundOf(size, count, places).value, places, places);
}

constexpr KeyKernel kKeys = {Decode, Signs, Fewest, Nearest, LeastUseful};
const KeyKernel& Keys() { return kKeys; }

}  // namespace HWY_NAMESPACE
}  // namespace pliant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/cpu_dispatch.h"

namespace pliant {

const KeyKernel& ChooseKeyKernel(CpuLevel level) { PLIANT_RETURN_BY_LEVEL(level, Keys); }

}  // namespace pliant
#endif  // HWY_ONCE
