// Room: backend. Entry of the AMX attention kernels, and what describes a step to both.
#if defined(__x86_64__)

#include "backend/cpu/kv_amx.h"
#include "backend/step_check.h"

namespace pliant {
namespace kv_amx {
namespace {

// A block of rows that stands for an absent plane: the first absent digit reads as 8, the others as
// 0.
struct alignas(64) ConstantRows {
  std::uint8_t bytes[kBlockTokens * kMaxKvHeadDim / 2];
};
constexpr ConstantRows MakeRows(std::uint8_t value) {
  ConstantRows rows{};
  for (std::uint8_t& byte : rows.bytes) byte = value;
  return rows;
}
constexpr ConstantRows kMidRows = MakeRows(0x88);
constexpr ConstantRows kZeroRows = MakeRows(0);

/// 16 bf16 as the bits of f32.
PLIANT_KV_AMX_INLINE __m512i LoadBf16Bits(const std::uint16_t* from) {
  return _mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
}

/// log2(1 + i / 128): what the 7 mantissa bits of a bf16 add to its exponent.
struct alignas(64) LogTable {
  float values[128];
};
const LogTable kLogTable = [] {
  LogTable table;
  for (int i = 0; i < 128; ++i) table.values[i] = std::log2(1.0f + static_cast<float>(i) / 128.0f);
  return table;
}();

PLIANT_KV_AMX_INLINE __m512 LogMantissa(__m512i bits) {
  const __m512i index = _mm512_srli_epi32(bits, 16);
  __m512 part[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    part[i] = _mm512_permutex2var_ps(_mm512_load_ps(kLogTable.values + 32 * i), index,
                                     _mm512_load_ps(kLogTable.values + 32 * i + 16));
  }
  const __mmask16 bit5 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
  const __mmask16 bit6 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(64));
  return _mm512_mask_blend_ps(bit6, _mm512_mask_blend_ps(bit5, part[0], part[1]),
                              _mm512_mask_blend_ps(bit5, part[2], part[3]));
}

bool Present(const BlockView& block) { return block.k[0].valid() && block.v[0].valid(); }

/// Points one block's planes at their pages or at constant rows; returns how many are resident.
int DescribeBlock(const AttentionHead& head, const std::array<PageId, kPlanes>& pages, bool present,
                  const std::uint8_t** rows) {
  const int planes = present ? ResidentPlanes(pages) : 0;
  for (int p = 0; p < kPlanes; ++p) {
    rows[p] = p < planes ? head.Rows(pages[p]) : p == planes ? kMidRows.bytes : kZeroRows.bytes;
  }
  return planes;
}

}  // namespace

bool DescribeStep(const AttentionHead& head, int first, int end, PlaneSource& key,
                  PlaneSource& value) {
  int depth[2] = {0, 0};
  bool same[2] = {true, true};
  for (int b = 0; b < kStepBlocks; ++b) {
    const int at = first + b * kBlockTokens;
    static constexpr BlockView kNoBlock;
    const BlockView& block = at < end ? head.blocks[at / kBlockTokens] : kNoBlock;
    const bool present = Present(block);
    const int planes[2] = {DescribeBlock(head, block.k, present, key.rows[b]),
                           DescribeBlock(head, block.v, present, value.rows[b])};
    if (!present) continue;
    for (int side = 0; side < 2; ++side) {
      same[side] &= depth[side] == 0 || depth[side] == planes[side];
      depth[side] = planes[side];
    }
  }
  key.depth = same[0] && depth[0] <= 2 ? depth[0] : kPlanes;
  value.depth = same[1] && depth[1] <= 2 ? depth[1] : kPlanes;
  return depth[0] != 0;
}

void Prefetcher::Start(const AttentionHead& head, int first, int end) {
  chunks_ = 0;
  for (int at = first; at < std::min(first + kStep, end); at += kBlockTokens) {
    const BlockView& block = head.blocks[at / kBlockTokens];
    if (!Present(block)) continue;
    __builtin_prefetch(head.Scales(block.k[0]));
    __builtin_prefetch(head.Scales(block.v[0]));
    for (const auto* side : {&block.k, &block.v}) {
      for (const PageId page : *side) {
        if (page.valid()) rows_[chunks_++] = head.Rows(page);
      }
    }
  }
  chunk_ = 0;
  offset_ = 0;
  chunk_bytes_ = kBlockTokens * head.head_dim / 2;
  // A full step has 4 blocks of 2 to 8 planes; a plane of a block is 2 lines times the calls of
  // Issue / 8.
  lines_ = chunks_ > 16 ? 8 : chunks_ > 8 ? 4 : 2;
}

PLIANT_KV_AMX void LoadScales(const AttentionHead& head, int first, int end, StepScales& scales) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int n = 0; n < kStep; n += kVector) {
    const int at = first + n;
    if (at >= end || !Present(head.blocks[at / kBlockTokens])) {
      _mm512_store_ps(scales.key + n, _mm512_setzero_ps());
      _mm512_store_ps(scales.log_value + n, _mm512_set1_ps(-INFINITY));
      _mm512_store_ps(scales.inverse_value + n, _mm512_setzero_ps());
      continue;
    }
    const BlockView& block = head.blocks[at / kBlockTokens];
    const int token = at % kBlockTokens;
    const __mmask16 there = _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(end - at));
    const __m512 key = _mm512_castsi512_ps(LoadBf16Bits(head.Scales(block.k[0]) + token));
    // An infinite scale marks a row that is not finite: infinity * 0 is NaN and stays so.
    _mm512_store_ps(scales.key + n,
                    _mm512_maskz_mov_ps(there, _mm512_fmadd_ps(key, _mm512_setzero_ps(), key)));
    const __m512i bits = LoadBf16Bits(head.Scales(block.v[0]) + token);
    const __mmask16 infinite = _mm512_cmpge_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    // A scale below 2^-100 counts as 2^-100.
    const __m512i clamped = _mm512_max_epi32(bits, _mm512_set1_epi32((127 - 100) << 23));
    const __m512 exponent = _mm512_cvtepi32_ps(
        _mm512_sub_epi32(_mm512_srli_epi32(clamped, 23), _mm512_set1_epi32(127)));
    __m512 log_value = _mm512_add_ps(exponent, LogMantissa(clamped));
    log_value = _mm512_mask_mov_ps(log_value, infinite, _mm512_set1_ps(NAN));
    _mm512_store_ps(scales.log_value + n,
                    _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), there, log_value));
    // Finite even where the row is not: 0 * infinity would reach rows that do not see the token.
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_castsi512_ps(clamped));
    _mm512_store_ps(scales.inverse_value + n, _mm512_maskz_mov_ps(there & ~infinite, inverse));
  }
}

namespace {

bool Supports(int head_dim) { return head_dim == 64 || head_dim == 128 || head_dim == 256; }

std::size_t ScratchBytes(int head_dim) {
  return std::max(NarrowScratchBytes(head_dim), WideScratchBytes(head_dim));
}

void Attend(const AttentionHead& head, const QueryTile& tile, int first, int end, float* partials,
            std::byte* scratch) {
  if (tile.Columns() <= kNarrowColumns) {
    AttendNarrow(head, tile, first, end, partials, scratch);
  } else {
    AttendWide(head, tile, first, end, partials, scratch);
  }
}

// Sums of weights count in units of 2^-kWeightBits.
const AttentionKernel kKernel = {kWideColumns,
                                 kNarrowColumns,
                                 std::exp2(kWeightBits),
                                 /*exports_weights=*/false,
                                 ScratchBytes,
                                 Supports,
                                 Attend};

}  // namespace
}  // namespace kv_amx

const AttentionKernel& AmxAttentionKernel() { return kv_amx::kKernel; }

}  // namespace pliant

#endif  // x86_64
