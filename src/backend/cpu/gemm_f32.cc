// Room: backend. Products in f32 with Highway, for machines without AVX-512 BF16 and for exact-ish
// results (`precise`): a panel's weights are dequantised to f32 rows, x is read as it lies, dot
// products run along the columns.
#include <algorithm>

#include "backend/cpu/gemm.h"

// The targets that a CpuLevel can name: the build's baseline, AVX2 and AVX-512.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gemm_f32.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace pliant {
namespace HWY_NAMESPACE {
namespace {  // other files have kernels of the same names
namespace hn = hwy::HWY_NAMESPACE;

constexpr std::int64_t kRowBlock = 16;  // rows of x per pass over a panel

struct Scales {
  float d[2][kPanelRows];
  float m[kPanelRows];
};

using Floats = hn::FixedTag<float, 4>;  // scales are few; 4 lanes do on every target

inline void HalfScales(const std::byte* p, float* out) {
  const Floats df;
  const hn::Rebind<hwy::float16_t, Floats> dh;
  for (int i = 0; i < kPanelRows; i += 4) {
    const auto half = hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p) + i);
    hn::StoreU(hn::PromoteTo(df, half), df, out + i);
  }
}

inline void LoadScales(PackedFormat format, const std::byte* super, const std::byte* block,
                       Scales& scales) {
  const PackedTraits traits = Traits(format);
  if (traits.super_bytes == 0) {
    HalfScales(block, scales.d[0]);
    std::copy_n(scales.d[0], kPanelRows, scales.d[1]);
    if (traits.scale_bytes == 128) {
      HalfScales(block + 64, scales.m);
    } else {
      std::fill_n(scales.m, kPanelRows, 0.0f);
    }
    return;
  }
  float d[kPanelRows];
  HalfScales(super, d);
  const bool six = format == PackedFormat::kQ6_K;
  float dmin[kPanelRows] = {};
  if (!six) HalfScales(super + 64, dmin);
  for (int r = 0; r < kPanelRows; ++r) {
    const auto a = std::to_integer<std::uint8_t>(block[r]);
    const auto b = std::to_integer<std::uint8_t>(block[kPanelRows + r]);
    scales.d[0][r] = d[r] * (six ? static_cast<std::int8_t>(a) : static_cast<int>(a));
    scales.d[1][r] = six ? d[r] * static_cast<std::int8_t>(b) : scales.d[0][r];
    scales.m[r] = six ? 0.0f : -(dmin[r] * b);
  }
}

// Rows of 4- or 5-bit codes: d (code - zero) + m.
HWY_INLINE void DequantDigits(PackedFormat format, const std::byte* codes, const Scales& scales,
                              float* out, std::int64_t stride) {
  const hn::ScalableTag<float> df;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<std::uint16_t, decltype(df)> dw;
  const hn::RebindToUnsigned<decltype(df)> du;
  const PackedTraits traits = Traits(format);
  const auto zero = hn::Set(df, static_cast<float>(traits.zero));
  const auto* words = reinterpret_cast<const std::uint16_t*>(codes);
  const auto* fifth = reinterpret_cast<const std::uint32_t*>(codes + 512);
  for (int r = 0; r < kPanelRows; ++r) {
    const auto d = hn::Set(df, scales.d[0][r]);
    const auto m = hn::Set(df, scales.m[r]);
    const int shift = r % 4 * 4;
    for (std::size_t k = 0; k < kPanelCols; k += hn::Lanes(df)) {
      auto code =
          hn::And(hn::ShiftRightSame(
                      hn::PromoteTo(du, hn::LoadU(dw, words + r / 4 * kPanelCols + k)), shift),
                  hn::Set(du, 15u));
      if (traits.code_bits == 5) {
        const auto bit = hn::And(hn::ShiftRightSame(hn::LoadU(du, fifth + k), r), hn::Set(du, 1u));
        code = hn::Or(code, hn::ShiftLeft<4>(bit));
      }
      const auto value = hn::Sub(hn::ConvertTo(df, hn::BitCast(di, code)), zero);
      hn::StoreU(hn::MulAdd(d, value, m), df, out + r * stride + k);
    }
  }
}

HWY_INLINE void DequantBytes(const std::byte* codes, const Scales& scales, float* out,
                             std::int64_t stride) {
  const hn::ScalableTag<float> df;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<std::int8_t, decltype(df)> db;
  const auto* bytes = reinterpret_cast<const std::int8_t*>(codes);
  for (int r = 0; r < kPanelRows; ++r) {
    for (std::size_t k = 0; k < kPanelCols; k += hn::Lanes(df)) {
      const auto code = hn::PromoteTo(di, hn::LoadU(db, bytes + r * kPanelCols + k));
      hn::StoreU(hn::Mul(hn::Set(df, scales.d[k / 16][r]), hn::ConvertTo(df, code)), df,
                 out + r * stride + k);
    }
  }
}

// out: 32 rows of `stride` floats.
void DequantPanel(PackedFormat format, const std::byte* panel, std::int64_t blocks, float* out,
                  std::int64_t stride) {
  const PackedTraits traits = Traits(format);
  Scales scales;
  for (std::int64_t b = 0; b < blocks; ++b, out += kPanelCols) {
    const std::byte* block = panel + PackedBlockOffset(format, b);
    const std::byte* codes = block + traits.scale_bytes;
    if (traits.code_bits == 32) {
      const auto* values = reinterpret_cast<const float*>(codes);
      for (int r = 0; r < kPanelRows; ++r) {
        std::copy_n(values + r * kPanelCols, kPanelCols, out + r * stride);
      }
      continue;
    }
    if (traits.code_bits == 16) {
      const auto* values = reinterpret_cast<const std::uint16_t*>(codes);
      const hn::ScalableTag<float> df;
      const hn::Rebind<std::uint16_t, decltype(df)> dw;
      const hn::RebindToUnsigned<decltype(df)> du;
      for (int r = 0; r < kPanelRows; ++r) {
        for (std::size_t k = 0; k < kPanelCols; k += hn::Lanes(df)) {
          const auto bits = hn::PromoteTo(du, hn::LoadU(dw, values + r * kPanelCols + k));
          hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(bits)), df, out + r * stride + k);
        }
      }
      continue;
    }
    LoadScales(format, panel + PackedSuperOffset(format, b), block, scales);
    if (traits.code_bits == 8) {
      DequantBytes(codes, scales, out, stride);
    } else {
      DequantDigits(format, codes, scales, out, stride);
    }
  }
}

// kRows rows of x times kOutputs outputs, each sum in a register of its own.
template <int kRows, int kOutputs>
HWY_INLINE void Dots(const GemmCall& call, const float* weights, std::int64_t stride,
                     const float* x, std::int64_t x_stride, std::int64_t row, std::int64_t column) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  V sums[kRows][kOutputs];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kOutputs; ++j) sums[i][j] = hn::Zero(d);
  }
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t k = 0; k < stride; k += lanes) {
    V w[kOutputs];
    for (int j = 0; j < kOutputs; ++j) w[j] = hn::LoadU(d, weights + j * stride + k);
    for (int i = 0; i < kRows; ++i) {
      const V v = hn::LoadU(d, x + i * x_stride + k);
      for (int j = 0; j < kOutputs; ++j) sums[i][j] = hn::MulAdd(v, w[j], sums[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kOutputs; ++j) {
      float sum = hn::GetLane(hn::SumOfLanes(d, sums[i][j]));
      if (call.bias != nullptr) sum += call.bias[column + j];
      float& out = call.out[(row + i) * call.out_stride + column + j];
      out = call.accumulate ? out + sum : sum;
    }
  }
}

// All rows of x in [first, last) times one panel's `width` outputs.
void PanelRows(const GemmCall& call, const float* weights, std::int64_t stride, const float* x,
               std::int64_t x_stride, std::int64_t first, std::int64_t last, std::int64_t column,
               int width) {
  for (int j = 0; j < width; j += 4) {
    const float* w = weights + j * stride;
    if (width - j >= 4) {
      std::int64_t row = first;
      for (; row + 2 <= last; row += 2) {
        Dots<2, 4>(call, w, stride, x + (row - first) * x_stride, x_stride, row, column + j);
      }
      if (row < last) {
        Dots<1, 4>(call, w, stride, x + (row - first) * x_stride, x_stride, row, column + j);
      }
    } else {
      for (int t = 0; t < width - j; ++t) {
        for (std::int64_t row = first; row < last; ++row) {
          Dots<1, 1>(call, w + t * stride, stride, x + (row - first) * x_stride, x_stride, row,
                     column + j + t);
        }
      }
    }
  }
}

void Run(const GemmCall& call, std::int64_t begin, std::int64_t end, std::byte* scratch) {
  const PackedMatrix& matrix = *call.weight;
  const std::int64_t stride = matrix.blocks * kPanelCols;
  auto* weights = reinterpret_cast<float*>(scratch);
  float* padded = weights + kPanelRows * stride;  // rows of x when cols is no multiple of 32
  for (const PackedSegment& segment : matrix.segments) {
    const std::int64_t from = std::max(begin, segment.first_panel);
    const std::int64_t to = std::min(end, segment.first_panel + segment.panels);
    for (std::int64_t p = from; p < to; ++p) {
      const std::int64_t local = p - segment.first_panel;
      DequantPanel(segment.format, segment.data + local * segment.panel_bytes, matrix.blocks,
                   weights, stride);
      const auto width =
          static_cast<int>(std::min<std::int64_t>(kPanelRows, segment.rows - local * kPanelRows));
      for (std::int64_t first = 0; first < call.rows; first += kRowBlock) {
        const std::int64_t last = std::min(call.rows, first + kRowBlock);
        const float* x = call.x + first * call.x_stride;
        std::int64_t x_stride = call.x_stride;
        if (stride != matrix.cols) {
          for (std::int64_t i = 0; i < last - first; ++i) {
            std::copy_n(x + i * x_stride, matrix.cols, padded + i * stride);
            std::fill(padded + i * stride + matrix.cols, padded + (i + 1) * stride, 0.0f);
          }
          x = padded;
          x_stride = stride;
        }
        PanelRows(call, weights, stride, x, x_stride, first, last,
                  segment.first_row + local * kPanelRows, width);
      }
    }
  }
}

std::size_t ScratchBytes(std::int64_t blocks) {
  return static_cast<std::size_t>((kPanelRows + kRowBlock) * blocks * kPanelCols) * sizeof(float);
}

bool WantsBf16(std::int64_t) { return false; }
bool Gates(std::int64_t, const PackedMatrix&) { return false; }

const GemmKernel& Kernel() {
  static const GemmKernel kernel{hwy::TargetName(HWY_TARGET), ScratchBytes, WantsBf16, Gates, Run};
  return kernel;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace pliant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/cpu_dispatch.h"

namespace pliant {

const GemmKernel& F32GemmKernel(CpuLevel level) { PLIANT_RETURN_BY_LEVEL(level, Kernel); }

const GemmKernel& ChooseGemmKernel(CpuLevel level, bool precise) {
#if defined(__x86_64__)
  if (!precise && level == CpuLevel::kAmx) return AmxGemmKernel();
  if (!precise && level == CpuLevel::kAvx512) return Avx512Bf16GemmKernel();
#endif
  return F32GemmKernel(level);
}

}  // namespace pliant
#endif  // HWY_ONCE
