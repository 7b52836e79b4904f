// Room: backend/cuda. What the phases of history attention share: one thread block works on one KV
// head of one history. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "backend/cuda/history/rows.cuh"
#include "backend/cuda/history_attention/history_attention.h"
#include "backend/cuda/ptx.cuh"
#include "backend/retained_history.h"

namespace pliant::cuda {

inline constexpr int kHistoryWarps = 16, kHistoryThreads = kHistoryWarps * 32;
inline constexpr int kChunkHeads = 4;  // that a warp works on at once
inline constexpr int kMostChunks = kMostGroup / kChunkHeads;
inline constexpr int kSharedIds = 64;      // blocks of which the page ids are at hand
inline constexpr int kSharedBlocks = 512;  // dropped ones of which the kept bits are
// In shared memory, of which there are 99 KiB at least; more lie in device memory.
inline constexpr int kMostLogitBytes = 40 << 10;
inline constexpr int kSumFloats = 8192;  // of the outputs of warps side by side
/// Units that are asked for together: of K, of V, of dropped blocks.
enum Stage { kStageK, kStageV, kStageDropped, kStages };
inline constexpr std::uint32_t kAllLanes = 0xffffffffu;
inline constexpr float kLog2e = 1.44269504088896340736f;

/// Of one thread block: logits of what takes part and masses of dropped pages.
__host__ __device__ inline std::int64_t LogitBytes(const HistoryAttentionArgs& a) {
  return std::int64_t{a.heads / a.kv_heads} * (a.most_tokens + a.most_dropped / kReturnTokens) * 4;
}

template <int D>
struct HistoryShared {
  uint4 digits[kMostChunks][D / 32][32];  // queries as operands: digits 2 and 1, even and odd dims;
                                          // digit 0
  uint2 watching[D / 32][32];             // queries in 8 bits as operands, even and odd dims
  alignas(16) float queries[kMostGroup * D];
  unsigned long long wanted;
  UseKey keys[kHistoryWarps][kReturnTokens];  // of each warp's slots those of least use, in order
  int query_sum[kMostGroup];                  // in units of query_unit
  float query_unit[kMostGroup];               // what one unit of a score is worth, log2
  alignas(8) int watch_offset[kMostGroup];    // 15 * the sum of codes
  alignas(8) float watch_step[kMostGroup];    // in units of log2 logits
  float part_top[kHistoryWarps], part_sum[kHistoryWarps];
  float top[kMostGroup], inverse[kMostGroup];
  alignas(8) float reference[kMostGroup];  // what masses of pages are relative to
  float factor[kMostGroup];                // of a mass to a share
  alignas(16) std::uint32_t ids[kSharedIds][2 * kPlanes];
  std::uint32_t kept[kSharedBlocks];  // a copy of the tables' for dropped blocks, as far as it goes
  std::int32_t back[kReturnTokens], leaves[kReturnTokens];
  float back_score[kReturnTokens], back_weight[kReturnTokens];
  Move moves[kReturnTokens];
  int back_count, slots_found;
  unsigned long long arrived[kStages];  // barriers of units on their way to shared memory
  HistoryRow history;
};

/// What one thread block works on. Lane (g, t) as in plane_operands.cuh.
template <int D>
struct HistoryWork {
  const HistoryAttentionArgs& a;
  const HistoryRow& r;
  HistoryShared<D>& s;
  int kv_head, group, chunks, unit, warp, lane, g, t;
  int part_blocks;  // that take part
  float* logits;    // [group][most_tokens], log2
  float* masses;    // [most_dropped / 16][group]: sums of 2^(logit - reference) of dropped pages
  float* outputs;   // [OutputSlots()][group][D] of warps
  UnitPages pages;
  std::uint8_t* staged;  // [staged_units][unit]: copies of the first units in an order of all
  int kept_k, kept_v;    // planes of the kept blocks

  __device__ std::size_t UnitAt() const { return static_cast<std::size_t>(unit) * UnitStride(D); }
  /// Page ids of block i of what takes part.
  __device__ const std::uint32_t* Ids(int i) const { return i < kSharedIds ? s.ids[i] : IdsAt(i); }
  __device__ const std::uint32_t* IdsAt(int i) const {
    const int at =
        i < r.kept_blocks ? r.first_kept + i : r.first_block + r.frontier + (i - r.kept_blocks);
    return a.blocks + static_cast<std::size_t>(at) * 2 * kPlanes;
  }
  /// Where in the order of units those of block i of what takes part begin: K's planes, then V's;
  /// and V's among them.
  __device__ int StagedAt(int i) const {
    return i < r.kept_blocks
               ? i * (kept_k + kept_v)
               : r.kept_blocks * (kept_k + kept_v) + (i - r.kept_blocks) * 2 * kPlanes;
  }
  __device__ int StagedV(int i) const { return i < r.kept_blocks ? kept_k : kPlanes; }
  /// A unit of that order in shared memory, if it is there.
  __device__ std::uint8_t* Staged(int at) const {
    return at < a.staged_units ? staged + at * UnitStride(D) : nullptr;
  }
  /// K's planes of block i of what takes part (V's with `is_v`), once they have arrived.
  __device__ UnitPlanes Planes(int i, bool is_v) const {
    UnitPlanes planes(pages, Ids(i) + (is_v ? kPlanes : 0));
    const int at = StagedAt(i) + (is_v ? StagedV(i) : 0);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      if (planes.plane[p] != nullptr && at + p < a.staged_units) planes.plane[p] = Staged(at + p);
    }
    return planes;
  }
  /// All that was asked for together is there.
  __device__ void Await(Stage stage) const { BarrierWait(SharedAddress(&s.arrived[stage]), 0); }
  /// The token that row `token` of block i holds, if it is a whole block.
  __device__ int WholeToken(int i, int token) const {
    return (r.frontier + i - r.kept_blocks) * kBlockTokens + token;
  }
  /// The last row of block i that takes part.
  __device__ int LastRow(int i) const {
    return i < r.kept_blocks ? kBlockTokens - 1 : r.context - WholeToken(i, 0);
  }
  /// Which tokens of a dropped block are kept.
  __device__ std::uint32_t Kept(int block) const {
    return block < kSharedBlocks ? s.kept[block] : *KeptAt(block);
  }
  __device__ std::uint32_t* KeptAt(int block) const {
    return r.tables.kept + static_cast<std::size_t>(unit) * (r.tables.token_room / kBlockTokens) +
           block;
  }
  __device__ void SetKept(int token, bool kept) const {
    const int block = token / kBlockTokens;
    const std::uint32_t bit = 1u << (token % kBlockTokens);
    std::uint32_t* const at[2] = {KeptAt(block), &s.kept[block]};
    for (int i = 0; i < (block < kSharedBlocks ? 2 : 1); ++i) {
      if (kept)
        atomicOr(at[i], bit);
      else
        atomicAnd(at[i], ~bit);
    }
  }
  __device__ bool Watches() const {
    return r.tables.returns && r.tables.most_returns > 0 && r.frontier > 0 && r.kept_blocks > 0;
  }
  /// Warps whose outputs have room side by side.
  __device__ int OutputSlots() const { return min(kHistoryWarps, kSumFloats / (group * D)); }
};

}  // namespace pliant::cuda
