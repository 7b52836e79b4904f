// Room: backend/cuda. History attention: masses of dropped pages by plane 0 of their keys
// (watched_keys.h), and what returns before the head attends. Device code only.
#pragma once

#include "backend/cuda/history_attention/logits.cuh"
#include "backend/cuda/history_attention/work.cuh"
#include "backend/cuda/plane_operands.cuh"

namespace pliant::cuda {

/// Plane 0 of the keys of a dropped block: rows g + 8 r are the lane's.
template <int D>
struct WatchedBlock {
  std::uint32_t rows[4][D / 32];
  uint2 scales;
  bool there;

  /// `first`: where dropped blocks begin in the order of units.
  __device__ __forceinline__ void Load(const HistoryWork<D>& w, int block, int first) {
    const std::uint32_t id =
        w.a.blocks[static_cast<std::size_t>(w.r.first_block + block) * 2 * kPlanes];
    there = id != kAbsentPage;
    const std::uint8_t* plane = w.Staged(first + block);
    if (plane == nullptr) plane = w.pages.At(there ? id : 0);
    scales = *reinterpret_cast<const uint2*>(plane + ScaleByte(D, w.g));
#pragma unroll
    for (int r = 0; r < 4; ++r) ReadKRow<D>(plane, 8 * r + w.g, w.t, rows[r]);
  }

  /// What the dropped tokens of its two pages weigh for each head, relative to s.reference: exact
  /// integers times scales (WatchProduct). Into w.masses; a lane returns one of them, of page (g /
  /// 2) % 2 and head 2 t + g % 2.
  __device__ __forceinline__ float Weigh(const HistoryWork<D>& w, int block) const {
    static_assert(2 * kReturnTokens == kBlockTokens && kMostGroup == 8);
    constexpr std::uint32_t kLow = 0x0f0f0f0fu;
    int sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < D / 32; ++step) {
      const uint2 q = w.s.watching[step][w.lane];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        MmaU8S8(sums[m], rows[2 * m][step] & kLow, rows[2 * m + 1][step] & kLow,
                rows[2 * m][step] >> 4 & kLow, rows[2 * m + 1][step] >> 4 & kLow, q.x, q.y);
      }
    }
    const std::uint32_t gone = there ? ~w.Kept(block) >> w.g : 0u;
    const int2 offset = reinterpret_cast<const int2*>(w.s.watch_offset)[w.t];
    const float2 step = reinterpret_cast<const float2*>(w.s.watch_step)[w.t];
    const float2 reference = reinterpret_cast<const float2*>(w.s.reference)[w.t];
    float mass[2][2] = {};  // [page][head]
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::uint32_t two = r < 2 ? scales.x : scales.y;
      const float scale = r % 2 == 0 ? Bf16Low(two) : Bf16High(two);
      const float finite = scale + (scale - scale);  // NaN for infinite ones
      const int at = 2 * (r % 2);
      const float x = static_cast<float>(2 * sums[r / 2][at] - offset.x) * (finite * step.x);
      const float y = static_cast<float>(2 * sums[r / 2][at + 1] - offset.y) * (finite * step.y);
      if (gone >> (8 * r) & 1) {
        mass[r / 2][0] += Exp2(x - reference.x);
        mass[r / 2][1] += Exp2(y - reference.y);
      }
    }
    // Sums over tokens; with each exchange a lane gives one half away.
    const bool second_head = (w.g & 1) != 0, second_page = (w.g & 2) != 0;
    float own[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      own[m] = second_head ? mass[m][1] : mass[m][0];
      own[m] += __shfl_xor_sync(kAllLanes, second_head ? mass[m][0] : mass[m][1], 4);
    }
    float sum = second_page ? own[1] : own[0];
    sum += __shfl_xor_sync(kAllLanes, second_page ? own[0] : own[1], 8);
    sum += __shfl_xor_sync(kAllLanes, sum, 16);
    const int h = 2 * w.t + (w.g & 1), page = 2 * block + (w.g >> 1 & 1);
    if (w.g < 4 && h < w.group) w.masses[static_cast<std::size_t>(page) * w.group + h] = sum;
    return sum;
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
  if (threadIdx.x < kMostGroup) {  // heads that are none get no mass
    const bool there = threadIdx.x < w.group;
    w.s.reference[threadIdx.x] = there ? w.s.top[threadIdx.x] : INFINITY;
    w.s.factor[threadIdx.x] = there ? w.s.inverse[threadIdx.x] : 0.f;
  }
  if (threadIdx.x == 0) w.s.wanted = 0;
  __syncthreads();
  const int first = w.StagedAt(w.part_blocks);
  const float factor = w.s.factor[2 * w.t + (w.g & 1)];
#pragma unroll 1
  for (int block = w.warp; block < w.r.frontier; block += kHistoryWarps) {
    WatchedBlock<D> watched;
    watched.Load(w, block, first);
    float most = watched.Weigh(w, block) * factor;
    if (!__any_sync(kAllLanes, most > w.r.tables.return_weight)) continue;
    most = fmaxf(most, 0.f);  // a NaN is left out
#pragma unroll
    for (int m = 1; m < 8; m *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, m));
    if ((w.lane & ~8) == 0) {  // one lane of each page
      if (const unsigned long long want = Want(w, 2 * block + w.lane / 8, most); want != 0)
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

/// Masses of the blocks that tokens left or came to.
template <int D>
__device__ void WatchAgain(HistoryWork<D>& w, int page, int count) {
  const auto changed = [&w, page, count](int i) {
    return i < count ? w.s.leaves[i] / kBlockTokens : page / 2;
  };
#pragma unroll 1
  for (int i = w.warp; i <= count; i += kHistoryWarps) {
    bool first = true;
#pragma unroll 1
    for (int before = 0; before < i; ++before) first = first && changed(before) != changed(i);
    if (!first) continue;  // the same for all lanes
    WatchedBlock<D> watched;
    watched.Load(w, changed(i), w.StagedAt(w.part_blocks));
    watched.Weigh(w, changed(i));
  }
}

/// RetainedHistory::Return.
template <int D>
__device__ void Return(HistoryWork<D>& w, int page) {
  const HistoryTables& t = w.r.tables;
  const int count = ExchangeTokens(w, page);
  w.Await(kStageV);
  CopyRows<D>(
      w.s.moves, count, t, w.IdsAt(0), w.a.pages, w.a.page_bytes, w.UnitAt(),
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
