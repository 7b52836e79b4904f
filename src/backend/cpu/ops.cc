#include "backend/cpu/ops.h"

#include <cmath>

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/ops.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace pliant {
namespace HWY_NAMESPACE {
namespace {  // other files have kernels of the same names
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

void RmsNorm(const float* x, const float* weight, float eps, std::int64_t cols, float* out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  std::int64_t i = 0;
  for (; i + 4 * lanes <= cols; i += 4 * lanes) {
    for (int j = 0; j < 4; ++j) {
      const V v = hn::LoadU(d, x + i + j * lanes);
      sums[j] = hn::MulAdd(v, v, sums[j]);
    }
  }
  float rest = 0;
  for (; i < cols; ++i) rest += x[i] * x[i];
  const V sum = hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]));
  const float total = hn::GetLane(hn::SumOfLanes(d, sum)) + rest;
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(cols) + eps);
  const V scales = hn::Set(d, scale);
  i = 0;
  for (; i + lanes <= cols; i += lanes) {
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + i), scales), hn::LoadU(d, weight + i)), d, out + i);
  }
  for (; i < cols; ++i) out[i] = x[i] * scale * weight[i];
}

// exp(x) for x at most 87: 2^n * 2^f with n an integer and |f| <= 1/2; 2^f by its Taylor series in
// f ln 2, degree 6 (relative error below 2e-7, of the order of f32 rounding). Below -87 the result
// is about 1e-38, which the caller's 1 + exp() does not see.
HWY_INLINE V Exp(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V clamped = hn::Max(x, hn::Set(d, -87.0f));
  const V n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504f)));
  // x - n ln 2, ln 2 in two parts (Cody and Waite).
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  V p = hn::Set(d, 1.0f / 720);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::Mul(p, hn::BitCast(d, exponent));
}

// For a NaN gate the clamp gives a number and the product is NaN again; nothing hides a NaN.
HWY_INLINE V Silu(D d, V gate) {
  const V e = Exp(d, hn::Min(hn::Neg(gate), hn::Set(d, 87.0f)));
  const V y = hn::Add(hn::Set(d, 1.0f), e);
  // 1 / y by the approximation and one Newton step, in place of a division.
  V inverse = hn::ApproximateReciprocal(y);
  inverse = hn::Mul(inverse, hn::NegMulAdd(y, inverse, hn::Set(d, 2.0f)));
  return hn::Mul(gate, inverse);
}

void SiluMul(const float* gate, const float* up, std::int64_t count, float* out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Mul(Silu(d, hn::LoadU(d, gate + i)), hn::LoadU(d, up + i)), d, out + i);
  }
  for (; i < count; ++i) out[i] = hn::GetLane(Silu(d, hn::Set(d, gate[i]))) * up[i];
}

const CpuOps& Ops() {
  static const CpuOps ops{RmsNorm, SiluMul};
  return ops;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace pliant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/cpu_dispatch.h"

namespace pliant {

const CpuOps& ChooseCpuOps(CpuLevel level) { PLIANT_RETURN_BY_LEVEL(level, Ops); }

}  // namespace pliant
#endif  // HWY_ONCE
