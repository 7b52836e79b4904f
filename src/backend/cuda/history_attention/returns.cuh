// Room: backend/cuda. History attention: masses of dropped pages by plane 0 of their keys
// (watched_keys.h), and what returns before the head attends. Device code only.
#pragma once

#include "backend/cuda/history_attention/logits.cuh"
#include "backend/cuda/history_attention/work.cuh"
#include "backend/cuda/plane_operands.cuh"

namespace pliant::cuda {

/// Plane 0 of the keys of a dropped page of 16 tokens: rows g and g + 8 are the lane's.
template <int D>
struct WatchedPage {
  std::uint32_t upper[D / 32], lower[D / 32];
  std::uint32_t scales;
  bool there;

  /// `first`: where dropped blocks begin in the order of units.
  __device__ __forceinline__ void Load(const HistoryWork<D>& w, int page, int first) {
    const std::uint32_t id =
        w.a.blocks[static_cast<std::size_t>(w.r.first_block + page / 2) * 2 * kPlanes];
    there = id != kAbsentPage;
    if (!there) return;
    const std::uint8_t* const copy = w.Staged(first + page / 2);
    const std::uint8_t* const plane = copy != nullptr ? copy : w.pages.At(id);
    const int row = page % 2 * kReturnTokens + w.g;
    scales = *reinterpret_cast<const std::uint32_t*>(plane + ScaleByte(D, row));
    ReadKRow<D>(plane, row, w.t, upper);
    ReadKRow<D>(plane, row + 8, w.t, lower);
  }

  /// What its dropped tokens weigh for each head, relative to s.reference: exact integers times
  /// scales (WatchProduct). Returns the largest of the masses as shares: times s.inverse; a NaN is
  /// left out.
  __device__ __forceinline__ float Weigh(const HistoryWork<D>& w, int page) const {
    static_assert(kReturnTokens == 16);
    constexpr std::uint32_t kLow = 0x0f0f0f0fu;
    int sums[4] = {};
    if (there) {
#pragma unroll
      for (int step = 0; step < D / 32; ++step) {
        const uint2 q = w.s.watching[step][w.lane];
        MmaU8S8(sums, upper[step] & kLow, lower[step] & kLow, upper[step] >> 4 & kLow,
                lower[step] >> 4 & kLow, q.x, q.y);
      }
    }
    const std::uint32_t gone = there ? ~(w.Kept(page / 2) >> (page % 2 * kReturnTokens)) : 0u;
    const float scale[2] = {Bf16Low(scales), Bf16High(scales)};
    float most = 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int h = 2 * w.t + c;
      float mass = 0;
      if (h < w.group) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float finite = scale[row] + (scale[row] - scale[row]);  // NaN for infinite ones
          const float product = static_cast<float>(2 * sums[2 * row + c] - w.s.watch_offset[h]);
          const float logit = product * (finite * w.s.watch_step[h]);
          if (gone >> (w.g + 8 * row) & 1) mass += Exp2(logit - w.s.reference[h]);
        }
      }
#pragma unroll
      for (int m = 4; m < 32; m *= 2) mass += __shfl_xor_sync(kAllLanes, mass, m);
      if (h >= w.group) continue;
      if (w.g == 0) w.masses[static_cast<std::size_t>(page) * w.group + h] = mass;
      most = fmaxf(most, mass * w.s.inverse[h]);
    }
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    return fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
  }
};

/// What a page is wanted for, as one number: (share, ~page); 0: it stays. `most`: the largest part
/// of what a head gives to the others that it would give to the page.
template <int D>
__device__ __forceinline__ unsigned long long Want(const HistoryWork<D>& w, int page, float most) {
  const HistoryTables& t = w.r.tables;
  if (!(most > t.return_weight)) return 0;  // shares are smaller still
  // What is past all numbers is all there is.
  const float share = most < INFINITY ? most / (1 + most) : 1.f;
  if (!(share > t.return_weight) ||
      t.lost[static_cast<std::size_t>(w.unit) * (t.token_room / kReturnTokens) + page] != 0)
    return 0;
  return static_cast<unsigned long long>(__float_as_uint(share)) << 32 |
         (static_cast<std::uint32_t>(page) ^ kAllLanes);
}

/// Masses of all dropped pages, and in s.wanted what is wanted most.
template <int D>
__device__ void Watch(HistoryWork<D>& w) {
  w.Await(kStageDropped);
  if (threadIdx.x < w.group) w.s.reference[threadIdx.x] = w.s.top[threadIdx.x];
  if (threadIdx.x == 0) w.s.wanted = 0;
  __syncthreads();
  const int pages = 2 * w.r.frontier, first = w.StagedAt(w.part_blocks);
#pragma unroll 1
  for (int page = w.warp; page < pages; page += kHistoryWarps) {
    WatchedPage<D> watched;
    watched.Load(w, page, first);
    const float most = watched.Weigh(w, page);
    if (w.lane == 0 && most > w.r.tables.return_weight) {
      if (const unsigned long long want = Want(w, page, most); want != 0)
        atomicMax(&w.s.wanted, want);
    }
  }
}

/// What is wanted most; `again`: told anew by the masses, after a return.
template <int D>
__device__ unsigned long long Wanted(HistoryWork<D>& w, bool again) {
  __syncthreads();
  if (!again) return w.s.wanted;
  if (threadIdx.x == 0) w.s.wanted = 0;
  if (threadIdx.x < w.group) {
    w.s.factor[threadIdx.x] =
        Exp2(w.s.reference[threadIdx.x] - w.s.top[threadIdx.x]) * w.s.inverse[threadIdx.x];
  }
  __syncthreads();
#pragma unroll 1
  for (int page = threadIdx.x; page < 2 * w.r.frontier; page += kHistoryThreads) {
    float most = 0;
#pragma unroll 1
    for (int h = 0; h < w.group; ++h)
      most = fmaxf(most, w.masses[static_cast<std::size_t>(page) * w.group + h] * w.s.factor[h]);
    if (const unsigned long long want = Want(w, page, most); want != 0)
      atomicMax(&w.s.wanted, want);
  }
  __syncthreads();
  return w.s.wanted;
}

/// The kReturnTokens slots of least use of those that a warp looks at, in its first lanes.
template <int D>
__device__ __forceinline__ void LeastOfWarp(const HistoryWork<D>& w, int page, UseKey& best,
                                            int& best_slot) {
  const HistoryTables& t = w.r.tables;
  const std::size_t first_slot = static_cast<std::size_t>(w.unit) * t.slot_room;
  const int slots = w.r.kept_blocks * kBlockTokens;
  best = kNoKey, best_slot = -1;
  // First 32, then 16 at a time beside the best so far.
#pragma unroll 1
  for (int start = 0; start < slots; start += start == 0 ? kHistoryThreads : kHistoryThreads / 2) {
    const int slot =
        start == 0 ? w.warp * 32 + w.lane : start + w.warp * kReturnTokens + w.lane - kReturnTokens;
    if (start == 0 || w.lane >= kReturnTokens) {
      best = kNoKey, best_slot = slot;
      if (slot < slots) {
        const std::int32_t token = t.slot_token[first_slot + slot];
        const float use = UseOf(t.slot_score[first_slot + slot], t.slot_weight[first_slot + slot]);
        if (token >= t.sink_tokens && token / kReturnTokens != page) best = KeyOf(use, token);
      }
    }
    SortWarp(best, best_slot);
  }
}

/// A kept token leaves, the `nth` that returns takes its slot.
template <int D>
__device__ __forceinline__ void Exchange(HistoryWork<D>& w, int nth, int in_slot, int leaves) {
  const int token = w.s.back[nth];
  const HistoryTables& t = w.r.tables;
  const std::size_t tokens = static_cast<std::size_t>(w.unit) * t.token_room;
  const std::size_t slot = static_cast<std::size_t>(w.unit) * t.slot_room + in_slot;
  t.token_score[tokens + leaves] = t.slot_score[slot];
  t.token_weight[tokens + leaves] = t.slot_weight[slot];
  w.SetKept(leaves, false);
  t.slot_token[slot] = token;
  t.slot_score[slot] = w.s.back_score[nth];
  t.slot_weight[slot] = w.s.back_weight[nth];
  w.SetKept(token, true);
}

/// The dropped tokens of `page` change places with the kept ones of least use, in order: s.moves
/// and s.leaves; how many.
template <int D>
__device__ int ExchangeTokens(HistoryWork<D>& w, int page) {
  static_assert(kReturnTokens <= 32);
  const HistoryTables& t = w.r.tables;
  if (w.warp == kHistoryWarps - 1) {  // the last warp has the fewest slots
    const std::uint32_t kept =
        w.Kept(page * kReturnTokens / kBlockTokens) >> (page * kReturnTokens % kBlockTokens);
    const bool gone = w.lane < kReturnTokens && (kept >> w.lane & 1) == 0;
    const std::uint32_t all = __ballot_sync(kAllLanes, gone);
    if (gone) {
      const int nth = __popc(all & ((1u << w.lane) - 1)), token = page * kReturnTokens + w.lane;
      const std::size_t at = static_cast<std::size_t>(w.unit) * t.token_room + token;
      w.s.back[nth] = token;
      w.s.back_score[nth] = t.token_score[at];
      w.s.back_weight[nth] = t.token_weight[at];
    }
    if (w.lane == 0) w.s.back_count = __popc(all), w.s.slots_found = 0;
  }
  UseKey best;
  int slot;
  LeastOfWarp(w, page, best, slot);
  if (w.lane < kReturnTokens) w.s.keys[w.warp][w.lane] = best;
  __syncthreads();
  int rank = w.lane;
#pragma unroll 4
  for (int other = 0; other < kHistoryWarps; ++other)
    rank += other == w.warp ? 0 : CountLess(w.s.keys[other], best);
  if (w.lane < kReturnTokens && rank < w.s.back_count && best != kNoKey) {
    const int leaves = TokenOf(best);
    w.s.moves[rank] = {w.s.back[rank], slot};
    w.s.leaves[rank] = leaves;
    atomicAdd(&w.s.slots_found, 1);
    Exchange(w, rank, slot, leaves);
  }
  __syncthreads();
  return w.s.slots_found;
}

/// Masses of the pages that tokens left or came to.
template <int D>
__device__ void WatchAgain(HistoryWork<D>& w, int page, int count) {
#pragma unroll 1
  for (int i = w.warp; i <= count; i += kHistoryWarps) {
    const int changed = i < count ? w.s.leaves[i] / kReturnTokens : page;
    bool first = true;
#pragma unroll 1
    for (int before = 0; before < min(i, count - 1); ++before)
      first = first && (i == count || w.s.leaves[before] / kReturnTokens != changed);
    if (!first) continue;  // the same for all lanes
    WatchedPage<D> watched;
    watched.Load(w, changed, w.StagedAt(w.part_blocks));
    watched.Weigh(w, changed);
  }
}

/// RetainedHistory::Return.
template <int D>
__device__ void Return(HistoryWork<D>& w, int page) {
  const HistoryTables& t = w.r.tables;
  const int count = ExchangeTokens(w, page);
  w.Await(kStageV);
  CopyRows<D>(
      w.s.moves, count, t, w.Ids(0), w.a.pages, w.a.page_bytes, w.UnitAt(),
      [&w](int block, int plane) {
        return w.Staged(w.StagedAt(block) + (plane < kPlanes ? plane : w.kept_k + plane - kPlanes));
      });
  if (threadIdx.x == 0) {
    atomicAdd(&w.a.counts[w.r.index].returned_pages, 1u);
    atomicAdd(&w.a.counts[w.r.index].returned_tokens, static_cast<std::uint32_t>(count));
  }
  WatchAgain(w, page, count);
  __syncthreads();
#pragma unroll 1
  for (int i = w.warp; i < count; i += kHistoryWarps) {
    const int slot = w.s.moves[i].slot;
    float logits[kMostGroup];
    KeyLogitsOfWarp<D>(w.Planes(slot / kBlockTokens, false), slot % kBlockTokens, w.s.queries,
                       w.group, w.a.softmax_scale * kLog2e, logits);
#pragma unroll
    for (int h = 0; h < kMostGroup; ++h) {
      if (h < w.group && w.lane == 0)
        w.logits[static_cast<std::size_t>(h) * w.a.most_tokens + slot] = logits[h];
    }
  }
}

/// The softmax of what takes part, once pages that a head would give much to have returned, one
/// after the other.
template <int D>
__device__ void BringBack(HistoryWork<D>& w) {
  const HistoryTables& t = w.r.tables;
#pragma unroll 1
  for (int returned = 0;; ++returned) {
    Softmax(w);
    if (!w.Watches() || returned == t.most_returns) return;
    if (returned == 0) Watch(w);
    int page = 0;
    bool found = false;
#pragma unroll 1
    for (bool again = returned > 0; !found; again = true) {
      const unsigned long long wanted = Wanted(w, again);
      if (wanted == 0) return;
      page = static_cast<int>(static_cast<std::uint32_t>(wanted) ^ kAllLanes);
      found = Readable(t.places[page * kReturnTokens / kBlockTokens], w.kept_k, w.kept_v);
      if (!found && threadIdx.x == 0) {
        t.lost[static_cast<std::size_t>(w.unit) * (t.token_room / kReturnTokens) + page] = 1;
        atomicAdd(&w.a.counts[w.r.index].lost_pages, 1u);
      }
    }
    Return(w, page);
  }
}

}  // namespace pliant::cuda
