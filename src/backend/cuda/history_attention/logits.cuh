// Room: backend/cuda. History attention: queries as operands, logits of what takes part, and their
// softmax. Device code only.
#pragma once

#include "backend/cuda/history_attention/work.cuh"
#include "backend/cuda/plane_operands.cuh"

namespace pliant::cuda {

/// What does not depend on anything else, all on its way at once.
template <int D>
__device__ void LoadInputs(HistoryWork<D>& w) {
  constexpr int kQuarter = kHistoryThreads / 4;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kStages) {
#if __CUDA_ARCH__ >= 900
    BarrierInit(SharedAddress(&w.s.arrived[thread]), kHistoryWarps);
    BarrierInitFence();
#else
    BarrierInit(SharedAddress(&w.s.arrived[thread]), kHistoryThreads);
#endif
  }
  if (thread < 2 * kQuarter) {
    const float4* const q = reinterpret_cast<const float4*>(
        w.a.q + w.r.row * w.a.q_stride + static_cast<std::int64_t>(w.kv_head) * w.group * D);
#pragma unroll 1
    for (int i = thread; i < w.group * D / 4; i += 2 * kQuarter)
      reinterpret_cast<float4*>(w.s.queries)[i] = q[i];
  } else if (thread < 3 * kQuarter) {
#pragma unroll 1
    for (int i = thread - 2 * kQuarter; i < min(w.part_blocks, kSharedIds) * 2; i += kQuarter)
      reinterpret_cast<uint4*>(w.s.ids)[i] = reinterpret_cast<const uint4*>(w.IdsAt(i / 2))[i % 2];
  } else if (w.Watches()) {
#pragma unroll 1
    for (int b = thread - 3 * kQuarter; b < min(w.r.frontier, kSharedBlocks); b += kQuarter)
      w.s.kept[b] = *w.KeptAt(b);
  }
  __syncthreads();
  w.kept_k = w.kept_v = 0;
  if (w.r.kept_blocks > 0) w.kept_k = PlanesOf(w.Ids(0)), w.kept_v = PlanesOf(w.Ids(0) + kPlanes);
}

/// All warps ask for units: Page(i) is the page of the i-th one, At(i) its place in the order.
template <int D, typename Page, typename At>
__device__ void AskFor(HistoryWork<D>& w, Stage stage, int count, Page&& page, At&& at) {
  constexpr int kBytes = UnitStride(D);
  const std::uint32_t barrier = SharedAddress(&w.s.arrived[stage]);
#if __CUDA_ARCH__ >= 900
  int i = w.warp + kHistoryWarps * w.lane;
#pragma unroll 1
  do {  // one round but for very many
    const std::uint32_t id = i < count && at(i) < w.a.staged_units ? page(i) : kAbsentPage;
    const std::uint32_t own = __ballot_sync(kAllLanes, id != kAbsentPage);
    const bool last = i - w.lane * kHistoryWarps + kHistoryThreads >= count;
    if (w.lane == 0) {
      if (last)
        BarrierExpect(barrier, __popc(own) * kBytes);
      else
        BarrierExpectMore(barrier, __popc(own) * kBytes);
    }
    __syncwarp();
    if (id != kAbsentPage)
      BulkCopy(SharedAddress(w.Staged(at(i))), w.pages.At(id), kBytes, barrier);
    i += kHistoryThreads;
  } while (i - w.lane * kHistoryWarps < count);
#else
  for (int i = w.warp; i < count; i += kHistoryWarps) {
    const std::uint32_t id = at(i) < w.a.staged_units ? page(i) : kAbsentPage;
    if (id == kAbsentPage) continue;
    for (int byte = w.lane * 16; byte < kBytes; byte += 512)
      AsyncCopy16(SharedAddress(w.Staged(at(i))) + byte, w.pages.At(id) + byte);
  }
  AsyncArrive(barrier);
#endif
}

/// Units into shared memory as far as there is room.
template <int D>
__device__ void AskForUnits(HistoryWork<D>& w) {
#pragma unroll 1
  for (int is_v = 0; is_v < 2; ++is_v) {
    AskFor(
        w, is_v != 0 ? kStageV : kStageK, w.part_blocks * kPlanes,
        [&w, is_v](int i) { return w.Ids(i / kPlanes)[is_v * kPlanes + i % kPlanes]; },
        [&w, is_v](int i) {
          const int block = i / kPlanes;
          return w.StagedAt(block) + (is_v != 0 ? w.StagedV(block) : 0) + i % kPlanes;
        });
  }
  const int first = w.StagedAt(w.part_blocks);
  AskFor(
      w, kStageDropped, w.Watches() ? w.r.frontier : 0,
      [&w](int i) { return w.a.blocks[static_cast<std::size_t>(w.r.first_block + i) * 8]; },
      [first](int i) { return first + i; });
}

/// One warp makes the digits of a chunk of heads. A lane holds column g of the operand: digit 2 or
/// 1 of head g / 2, and digit 0 in every other column.
template <int D>
__device__ void MakeDigits(HistoryWork<D>& w, int chunk) {
  const int own = chunk * kChunkHeads + (w.g >> 1);
  const bool there = own < w.group;
  float x[D / 32][8], largest = 0;
#pragma unroll
  for (int step = 0; step < D / 32; ++step) {
    const float* const q = w.s.queries + own * D + KDim<D>(step, w.t);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[step][i] = there ? q[i] : 0;
      const float magnitude = fabsf(x[step][i]);
      // A NaN must reach the logits.
      largest = magnitude > largest || isnan(magnitude) ? magnitude : largest;
    }
  }
#pragma unroll
  for (int m = 1; m < 4; m *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, largest, m);
    largest = other > largest || isnan(other) ? other : largest;
  }
  const float to_integer = largest > 0 ? kQueryRange / largest : 0;
  int sum = 0;
#pragma unroll
  for (int step = 0; step < D / 32; ++step) {
    std::uint32_t top[2] = {0, 0}, low[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int value = __float2int_rn(x[step][i] * to_integer);
      sum += value;
      const QueryDigits digits(value);
      top[i & 1] |= ((w.g & 1 ? digits.d1 : digits.d2) & 0xffu) << (8 * (i >> 1));
      low[i & 1] |= (w.g & 1 ? 0u : digits.d0 & 0xffu) << (8 * (i >> 1));
    }
    w.s.digits[chunk][step][w.lane] = make_uint4(top[0], top[1], low[0], low[1]);
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  if (there && (w.lane & 7) == 0) {
    w.s.query_sum[own] = sum;
    // 256 * (code / 256): a score is (sum of integers) / 256 per unit, K is code / 32768.
    w.s.query_unit[own] =
        largest * (256.f * 256.f / 32768.f / kQueryRange) * w.a.softmax_scale * kLog2e;
  }
}

/// One warp codes the queries that watch (CodeWatchingQuery). A lane holds column g: head g.
template <int D>
__device__ void MakeWatchingCodes(HistoryWork<D>& w) {
  const bool there = w.g < w.group;
  float x[D / 32][8], most = 0;
#pragma unroll
  for (int step = 0; step < D / 32; ++step) {
    const float* const q = w.s.queries + w.g * D + KDim<D>(step, w.t);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[step][i] = there ? q[i] : 0;
      most = fmaxf(most, fabsf(x[step][i]));
    }
  }
  most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
  most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
  const float inverse = most > 0 ? __fdiv_rn(127.f, most) : 0.f;
  int sum = 0;
#pragma unroll
  for (int step = 0; step < D / 32; ++step) {
    std::uint32_t packed[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float y = rintf(__fmul_rn(x[step][i], inverse));
      const int code = fabsf(y) <= 127 ? static_cast<int>(y) : 0;
      sum += code;
      packed[i & 1] |= static_cast<std::uint32_t>(code & 255) << (8 * (i >> 1));
    }
    w.s.watching[step][w.lane] = make_uint2(packed[0], packed[1]);
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  if (w.t == 0) {  // of heads that are none: 0
    w.s.watch_offset[w.g] = 15 * sum;
    w.s.watch_step[w.g] = most * (1 / 127.f) * w.a.softmax_scale * (kLog2e / 16);
  }
}

template <int D>
__device__ void CodeQueries(HistoryWork<D>& w) {
  if (w.warp < w.chunks) {
    MakeDigits(w, w.warp);
  } else if (w.warp == w.chunks && w.Watches()) {
    MakeWatchingCodes(w);
  }
  __syncthreads();
}

/// Logits of block i of what takes part, by a warp.
template <int D>
__device__ void BlockLogits(HistoryWork<D>& w, int i) {
  const std::uint32_t* const ids = w.Ids(i);
  float* const to = w.logits + i * kBlockTokens + w.g;
  if (ids[0] == kAbsentPage || ids[kPlanes] == kAbsentPage) {
#pragma unroll 1
    for (int h = w.t; h < w.group; h += kChunkHeads) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        to[static_cast<std::size_t>(h) * w.a.most_tokens + 8 * j] = -INFINITY;
    }
    return;
  }
  const int planes = PlanesOf(ids);
  const UnitPlanes k = w.Planes(i, false);
  const uint2 scales = *reinterpret_cast<const uint2*>(k.plane[0] + ScaleByte(D, w.g));
  float scores[kMostChunks][4];
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    if (2 * pair >= planes) break;
    std::uint32_t high[4][D / 32], low[4][D / 32] = {};
#pragma unroll
    for (int row = 0; row < 4; ++row) ReadKRow<D>(k.plane[2 * pair], 8 * row + w.g, w.t, high[row]);
    if (2 * pair + 1 < planes) {
#pragma unroll
      for (int row = 0; row < 4; ++row)
        ReadKRow<D>(k.plane[2 * pair + 1], 8 * row + w.g, w.t, low[row]);
    }
#pragma unroll
    for (int chunk = 0; chunk < kMostChunks; ++chunk) {
      if (chunk >= w.chunks) break;
      int sums[2][2][4] = {};
#pragma unroll
      for (int step = 0; step < D / 32; ++step) {
        const uint4 q = w.s.digits[chunk][step][w.lane];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const std::uint32_t e0 = EvenBytes(high[2 * m][step], low[2 * m][step]);
          const std::uint32_t e1 = EvenBytes(high[2 * m + 1][step], low[2 * m + 1][step]);
          const std::uint32_t o0 = OddBytes(high[2 * m][step], low[2 * m][step]);
          const std::uint32_t o1 = OddBytes(high[2 * m + 1][step], low[2 * m + 1][step]);
          MmaU8S8(sums[m][0], e0, e1, o0, o1, q.x, q.y);
          MmaU8S8(sums[m][1], e0, e1, o0, o1, q.z, q.w);
        }
      }
      const int offset =
          -(w.s.query_sum[min(chunk * kChunkHeads + w.t, w.group - 1)] >> 1);  // codes are unsigned
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int(&d)[2][4] = sums[j >> 1];
        const int c = 2 * (j & 1);
        const int sum = d[0][c] * 256 + d[0][c + 1] + (d[1][c] >> 8);
        scores[chunk][j] = pair == 0 ? static_cast<float>(sum + offset)
                                     : fmaf(static_cast<float>(sum), 1.f / 256.f, scores[chunk][j]);
      }
    }
  }
  const float scale[4] = {Bf16Low(scales.x), Bf16High(scales.x), Bf16Low(scales.y),
                          Bf16High(scales.y)};
  const int last = w.LastRow(i);
  const float middle = static_cast<float>(0x8000 >> (4 * planes)) * (1.f / 65536.f);
#pragma unroll
  for (int chunk = 0; chunk < kMostChunks; ++chunk) {
    const int h = chunk * kChunkHeads + w.t;
    if (h >= w.group) break;
    const float absent = middle * static_cast<float>(w.s.query_sum[h]), unit = w.s.query_unit[h];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      to[static_cast<std::size_t>(h) * w.a.most_tokens + 8 * j] =
          w.g + 8 * j <= last ? (scores[chunk][j] + absent) * (scale[j] * unit) : -INFINITY;
    }
  }
}

/// Largest logit and the inverse of the sum of each head, several warps for one. Ends in step.
template <int D>
__device__ void Softmax(HistoryWork<D>& w) {
  __syncthreads();
  const int tokens = w.part_blocks * kBlockTokens;
  const int parts = kHistoryWarps / w.group, head = w.warp / parts, part = w.warp % parts;
  if (head < w.group) {
    const float* const logits = w.logits + static_cast<std::size_t>(head) * w.a.most_tokens;
    float top = -INFINITY;
#pragma unroll 2
    for (int i = part * 32 + w.lane; i < tokens; i += parts * 32) top = fmaxf(top, logits[i]);
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, m));
    const float base = top == -INFINITY ? 0.f : top;
    float sum = 0;
#pragma unroll 2
    for (int i = part * 32 + w.lane; i < tokens; i += parts * 32) sum += Exp2(logits[i] - base);
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, m);
    if (w.lane == 0) w.s.part_top[w.warp] = top, w.s.part_sum[w.warp] = sum;
  }
  __syncthreads();
  if (w.warp < w.group) {
    const bool own = w.lane < parts;
    const float part_top = own ? w.s.part_top[w.warp * parts + w.lane] : -INFINITY;
    float top = part_top;
#pragma unroll
    for (int m = 8; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, m));
    // Of a part of absent tokens only the sum counts: 0, or no number.
    float sum = own ? w.s.part_sum[w.warp * parts + w.lane] : 0.f;
    if (part_top != -INFINITY) sum *= Exp2(part_top - top);
#pragma unroll
    for (int m = 8; m > 0; m >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, m);
    if (w.lane == 0) w.s.top[w.warp] = top, w.s.inverse[w.warp] = 1 / sum;
  }
  __syncthreads();
}

}  // namespace pliant::cuda
