// Room: backend. Entry of the AMX attention kernels, and what describes a step to both.
#if defined(__x86_64__)

#include "backend/cpu/kv_amx.h"
#include "backend/step_check.h"

namespace pliant {
namespace kv_amx {
namespace {

// Rows that stand for absent planes: the first absent digit reads as 8, the others as 0. Two tokens
// of the widest head fit.
struct alignas(64) ConstantRow {
  std::uint8_t bytes[kMaxKvHeadDim];
};
constexpr ConstantRow MakeRow(std::uint8_t value) {
  ConstantRow row{};
  for (std::uint8_t& byte : row.bytes) byte = value;
  return row;
}
constexpr ConstantRow kMidRow = MakeRow(0x88);
constexpr ConstantRow kZeroRow = MakeRow(0);

/// 16 bf16 as the bits of f32.
PLIANT_KV_AMX_INLINE __m512i LoadBf16Bits(const std::uint16_t* from) {
  return _mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
}

bool Present(const BlockView& block) { return block.k[0].valid() && block.v[0].valid(); }

/// Points one block's planes at their pages or at constant rows; returns how many are resident.
int DescribeBlock(const AttentionHead& head, const std::array<PageId, kPlanes>& pages, bool present,
                  const std::uint8_t** rows, std::ptrdiff_t* stride) {
  const int planes = present ? ResidentPlanes(pages) : 0;
  for (int p = 0; p < kPlanes; ++p) {
    rows[p] = p < planes ? head.Rows(pages[p]) : p == planes ? kMidRow.bytes : kZeroRow.bytes;
    stride[p] = p < planes ? head.head_dim / 2 : 0;
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
    const int planes[2] = {DescribeBlock(head, block.k, present, key.rows[b], key.stride[b]),
                           DescribeBlock(head, block.v, present, value.rows[b], value.stride[b])};
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

PLIANT_KV_AMX void LoadScales(const AttentionHead& head, int first, int end, StepScales& scales) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int n = 0; n < kStep; n += kVector) {
    const int at = first + n;
    if (at >= end || !Present(head.blocks[at / kBlockTokens])) {
      _mm512_store_ps(scales.key + n, _mm512_setzero_ps());
      _mm512_store_ps(scales.exponent + n, _mm512_set1_ps(-INFINITY));
      _mm512_store_ps(scales.weight + n, _mm512_setzero_ps());
      _mm512_store_ps(scales.inverse_exponent + n, _mm512_setzero_ps());
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
    const __m512i field = _mm512_srli_epi32(bits, 23);
    const __mmask16 infinite = _mm512_cmpeq_epi32_mask(field, _mm512_set1_epi32(255));
    const __mmask16 zero = _mm512_cmplt_epi32_mask(field, _mm512_set1_epi32(27));
    // A scale below 2^-100 counts as zero. Its token keeps its place in the sum of weights:
    // exponent -100, mantissa 0.
    __m512i exponent =
        _mm512_max_epi32(_mm512_sub_epi32(field, _mm512_set1_epi32(127)), _mm512_set1_epi32(-100));
    __m512 e = _mm512_cvtepi32_ps(exponent);
    e = _mm512_mask_mov_ps(e, infinite, _mm512_set1_ps(NAN));
    _mm512_store_ps(scales.exponent + n, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), there, e));
    const __m512i mantissa = _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff)),
                                             _mm512_set1_epi32(127 << 23));
    const __m512 weight =
        _mm512_mul_ps(_mm512_castsi512_ps(mantissa), _mm512_set1_ps(kWeightLevels));
    _mm512_store_ps(scales.weight + n, _mm512_maskz_mov_ps(there & ~zero, weight));
    exponent = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127), exponent), 23);
    // Finite even where the row is not: 0 * infinity would reach rows that do not see the token.
    _mm512_store_ps(scales.inverse_exponent + n,
                    _mm512_maskz_mov_ps(there & ~infinite, _mm512_castsi512_ps(exponent)));
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

constexpr AttentionKernel kKernel = {kWideColumns, kNarrowColumns, ScratchBytes, Supports, Attend};

}  // namespace
}  // namespace kv_amx

const AttentionKernel& AmxAttentionKernel() { return kv_amx::kKernel; }

}  // namespace pliant

#endif  // x86_64
