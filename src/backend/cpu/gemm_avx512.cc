// Room: backend. Products with AVX-512 BF16 (VDPBF16PS): weights dequantised to bf16 rows, x as it
// lies, dot products along the columns. Also the bf16 conversion that the AMX kernels share.
#include "backend/cpu/gemm.h"

// GCC 12 warns of its own _mm512_undefined_*() placeholders once they are inlined.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(__x86_64__)

#include <algorithm>

#include "backend/cpu/dequant_avx512.h"

namespace pliant {
namespace {

constexpr std::int64_t kBlockBytes = 2048;  // 32 rows of 32 bf16
constexpr std::int64_t kRowBlock = 16;      // rows of x per pass over a panel: they stay in L1

template <PackedFormat kFormat>
PLIANT_TARGET_AVX512 void DequantPanel(const std::byte* panel, std::int64_t blocks, std::byte* to) {
  avx512::ScaleQueue<kFormat> queue(panel);
  for (std::int64_t b = 0; b < blocks; ++b) {
    const avx512::RowScales* scales = queue.Next(b, blocks);
    for (int half = 0; half < 2; ++half) {
      __m512i rows[16];
      avx512::DequantRows<kFormat>(scales[half], panel + PackedBlockOffset(kFormat, b), half, rows);
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        _mm512_store_si512(to + b * kBlockBytes + (half * 16 + r) * 64, rows[r]);
      }
    }
  }
}

PLIANT_INLINE_AVX512 void FinishOne(const GemmCall& call, std::int64_t row, std::int64_t column,
                                    float sum) {
  if (call.bias != nullptr) sum += call.bias[column];
  float& out = call.out[row * call.out_stride + column];
  out = call.accumulate ? out + sum : sum;
}

// kRows rows of x times 4 outputs. Every sum has its own register, so its order of addition does
// not depend on kRows.
template <int kRows>
PLIANT_TARGET_AVX512 void Dots(const GemmCall& call, const std::byte* weights, std::int64_t row,
                               std::int64_t column, int width) {
  __m512 sums[kRows][4];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[i][j] = _mm512_setzero_ps();
  }
  const std::uint16_t* x = call.x_bf16 + row * call.x_bf16_stride;
  for (std::int64_t b = 0; b < call.weight->blocks; ++b) {
    __m512i w[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) w[j] = _mm512_load_si512(weights + b * kBlockBytes + j * 64);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const __m512i v = _mm512_loadu_si512(x + i * call.x_bf16_stride + b * kPanelCols);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)v, (__m512bh)w[j]);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < width; ++j) {
      FinishOne(call, row + i, column + j, _mm512_reduce_add_ps(sums[i][j]));
    }
  }
}

// One row of x times a panel: every weight is used once, so it goes from its codes into the sum
// without a stop in memory. Each sum is added up in the same order as in Dots.
template <PackedFormat kFormat>
PLIANT_TARGET_AVX512 void OneRow(const GemmCall& call, const std::byte* panel, std::int64_t column,
                                 int width) {
  const std::int64_t blocks = call.weight->blocks;
  for (int half = 0; half * 16 < width; ++half) {
    avx512::RowScales scales[2];  // of the block at hand and of the next
    const auto load = [&](std::int64_t b) PLIANT_INLINE_LAMBDA_AVX512 {
      avx512::LoadScales<kFormat>(panel + PackedSuperOffset(kFormat, b),
                                  panel + PackedBlockOffset(kFormat, b), half, scales[b % 2]);
    };
    load(0);
    __m512 sums[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) sums[r] = _mm512_setzero_ps();
    for (std::int64_t b = 0; b < blocks; ++b) {
      if (b + 1 < blocks) load(b + 1);
      const avx512::RowScales* here = &scales[b % 2];
      __asm__ volatile("" : "+r"(here) : : "memory");  // as in ScaleQueue
      const __m512i x = _mm512_loadu_si512(call.x_bf16 + b * kPanelCols);
      avx512::DequantEachRow<kFormat>(*here, panel + PackedBlockOffset(kFormat, b), half,
                                      [&](int r, __m512i row) PLIANT_INLINE_LAMBDA_AVX512 {
                                        sums[r] =
                                            _mm512_dpbf16_ps(sums[r], (__m512bh)x, (__m512bh)row);
                                      });
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      if (half * 16 + r < width)
        FinishOne(call, 0, column + half * 16 + r, _mm512_reduce_add_ps(sums[r]));
    }
  }
}

PLIANT_TARGET_AVX512 void Run(const GemmCall& call, std::int64_t begin, std::int64_t end,
                              std::byte* scratch) {
  const PackedMatrix& matrix = *call.weight;
  for (const PackedSegment& segment : matrix.segments) {
    const std::int64_t from = std::max(begin, segment.first_panel);
    const std::int64_t to = std::min(end, segment.first_panel + segment.panels);
    for (std::int64_t p = from; p < to; ++p) {
      const std::int64_t local = p - segment.first_panel;
      const std::byte* data = segment.data + local * segment.panel_bytes;
      const std::int64_t column = segment.first_row + local * kPanelRows;
      const auto width =
          static_cast<int>(std::min<std::int64_t>(kPanelRows, segment.rows - local * kPanelRows));
      if (call.rows == 1) {
#define PLIANT_ONE_ROW(FORMAT) OneRow<FORMAT>(call, data, column, width)
        PLIANT_SWITCH_FORMAT(segment.format, PLIANT_ONE_ROW)
#undef PLIANT_ONE_ROW
        continue;
      }
#define PLIANT_DEQUANT_PANEL(FORMAT) DequantPanel<FORMAT>(data, matrix.blocks, scratch)
      PLIANT_SWITCH_FORMAT(segment.format, PLIANT_DEQUANT_PANEL)
#undef PLIANT_DEQUANT_PANEL
      for (std::int64_t first = 0; first < call.rows; first += kRowBlock) {
        const std::int64_t last = std::min(call.rows, first + kRowBlock);
        for (int j = 0; j < width; j += 4) {
          const int columns = std::min(4, width - j);
          std::int64_t row = first;
          for (; row + 4 <= last; row += 4) {
            Dots<4>(call, scratch + j * 64, row, column + j, columns);
          }
          for (; row < last; ++row) Dots<1>(call, scratch + j * 64, row, column + j, columns);
        }
      }
    }
  }
}

}  // namespace

const GemmKernel& Avx512Bf16GemmKernel() {
  static const GemmKernel kernel{
      "avx512 bf16",
      [](std::int64_t blocks) { return static_cast<std::size_t>(blocks * kBlockBytes); },
      [](std::int64_t) { return true; }, [](std::int64_t, const PackedMatrix&) { return false; },
      Run};
  return kernel;
}

PLIANT_TARGET_AVX512 void ConvertRowsToBf16(const float* x, std::int64_t x_stride,
                                            std::int64_t cols, std::int64_t begin, std::int64_t end,
                                            std::uint16_t* out, std::int64_t padded_cols) {
  for (std::int64_t row = begin; row < end; ++row) {
    const float* from = x + row * x_stride;
    std::uint16_t* to = out + row * padded_cols;
    std::int64_t k = 0;
    for (; k + 32 <= cols; k += 32) {
      _mm512_storeu_si512(
          to + k, avx512::RoundPair(_mm512_loadu_ps(from + k + 16), _mm512_loadu_ps(from + k)));
    }
    if (k < cols) {
      const std::uint32_t mask = (1u << (cols - k)) - 1u;
      _mm512_storeu_si512(
          to + k, avx512::RoundPair(
                      _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + k + 16),
                      _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from + k)));
    }
  }
}

}  // namespace pliant

#endif  // x86-64
