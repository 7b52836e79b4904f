#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "backend/cuda/attention_decode/attention_decode.h"
#include "backend/cuda/attention_decode/kernel_args.cuh"
#include "backend/cuda/attention_decode/merge.cuh"
#include "backend/cuda/attention_decode/producer.cuh"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/overlap.cuh"
#include "backend/cuda/page_layout.h"
#include "backend/cuda/plane_operands.cuh"
#include "backend/cuda/ptx.cuh"
#include "base/check.h"

namespace pliant::cuda {
namespace {

// p * (V scale) as an integer: at a rescale the largest stands at 2^27.5; at 2^31.5 the maximum is
// raised again.
constexpr float kTopExponent = 27.5f;
constexpr float kRescaleAt = 3.0e9f;
constexpr float kRescaleExponent = 31.25f;  // a little under log2(kRescaleAt), so that the head
                                            // that asked is always among those raised

/// A consumer warp works one chunk of up to four heads. Lane (g, t) = (lane / 4, lane % 4): of the
/// scores it owns head t and tokens g + 8 j; of the output head t and dims 16 i + 2 g + {0, 1}; as
/// an operand of the tensor cores it holds column g, which is digit g % 2 of head g / 2.
template <int D, int kSplit, int kMaxWarps>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    DecodeAttentionKernel(const __grid_constant__ KernelArgs args) {
  constexpr int kSteps = D / 32;           // of 32 dims, in the scores
  constexpr int kTiles = D / 16 / kSplit;  // of 16 dims, in this warp's part of the output
  constexpr int kStride = UnitStride(D);
  constexpr int kRowBytes = 16 * D;  // of a unit, without its scales
  extern __shared__ __align__(128) std::uint8_t shared[];
  const DecodeArgs& a = args.a;
  const DecodeLaunch& launch = args.launch;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warps = launch.consumers + 1;
  const int group = static_cast<int>(threadIdx.x >> 5) / warps,
            warp = static_cast<int>(threadIdx.x >> 5) % warps;
  const int column = blockIdx.x % launch.columns;

  // Shared memory: slots, flushed outputs, notes, barriers.
  const int second_plane = launch.heads * kStride, slot_bytes = 2 * second_plane;
  const int slots = launch.slots * launch.groups, consumers = launch.consumers * launch.groups;
  std::uint8_t* const kept_base = shared + slots * slot_bytes;
  std::uint8_t* const note_base = kept_base + consumers * (kHeadsPerChunk * D / kSplit) * 4;
  const std::uint32_t barrier_base = SharedAddress(note_base + slots * sizeof(Note));
  Ring ring{shared + group * launch.slots * slot_bytes,
            slot_bytes,
            barrier_base + group * launch.slots * 8,
            barrier_base + (slots + group * launch.slots) * 8,
            reinterpret_cast<Note*>(note_base) + group * launch.slots,
            launch.slots};
  const int kv_first = column * launch.heads, kv_here = min(launch.heads, args.kv_heads - kv_first);
  LetNextStart();  // the merge, which waits for this grid's end
  if (static_cast<int>(threadIdx.x) < slots) {
    BarrierInit(barrier_base + threadIdx.x * 8, kFullArrivals);
    BarrierInit(barrier_base + (slots + threadIdx.x) * 8,
                kEmptyArrivals * min(launch.consumers, kv_here * args.chunks_per_head * kSplit));
#if __CUDA_ARCH__ >= 900
    BarrierInitFence();
#endif
  }
  __syncthreads();
  WaitForPrevious();  // in every warp, also in those that have nothing to do

  if (warp == 0) {
    Produce<D>(args, ring, a.pages + a.layer_offset + static_cast<std::size_t>(kv_first) * kStride,
               kv_here * kStride, a.q + static_cast<std::int64_t>(kv_first) * args.group * D,
               args.QueryInRing(D) ? kv_here * args.group * D * 4 : 0,
               a.ranges[blockIdx.x / launch.columns * launch.groups + group]);
    return;
  }
  const int local_chunk = (warp - 1) / kSplit, part = (warp - 1) % kSplit;
  const int kv_local = local_chunk / args.chunks_per_head;
  if (kv_local >= kv_here) return;
  const int kv_head = kv_first + kv_local;
  const int first_head =
      (local_chunk % args.chunks_per_head) * kHeadsPerChunk;  // within the KV head's group
  const int heads = min(kHeadsPerChunk, args.group - first_head);
  // A piece is what one warp makes of a row: a part of the dims of a chunk.
  const int pieces = args.kv_heads * args.chunks_per_head * kSplit;
  const int piece =
      (kv_head * args.chunks_per_head + local_chunk % args.chunks_per_head) * kSplit + part;
  const std::uint8_t* const slots_base = ring.slots;
  ring.slots += kv_local * kStride;
  float* const kept = reinterpret_cast<float*>(kept_base) +
                      (group * launch.consumers + warp - 1) * (kHeadsPerChunk * D / kSplit) + lane;
  auto acquire = [&]() -> const std::uint8_t* {
    BarrierWait(ring.full + ring.slot * 8, ring.parity);
    return ring.slots + ring.slot * slot_bytes;
  };
  // Gives the slot back, once all lanes have read it, and moves on.
  auto release = [&] {
    __syncwarp();
    if (lane < kEmptyArrivals) BarrierArrive(ring.empty + ring.slot * 8);
    ring.Next();
  };
  const std::uint8_t* unit = acquire();
#pragma unroll 1
  while (true) {
    Note segment = ring.notes[ring.slot];
    if (segment.segment < 0) break;
    // ---- the query as digits: tile 0 holds digits 2 and 1 of each head in neighbouring columns,
    // tile 1 digit 0
    std::uint32_t q_top[kSteps][2], q_low[kSteps][2];
    float q_unit;  // what one unit of a score is worth, head t
    int q_offset;  // -128 * (sum of q), in units of a score
    float q_sum;   // sum of q in those units, for midpoints
    {
      const int head = g >> 1;
      const float* q =
          args.QueryInRing(D)
              ? reinterpret_cast<const float*>(slots_base + ring.slot * slot_bytes) +
                    (kv_local * args.group + first_head + head) * D
              : a.q + static_cast<std::int64_t>(segment.row) * a.q_stride +
                    (static_cast<std::int64_t>(kv_head) * args.group + first_head + head) * D;
      float x[kSteps][8], largest = 0.f;
#pragma unroll
      for (int w = 0; w < kSteps; ++w) {
        if (head < heads) {
          const float4* p = reinterpret_cast<const float4*>(q + KDim<D>(w, t));
          const float4 u = p[0], v = p[1];
          x[w][0] = u.x, x[w][1] = u.y, x[w][2] = u.z, x[w][3] = u.w, x[w][4] = v.x, x[w][5] = v.y,
          x[w][6] = v.z, x[w][7] = v.w;
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) x[w][i] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float magnitude = fabsf(x[w][i]);
          largest = magnitude > largest || isnan(magnitude) ? magnitude
                                                            : largest;  // a NaN must reach q_unit
        }
      }
      for (int m = 1; m < 4; m <<= 1) {
        const float other = __shfl_xor_sync(kAll, largest, m);
        largest = other > largest || isnan(other) ? other : largest;
      }
      const float to_integer = largest > 0.f ? kQueryRange / largest : 0.f;
      int sum = 0;
#pragma unroll
      for (int w = 0; w < kSteps; ++w) {
        q_top[w][0] = q_top[w][1] = q_low[w][0] = q_low[w][1] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int value = __float2int_rn(x[w][i] * to_integer);
          sum += value;
          const QueryDigits digits(value);
          const int shift =
              8 * (i >> 1);  // even dims go to the lower half of k, odd ones to the upper
          q_top[w][i & 1] |= ((g & 1 ? digits.d1 : digits.d2) & 0xffu) << shift;
          q_low[w][i & 1] |= (g & 1 ? 0u : digits.d0 & 0xffu) << shift;
        }
      }
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      // 256 * (code / 256): a score is (sum of integers) / 256 per unit, K is code / 32768.
      const float unit =
          largest * (256.f * 256.f / 32768.f / kQueryRange) * a.softmax_scale * 1.4426950408889634f;
      q_unit = __shfl_sync(kAll, unit, 8 * t);
      const int head_sum = __shfl_sync(kAll, sum, 8 * t);
      q_offset = -(head_sum >> 1);
      q_sum = static_cast<float>(head_sum) * (1.f / 256.f);
    }
    release();
    int out[kTiles][2][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) out[i][n][c] = 0;
    int digit_sum[2] = {0, 0},
        digit_mid[2] = {0,
                        0};  // as a column of the operand: sums of p's digits; times midpoint / 8
    float top = -INFINITY, mass = 0.f;  // 2^(score - top) is p as an integer; mass is the sum of p
    bool dirty = false, has_kept = false;  // sums not flushed; `kept` holds something

    // Moves the integer sums into `kept`, exactly up to one rounding, then multiplies by `scale`
    // (of head t).
    auto flush = [&](float scale) {
      float offset = 0.f;  // from midpoints
      int center[2][2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        int d = digit_sum[n], m = digit_mid[n];
        d += __shfl_xor_sync(kAll, d, 1);
        d += __shfl_xor_sync(kAll, d, 2);
        m += __shfl_xor_sync(kAll, m, 1);
        m += __shfl_xor_sync(kAll, m, 2);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          center[n][c] = 128 * __shfl_sync(kAll, d, 8 * t + 4 * c);
          const float weight = n == 0 ? (c == 0 ? 0x1p24f : 0x1p16f) : (c == 0 ? 0x1p8f : 1.f);
          offset += static_cast<float>(__shfl_sync(kAll, m, 8 * t + 4 * c)) * (weight / 32.f);
        }
        digit_sum[n] = digit_mid[n] = 0;
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // Carries move up first: the lower bytes of codes are not centred, and their sums would
          // round in f32.
          int d0 = out[i][1][2 * h + 1] - center[1][1], d1 = out[i][1][2 * h] - center[1][0];
          int d2 = out[i][0][2 * h + 1] - center[0][1], d3 = out[i][0][2 * h] - center[0][0];
          d1 += d0 >> 8;
          d2 += d1 >> 8;
          d3 += d2 >> 8;
          const float low = static_cast<float>((d2 & 255) << 16 | (d1 & 255) << 8 | (d0 & 255));
          const float v = fmaf(static_cast<float>(d3), 0x1p24f, low + offset);
          float* const to = kept + (2 * i + h) * 32;
          *to = (has_kept ? *to + v : v) * scale;
          out[i][0][2 * h] = out[i][0][2 * h + 1] = out[i][1][2 * h] = out[i][1][2 * h + 1] = 0;
        }
      has_kept = true;
      dirty = false;
    };

    bool last = false;
    unit = acquire();
    segment.state = ring.notes[ring.slot].state;
#pragma unroll 1
    while (true) {
      // ---- scores of 32 tokens by 4 heads
      const int k_planes = segment.state & 15, v_planes = (segment.state >> 4) & 15;
      last = (segment.state >> 8) != 0;
      if (k_planes == 0) {
        release();
        unit = acquire();
        if (last) break;
        segment.state = ring.notes[ring.slot].state;
        continue;
      }
      int score_sum[4];
      auto multiply_k = [&](auto two) {
        int sums[2][2][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) (&sums[0][0][0])[i] = 0;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          std::uint32_t x0[kSteps], x1[kSteps], y0[kSteps] = {}, y1[kSteps] = {};
          ReadKRow<D>(unit, 16 * m + g, t, x0);
          ReadKRow<D>(unit, 16 * m + 8 + g, t, x1);
          if constexpr (decltype(two)::value) {
            ReadKRow<D>(unit + second_plane, 16 * m + g, t, y0);
            ReadKRow<D>(unit + second_plane, 16 * m + 8 + g, t, y1);
          }
#pragma unroll
          for (int w = 0; w < kSteps; ++w) {
            const std::uint32_t e0 = EvenBytes(x0[w], y0[w]), e1 = EvenBytes(x1[w], y1[w]);
            const std::uint32_t o0 = OddBytes(x0[w], y0[w]), o1 = OddBytes(x1[w], y1[w]);
            MmaU8S8(sums[m][0], e0, e1, o0, o1, q_top[w][0], q_top[w][1]);
            MmaU8S8(sums[m][1], e0, e1, o0, o1, q_low[w][0], q_low[w][1]);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int(&d)[2][4] = sums[j >> 1];
          const int c = 2 * (j & 1);
          score_sum[j] = d[0][c] * 256 + d[0][c + 1] + (d[1][c] >> 8);
        }
      };
      const uint2 k_scales = *reinterpret_cast<const uint2*>(unit + kRowBytes + g * 8);
      if (k_planes >= 2) {
        multiply_k(std::true_type{});
      } else {
        multiply_k(std::false_type{});
      }
      release();
      float score[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) score[j] = static_cast<float>(score_sum[j] + q_offset);
      if (k_planes > 2) {
        unit = acquire();
        if (k_planes == 4) {
          multiply_k(std::true_type{});
        } else {
          multiply_k(std::false_type{});
        }
        release();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          score[j] = fmaf(static_cast<float>(score_sum[j]), 1.f / 256.f, score[j]);
      }
      {
        const float middle = static_cast<float>(0x8000 >> (4 * k_planes)) * (1.f / 256.f) * q_sum;
        const float k_scale[4] = {Bf16Low(k_scales.x), Bf16High(k_scales.x), Bf16Low(k_scales.y),
                                  Bf16High(k_scales.y)};
#pragma unroll
        for (int j = 0; j < 4; ++j) score[j] = (score[j] + middle) * (k_scale[j] * q_unit);
      }
      if (last) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (g + 8 * j >= segment.tail) score[j] = -INFINITY;
      }
      // ---- weights p * (V scale) as 32-bit integers
      unit = acquire();
      const uint2 v_scales = *reinterpret_cast<const uint2*>(unit + kRowBytes + g * 8);
      const float v_scale[4] = {Bf16Low(v_scales.x), Bf16High(v_scales.x), Bf16Low(v_scales.y),
                                Bf16High(v_scales.y)};
      float p[4], weight[4];
      auto weigh = [&] {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          p[j] = Exp2(score[j] - top);
          weight[j] = p[j] * v_scale[j];
        }
      };
      weigh();
      if (__any_sync(kAll, fmaxf(fmaxf(weight[0], weight[1]), fmaxf(weight[2], weight[3])) >=
                               kRescaleAt)) {
        float candidate = -INFINITY;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          candidate = fmaxf(candidate, score[j] + fmaxf(__log2f(v_scale[j]), -64.f));
#pragma unroll
        for (int m = 4; m < 32; m <<= 1)
          candidate = fmaxf(candidate, __shfl_xor_sync(kAll, candidate, m));
        const bool raise = candidate - top > kRescaleExponent;
        const float new_top = raise ? candidate - kTopExponent : top;
        const float shrink = raise ? Exp2(top - new_top) : 1.f;
        if (dirty) {
          flush(shrink);
        } else if (has_kept) {
#pragma unroll
          for (int i = 0; i < 2 * kTiles; ++i) kept[i * 32] *= shrink;
        }
        mass *= shrink;
        top = new_top;
        weigh();
      }
      dirty = true;
      std::uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mass += p[j];
        w[j] = __float2uint_rn(weight[j]);
      }
      std::uint32_t b0[2], b1[2];  // operand: [tile][k half]; tile 0: digits 3 and 2 of a head in
                                   // neighbouring columns; 1: 1 and 0
      auto pack = [&] {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const std::uint32_t selector = n == 0 ? 0x6273u : 0x4051u;
          const std::uint32_t low = TransposeB16(__byte_perm(w[0], w[1], selector));
          const std::uint32_t high = TransposeB16(__byte_perm(w[2], w[3], selector));
          b0[n] = __byte_perm(low, high, 0x5410);
          b1[n] = __byte_perm(low, high, 0x7632);
        }
      };
      pack();
      {
        const int middle = 0x1000 >> (4 * v_planes);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int sum = __dp4a(b0[n], 0x01010101u, __dp4a(b1[n], 0x01010101u, 0u));
          digit_sum[n] += sum;
          digit_mid[n] += sum * middle;
        }
      }
      // ---- output += weights * V
      auto multiply_v = [&](auto two) {
        constexpr int kRun = D >= 64 ? 4 : 2;
#pragma unroll
        for (int h = 0; h < kTiles / kRun; ++h) {
          const std::uint8_t* at = unit + 2 * t * (2 * D) +
                                   ((part * (kTiles / kRun) + h) * 8 + (g ^ (2 * t))) * (kRun * 4);
          std::uint32_t x0[kRun], x1[kRun], y0[kRun] = {}, y1[kRun] = {};
          ReadWords<kRun>(at, x0);
          ReadWords<kRun>(at + 2 * D, x1);
          if constexpr (decltype(two)::value) {
            ReadWords<kRun>(at + second_plane, y0);
            ReadWords<kRun>(at + second_plane + 2 * D, y1);
          }
#pragma unroll
          for (int i = 0; i < kRun; ++i) {
            const std::uint32_t e0 = EvenBytes(x0[i], y0[i]), o0 = OddBytes(x0[i], y0[i]);
            const std::uint32_t e1 = EvenBytes(x1[i], y1[i]), o1 = OddBytes(x1[i], y1[i]);
            MmaU8U8(out[h * kRun + i][0], e0, o0, e1, o1, b0[0], b1[0]);
            MmaU8U8(out[h * kRun + i][1], e0, o0, e1, o1, b0[1], b1[1]);
          }
        }
      };
      if (v_planes >= 2) {
        multiply_v(std::true_type{});
      } else {
        multiply_v(std::false_type{});
      }
      release();
      if (v_planes > 2) {
        // The lower byte of a code is worth 1 / 256: every digit of the weight moves down one
        // column. Rounded, not cut: lower bytes are not centred, so a bias of the weights would
        // show. (No overflow: weights stay below kRescaleAt.)
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = (w[j] + 128u) >> 8;
        pack();
        unit = acquire();
        if (v_planes == 4) {
          multiply_v(std::true_type{});
        } else {
          multiply_v(std::false_type{});
        }
        release();
      }
      unit = acquire();  // the next block's, or the next segment's first planes
      if (last) break;
      segment.state = ring.notes[ring.slot].state;
    }

    // ---- the segment's result: alone, it is the output; else a partial, merged by the warp that
    // comes last
    if (dirty) {
      flush(1.f);
    } else if (!has_kept) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) kept[i * 32] = 0.f;
    }
#pragma unroll
    for (int m = 4; m < 32; m <<= 1) mass += __shfl_xor_sync(kAll, mass, m);
    if (isnan(mass)) top = INFINITY;  // so that the merge keeps it
    float result[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) result[i] = kept[i * 32];
    if (segment.count > 1) {
      float* const mine =
          a.partials +
          (static_cast<std::size_t>(segment.segment) * pieces + piece) * PartialFloats<D, kSplit>();
#pragma unroll
      for (int i = 0; i < kTiles / 2; ++i) {
        reinterpret_cast<float4*>(mine)[i * 32 + lane] =
            make_float4(result[4 * i], result[4 * i + 1], result[4 * i + 2], result[4 * i + 3]);
      }
      if (g == 0)
        *reinterpret_cast<float2*>(mine + kHeadsPerChunk * D / kSplit + 2 * t) =
            make_float2(top, mass);
    } else if (t < heads) {
      StoreResult<D, kTiles>(args, segment.row, kv_head, first_head + t,
                             part * (D / kSplit) + 2 * g, mass, result);
    }
    __syncwarp();
  }
}

// Dims of the output are split over this many warps, each of which computes all scores, where a
// warp's registers cannot hold all sums.
constexpr int Split(int head_dim) { return head_dim == 256 ? 2 : 1; }
// Warps of a thread block at most: what the kernel's registers allow.
constexpr int MaxWarps(int head_dim) { return head_dim >= 128 ? 12 : 16; }
constexpr int kMaxChunks = 8;  // of a group of warps
constexpr int kMaxSlots = 16;  // of a group of warps

template <int D>
void Launch(const KernelArgs& args, cudaStream_t stream) {
  const DecodeLaunch& launch = args.launch;
  const auto kernel = DecodeAttentionKernel<D, Split(D), MaxWarps(D)>;
  static int raised = 0;
  if (raised < launch.smem_bytes) {
    PLIANT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           launch.smem_bytes));
    raised = launch.smem_bytes;
  }
  LaunchOverlapped(true, kernel, dim3(launch.grid),
                   dim3(launch.groups * (launch.consumers + 1) * 32),
                   static_cast<std::size_t>(launch.smem_bytes), stream, args);
  if (args.a.max_cut_rows == 0) return;
  LaunchOverlapped(true, MergeKernel<D, Split(D)>,
                   dim3(args.a.max_cut_rows, args.kv_heads * args.chunks_per_head * Split(D)),
                   dim3(D / Split(D) * 4), 0, stream, args);
}

}  // namespace

Result<DecodeLaunch> DecodeLaunchFor(const DecodeShape& shape) {
  const int d = shape.head_dim;
  if (d != 32 && d != 64 && d != 128 && d != 256) {
    return Unimplemented("no CUDA attention kernel for head dimension " + std::to_string(d) +
                         "; there are 32, 64, 128 and 256");
  }
  const int chunks = shape.ChunksPerHead(),
            most = std::min(kMaxChunks, (MaxWarps(d) - 1) / Split(d));
  if (shape.kv_heads < 1 || shape.group < 1 || chunks > most) {
    return Unimplemented("no CUDA attention kernel for " + std::to_string(shape.group) +
                         " query heads a KV head; the limit is " +
                         std::to_string(most * kHeadsPerChunk));
  }
  int device = 0, shared = 0, multiprocessors = 0;
  PLIANT_CUDA_CHECK(cudaGetDevice(&device));
  PLIANT_CUDA_CHECK(
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  PLIANT_CUDA_CHECK(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  DecodeLaunch launch;
  // With little shared memory (sm_89) a slot of all heads would leave too few slots.
  for (launch.heads = std::min(shape.kv_heads, most / chunks); launch.heads >= 1; --launch.heads) {
    launch.consumers = launch.heads * chunks * Split(d);
    for (launch.groups = std::max(1, MaxWarps(d) / (launch.consumers + 1)); launch.groups >= 1;
         --launch.groups) {
      const int group_bytes = launch.heads * chunks * kHeadsPerChunk * d * 4;
      const int slot_bytes = 2 * launch.heads * UnitStride(d) + static_cast<int>(sizeof(Note)) +
                             16;  // and two barriers
      launch.slots = std::min(kMaxSlots, (shared / launch.groups - group_bytes) / slot_bytes);
      launch.smem_bytes = launch.groups * (group_bytes + launch.slots * slot_bytes);
      if (launch.slots >= 3) break;
    }
    if (launch.groups >= 1) break;
  }
  if (launch.heads < 1)
    return Unimplemented(
        "too little shared memory for the attention kernel: " + std::to_string(shared) + " bytes");
  launch.columns = (shape.kv_heads + launch.heads - 1) / launch.heads;
  launch.grid = std::max(1, multiprocessors / launch.columns) * launch.columns;
  return launch;
}

std::size_t DecodePartialFloats(const DecodeShape& shape, std::size_t segments) {
  return segments * shape.Chunks() *
         (kHeadsPerChunk * shape.head_dim + Split(shape.head_dim) * 2 * kHeadsPerChunk);
}

void LaunchDecodeAttention(const DecodeShape& shape, const DecodeLaunch& launch,
                           const DecodeArgs& args, cudaStream_t stream) {
  const KernelArgs k{args, launch, shape.kv_heads, shape.group, shape.ChunksPerHead()};
  switch (shape.head_dim) {
    case 32:
      return Launch<32>(k, stream);
    case 64:
      return Launch<64>(k, stream);
    case 128:
      return Launch<128>(k, stream);
    case 256:
      return Launch<256>(k, stream);
  }
  CheckFailed(__FILE__, __LINE__, "head_dim", "no decode attention kernel for this head dimension");
}

}  // namespace pliant::cuda
