// One thread block a (history, KV head), in phases: logits of what takes part; watched logits of
// what was dropped; returns; the weighted sum; scores. Blocks of 32 tokens go to warps, a token to
// a lane. Bound: the bytes of the planes that are read, once; a multiprocessor alone reaches a few
// dozen GB/s, so that it takes many sequences or KV heads to fill the device. With few it is the
// latencies one behind the other that count: logits stay in shared memory where they fit, all of a
// row is asked for at once, and slots of least use come out of sorted warps.
#include "backend/cuda/channel_code.cuh"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/head_dims.cuh"
#include "backend/cuda/history/rows.cuh"
#include "backend/cuda/history_attention/history_attention.h"
#include "backend/cuda/overlap.cuh"
#include "backend/cuda/ptx.cuh"
#include "backend/retained_history.h"
#include "base/check.h"

namespace pliant::cuda {
namespace {

constexpr int kWarps = 16, kThreads = kWarps * 32;
/// Shared memory for logits; what does not fit lies in device memory.
constexpr int kMostLogitBytes = 48 << 10;
constexpr int kSharedBlocks = 512;  // of which the kept bits are at hand
constexpr std::uint32_t kAll = 0xffffffffu;
constexpr float kLog2e = 1.44269504088896340736f;

/// Of one thread block.
__host__ __device__ std::int64_t LogitBytes(const HistoryAttentionArgs& a) {
  return std::int64_t{a.heads / a.kv_heads} * (a.most_tokens + a.most_dropped) * 4;
}

template <int D>
struct Shared {
  float queries[kMostGroup * D];
  float sums[kMostGroup * D];
  float shares[kWarps][kMostGroup][kBlockTokens];  // weights times V's row scales
  // Queries in 8 bits: of even and of odd elements, four a word.
  int even[kMostGroup][D / 8], odd[kMostGroup][D / 8];
  int offset[kMostGroup];  // 15 * the sum of codes
  float step[kMostGroup];  // in units of log2 logits
  float top[kMostGroup], inverse[kMostGroup];
  unsigned long long wanted;
  UseKey least[kWarps];
  // Of each warp's slots those of least use, in order.
  UseKey keys[kWarps][kReturnTokens];
  std::uint32_t kept[kSharedBlocks];  // a copy of the tables' for dropped blocks, as far as it goes
  std::int32_t back[kReturnTokens];
  Move moves[kReturnTokens];
  int back_count, slots_found;
  HistoryRow history;
};

/// What one thread block works on.
template <int D>
struct Work {
  const HistoryAttentionArgs& a;
  const HistoryRow& r;
  Shared<D>& s;
  int kv_head, group, unit, warp, lane;
  int part_blocks;  // that take part
  float* logits;    // [group][most_tokens]
  float* watched;   // [group][most_dropped]
  UnitPages pages;

  __device__ std::size_t UnitAt() const { return static_cast<std::size_t>(unit) * UnitStride(D); }
  /// Page ids of block i of what takes part.
  __device__ const std::uint32_t* Ids(int i) const {
    const int at =
        i < r.kept_blocks ? r.first_kept + i : r.first_block + r.frontier + (i - r.kept_blocks);
    return a.blocks + static_cast<std::size_t>(at) * 2 * kPlanes;
  }
  /// The token of lane `token` of block i, if it is a whole one.
  __device__ int WholeToken(int i, int token) const {
    return (r.frontier + i - r.kept_blocks) * kBlockTokens + token;
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
  __device__ bool TakesPart(int i, int token) const {
    return i < r.kept_blocks || WholeToken(i, token) <= r.context;
  }
};

/// Queries and their codes (CodeWatchingQuery).
template <int D>
__device__ void LoadQueries(Work<D>& w) {
  const float* const q =
      w.a.q + w.r.row * w.a.q_stride + static_cast<std::int64_t>(w.kv_head) * w.group * D;
  for (int i = threadIdx.x; i < w.group * D; i += kThreads) w.s.queries[i] = q[i];
  __syncthreads();
  for (int h = w.warp; h < w.group; h += kWarps) {
    const float* const row = w.s.queries + h * D;
    float most = 0;
    for (int c = w.lane; c < D; c += 32) most = fmaxf(most, fabsf(row[c]));
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) most = fmaxf(most, __shfl_xor_sync(kAll, most, m));
    const float inverse = most > 0 ? __fdiv_rn(127.f, most) : 0.f;
    int sum = 0;
    for (int word = w.lane; word < D / 8; word += 32) {
      int packed[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = rintf(__fmul_rn(row[8 * word + i], inverse));
        const int code = fabsf(x) <= 127 ? static_cast<int>(x) : 0;
        sum += code;
        packed[i % 2] |= (code & 255) << (8 * (i / 2));
      }
      w.s.even[h][word] = packed[0];
      w.s.odd[h][word] = packed[1];
    }
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(kAll, sum, m);
    if (w.lane == 0) {
      w.s.offset[h] = 15 * sum;
      w.s.step[h] = most * (1 / 127.f) * w.a.softmax_scale * (kLog2e / 16);
    }
  }
  __syncthreads();
}

/// Logits of one token of block i of what takes part.
template <int D>
__device__ __forceinline__ void TokenLogits(Work<D>& w, int i, int token) {
  const std::uint32_t* const ids = w.Ids(i);
  float logits[kMostGroup];
  const bool there = ids[0] != kAbsentPage && ids[kPlanes] != kAbsentPage && w.TakesPart(i, token);
  if (there) {
    KeyLogits<D>(UnitPlanes(w.pages, ids), token, w.s.queries, w.group, w.a.softmax_scale * kLog2e,
                 logits);
  }
#pragma unroll
  for (int h = 0; h < kMostGroup; ++h) {
    if (h >= w.group) break;
    w.logits[static_cast<std::size_t>(h) * w.a.most_tokens + i * kBlockTokens + token] =
        there ? logits[h] : -INFINITY;
  }
}

/// Largest logit and the inverse of the sum, a warp for each head.
template <int D>
__device__ void Softmax(Work<D>& w) {
  __syncthreads();
  const int tokens = w.part_blocks * kBlockTokens;
  for (int h = w.warp; h < w.group; h += kWarps) {
    const float* const logits = w.logits + static_cast<std::size_t>(h) * w.a.most_tokens;
    float top = -INFINITY;
    for (int t = w.lane; t < tokens; t += 32) top = fmaxf(top, logits[t]);
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(kAll, top, m));
    float sum = 0;
    for (int t = w.lane; t < tokens; t += 32) sum += exp2f(logits[t] - top);
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(kAll, sum, m);
    if (w.lane == 0) w.s.top[h] = top, w.s.inverse[h] = 1 / sum;
  }
  __syncthreads();
}

/// Plane 0 of the key of a lane's token.
template <int D>
struct WatchedRow {
  uint4 digits[D / 32];
  float scale;
  bool there;

  __device__ __forceinline__ void Load(const Work<D>& w, std::uint32_t page) {
    there = page != kAbsentPage;
    scale = 0;
    if (!there) return;
    const std::uint8_t* const plane = w.pages.At(page);
    const std::uint32_t bits =
        *reinterpret_cast<const std::uint16_t*>(plane + ScaleByte(D, w.lane));
    scale = __uint_as_float(bits << 16);
#pragma unroll
    for (int i = 0; i < D / 32; ++i)
      digits[i] = *reinterpret_cast<const uint4*>(plane + KByte(D, w.lane, 32 * i));
  }

  /// Its logits, exact integers times scales (WatchProduct).
  __device__ __forceinline__ void Logits(const Work<D>& w, int block) const {
    int sums[kMostGroup] = {};
#pragma unroll
    for (int word = 0; there && word < D / 8; ++word) {
      const std::uint32_t both = Word(digits[word / 4], word % 4);
      const int even = static_cast<int>(both & 0x0f0f0f0fu);
      const int odd = static_cast<int>(both >> 4 & 0x0f0f0f0fu);
#pragma unroll
      for (int h = 0; h < kMostGroup; ++h) {
        if (h >= w.group) break;
        sums[h] = __dp4a(even, w.s.even[h][word], sums[h]);
        sums[h] = __dp4a(odd, w.s.odd[h][word], sums[h]);
      }
    }
    const float finite = scale + (scale - scale);  // NaN for infinite scales: never wanted
#pragma unroll
    for (int h = 0; h < kMostGroup; ++h) {
      if (h >= w.group) break;
      const float product = static_cast<float>(2 * sums[h] - w.s.offset[h]);
      w.watched[static_cast<std::size_t>(h) * w.a.most_dropped + block * kBlockTokens + w.lane] =
          there ? product * (finite * w.s.step[h]) : -INFINITY;
    }
  }
};

/// Logits of dropped tokens; a warp asks for several blocks at once.
template <int D>
__device__ void Watch(Work<D>& w) {
  constexpr int kAhead = D <= 64 ? 4 : D <= 128 ? 2 : 1;
  for (int first = w.warp; first < w.r.frontier; first += kAhead * kWarps) {
    std::uint32_t pages[kAhead];
    WatchedRow<D> rows[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int block = first + i * kWarps;
      pages[i] = block < w.r.frontier
                     ? w.a.blocks[static_cast<std::size_t>(w.r.first_block + block) * 8]
                     : kAbsentPage;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) rows[i].Load(w, pages[i]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int block = first + i * kWarps;
      if (block < w.r.frontier) rows[i].Logits(w, block);
    }
  }
}

/// The page that a head would give most to, if that is above the threshold: (share, ~page), or 0.
template <int D>
__device__ unsigned long long Wanted(Work<D>& w) {
  const HistoryTables& t = w.r.tables;
  if (threadIdx.x == 0) w.s.wanted = 0;
  __syncthreads();
  unsigned long long own = 0;
  for (int b = w.warp; b < w.r.frontier; b += kWarps) {
    const std::size_t at = static_cast<std::size_t>(w.unit) * (t.token_room / kBlockTokens) + b;
    const bool kept = (w.Kept(b) >> w.lane & 1) != 0;
    float most = 0;
    for (int h = 0; h < w.group; ++h) {
      const float logit =
          w.watched[static_cast<std::size_t>(h) * w.a.most_dropped + b * kBlockTokens + w.lane];
      float mass = kept ? 0.f : exp2f(logit - w.s.top[h]);
#pragma unroll
      for (int m = 8; m > 0; m >>= 1) mass += __shfl_xor_sync(kAll, mass, m);
      most = fmaxf(most, mass * w.s.inverse[h]);  // a NaN is left out
    }
    // What is past all numbers is all there is.
    const float share = most < INFINITY ? most / (1 + most) : 1.f;
    const std::uint32_t page = static_cast<std::uint32_t>(2 * b + w.lane / kReturnTokens);
    if (share > t.return_weight && t.lost[2 * at + w.lane / kReturnTokens] == 0) {
      const unsigned long long mine =
          static_cast<unsigned long long>(__float_as_uint(share)) << 32 | (page ^ kAll);
      own = max(own, mine);
    }
  }
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) own = max(own, __shfl_xor_sync(kAll, own, m));
  if (w.lane == 0 && own != 0) atomicMax(&w.s.wanted, own);
  __syncthreads();
  return w.s.wanted;
}

/// The `wanted` slots of least use into s.moves, in order; how many there are.
template <int D>
__device__ int LeastUsedSlots(Work<D>& w, int page, int wanted) {
  const HistoryTables& t = w.r.tables;
  const std::size_t first_slot = static_cast<std::size_t>(w.unit) * t.slot_room;
  const int slots = w.r.kept_blocks * kBlockTokens;
  const auto key_of = [&](int slot) {
    const std::int32_t token = t.slot_token[first_slot + slot];
    if (token < t.sink_tokens || token / kReturnTokens == page) return kNoKey;
    return KeyOf(UseOf(t.slot_score[first_slot + slot], t.slot_weight[first_slot + slot]), token);
  };
  if (slots <= kThreads) {
    const int own = static_cast<int>(threadIdx.x);
    UseKey key = own < slots ? key_of(own) : kNoKey;
    int slot = own;
    SortWarp(key, slot);
    if (w.lane < kReturnTokens) w.s.keys[w.warp][w.lane] = key;
    if (threadIdx.x == 0) w.s.slots_found = 0;
    __syncthreads();
    int rank = w.lane;
    for (int other = 0; other < kWarps && rank < wanted; ++other)
      rank += other == w.warp ? 0 : CountLess(w.s.keys[other], key);
    if (rank < wanted && key != kNoKey) {
      w.s.moves[rank] = {w.s.back[rank], slot};
      atomicAdd(&w.s.slots_found, 1);
    }
    __syncthreads();
    return w.s.slots_found;
  }
  UseKey last = 0;
  int count = 0;
  for (; count < wanted; ++count) {
    UseKey least = kNoKey;
    int slot = -1;
    for (int i = threadIdx.x; i < slots; i += kThreads) {
      const UseKey key = key_of(i);
      if ((count == 0 || key > last) && key < least) least = key, slot = i;
    }
    last = LeastOf(least, w.s.least);
    if (last == kNoKey) break;
    if (least == last) w.s.moves[count] = {w.s.back[count], slot};  // one thread has it
  }
  __syncthreads();
  return count;
}

/// Fills s.moves with the tokens of `page` that are dropped and the slots of least use; how many.
template <int D>
__device__ int ChooseSlots(Work<D>& w, int page) {
  if (w.warp == 0) {
    const int block = page * kReturnTokens / kBlockTokens;
    const std::uint32_t kept = w.Kept(block) >> (page * kReturnTokens % kBlockTokens);
    const bool gone = w.lane < kReturnTokens && (kept >> w.lane & 1) == 0;
    const std::uint32_t all = __ballot_sync(kAll, gone);
    if (gone) w.s.back[__popc(all & ((1u << w.lane) - 1))] = page * kReturnTokens + w.lane;
    if (w.lane == 0) w.s.back_count = __popc(all);
  }
  __syncthreads();
  return LeastUsedSlots(w, page, w.s.back_count);
}

/// RetainedHistory::Return.
template <int D>
__device__ void Return(Work<D>& w, int page) {
  const HistoryTables& t = w.r.tables;
  const int count = ChooseSlots(w, page);
  if (threadIdx.x < count) {
    const Move move = w.s.moves[threadIdx.x];
    const std::size_t tokens = static_cast<std::size_t>(w.unit) * t.token_room;
    const std::size_t slot = static_cast<std::size_t>(w.unit) * t.slot_room + move.slot;
    const std::int32_t leaves = t.slot_token[slot];
    t.token_score[tokens + leaves] = t.slot_score[slot];
    t.token_weight[tokens + leaves] = t.slot_weight[slot];
    w.SetKept(leaves, false);
    t.slot_token[slot] = move.token;
    t.slot_score[slot] = t.token_score[tokens + move.token];
    t.slot_weight[slot] = t.token_weight[tokens + move.token];
    w.SetKept(move.token, true);
  }
  CopyRows<D>(w.s.moves, count, t, w.Ids(0), w.a.pages, w.a.page_bytes, w.UnitAt());
  if (threadIdx.x == 0) {
    atomicAdd(&w.a.counts[w.r.index].returned_pages, 1u);
    atomicAdd(&w.a.counts[w.r.index].returned_tokens, static_cast<std::uint32_t>(count));
  }
  __syncthreads();
  for (int i = w.warp; i < count; i += kWarps) {
    const int slot = w.s.moves[i].slot;
    float logits[kMostGroup];
    KeyLogitsOfWarp<D>(UnitPlanes(w.pages, w.Ids(slot / kBlockTokens)), slot % kBlockTokens,
                       w.s.queries, w.group, w.a.softmax_scale * kLog2e, logits);
#pragma unroll
    for (int h = 0; h < kMostGroup; ++h) {
      if (h < w.group && w.lane == 0)
        w.logits[static_cast<std::size_t>(h) * w.a.most_tokens + slot] = logits[h];
    }
  }
}

template <int D>
__device__ void BringBack(Work<D>& w) {
  const HistoryTables& t = w.r.tables;
  if (!t.returns || w.r.frontier == 0 || w.r.kept_blocks == 0) return;
  for (int b = threadIdx.x; b < min(w.r.frontier, kSharedBlocks); b += kThreads)
    w.s.kept[b] = *w.KeptAt(b);
  Watch(w);
  const int k = PlanesOf(w.Ids(0)), v = PlanesOf(w.Ids(0) + kPlanes);
  for (int returned = 0; returned < t.most_returns;) {
    const unsigned long long wanted = Wanted(w);
    if (wanted == 0) return;
    const int page = static_cast<int>(static_cast<std::uint32_t>(wanted) ^ kAll);
    const int block = page * kReturnTokens / kBlockTokens;
    if (!Readable(t.places[block], k, v)) {
      if (threadIdx.x == 0) {
        t.lost[static_cast<std::size_t>(w.unit) * (t.token_room / kReturnTokens) + page] = 1;
        atomicAdd(&w.a.counts[w.r.index].lost_pages, 1u);
      }
      __syncthreads();
      continue;
    }
    Return(w, page);
    ++returned;
    Softmax(w);
  }
}

/// The weighted sum of V into s.sums, and the scores of what takes part.
template <int D>
__device__ void SumValues(Work<D>& w) {
  const HistoryTables& t = w.r.tables;
  constexpr int kPairs = (D / 2 + 31) / 32;  // of a lane; with D 32 half of the lanes have none
  float sums[kMostGroup][2 * kPairs] = {};
  for (int i = w.warp; i < w.part_blocks; i += kWarps) {
    const std::uint32_t* const ids = w.Ids(i);
    if (ids[0] == kAbsentPage || ids[kPlanes] == kAbsentPage) continue;  // the same for all lanes
    const UnitPlanes v(w.pages, ids + kPlanes);
    const bool there = w.TakesPart(i, w.lane);
    const float scale = there ? v.Scale<D>(w.lane) * (1 / 32768.f) : 0.f;
    float share = 0;
#pragma unroll
    for (int h = 0; h < kMostGroup; ++h) {
      if (h >= w.group) break;
      const float logit =
          w.logits[static_cast<std::size_t>(h) * w.a.most_tokens + i * kBlockTokens + w.lane];
      const float weight = there ? exp2f(logit - w.s.top[h]) * w.s.inverse[h] : 0.f;
      share += t.squared ? weight * weight : weight;
      w.s.shares[w.warp][h][w.lane] = weight * scale;
    }
    if (there && t.token_score != nullptr) {
      float* const score = i < w.r.kept_blocks
                               ? t.slot_score + static_cast<std::size_t>(w.unit) * t.slot_room +
                                     i * kBlockTokens + w.lane
                               : t.token_score + static_cast<std::size_t>(w.unit) * t.token_room +
                                     t.At(w.WholeToken(i, w.lane));
      *score += share / static_cast<float>(w.group);
    }
    __syncwarp();
#pragma unroll(D <= 64 ? 4 : 1)
    for (int g = 0; g < 8; ++g) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int pair = w.lane + 32 * j;
        if (pair >= D / 2) break;
        std::uint32_t words[kPlanes];
        v.Words(VByte(D, g, 2 * pair), words);
        const Codes codes = CodesOf(words);
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // tokens g, g + 8, g + 16, g + 24
          const float x = codes.low[k], y = codes.high[k];
#pragma unroll
          for (int h = 0; h < kMostGroup; ++h) {
            if (h >= w.group) break;
            const float weight = w.s.shares[w.warp][h][g + 8 * k];
            sums[h][2 * j] += weight * x;
            sums[h][2 * j + 1] += weight * y;
          }
        }
      }
    }
    __syncwarp();
  }
  // Warps one after the other: sums have one order.
  for (int turn = 0; turn < kWarps; ++turn) {
    if (w.warp == turn) {
#pragma unroll
      for (int h = 0; h < kMostGroup; ++h) {
        if (h >= w.group) break;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const int pair = w.lane + 32 * j;
          if (pair >= D / 2) break;
          float2* const to = reinterpret_cast<float2*>(w.s.sums + h * D) + pair;
          const float2 before = turn == 0 ? make_float2(0, 0) : *to;
          *to = make_float2(before.x + sums[h][2 * j], before.y + sums[h][2 * j + 1]);
        }
      }
    }
    __syncthreads();
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    HistoryAttentionKernel(const __grid_constant__ HistoryAttentionArgs a) {
  extern __shared__ __align__(16) std::uint8_t memory[];
  Shared<D>& shared = *reinterpret_cast<Shared<D>*>(memory);
  LetNextStart();
  WaitForPrevious();
  static_assert(sizeof(HistoryRow) % 4 == 0);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(HistoryRow) / 4); i += kThreads) {
    reinterpret_cast<std::uint32_t*>(&shared.history)[i] =
        reinterpret_cast<const std::uint32_t*>(a.histories + blockIdx.y)[i];
  }
  __syncthreads();
  const HistoryRow& r = shared.history;
  if (r.rows != 1) return;
  Work<D> w{a, r, shared};
  w.kv_head = blockIdx.x;
  w.group = a.heads / a.kv_heads;
  w.unit = a.layer * a.kv_heads + w.kv_head;
  w.warp = threadIdx.x >> 5, w.lane = threadIdx.x & 31;
  w.part_blocks = r.kept_blocks + r.context / kBlockTokens + 1 - r.frontier;
  const std::size_t first_head =
      static_cast<std::size_t>(blockIdx.y) * a.heads + w.kv_head * w.group;
  if (LogitBytes(a) <= kMostLogitBytes) {
    w.logits = reinterpret_cast<float*>(memory + sizeof(Shared<D>));
    w.watched = w.logits + w.group * a.most_tokens;
  } else {
    w.logits = a.logits + first_head * a.most_tokens;
    w.watched = a.watched + first_head * a.most_dropped;
  }
  w.pages = {a.pages + w.UnitAt(), a.page_bytes};
  LoadQueries(w);
  for (int i = w.warp; i < w.part_blocks; i += kWarps) TokenLogits(w, i, w.lane);
  Softmax(w);
  BringBack(w);
  SumValues(w);
  const std::int64_t first =
      r.row * a.out_stride + static_cast<std::int64_t>(w.kv_head) * w.group * D;
  for (int i = threadIdx.x; i < w.group * D / 2; i += kThreads) {
    const int channel = w.kv_head * D + 2 * i % D;
    const float x = Uncoded(a.value, channel, shared.sums[2 * i]);
    const float y = Uncoded(a.value, channel + 1, shared.sums[2 * i + 1]);
    if (a.out_type == ElementType::kF32) {
      *reinterpret_cast<float2*>(static_cast<float*>(a.out) + first + 2 * i) = make_float2(x, y);
    } else {
      *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(a.out) + first + 2 * i) =
          PackBf16(x, y);
    }
  }
}

template <int D>
void Launch(const HistoryAttentionArgs& args, cudaStream_t stream) {
  static const bool ready = [] {
    PLIANT_CUDA_CHECK(cudaFuncSetAttribute(HistoryAttentionKernel<D>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(sizeof(Shared<D>)) + kMostLogitBytes));
    return true;
  }();
  PLIANT_CHECK(ready, "shared memory of history attention");
  const std::int64_t logits = LogitBytes(args);
  const std::size_t bytes =
      sizeof(Shared<D>) +
      (logits <= kMostLogitBytes ? static_cast<std::size_t>(logits) : std::size_t{0});
  LaunchOverlapped(true, HistoryAttentionKernel<D>, dim3(args.kv_heads, args.count), dim3(kThreads),
                   bytes, stream, args);
}

}  // namespace

void LaunchHistoryAttention(const HistoryAttentionArgs& args, cudaStream_t stream) {
  if (args.count == 0) return;
  ForHeadDim(args.head_dim, [&]<int D>() { Launch<D>(args, stream); });
}

}  // namespace pliant::cuda
