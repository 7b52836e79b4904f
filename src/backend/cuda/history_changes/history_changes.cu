// A thread block a unit, and a kept block of a unit for refilling. All of this is once in 32 tokens
// of a sequence. Bound: taking note reads a block's keys at 8 bits and compares 32 new signs with
// those of what takes part; a drop reads the scores of what takes part 32 times from L1.
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/head_dims.cuh"
#include "backend/cuda/history/rows.cuh"
#include "backend/cuda/history_changes/history_changes.h"
#include "backend/cuda/history_changes/noted_keys.cuh"

namespace pliant::cuda {
namespace {

constexpr int kThreads = kNoteThreads, kWarps = kThreads / 32;
constexpr std::uint32_t kAll = 0xffffffffu;

__global__ void ClearKernel(const __grid_constant__ HistoryTables t, int units) {
  const std::int64_t tokens = std::int64_t{units} * t.token_room;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < tokens;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    t.token_score[i] = 0;
    t.token_weight[i] = 1;
    if (t.returns && i % kBlockTokens == 0) t.kept[i / kBlockTokens] = 0;
    if (t.returns && i % 16 == 0) t.lost[i / 16] = 0;
    if (i < t.token_room && i % kBlockTokens == 0) t.places[i / kBlockTokens] = {};
  }
}

// ---- keys

template <int D>
struct NoteShared : KeyRows<D> {
  std::uint64_t signs[kBlockTokens][(D + 63) / 64];
  double mean[D];
};

/// Lowers weights of what takes part by the keys of `block`, whose signs are in s.signs.
template <int D>
__device__ void Compare(const HistoryNoteArgs& a, std::int32_t block, const NoteShared<D>& s) {
  constexpr int kWords = (D + 63) / 64;
  const HistoryTables& t = a.tables;
  const std::size_t unit = blockIdx.x;
  const std::int32_t first = block * kBlockTokens, slots = a.kept_blocks * kBlockTokens;
  const std::int32_t whole = a.frontier * kBlockTokens;
  const std::int32_t count = slots + first + kBlockTokens - whole;
  for (std::int32_t i = threadIdx.x; i < count; i += kThreads) {
    const std::size_t slot = unit * t.slot_room + i;
    const std::int32_t token = i < slots ? t.slot_token[slot] : whole + i - slots;
    const std::uint64_t* const own = t.signs + (unit * t.token_room + token) * kWords;
    int nearest = D;
    for (int later = max(0, token + 1 - first); later < kBlockTokens; ++later) {
      int differ = 0;
#pragma unroll
      for (int word = 0; word < kWords; ++word)
        differ += __popcll(own[word] ^ s.signs[later][word]);
      nearest = min(nearest, differ);
    }
    float* const weight =
        i < slots ? t.slot_weight + slot : t.token_weight + unit * t.token_room + token;
    *weight = fminf(*weight, t.weight_at[nearest]);
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads) NoteKernel(const __grid_constant__ HistoryNoteArgs a) {
  constexpr int kWords = (D + 63) / 64;
  __shared__ NoteShared<D> s;
  const HistoryTables& t = a.tables;
  const std::size_t unit = blockIdx.x;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const double* const key_sum = t.key_sum + unit * D;
  SumKeys<D>(a, s);
  const double share = t.keys_summed > 0 ? 1.0 / t.keys_summed : 0.0;
  for (int c = threadIdx.x; c < D; c += kThreads) s.mean[c] = key_sum[c] * share;
  for (std::int32_t block = a.first_block; block < a.blocks; ++block) {
    DecodeKeys<D>(a, block, s);
    for (int token = warp; token < kBlockTokens; token += kWarps) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        std::uint64_t signs = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int c = 64 * word + 32 * half + lane;
          const bool above = c < D && s.keys[token][min(c, D - 1)] > s.mean[min(c, D - 1)];
          signs |= std::uint64_t{__ballot_sync(kAll, above)} << (32 * half);
        }
        if (lane != 0) continue;
        s.signs[token][word] = signs;
        t.signs[(unit * t.token_room + block * kBlockTokens + token) * kWords + word] = signs;
      }
    }
    __syncthreads();
    Compare<D>(a, block, s);
  }
}

// ---- dropping

/// Up to so many kept blocks, and the one that is dropped, are sorted one by one.
constexpr int kSortedBlocks = 40;

struct DropShared {
  UseKey sorted[kSortedBlocks + 1][kBlockTokens];
  UseKey least[kWarps];
  UseKey gone[kBlockTokens];             // in the order of use
  std::int32_t gone_slot[kBlockTokens];  // or -1: of the block
  Move moves[kBlockTokens];
  int count;
};

/// The 32 tokens of least use among kept ones and the block's.
__device__ void ChooseGone(const HistoryMoveArgs& a, DropShared& s) {
  const HistoryTables& t = a.tables;
  const std::size_t slots = static_cast<std::size_t>(blockIdx.x) * t.slot_room;
  const std::size_t tokens = static_cast<std::size_t>(blockIdx.x) * t.token_room;
  const int kept = a.kept_blocks * kBlockTokens;
  const auto key_of = [&](int i) {
    const std::int32_t token =
        i < kept ? t.slot_token[slots + i] : a.frontier * kBlockTokens + i - kept;
    const std::size_t at = tokens + t.At(token);
    const float use = i < kept ? UseOf(t.slot_score[slots + i], t.slot_weight[slots + i])
                               : UseOf(t.token_score[at], t.token_weight[at]);
    return KeyOf(token < t.sink_tokens ? INFINITY : use, token);
  };
  if (a.kept_blocks <= kSortedBlocks) {
    constexpr int kEach = (kSortedBlocks + kWarps) / kWarps;  // of a warp
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    UseKey keys[kEach];
    int at[kEach];
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int block = warp + n * kWarps;
      if (block > a.kept_blocks) break;
      at[n] = block * kBlockTokens + lane;
      keys[n] = key_of(at[n]);
      SortWarp(keys[n], at[n]);
      s.sorted[block][lane] = keys[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int block = warp + n * kWarps;
      if (block > a.kept_blocks) break;
      int rank = lane;
      for (int other = 0; other <= a.kept_blocks && rank < kBlockTokens; ++other)
        rank += other == block ? 0 : CountLess(s.sorted[other], keys[n]);
      if (rank >= kBlockTokens) continue;
      s.gone[rank] = keys[n];
      s.gone_slot[rank] = at[n] < kept ? at[n] : -1;
    }
    __syncthreads();
    return;
  }
  UseKey last = 0;
  for (int n = 0; n < kBlockTokens; ++n) {
    UseKey least = kNoKey;
    int at = 0;
    for (int i = threadIdx.x; i < kept + kBlockTokens; i += kThreads) {
      const UseKey key = key_of(i);
      if ((n == 0 || key > last) && key < least) least = key, at = i;
    }
    last = LeastOf(least, s.least);
    if (least != last) continue;  // one thread has it
    s.gone[n] = last;
    s.gone_slot[n] = at < kept ? at : -1;
  }
  __syncthreads();
}

/// Slots that come free take the block's tokens that stay, both in the order of use. One warp.
__device__ void PairUp(const HistoryMoveArgs& a, DropShared& s) {
  const HistoryTables& t = a.tables;
  const int lane = threadIdx.x;
  const std::int32_t token = a.frontier * kBlockTokens + lane;
  const std::size_t at = static_cast<std::size_t>(blockIdx.x) * t.token_room + t.At(token);
  const float use = token < t.sink_tokens ? INFINITY : UseOf(t.token_score[at], t.token_weight[at]);
  const UseKey key = KeyOf(use, token);
  bool stays = true;
  for (int n = 0; n < kBlockTokens; ++n) stays = stays && s.gone[n] != key;
  int rank = 0;
  for (int other = 0; other < 32; ++other) {
    const UseKey its = __shfl_sync(kAll, stays ? key : kNoKey, other);
    rank += its < key;
  }
  const std::uint32_t free = __ballot_sync(kAll, s.gone_slot[lane] >= 0);
  // The rank-th slot that comes free.
  int place = 0;
  for (int before = rank; place < 32; ++place) {
    if ((free >> place & 1) != 0 && before-- == 0) break;
  }
  if (stays && place < 32) s.moves[rank] = {token, s.gone_slot[place]};
  if (lane == 0) s.count = __popc(free);
}

/// What leaves a slot keeps what was known of it. Without returns nobody asks.
__device__ void Remember(const HistoryTables& t, DropShared& s) {
  const int n = threadIdx.x;
  if (!t.returns || n >= kBlockTokens || s.gone_slot[n] < 0) return;
  const std::size_t slot = static_cast<std::size_t>(blockIdx.x) * t.slot_room + s.gone_slot[n];
  const std::size_t tokens = static_cast<std::size_t>(blockIdx.x) * t.token_room;
  const std::int32_t token = TokenOf(s.gone[n]);
  t.token_score[tokens + token] = t.slot_score[slot];
  t.token_weight[tokens + token] = t.slot_weight[slot];
  atomicAnd(t.kept + (tokens + token) / kBlockTokens, ~(1u << (token % kBlockTokens)));
}

/// Slots get what is known of their new tokens; without returns the block's entries become those of
/// tokens to come.
template <int D>
__device__ void MoveTables(const HistoryMoveArgs& a, const DropShared& s) {
  const HistoryTables& t = a.tables;
  const std::size_t slots = static_cast<std::size_t>(blockIdx.x) * t.slot_room;
  const std::size_t tokens = static_cast<std::size_t>(blockIdx.x) * t.token_room;
  if (threadIdx.x < s.count) {
    const Move move = s.moves[threadIdx.x];
    const std::size_t to = slots + move.slot, from = tokens + t.At(move.token);
    t.slot_token[to] = move.token;
    t.slot_score[to] = t.token_score[from];
    t.slot_weight[to] = t.token_weight[from];
    if (t.returns)
      atomicOr(t.kept + from / kBlockTokens, 1u << (move.token % kBlockTokens));
    else
      t.slot_norm[to] = t.token_norm[from];
  }
  if (t.returns) return;
  constexpr int kWords = D / 16;
  for (int i = threadIdx.x; i < s.count * kWords; i += kThreads) {
    const Move move = s.moves[i / kWords];
    const auto* const from =
        reinterpret_cast<const uint4*>(t.token_codes + (tokens + t.At(move.token)) * D);
    auto* const to = reinterpret_cast<uint4*>(t.slot_codes + (slots + move.slot) * D);
    to[i % kWords] = from[i % kWords];
  }
  __syncthreads();
  if (threadIdx.x >= kBlockTokens) return;
  const std::size_t at = tokens + t.At(a.frontier * kBlockTokens + threadIdx.x);
  t.token_score[at] = 0;
  t.token_weight[at] = 1;
}

template <int D>
__global__ void __launch_bounds__(kThreads) DropKernel(const __grid_constant__ HistoryMoveArgs a) {
  __shared__ DropShared s;
  if (a.into_new) {
    if (threadIdx.x < kBlockTokens) {
      const int lane = threadIdx.x;
      s.moves[lane] = {a.frontier * kBlockTokens + lane, a.kept_blocks * kBlockTokens + lane};
      if (lane == 0) s.count = kBlockTokens;
    }
    __syncthreads();
  } else {
    ChooseGone(a, s);
    if (threadIdx.x < 32) PairUp(a, s);
    __syncthreads();
    Remember(a.tables, s);
    __syncthreads();
  }
  MoveTables<D>(a, s);
  CopyRows<D>(s.moves, s.count, a.tables, a.kept, a.pages, a.page_bytes,
              static_cast<std::size_t>(blockIdx.x) * UnitStride(D));
}

template <int D>
__global__ void __launch_bounds__(kThreads)
    RefillKernel(const __grid_constant__ HistoryMoveArgs a) {
  __shared__ Move moves[kBlockTokens];
  if (threadIdx.x < kBlockTokens) {
    const int slot = static_cast<int>(blockIdx.y) * kBlockTokens + static_cast<int>(threadIdx.x);
    const std::size_t first = static_cast<std::size_t>(blockIdx.x) * a.tables.slot_room;
    moves[threadIdx.x] = {a.tables.slot_token[first + slot], slot};
  }
  __syncthreads();
  CopyRows<D>(moves, kBlockTokens, a.tables, a.kept, a.pages, a.page_bytes,
              static_cast<std::size_t>(blockIdx.x) * UnitStride(D));
}

}  // namespace

void LaunchHistoryClear(const HistoryTables& tables, int units, cudaStream_t stream) {
  ClearKernel<<<256, 256, 0, stream>>>(tables, units);
  PLIANT_CUDA_CHECK_LAUNCH();
}

void LaunchHistoryNote(const HistoryNoteArgs& args, cudaStream_t stream) {
  if (!args.tables.returns) return LaunchHistoryNoteExactly(args, stream);
  ForHeadDim(args.head_dim,
             [&]<int D>() { NoteKernel<D><<<args.units, kThreads, 0, stream>>>(args); });
  PLIANT_CUDA_CHECK_LAUNCH();
}

void LaunchHistoryDrop(const HistoryMoveArgs& args, cudaStream_t stream) {
  ForHeadDim(args.head_dim,
             [&]<int D>() { DropKernel<D><<<args.units, kThreads, 0, stream>>>(args); });
  PLIANT_CUDA_CHECK_LAUNCH();
}

void LaunchHistoryRefill(const HistoryMoveArgs& args, cudaStream_t stream) {
  if (args.kept_blocks == 0) return;
  ForHeadDim(args.head_dim, [&]<int D>() {
    RefillKernel<D><<<dim3(args.units, args.kept_blocks), kThreads, 0, stream>>>(args);
  });
  PLIANT_CUDA_CHECK_LAUNCH();
}

}  // namespace pliant::cuda
