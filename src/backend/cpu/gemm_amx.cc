// Room: backend. Products on AMX bf16 tiles. Two shapes of the same sum:
//
// Few rows (decode): the weights are the left operand, dequantised row by row into a ring of tiles
// that never leaves L1, and xᵀ the right one; the result comes out transposed. Weights are read
// from memory once. Many rows (prefill): x is the left operand as it lies, and a panel's weights
// are dequantised and transposed once for all rows.
//
// Either way an element of the result starts at zero and adds, tile by tile in column order, what
// TDPBF16PS makes of 32 products; multiplication commutes, so both give the same bits.
#include "backend/cpu/gemm.h"

// GCC 12 warns of its own _mm512_undefined_*() placeholders once they are inlined.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "backend/cpu/dequant_avx512.h"

#define PLIANT_TARGET_AMX                                                              \
  __attribute__((                                                                      \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c," \
             "amx-tile,amx-bf16")))
#define PLIANT_INLINE_AMX PLIANT_TARGET_AMX __attribute__((always_inline)) inline

namespace pliant {
namespace {

constexpr std::int64_t kTileBytes = 1024;
constexpr std::int64_t kPairBytes = 2 * kTileBytes;  // a block's 32 rows of weights
// Blocks between dequantising and multiplying, for stores to reach L1. (1, 2 and 4 measured alike.)
constexpr std::int64_t kLag = 2;
constexpr std::int64_t kRing = 4;      // blocks in flight between dequantise and multiply
constexpr std::int64_t kFewRows = 32;  // at most so many take the decode shape
constexpr std::int64_t kGroupBytes = std::int64_t{320} << 10;  // of weights at a time, in L2
constexpr std::int64_t kMostGroup = 16;                        // panels at a time

// Operand of LDTILECFG (Intel SDM): palette, start row, then bytes a row and rows of each tile.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Tiles 0-3 sum, 4 and 5 are left operands, 6 and 7 right ones. `columns` of the sums and the right
// operands: 16, or 1 for a single row of x in the decode shape.
PLIANT_TARGET_AMX void ConfigureTiles(int columns) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = 16;
    config.row_bytes[t] = static_cast<std::uint16_t>(t == 4 || t == 5 ? 64 : 4 * columns);
  }
  // GCC 12 tells the optimiser of 8 bytes of the operand only.
  __asm__ volatile("" : : "m"(config) : "memory");
  _tile_loadconfig(&config);
}

struct Panel {
  const PackedSegment* segment;
  const std::byte* data;
  std::int64_t column;  // of out
  int width;            // columns that exist, 1 to 32
};

Panel PanelAt(const PackedMatrix& matrix, std::int64_t index) {
  const PackedSegment* segment = matrix.segments.data();
  while (index >= segment->first_panel + segment->panels) ++segment;
  const std::int64_t local = index - segment->first_panel;
  return {segment, segment->data + local * segment->panel_bytes,
          segment->first_row + local * kPanelRows,
          static_cast<int>(std::min<std::int64_t>(kPanelRows, segment->rows - local * kPanelRows))};
}

// out[0 .. 15] of one row gets `sum`, for the columns in `mask`.
PLIANT_INLINE_AMX void Finish(const GemmCall& call, std::int64_t row, std::int64_t column,
                              __mmask16 mask, __m512 sum) {
  if (call.bias != nullptr) {
    sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, call.bias + column));
  }
  float* out = call.out + row * call.out_stride + column;
  if (call.accumulate) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), sum);
  _mm512_mask_storeu_ps(out, mask, sum);
}

__mmask16 ColumnMask(int width, int half) {
  const int columns = std::clamp(width - 16 * half, 0, 16);
  return static_cast<__mmask16>((1u << columns) - 1u);
}

PLIANT_INLINE_AMX __m512i LoadRowPairs(const GemmCall& call, std::int64_t row, std::int64_t k) {
  if (call.x_bf16 != nullptr) {
    return _mm512_loadu_si512(call.x_bf16 + row * call.x_bf16_stride + k);
  }
  const float* x = call.x + row * call.x_stride + k;
  const std::int64_t left = call.weight->cols - k;
  if (left >= 32) return avx512::RoundPair(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
  const std::uint32_t mask = (1u << left) - 1u;
  return avx512::RoundPair(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + 16),
                           _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x));
}

// x as right operands: [16 rows of x][block] tiles of [16 column pairs][16 rows of x][2].
PLIANT_TARGET_AMX void PackRight(const GemmCall& call, std::byte* to) {
  const std::int64_t blocks = call.weight->blocks;
  for (std::int64_t first = 0; first < call.rows; first += 16) {
    const int rows = static_cast<int>(std::min<std::int64_t>(16, call.rows - first));
    for (std::int64_t b = 0; b < blocks; ++b) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) {
        r[i] = i < rows ? LoadRowPairs(call, first + i, b * kPanelCols) : _mm512_setzero_si512();
      }
      avx512::Transpose16(r);
      std::byte* tile = to + (first / 16 * blocks + b) * kTileBytes;
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 64 * i, r[i]);
    }
  }
}

template <PackedFormat kFormat>
PLIANT_INLINE_AMX void DequantBlock(const avx512::RowScales* scales, const std::byte* block,
                                    std::byte* to) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m512i rows[16];
    avx512::DequantRows<kFormat>(scales[half], block, half, rows);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) _mm512_store_si512(to + half * kTileBytes + 64 * r, rows[r]);
  }
}

// Sums in tiles 0, 1 (rows of x 0-15 with the panel's two halves), then 2, 3 (rows 16-31).
template <int kColumnTiles>
PLIANT_INLINE_AMX void MultiplyLeft(const std::byte* weights, const std::byte* right,
                                    std::int64_t right_next, std::int64_t right_stride) {
  _tile_loadd(4, weights, 64);
  _tile_loadd(5, weights + kTileBytes, 64);
  _tile_loadd(6, right, right_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (kColumnTiles == 2) {
    _tile_loadd(7, right + right_next, right_stride);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Stores a transposed sum tile: row n of `tile` is column `column + n` of out.
PLIANT_INLINE_AMX void FinishTransposed(const GemmCall& call, const std::byte* tile,
                                        std::int64_t first_row, std::int64_t column,
                                        __mmask16 mask) {
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(tile + 64 * i);
  avx512::Transpose16(r);
  const std::int64_t rows = call.rows - first_row;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i < rows) Finish(call, first_row + i, column, mask, _mm512_castsi512_ps(r[i]));
  }
}

template <int kColumnTiles>
PLIANT_INLINE_AMX void FinishFew(const GemmCall& call, const Panel& panel) {
  alignas(64) std::byte sums[4 * kTileBytes];
  const __mmask16 low = ColumnMask(panel.width, 0);
  const __mmask16 high = ColumnMask(panel.width, 1);
  if constexpr (kColumnTiles == 0) {  // one row of x: a sum tile is 16 floats
    _tile_stored(0, sums, 4);
    _tile_stored(1, sums + 64, 4);
    Finish(call, 0, panel.column, low, _mm512_load_ps(reinterpret_cast<float*>(sums)));
    Finish(call, 0, panel.column + 16, high, _mm512_load_ps(reinterpret_cast<float*>(sums + 64)));
    return;
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileBytes, 64);
  FinishTransposed(call, sums, 0, panel.column, low);
  FinishTransposed(call, sums + kTileBytes, 0, panel.column + 16, high);
  if constexpr (kColumnTiles == 2) {
    _tile_stored(2, sums + 2 * kTileBytes, 64);
    _tile_stored(3, sums + 3 * kTileBytes, 64);
    FinishTransposed(call, sums + 2 * kTileBytes, 16, panel.column, low);
    FinishTransposed(call, sums + 3 * kTileBytes, 16, panel.column + 16, high);
  }
}

// The tile intrinsics of GCC 12 do not say that they read memory: without this, stores to what a
// tile load reads next might be moved behind it.
inline void StoresAreSeen() { __asm__ volatile("" : : : "memory"); }

PLIANT_INLINE_AMX void ZeroSums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// One pass over a panel for up to 32 rows of x: block b + 1 is dequantised while block b
// multiplies.
template <PackedFormat kFormat, int kColumnTiles>
PLIANT_TARGET_AMX void PanelFew(const GemmCall& call, const Panel& panel, const std::byte* right,
                                std::byte* ring) {
  constexpr std::int64_t kAhead = 8 * static_cast<std::int64_t>(PackedBlockBytes(kFormat));
  constexpr int kLines = (PackedBlockBytes(kFormat) + 63) / 64;
  const std::int64_t blocks = call.weight->blocks;
  const std::int64_t right_next = blocks * kTileBytes;
  const std::int64_t right_bytes = kColumnTiles == 0 ? 64 : kTileBytes;
  const std::int64_t right_stride = kColumnTiles == 0 ? 4 : 64;
  ZeroSums();
  avx512::ScaleQueue<kFormat> queue(panel.data);
  for (std::int64_t b = 0; b < blocks + kLag; ++b) {
    if (b < blocks) {
      const std::byte* ahead = panel.data + PackedBlockOffset(kFormat, b) + kAhead;
#pragma GCC unroll 8
      for (int line = 0; line < kLines; ++line) _mm_prefetch(ahead + 64 * line, _MM_HINT_T0);
      DequantBlock<kFormat>(queue.Next(b, blocks), panel.data + PackedBlockOffset(kFormat, b),
                            ring + b % kRing * kPairBytes);
      StoresAreSeen();
    }
    if (b >= kLag) {
      MultiplyLeft<kColumnTiles>(ring + (b - kLag) % kRing * kPairBytes,
                                 right + (b - kLag) * right_bytes, right_next, right_stride);
    }
  }
  FinishFew<kColumnTiles>(call, panel);
}

PLIANT_TARGET_AMX void RunFew(const GemmCall& call, std::int64_t begin, std::int64_t end,
                              std::byte* scratch) {
  const std::int64_t blocks = call.weight->blocks;
  std::byte* right = scratch;
  std::byte* weights = scratch + kFewRows / 16 * blocks * kTileBytes;
  if (call.rows == 1) {
    for (std::int64_t b = 0; b < blocks; ++b) {
      _mm512_store_si512(right + 64 * b, LoadRowPairs(call, 0, b * kPanelCols));
    }
  } else {
    PackRight(call, right);
  }
  StoresAreSeen();
  ConfigureTiles(call.rows == 1 ? 1 : 16);
  for (std::int64_t p = begin; p < end; ++p) {
    const Panel panel = PanelAt(*call.weight, p);
#define PLIANT_RUN_PANEL(FORMAT)                      \
  if (call.rows == 1) {                               \
    PanelFew<FORMAT, 0>(call, panel, right, weights); \
  } else if (call.rows <= 16) {                       \
    PanelFew<FORMAT, 1>(call, panel, right, weights); \
  } else {                                            \
    PanelFew<FORMAT, 2>(call, panel, right, weights); \
  }
    PLIANT_SWITCH_FORMAT(panel.segment->format, PLIANT_RUN_PANEL)
#undef PLIANT_RUN_PANEL
  }
  _tile_release();
}

// A panel's weights as right operands: [block][half] tiles of [16 column pairs][16 outputs][2].
template <PackedFormat kFormat>
PLIANT_TARGET_AMX void DequantPanelRight(const std::byte* panel, std::int64_t blocks,
                                         std::byte* to) {
  avx512::ScaleQueue<kFormat> queue(panel);
  for (std::int64_t b = 0; b < blocks; ++b) {
    const avx512::RowScales* scales = queue.Next(b, blocks);
    for (int half = 0; half < 2; ++half) {
      __m512i rows[16];
      avx512::DequantRows<kFormat>(scales[half], panel + PackedBlockOffset(kFormat, b), half, rows);
      avx512::Transpose16(rows);
      std::byte* tile = to + b * kPairBytes + half * kTileBytes;
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) _mm512_store_si512(tile + 64 * r, rows[r]);
    }
  }
}

// Tiles 0 and 1: 16 rows of x with two right operands; 2 and 3: the next 16 rows. Panel after panel
// passes over the same rows; TILELOADDT1 hints that those of the panels need not stay in L1.
template <int kRowTiles>
PLIANT_INLINE_AMX void MultiplyRight(const std::byte* x, std::int64_t stride,
                                     const std::byte* first, const std::byte* second,
                                     std::int64_t blocks) {
  ZeroSums();
  for (std::int64_t b = 0; b < blocks; ++b) {
    _tile_stream_loadd(6, first + b * kPairBytes, 64);
    _tile_stream_loadd(7, second + b * kPairBytes, 64);
    _tile_loadd(4, x + b * 64, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, x + 16 * stride + b * 64, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

template <int kRowTiles>
PLIANT_INLINE_AMX void StoreSums(std::byte* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileBytes, 64);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, sums + 2 * kTileBytes, 64);
    _tile_stored(3, sums + 3 * kTileBytes, 64);
  }
}

// Rows row .. of x with the two halves of a panel.
template <int kRowTiles>
PLIANT_INLINE_AMX void RowsMany(const GemmCall& call, const Panel& panel, const std::byte* weights,
                                std::int64_t row) {
  const std::int64_t stride = call.x_bf16_stride * 2;
  const auto* x = reinterpret_cast<const std::byte*>(call.x_bf16 + row * call.x_bf16_stride);
  MultiplyRight<kRowTiles>(x, stride, weights, weights + kTileBytes, call.weight->blocks);
  const bool plain = call.bias == nullptr && !call.accumulate;
  if (plain && panel.width == kPanelRows && call.rows - row >= 16 * kRowTiles) {
    float* out = call.out + row * call.out_stride + panel.column;
    const std::int64_t out_stride = call.out_stride * 4;
    _tile_stored(0, out, out_stride);
    _tile_stored(1, out + 16, out_stride);
    if constexpr (kRowTiles == 2) {
      _tile_stored(2, out + 16 * call.out_stride, out_stride);
      _tile_stored(3, out + 16 * call.out_stride + 16, out_stride);
    }
    return;
  }
  alignas(64) std::byte sums[4 * kTileBytes];
  StoreSums<kRowTiles>(sums);
  const __mmask16 low = ColumnMask(panel.width, 0);
  const __mmask16 high = ColumnMask(panel.width, 1);
  const int rows = static_cast<int>(std::min<std::int64_t>(16 * kRowTiles, call.rows - row));
  for (int i = 0; i < rows; ++i) {
    const std::byte* sum = sums + i / 16 * kPairBytes + i % 16 * 64;
    Finish(call, row + i, panel.column, low, _mm512_load_ps(reinterpret_cast<const float*>(sum)));
    Finish(call, row + i, panel.column + 16, high,
           _mm512_load_ps(reinterpret_cast<const float*>(sum + kTileBytes)));
  }
}

// Rows row .. of x with 16 outputs of the gate and the same 16 of what it gates.
template <int kRowTiles>
PLIANT_INLINE_AMX void RowsGated(const GemmCall& call, const Panel& gate_panel, int half,
                                 const std::byte* gate, const std::byte* up, std::int64_t row) {
  const std::int64_t stride = call.x_bf16_stride * 2;
  const auto* x = reinterpret_cast<const std::byte*>(call.x_bf16 + row * call.x_bf16_stride);
  MultiplyRight<kRowTiles>(x, stride, gate, up, call.weight->blocks);
  alignas(64) float sums[4 * kTileBytes / 4];
  StoreSums<kRowTiles>(reinterpret_cast<std::byte*>(sums));
  const __mmask16 mask = ColumnMask(gate_panel.width, half);
  for (int t = 0; t < kRowTiles; ++t) {
    float* products = sums + t * 512;
    call.silu_mul(products, products + 256, 256, products);
    const int rows = static_cast<int>(std::clamp<std::int64_t>(call.rows - row - 16 * t, 0, 16));
    for (int i = 0; i < rows; ++i) {
      _mm256_mask_storeu_epi16(
          call.gated + (row + 16 * t + i) * call.gated_stride + gate_panel.column + 16 * half, mask,
          (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(products + 16 * i)));
    }
  }
}

PLIANT_TARGET_AMX void DequantRight(const Panel& panel, std::int64_t blocks, std::byte* to){
#define PLIANT_DEQUANT_PANEL(FORMAT) DequantPanelRight<FORMAT>(panel.data, blocks, to)
    PLIANT_SWITCH_FORMAT(panel.segment->format, PLIANT_DEQUANT_PANEL)
#undef PLIANT_DEQUANT_PANEL
}

// Panels whose dequantised weights share L2 with the rows of x.
std::int64_t GroupPanels(std::int64_t blocks) {
  return std::clamp<std::int64_t>(kGroupBytes / (blocks * kPairBytes), 2, kMostGroup) / 2 * 2;
}

PLIANT_TARGET_AMX void RunMany(const GemmCall& call, std::int64_t begin, std::int64_t end,
                               std::byte* scratch) {
  const std::int64_t blocks = call.weight->blocks;
  const std::int64_t panel_bytes = blocks * kPairBytes;
  const std::int64_t group = GroupPanels(blocks);
  ConfigureTiles(16);
  for (std::int64_t first = begin; first < end; first += group) {
    const auto count = static_cast<int>(std::min(group, end - first));
    Panel panels[kMostGroup];
    for (int i = 0; i < count; ++i) {
      panels[i] = PanelAt(*call.weight, first + i);
      DequantRight(panels[i], blocks, scratch + i * panel_bytes);
    }
    StoresAreSeen();
    for (std::int64_t row = 0; row < call.rows; row += 32) {
      for (int i = 0; i < count; ++i) {
        if (call.rows - row > 16) {
          RowsMany<2>(call, panels[i], scratch + i * panel_bytes, row);
        } else {
          RowsMany<1>(call, panels[i], scratch + i * panel_bytes, row);
        }
      }
    }
  }
  _tile_release();
}

// As RunMany, over pairs of a gate's panel and the panel that it gates.
PLIANT_TARGET_AMX void RunGated(const GemmCall& call, std::int64_t begin, std::int64_t end,
                                std::byte* scratch) {
  const std::int64_t blocks = call.weight->blocks;
  const std::int64_t panel_bytes = blocks * kPairBytes;
  const std::int64_t group = GroupPanels(blocks) / 2;
  const std::int64_t gates = call.weight->panels / 2;
  ConfigureTiles(16);
  for (std::int64_t first = begin; first < end; first += group) {
    const auto count = static_cast<int>(std::min(group, end - first));
    Panel panels[kMostGroup];
    for (int i = 0; i < count; ++i) {
      panels[i] = PanelAt(*call.weight, first + i);
      DequantRight(panels[i], blocks, scratch + 2 * i * panel_bytes);
      DequantRight(PanelAt(*call.weight, gates + first + i), blocks,
                   scratch + (2 * i + 1) * panel_bytes);
    }
    StoresAreSeen();
    for (std::int64_t row = 0; row < call.rows; row += 32) {
      for (int i = 0; i < 2 * count; ++i) {
        const int half = i % 2;
        const std::byte* gate = scratch + i / 2 * 2 * panel_bytes + half * kTileBytes;
        if (call.rows - row > 16) {
          RowsGated<2>(call, panels[i / 2], half, gate, gate + panel_bytes, row);
        } else {
          RowsGated<1>(call, panels[i / 2], half, gate, gate + panel_bytes, row);
        }
      }
    }
  }
  _tile_release();
}

bool Gates(std::int64_t rows, const PackedMatrix& weight) {
  if (rows <= kFewRows || weight.rows % 2 != 0 || weight.panels % 2 != 0) return false;
  return PanelAt(weight, weight.panels / 2).column == weight.rows / 2;
}

void Run(const GemmCall& call, std::int64_t begin, std::int64_t end, std::byte* scratch) {
  if (begin >= end || call.rows == 0) return;
  if (call.gated != nullptr) {
    RunGated(call, begin, end, scratch);
  } else if (call.rows <= kFewRows) {
    RunFew(call, begin, end, scratch);
  } else {
    RunMany(call, begin, end, scratch);
  }
}

// Enough for this many blocks and for any smaller number. A group's bytes do not grow with the
// blocks (fewer of them make more panels a group), so what bounds every group is asked for.
std::size_t ScratchBytes(std::int64_t blocks) {
  const std::int64_t few = (kFewRows / 16 * kTileBytes + kPairBytes) * blocks + kRing * kPairBytes;
  return static_cast<std::size_t>(std::max({few, kGroupBytes, 2 * blocks * kPairBytes}));
}

}  // namespace

const GemmKernel& AmxGemmKernel() {
  static const GemmKernel kernel{"amx bf16", ScratchBytes,
                                 [](std::int64_t rows) { return rows > kFewRows; }, Gates, Run};
  return kernel;
}

}  // namespace pliant

#endif  // x86-64
