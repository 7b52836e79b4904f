// Room: backend. Attention over planes: what the kernels of all levels share. Pure functions over
// pages and a scratch of the caller's; any thread.
//
// A row's context is cut at fixed places (kSplitTokens, counted from position 0) into splits.
// `attend` computes the softmax of a tile of query rows over one split, by online softmax over
// smaller steps at fixed places too; splits are then merged in order of position by their maxima
// and sums (log-sum-exp). So the result of a row depends on its query, its context and the kernel
// level only: bit for bit not on the batch around it, the chunk of the prompt it came in, or the
// number of threads.
//
// Accuracy, per level:
// - plain, avx2, avx512: K and V are decoded to f32 (exact to one rounding) and all sums are f32.
// - amx: K, V and their digits are integers and stay integers (TDPB*D, exact 32-bit sums). Rounded
// are
//   the query, to 16 bits of its row's absmax; the weights p * scale(V), to 16 bits of the largest
//   in a step of 128 tokens; the product of the two low bytes, to its mean over K's (V's) byte; the
//   sums to f32 (relative 6e-8) and exp2 (1.5e-7). Each of the first three is of the order of the
//   code's own rounding. Against an fp16 cache with exact arithmetic, the error of this cache with
//   this kernel is 0.15 to 0.5 (root mean square; with the f32 kernels 0.10 to 0.13), measured by
//   ErrorIsBelowThatOfAnFp16Cache in tests/backend/cpu_kv_test.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "backend/cpu/cpu_level.h"
#include "backend/cpu/kv_write.h"
#include "backend/plane_code.h"

namespace pliant {

inline constexpr int kSplitTokens = 1024;
inline constexpr int kSplitBlocks = kSplitTokens / kBlockTokens;
inline constexpr int kMaxKvHeadDim = 256;

/// One KV head of one sequence in one layer.
struct AttentionHead {
  const std::byte* pages = nullptr;
  std::size_t page_bytes = 0;
  std::size_t rows_offset = 0;    // of (layer, head) inside a page
  std::size_t scales_offset = 0;  // the same
  int head_dim = 0;
  const BlockView* blocks = nullptr;  // of the sequence

  const std::uint8_t* Rows(PageId page) const {
    return reinterpret_cast<const std::uint8_t*>(pages + page.value() * page_bytes + rows_offset);
  }
  const std::uint16_t* Scales(PageId page) const {
    return reinterpret_cast<const std::uint16_t*>(pages + page.value() * page_bytes +
                                                  scales_offset);
  }
};

/// `rows` neighbouring rows of a sequence with the `group` query heads that share a KV head. Its
/// columns are (row, head of the group), row first; the column (r, g) sees positions 0 ..
/// first_position + r.
struct QueryTile {
  const float* query = nullptr;  // row 0, first head of the group; heads lie head_dim apart
  std::int64_t query_stride = 0;
  float* out = nullptr;
  std::int64_t out_stride = 0;
  int rows = 0;
  int group = 0;
  int first_position = 0;
  float softmax_scale = 0;
  ChannelRow value_code;  // V's, undone by PartialKernel::finish
  /// What each of the split's tokens counted, [columns][kSplitTokens], or null. As
  /// AttentionKernel::exports_weights says: weights exp2(logit - base), with bases
  /// [columns][kSplitBlocks], or logits (in units of log2). 0, or minus infinity, for tokens behind
  /// `end` in the last block. Only for one row, and up to narrow_columns columns.
  float* weights = nullptr;
  float* bases = nullptr;
  /// What is wanted soon after: WatchKernel asks for it, a piece with each block, so that nobody
  /// waits.
  const float* soon = nullptr;
  int soon_count = 0;

  int Columns() const { return rows * group; }
  int LastPosition() const { return first_position + rows - 1; }
};

/// Partial results of one column: [0, head_dim) the weighted sum of V as stored, then the maximum
/// logit (in units of log2, so that a weight is exp2(logit - maximum)), then the sum of weights.
/// Padded to 64 bytes.
constexpr std::size_t PartialFloats(int head_dim) {
  return static_cast<std::size_t>(head_dim) + 16;
}

struct AttentionKernel {
  /// The most columns of one tile.
  int max_columns;
  /// Sequences of up to this many columns are worth spreading over threads one split at a time.
  int narrow_columns;
  /// What the sum of weights of a partial result counts in: a token's share is exp2(logit -
  /// maximum) * total_unit / sum.
  float total_unit;
  /// What QueryTile::weights is filled with.
  bool exports_weights;
  /// Bytes that `attend` needs, aligned to 64.
  std::size_t (*scratch_bytes)(int head_dim);
  bool (*supports)(int head_dim);
  /// Softmax over positions [first, end) of the sequence, within one split, into
  /// partials[column][PartialFloats].
  void (*attend)(const AttentionHead& head, const QueryTile& tile, int first, int end,
                 float* partials, std::byte* scratch);
};

/// The kernel for a level and head dim; AMX falls to f32 with AVX-512 for head dims it has no code
/// for.
const AttentionKernel& ChooseAttentionKernel(CpuLevel level, int head_dim);

/// In f32 with vectors of the level's width. Never called above MachineLevel().
const AttentionKernel& F32AttentionKernel(CpuLevel level);
/// AMX int8 tiles; head dims 64, 128 and 256.
const AttentionKernel& AmxAttentionKernel();

struct PartialKernel {
  /// Merges the later partial result `part` into `total`, for each of `columns`.
  void (*merge)(int head_dim, int columns, const float* part, float* total);
  /// Divides by the sum of weights, undoes V's code and writes the tile's rows of `out`.
  void (*finish)(int head_dim, const QueryTile& tile, const float* total);
};
const PartialKernel& ChoosePartialKernel(CpuLevel level);

}  // namespace pliant
