// Room: backend/cuda. History attention: the weighted sum of V, and the scores of what takes part.
// Device code only.
#pragma once

#include <type_traits>

#include "backend/cuda/history_attention/work.cuh"
#include "backend/cuda/plane_operands.cuh"

namespace pliant::cuda {

/// One plane of V of a block: of token groups 2 t and 2 t + 1, 16 dims a tile.
template <int D, int kTiles>
struct ValuePlane {
  std::uint32_t words[2][kTiles];
  __device__ __forceinline__ void Load(const std::uint8_t* unit, int part, int g, int t) {
    constexpr int kRun = D >= 64 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < kTiles / kRun; ++i) {
      const std::uint8_t* const at =
          unit + 2 * t * (2 * D) + ((part * (kTiles / kRun) + i) * 8 + (g ^ (2 * t))) * (kRun * 4);
      ReadWords<kRun>(at, words[0] + i * kRun);
      ReadWords<kRun>(at + 2 * D, words[1] + i * kRun);
    }
  }
};

/// Weights of a chunk of heads as an operand: digits 3 and 2 of a head in neighbouring columns, and
/// digits 1 and 0. `weights`: of head t and tokens g + 8 j.
struct WeightOperand {
  std::uint32_t low[2], high[2];  // halves of the depth
  explicit __device__ __forceinline__ WeightOperand(const std::uint32_t (&weights)[4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const std::uint32_t selector = n == 0 ? 0x6273u : 0x4051u;
      const std::uint32_t a = TransposeB16(__byte_perm(weights[0], weights[1], selector));
      const std::uint32_t b = TransposeB16(__byte_perm(weights[2], weights[3], selector));
      low[n] = __byte_perm(a, b, 0x5410);
      high[n] = __byte_perm(a, b, 0x7632);
    }
  }
};

template <int D, int kTiles>
__device__ __forceinline__ void Multiply(const ValuePlane<D, kTiles>& upper,
                                         const ValuePlane<D, kTiles>& lower,
                                         const WeightOperand& weights, int (&out)[kTiles][2][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const std::uint32_t e0 = EvenBytes(upper.words[0][i], lower.words[0][i]);
    const std::uint32_t o0 = OddBytes(upper.words[0][i], lower.words[0][i]);
    const std::uint32_t e1 = EvenBytes(upper.words[1][i], lower.words[1][i]);
    const std::uint32_t o1 = OddBytes(upper.words[1][i], lower.words[1][i]);
#pragma unroll
    for (int n = 0; n < 2; ++n) MmaU8U8(out[i][n], e0, o0, e1, o1, weights.low[n], weights.high[n]);
  }
}

/// Adds a block's share of the output of head t of a chunk, dims 16 i + 2 g + {0, 1} of the part.
/// `weights`: attention times V's scales, of tokens g + 8 j. The largest one of a head stands at
/// 2^31, so that a sum is of integers; NaNs and infinities reach the output.
template <int D, int kTiles>
__device__ __forceinline__ void AddValues(const UnitPlanes& v, int planes,
                                          const ValuePlane<D, kTiles> (&first)[2], int part, int g,
                                          int t, const float (&weights)[4],
                                          float (&sums)[2 * kTiles]) {
  float largest = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    largest = weights[j] > largest || isnan(weights[j]) ? weights[j] : largest;
#pragma unroll
  for (int m = 4; m < 32; m *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, largest, m);
    largest = other > largest || isnan(other) ? other : largest;
  }
  const float to_integer = largest > 1e-29f && largest < INFINITY ? 0x1p31f / largest : 0.f;
  std::uint32_t codes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) codes[j] = __float2uint_rn(weights[j] * to_integer);
  int out[kTiles][2][4] = {};
  int center[2][2];
  float offset = 0;  // of absent digits
  {
    const WeightOperand operand(codes);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      int digits = static_cast<int>(
          __dp4a(operand.low[n], 0x01010101u, __dp4a(operand.high[n], 0x01010101u, 0u)));
      digits += __shfl_xor_sync(kAllLanes, digits, 1);
      digits += __shfl_xor_sync(kAllLanes, digits, 2);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int sum = __shfl_sync(kAllLanes, digits, 8 * t + 4 * c);
        center[n][c] = 128 * sum;
        offset += static_cast<float>(sum * (0x1000 >> (4 * planes))) *
                  ((n == 0 ? (c == 0 ? 0x1p24f : 0x1p16f) : (c == 0 ? 0x1p8f : 1.f)) / 32.f);
      }
    }
    Multiply(first[0], first[1], operand, out);
  }
  if (planes > 2) {
    // The lower byte of a code is worth 1 / 256 of the upper one: digits move down a column.
    ValuePlane<D, kTiles> second[2] = {};
    second[0].Load(v.plane[2], part, g, t);
    if (planes > 3) second[1].Load(v.plane[3], part, g, t);
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] = (codes[j] + 128u) >> 8;
    Multiply(second[0], second[1], WeightOperand(codes), out);
  }
  const float unit = largest * (0x1p-31f / 128.f);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Carries move up first: lower bytes are not centred, and their sums would round in f32.
      int d0 = out[i][1][2 * h + 1] - center[1][1], d1 = out[i][1][2 * h] - center[1][0];
      int d2 = out[i][0][2 * h + 1] - center[0][1], d3 = out[i][0][2 * h] - center[0][0];
      d1 += d0 >> 8;
      d2 += d1 >> 8;
      d3 += d2 >> 8;
      const float low = static_cast<float>((d2 & 255) << 16 | (d1 & 255) << 8 | (d0 & 255));
      sums[2 * i + h] += fmaf(static_cast<float>(d3), 0x1p24f, low + offset) * unit;
    }
  }
}

/// Attention of head h to tokens g + 8 j of block i; 0 for a head that is none.
template <int D>
__device__ __forceinline__ void Shares(const HistoryWork<D>& w, int i, int h, float (&shares)[4]) {
  const int own = min(h, w.group - 1), last = h < w.group ? w.LastRow(i) : -1;
  const float* const logits =
      w.logits + static_cast<std::size_t>(own) * w.a.most_tokens + i * kBlockTokens + w.g;
  const float top = w.s.top[own], inverse = w.s.inverse[own];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float share = Exp2(logits[8 * j] - top) * inverse;
    shares[j] = w.g + 8 * j <= last ? share : 0.f;
  }
}

/// Where the score of row `token` of block i is.
template <int D>
__device__ __forceinline__ float* ScoreAt(const HistoryWork<D>& w, int i, int token) {
  const HistoryTables& t = w.r.tables;
  return i < w.r.kept_blocks ? t.slot_score + static_cast<std::size_t>(w.unit) * t.slot_room +
                                   i * kBlockTokens + token
                             : t.token_score + static_cast<std::size_t>(w.unit) * t.token_room +
                                   t.At(w.WholeToken(i, token));
}

/// What all heads give to a lane's token of block i, g + 8 t, over heads; squared where asked for.
/// `shares`: of the first chunk of heads.
template <int D>
__device__ __forceinline__ float ShareOfToken(const HistoryWork<D>& w, int i,
                                              const float (&shares)[4]) {
  const bool squared = w.r.tables.squared;
  float sums[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) sums[j] = squared ? shares[j] * shares[j] : shares[j];
#pragma unroll 1
  for (int chunk = 1; chunk < w.chunks; ++chunk) {
    float more[4];
    Shares(w, i, chunk * kChunkHeads + w.t, more);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] += squared ? more[j] * more[j] : more[j];
  }
  // Sums over heads; with each exchange a lane gives one half away.
  const bool odd = (w.t & 1) != 0, upper = (w.t & 2) != 0;
  float own[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    own[j] = odd ? sums[2 * j + 1] : sums[2 * j];
    own[j] += __shfl_xor_sync(kAllLanes, odd ? sums[2 * j] : sums[2 * j + 1], 1);
  }
  float sum = upper ? own[1] : own[0];
  sum += __shfl_xor_sync(kAllLanes, upper ? own[0] : own[1], 2);
  return sum / static_cast<float>(w.group);
}

/// The output into w.outputs, [warps that have room][group][D], which lie side by side; how many.
/// Sums have one order.
template <int D>
__device__ int SumValues(HistoryWork<D>& w) {
  constexpr int kSplit = D == 256 ? 2 : 1;  // registers hold the sums of a part of the dims
  constexpr int kTiles = D / 16 / kSplit;
  const int warps = min(kHistoryWarps, w.part_blocks), slots = min(w.OutputSlots(), warps);
#pragma unroll 1
  for (int chunk = 0; chunk < w.chunks; ++chunk) {
    float sums[kSplit][2 * kTiles] = {};
    const int h = chunk * kChunkHeads + w.t;
    const bool scored_chunk = chunk == 0 && w.r.tables.token_score != nullptr;
#pragma unroll 1
    for (int i = w.warp; i < w.part_blocks; i += kHistoryWarps) {
      const std::uint32_t* const ids = w.Ids(i);
      if (ids[0] == kAbsentPage || ids[kPlanes] == kAbsentPage) continue;  // the same for all lanes
      const UnitPlanes v = w.Planes(i, true);
      const int planes = PlanesOf(ids + kPlanes);
      const bool scored = scored_chunk && w.g + 8 * w.t <= w.LastRow(i);
      float* const score = scored ? ScoreAt(w, i, w.g + 8 * w.t) : nullptr;
      const float before = scored ? *score : 0.f;
      const uint2 scales = *reinterpret_cast<const uint2*>(v.plane[0] + ScaleByte(D, w.g));
      ValuePlane<D, kTiles> first[2];
      first[0].Load(v.plane[0], 0, w.g, w.t);
      first[1] = {};
      if (planes > 1) first[1].Load(v.plane[1], 0, w.g, w.t);
      float weights[4];
      Shares(w, i, h, weights);
      const float share = scored_chunk ? ShareOfToken(w, i, weights) : 0.f;
      const float scale[4] = {Bf16Low(scales.x), Bf16High(scales.x), Bf16Low(scales.y),
                              Bf16High(scales.y)};
      const int last = h < w.group ? w.LastRow(i) : -1;
#pragma unroll
      for (int j = 0; j < 4; ++j)  // the scale of a row that is none may be anything
        weights[j] = w.g + 8 * j <= last ? weights[j] * scale[j] : 0.f;
#pragma unroll
      for (int part = 0; part < kSplit; ++part) {
        if (part > 0) {
          first[0].Load(v.plane[0], part, w.g, w.t);
          if (planes > 1) first[1].Load(v.plane[1], part, w.g, w.t);
        }
        AddValues<D, kTiles>(v, planes, first, part, w.g, w.t, weights, sums[part]);
      }
      if (scored) *score = before + share;
    }
    // Warps that share a place come one after the other.
#pragma unroll 1
    for (int turn = 0; turn < warps; turn += slots) {
      if (turn > 0) __syncthreads();
      if (w.warp < turn || w.warp >= min(turn + slots, warps) || h >= w.group) continue;
      float* const to =
          w.outputs + ((w.warp - turn) * w.group + h) * static_cast<std::size_t>(D) + 2 * w.g;
#pragma unroll
      for (int part = 0; part < kSplit; ++part) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          float2* const at = reinterpret_cast<float2*>(to + (part * kTiles + i) * 16);
          float2 sum = make_float2(sums[part][2 * i], sums[part][2 * i + 1]);
          if (turn > 0) sum = make_float2(at->x + sum.x, at->y + sum.y);
          *at = sum;
        }
      }
    }
  }
  __syncthreads();
  return slots;
}

}  // namespace pliant::cuda
