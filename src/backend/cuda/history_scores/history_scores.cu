// Two passes over the same logits: what each row's attention adds up to, then what each token gets
// of it. Both are products of fp16 tiles, the row scales of K and the softmax in f32, as ordinary
// prefill attention has them (gather/ and attention_prefill/): K's codes keep 11 bits. The query
// heads of a group are further rows, so that a key is decoded once for all of them; below a "query"
// is one of slice.rows * group, number row * group + head.
//
// Bound: 8 rows * keys * heads * head_dim operations in both passes, half of it above the diagonal
// of a prompt. 8,000 tokens with 32 heads of 128: 0.5e12, 1.7 ms a layer at the 300 Tflop/s that
// mma.sync may reach on an H200, and 2e9 exponentials, 0.5 ms. What is decoded is less: the first
// pass decodes 4 head_dim words for 128 * 32 products of head_dim. Of queries the second pass reads
// rows * keys / 128 * heads * head_dim * 4 bytes, half of it above the diagonal: 4 GB, from L2.
#include <cmath>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/head_dims.cuh"
#include "backend/cuda/history_scores/history_scores.h"
#include "backend/cuda/page_layout.h"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/tile_f16.cuh"
#include "backend/plane_code.h"
#include "base/check.h"

namespace pliant::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kQueries = kWarps * 16;  // of a thread block at a time
constexpr std::uint32_t kAll = 0xffffffffu;

/// K of one block and unit on its way from the pages to a tile in shared memory. A thread has words
/// of 8 dims of a token, of every plane.
template <int D>
struct KeyBlock {
  static constexpr int kWords = 4 * D;
  static constexpr int kEach = (kWords + kThreads - 1) / kThreads;

  int planes = 0;  // 0: K or V is absent, and nothing of the block takes part
  std::uint32_t words[kEach][kPlanes];
  float scale;  // of token threadIdx.x, in the first 32 threads

  __device__ __forceinline__ void Load(const HistoryScoresArgs& a, std::int64_t block,
                                       int kv_head) {
    const std::uint32_t* const entries = a.blocks + block * 8;
    planes = 0;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) planes += entries[p] != kAll;
    if (entries[kPlanes] == kAll) planes = 0;
    const std::size_t unit = a.layer_offset + static_cast<std::size_t>(kv_head) * UnitStride(D);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      const std::uint8_t* const page = a.pages + entries[p] * a.page_bytes + unit;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int w = threadIdx.x + i * kThreads;
        words[i][p] = 0;
        if (p < planes && w < kWords)
          words[i][p] = *reinterpret_cast<const std::uint32_t*>(
              page + KByte(D, w / (D / 8), 8 * (w % (D / 8))));
      }
      if (p == 0 && planes > 0 && threadIdx.x < kBlockTokens)
        scale = Bf16Low(*reinterpret_cast<const std::uint16_t*>(page + ScaleByte(D, threadIdx.x)));
    }
  }

  /// Codes / 32768 as fp16, the block's tokens from row `first` of the tile on; and their scales.
  __device__ __forceinline__ void Store(std::uint8_t* tile, int first, float* scales) const {
    if (planes == 0) return;
    // Bytes are joined to 16-bit codes u, these to the float 2^23 + u; the middle of what is absent
    // is added with the offset.
    constexpr std::uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u, kFloat = 0x4b000000u;
    const float offset =
        static_cast<float>(static_cast<int>(0x8000u >> (4 * planes)) - 32768) - 8388608.f;
    const auto value = [offset](std::uint32_t bits) {
      return fmaf(__uint_as_float(bits), 1.f / 32768.f, offset * (1.f / 32768.f));
    };
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int w = threadIdx.x + i * kThreads;
      if (w >= kWords) continue;
      const std::uint32_t(&x)[kPlanes] = words[i];
      const std::uint32_t even_high = (x[0] & kLow) << 4 | (x[1] & kLow),
                          even_low = (x[2] & kLow) << 4 | (x[3] & kLow),
                          odd_high = (x[0] & kHigh) | (x[1] >> 4 & kLow),
                          odd_low = (x[2] & kHigh) | (x[3] >> 4 & kLow);
      std::uint32_t out[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t even = __byte_perm(even_low, even_high, half == 0 ? 0x5140 : 0x7362),
                            odd = __byte_perm(odd_low, odd_high, half == 0 ? 0x5140 : 0x7362);
        out[2 * half] = PackF16(value(__byte_perm(even, kFloat, 0x7410)),
                                value(__byte_perm(odd, kFloat, 0x7410)));
        out[2 * half + 1] = PackF16(value(__byte_perm(even, kFloat, 0x7432)),
                                    value(__byte_perm(odd, kFloat, 0x7432)));
      }
      *reinterpret_cast<uint4*>(tile + TileByte<D>(first + w / (D / 8), w % (D / 8))) =
          make_uint4(out[0], out[1], out[2], out[3]);
    }
    if (threadIdx.x < kBlockTokens) scales[first + threadIdx.x] = scale;
  }
};

/// The two queries of a lane, of 16 of its warp: lane (g, t) has first + g and first + g + 8.
template <int D>
struct Queries {
  std::uint32_t q[D / 16][4];  // a left operand, times softmax_scale / ln 2
  std::int64_t softmax[2];     // where a query's softmax is
  int last[2];                 // the last position that it sees; -1: there is no such query

  __device__ __forceinline__ void Load(const HistoryScoresArgs& a, const HistoryRow& slice,
                                       int kv_head, int first) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int group = a.heads / a.kv_heads, count = slice.rows * group;
    const float to_log2 = a.softmax_scale * 1.4426950408889634f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = first + g + 8 * h;
      const bool real = query < count;
      const int row = real ? query / group : 0, head = kv_head * group + (real ? query % group : 0);
      last[h] = real ? slice.context + row : -1;
      softmax[h] = static_cast<std::int64_t>(slice.row + row) * a.heads + head;
      const float* const from = a.q + (slice.row + row) * a.q_stride + head * D + 2 * t;
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const float2 x = *reinterpret_cast<const float2*>(from + 16 * d + 8 * part);
          q[d][2 * part + h] = real ? PackF16(x.x * to_log2, x.y * to_log2) : 0u;
        }
      }
    }
  }
};

/// Logits in units of ln 2 of a warp's 16 queries and 32 keys, from row `first` of the tile on; of
/// what a query does not see -inf.
template <int D>
__device__ __forceinline__ void Logits(const Queries<D>& queries, std::uint32_t tile, int first,
                                       const float* scales, int first_position,
                                       float (&logit)[4][4]) {
  const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 4; ++n) logit[n][0] = logit[n][1] = logit[n][2] = logit[n][3] = 0.f;
#pragma unroll
  for (int d = 0; d < D / 16; ++d) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      std::uint32_t k[4];
      LoadMatrices(k, tile + TileByte<D>(first + n * 16 + (lane >> 4) * 8 + (lane & 7),
                                         2 * d + ((lane >> 3) & 1)));
      MmaF16(logit[2 * n], queries.q[d], k[0], k[1]);
      MmaF16(logit[2 * n + 1], queries.q[d], k[2], k[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 scale = *reinterpret_cast<const float2*>(scales + first + 8 * n + 2 * t);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float x = logit[n][c] * ((c & 1) == 0 ? scale.x : scale.y);
      // By choice, not by arithmetic: what was never written may be anything, NaN too.
      logit[n][c] =
          first_position + 8 * n + 2 * t + (c & 1) <= queries.last[c >> 1] ? x : -INFINITY;
    }
  }
}

/// One thread block a (128 queries, KV head, slice): the largest logit of each, in units of ln 2,
/// and the sum of exp(logit - largest).
template <int D>
__global__ void __launch_bounds__(kThreads)
    SoftmaxKernel(const __grid_constant__ HistoryScoresArgs a) {
  __shared__ __align__(128) std::uint8_t tiles[2][kBlockTokens * D * 2];
  __shared__ __align__(16) float scales[2][kBlockTokens];
  const HistoryRow slice = a.histories[blockIdx.z];
  const int group = a.heads / a.kv_heads, kv_head = blockIdx.y, count = slice.rows * group;
  // Those that see most first: they take longest.
  const int first = (gridDim.x - 1 - blockIdx.x) * kQueries;
  if (slice.rows <= 1 || first >= count) return;
  const int blocks =
      (slice.context + min(first + kQueries - 1, count - 1) / group) / kBlockTokens + 1;
  Queries<D> queries;
  queries.Load(a, slice, kv_head, first + (threadIdx.x >> 5) * 16);
  float top[2] = {-INFINITY, -INFINITY}, mass[2] = {0.f, 0.f};
  KeyBlock<D> keys;
  keys.Load(a, slice.first_block, kv_head);
  keys.Store(tiles[0], 0, scales[0]);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    const bool present = keys.planes > 0;
    __syncthreads();  // the block is there, and nobody reads the other tile any more
    if (block + 1 < blocks) keys.Load(a, slice.first_block + block + 1, kv_head);
    if (present) {
      float logit[4][4];
      Logits<D>(queries, SharedAddress(tiles[block & 1]), 0, scales[block & 1],
                block * kBlockTokens, logit);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float best = top[h];
#pragma unroll
        for (int n = 0; n < 4; ++n) best = fmaxf(best, fmaxf(logit[n][2 * h], logit[n][2 * h + 1]));
        const float base = best == -INFINITY ? 0.f : best;  // weights of 0, not NaN
        mass[h] *= Exp2(top[h] - base);
        top[h] = best;
#pragma unroll
        for (int n = 0; n < 4; ++n)
          mass[h] += Exp2(logit[n][2 * h] - base) + Exp2(logit[n][2 * h + 1] - base);
      }
    }
    if (block + 1 < blocks) keys.Store(tiles[(block + 1) & 1], 0, scales[(block + 1) & 1]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // A lane has every fourth pair of keys.
    float best = fmaxf(top[h], __shfl_xor_sync(kAll, top[h], 1));
    best = fmaxf(best, __shfl_xor_sync(kAll, best, 2));
    mass[h] *= Exp2(top[h] - (best == -INFINITY ? 0.f : best));
    mass[h] += __shfl_xor_sync(kAll, mass[h], 1);
    mass[h] += __shfl_xor_sync(kAll, mass[h], 2);
    if ((threadIdx.x & 3) == 0 && queries.last[h] >= 0)
      a.softmax[queries.softmax[h]] = make_float2(best, mass[h]);
  }
}

/// Blocks whose keys a thread block of ScoresKernel has: what fits 48 KiB.
template <int D>
constexpr int ScoredBlocks() {
  return D == 256 ? 2 : 4;
}

/// One thread block a (few blocks, KV head, slice) goes through all queries that see any of them. A
/// lane adds up its own in order, then lanes and warps are added in order.
template <int D>
__global__ void __launch_bounds__(kThreads, D == 128 ? 2 : 1)
    ScoresKernel(const __grid_constant__ HistoryScoresArgs a) {
  constexpr int kBlocks = ScoredBlocks<D>(), kKeys = kBlocks * kBlockTokens;
  __shared__ __align__(128) std::uint8_t tile[kKeys * D * 2];
  __shared__ __align__(16) float scales[kKeys];
  __shared__ float parts[kWarps][kKeys];
  const HistoryRow slice = a.histories[blockIdx.z];
  const int group = a.heads / a.kv_heads, kv_head = blockIdx.y, count = slice.rows * group;
  const int tokens = slice.context + slice.rows, first_key = blockIdx.x * kKeys;
  if (slice.rows <= 1 || first_key >= tokens) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  std::uint32_t present = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int block = first_key / kBlockTokens + b;
    if (block * kBlockTokens >= tokens) continue;
    KeyBlock<D> keys;
    keys.Load(a, slice.first_block + block, kv_head);
    keys.Store(tile, b * kBlockTokens, scales);
    present |= (keys.planes > 0 ? 1u : 0u) << b;
  }
  __syncthreads();
  const float power = slice.tables.squared ? 2.f : 1.f;
  float sum[kBlocks][4][2];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[b][n][0] = sum[b][n][1] = 0.f;
#pragma unroll 1
  for (int first = max(first_key - slice.context, 0) * group + warp * 16; first < count;
       first += kQueries) {
    Queries<D> queries;
    queries.Load(a, slice, kv_head, first);
    float base[2];  // weight = 2^(logit - base)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 softmax = a.softmax[queries.softmax[h]];
      base[h] = softmax.y > 0.f ? softmax.x + log2f(softmax.y) : INFINITY;  // sees nothing: all 0
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if ((present >> b & 1) == 0) continue;
      float logit[4][4];
      Logits<D>(queries, SharedAddress(tile), b * kBlockTokens, scales,
                first_key + b * kBlockTokens, logit);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          sum[b][n][c] +=
              Exp2((logit[n][c] - base[0]) * power) + Exp2((logit[n][c + 2] - base[1]) * power);
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = sum[b][n][c];
        x += __shfl_xor_sync(kAll, x, 4);
        x += __shfl_xor_sync(kAll, x, 8);
        x += __shfl_xor_sync(kAll, x, 16);
        if (lane < 4) parts[warp][b * kBlockTokens + 8 * n + 2 * t + c] = x;
      }
  __syncthreads();
  const int key = threadIdx.x;
  if (key >= kKeys || first_key + key >= tokens) return;
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += parts[w][key];
  const std::int64_t unit = static_cast<std::int64_t>(a.layer) * a.kv_heads + kv_head;
  const HistoryTables& tables = slice.tables;
  tables.token_score[unit * tables.token_room + tables.At(first_key + key)] += total / group;
}

template <int D>
void Launch(const HistoryScoresArgs& args, cudaStream_t stream) {
  const int queries = args.most_rows * (args.heads / args.kv_heads);
  const auto grid = [&](int x) { return dim3(x, args.kv_heads, args.count); };
  SoftmaxKernel<D><<<grid((queries + kQueries - 1) / kQueries), kThreads, 0, stream>>>(args);
  PLIANT_CUDA_CHECK_LAUNCH();
  constexpr int kBlocks = ScoredBlocks<D>();
  ScoresKernel<D><<<grid((args.most_blocks + kBlocks - 1) / kBlocks), kThreads, 0, stream>>>(args);
  PLIANT_CUDA_CHECK_LAUNCH();
}

}  // namespace

void LaunchHistoryScores(const HistoryScoresArgs& args, cudaStream_t stream) {
  if (args.count == 0 || args.most_rows <= 1) return;
  ForHeadDim(args.head_dim, [&]<int D>() { Launch<D>(args, stream); });
}

}  // namespace pliant::cuda
