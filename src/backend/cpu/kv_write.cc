#include "backend/cpu/kv_write.h"

#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kv_write.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/mix_channels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pliant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// head_dim is a multiple of 32 and no vector holds more than 16 floats, so there are no tails.
using F32 = hn::CappedTag<float, 16>;
using I32 = hn::Rebind<std::int32_t, F32>;
using U32 = hn::Rebind<std::uint32_t, F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using U8 = hn::Rebind<std::uint8_t, F32>;

constexpr int kMaxHeadDim = 256;

void Norm(int dim, std::span<const float> weight, float eps, float* HWY_RESTRICT x) {
  if (weight.empty()) return;
  const F32 d;
  auto squares = hn::Zero(d);
  for (int i = 0; i < dim; i += static_cast<int>(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, x + i);
    squares = hn::MulAdd(v, v, squares);
  }
  const float mean = hn::GetLane(hn::SumOfLanes(d, squares)) / static_cast<float>(dim);
  const auto inverse = hn::Set(d, 1.0f / std::sqrt(mean + eps));
  for (int i = 0; i < dim; i += static_cast<int>(hn::Lanes(d))) {
    const auto v = hn::Mul(hn::LoadU(d, x + i), inverse);
    hn::StoreU(hn::Mul(v, hn::LoadU(d, weight.data() + i)), d, x + i);
  }
}

/// Rotates the pairs (i, i + half).
void Rotate(int dim, const float* HWY_RESTRICT cosine, const float* HWY_RESTRICT sine,
            float* HWY_RESTRICT x) {
  const F32 d;
  const int half = dim / 2;
  for (int i = 0; i < half; i += static_cast<int>(hn::Lanes(d))) {
    const auto c = hn::LoadU(d, cosine + i);
    const auto s = hn::LoadU(d, sine + i);
    const auto a = hn::LoadU(d, x + i);
    const auto b = hn::LoadU(d, x + half + i);
    hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, x + i);
    hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), d, x + half + i);
  }
}

void Query(const KvWriteShape& shape, const float* cosine, const float* sine, float* x) {
  Norm(shape.head_dim, shape.q_norm, shape.norm_eps, x);
  Rotate(shape.head_dim, cosine, sine, x);
}

void Key(const KvWriteShape& shape, const float* cosine, const float* sine, float* x) {
  Norm(shape.head_dim, shape.k_norm, shape.norm_eps, x);
  Rotate(shape.head_dim, cosine, sine, x);
}

void CodeQuery(int head_dim, const float* channel, float* x) {
  const F32 d;
  for (int i = 0; channel != nullptr && i < head_dim; i += static_cast<int>(hn::Lanes(d))) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, channel + i)), d, x + i);
  }
  Mix(d, head_dim, kQueryMix, x);
}

/// Offset-binary codes of row (plane_code.h, EncodeRow).
void Encode(int dim, const float* HWY_RESTRICT row, float scale, std::uint16_t* HWY_RESTRICT u) {
  const F32 d;
  const I32 di;
  const auto divisor = hn::Set(d, scale);
  const auto high = hn::Set(d, 32767.0f);
  const auto low = hn::Set(d, -32767.0f);
  for (int i = 0; i < dim; i += static_cast<int>(hn::Lanes(d))) {
    const auto code = hn::Mul(hn::Div(hn::LoadU(d, row + i), divisor), hn::Set(d, 32768.0f));
    const auto rounded = hn::NearestInt(hn::Min(hn::Max(code, low), high));
    hn::StoreU(hn::DemoteTo(U16(), hn::Add(rounded, hn::Set(di, 32768))), U16(), u + i);
  }
}

/// Nibble rows out of codes: a 32-bit lane holds two neighbouring codes, the even dim below.
void Split(int dim, const std::uint16_t* HWY_RESTRICT u, const KvRowTarget& target) {
  const U32 du;
  const I32 di;
  const auto low_nibble = hn::Set(du, 0x0fu);
  const auto high_nibble = hn::Set(du, 0xf0u);
  for (int j = 0; j < dim / 2; j += static_cast<int>(hn::Lanes(du))) {
    const auto pair = hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(u) + j);
    const auto put = [&](int plane, auto even, auto odd) HWY_ATTR {
      const auto byte = hn::Or(hn::And(even, low_nibble), hn::And(odd, high_nibble));
      hn::StoreU(hn::DemoteTo(U8(), hn::BitCast(di, byte)), U8(), target.rows[plane] + j);
    };
    if (target.planes > 0) put(0, hn::ShiftRight<12>(pair), hn::ShiftRight<24>(pair));
    if (target.planes > 1) put(1, hn::ShiftRight<8>(pair), hn::ShiftRight<20>(pair));
    if (target.planes > 2) put(2, hn::ShiftRight<4>(pair), hn::ShiftRight<16>(pair));
    if (target.planes > 3) put(3, pair, hn::ShiftRight<12>(pair));
  }
}

void Store(int head_dim, bool mixed, ChannelRow code, const float* x, const KvRowTarget& target) {
  const F32 d;
  const U32 du;
  alignas(64) float row[kMaxHeadDim];
  alignas(64) std::uint16_t u[kMaxHeadDim];
  for (int i = 0; i < head_dim; i += static_cast<int>(hn::Lanes(d))) {
    auto v = hn::LoadU(d, x + i);
    if (code.scale != nullptr) {
      v = hn::Div(hn::Sub(v, hn::LoadU(d, code.center + i)), hn::LoadU(d, code.scale + i));
    }
    hn::Store(v, d, row + i);
  }
  if (mixed) Mix(d, head_dim, kKeyMix, row);
  // Magnitudes order like their bits, NaN above infinity; as signed integers too, with the sign bit
  // cleared.
  const I32 di;
  auto largest = hn::Zero(di);
  for (int i = 0; i < head_dim; i += static_cast<int>(hn::Lanes(d))) {
    const auto magnitude = hn::And(hn::BitCast(du, hn::Load(d, row + i)), hn::Set(du, 0x7fffffffu));
    largest = hn::Max(largest, hn::BitCast(di, magnitude));
  }
  const auto bits = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  const std::uint16_t scale =
      static_cast<std::uint16_t>(bits >= kInfinity ? kInfinity >> 16 : (bits + 0xffffu) >> 16);
  if (scale == 0 || scale == kInfinity >> 16) {
    for (int i = 0; i < head_dim; ++i) u[i] = 32768;
  } else {
    Encode(head_dim, row, Bf16ToFloat(scale), u);
  }
  Split(head_dim, u, target);
  std::memcpy(target.scale, &scale, sizeof(scale));
}

void StoreKey(int head_dim, ChannelRow code, const float* x, const KvRowTarget& target) {
  Store(head_dim, /*mixed=*/true, code, x, target);
}
void StoreValue(int head_dim, ChannelRow code, const float* x, const KvRowTarget& target) {
  Store(head_dim, /*mixed=*/false, code, x, target);
}

constexpr KvWriteKernel kKernel = {Query, Key, CodeQuery, StoreKey, StoreValue};
const KvWriteKernel& Kernel() { return kKernel; }

}  // namespace HWY_NAMESPACE
}  // namespace pliant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/cpu_dispatch.h"

namespace pliant {

const KvWriteKernel& ChooseKvWriteKernel(CpuLevel level) { PLIANT_RETURN_BY_LEVEL(level, Kernel); }

}  // namespace pliant
#endif  // HWY_ONCE
