// Room: backend. MixChannels of plane_code.h in vectors, bit for bit. Included once a Highway
// target, inside a file that foreach_target compiles; any thread.
#if defined(PLIANT_MIX_CHANNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PLIANT_MIX_CHANNELS_INL_H_
#undef PLIANT_MIX_CHANNELS_INL_H_
#else
#define PLIANT_MIX_CHANNELS_INL_H_
#endif

#include <hwy/highway.h>

#include "backend/plane_code.h"

HWY_BEFORE_NAMESPACE();
namespace pliant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// A stage of MixChannels that joins lanes of one vector, kApart from each other: lanes whose
/// number has that bit hold b of (a, b) and become a - b.
template <int kApart, class V>
HWY_INLINE V JoinLanes(V v) {
  const hn::DFromV<V> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const auto bit = hn::And(hn::Iota(du, 0), hn::Set(du, std::uint32_t{kApart}));
  constexpr int kShift = kApart == 1 ? 31 : kApart == 2 ? 30 : kApart == 4 ? 29 : 28;
  const auto negated = hn::Xor(v, hn::BitCast(d, hn::ShiftLeft<kShift>(bit)));
  if constexpr (kApart == 1) {
    return hn::Add(hn::Shuffle2301(v), negated);
  } else if constexpr (kApart == 2) {
    return hn::Add(hn::Shuffle1032(v), negated);
  } else if constexpr (kApart == 4) {
    return hn::Add(hn::SwapAdjacentBlocks(v), negated);
  } else {
    return hn::Add(hn::SwapAdjacentBlocks(hn::ReverseBlocks(d, v)), negated);
  }
}

/// kMixedChannels floats in as many vectors as they fill, times `factor`; d: at most 16 lanes.
template <class D>
HWY_INLINE void MixVectors(D d, float factor, hn::VFromD<D>* v) {
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
  constexpr int kVectors = kMixedChannels / kLanes;
  for (int i = 0; i < kVectors; ++i) {
    auto w = JoinLanes<2>(JoinLanes<1>(v[i]));
    if constexpr (kLanes > 4) w = JoinLanes<4>(w);
    if constexpr (kLanes > 8) w = JoinLanes<8>(w);
    v[i] = w;
  }
  for (int apart = 1; apart < kVectors; apart *= 2) {
    for (int i = 0; i < kVectors; ++i) {
      if ((i & apart) != 0) continue;
      const auto a = v[i], b = v[i + apart];
      v[i] = hn::Add(a, b);
      v[i + apart] = hn::Sub(a, b);
    }
  }
  for (int i = 0; i < kVectors; ++i) v[i] = hn::Mul(v[i], hn::Set(d, factor));
}

/// `dim` floats at x.
template <class D>
HWY_INLINE void Mix(D d, int dim, float factor, float* HWY_RESTRICT x) {
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
  constexpr int kVectors = kMixedChannels / kLanes;
  for (int first = 0; first < dim; first += kMixedChannels) {
    hn::VFromD<D> v[kVectors];
    for (int i = 0; i < kVectors; ++i) v[i] = hn::LoadU(d, x + first + i * kLanes);
    MixVectors(d, factor, v);
    for (int i = 0; i < kVectors; ++i) hn::StoreU(v[i], d, x + first + i * kLanes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace pliant
HWY_AFTER_NAMESPACE();

#endif  // include guard
