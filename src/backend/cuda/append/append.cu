#include "backend/cuda/append/append.h"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/history/query_means.cuh"
#include "backend/cuda/overlap.cuh"
#include "backend/cuda/page_layout.h"
#include "base/check.h"

namespace pliant::cuda {
namespace {

constexpr int kWarps = 8;
constexpr std::uint32_t kAll = 0xffffffffu;

__global__ void RopeAnglesKernel(const std::int32_t* positions, int rows, const float* inv_freq,
                                 int pairs, float2* angles) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= rows * pairs) return;
  // f32 would lose the angle's fraction at large positions.
  double sine, cosine;
  sincos(static_cast<double>(inv_freq[at % pairs]) * positions[at / pairs], &sine, &cosine);
  angles[at] = make_float2(static_cast<float>(cosine), static_cast<float>(sine));
}

/// Integers in the order of the floats they are made of; its own inverse on the bits.
__device__ int Ordered(float x) {
  const int bits = __float_as_int(x);
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

/// Adds an element of K or V, of channel `at` of the layer, to the statistics.
__device__ void Record(const AppendArgs& a, bool is_v, int at, float x) {
  if (is_v) {
    atomicAdd(a.value_energy + at, double{x} * x);
  } else {
    atomicMin(a.key_min + at, Ordered(x));
    atomicMax(a.key_max + at, Ordered(x));
  }
}

/// MixChannels of plane_code.h, bit for bit, of a head that a warp holds as AppendKernel does.
template <int kHalf, int kPairs>
__device__ __forceinline__ void Mix(float (&low)[kPairs], float (&high)[kPairs], float factor) {
  // Channels of one lane first, then those of other lanes: 1, 2, 4, 8, 16 apart. Unfused.
#pragma unroll
  for (int apart = 1; apart < kPairs; apart *= 2) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if ((i & apart) != 0) continue;
      const float a = low[i], b = low[i + apart], c = high[i], d = high[i + apart];
      low[i] = __fadd_rn(a, b), low[i + apart] = __fsub_rn(a, b);
      high[i] = __fadd_rn(c, d), high[i + apart] = __fsub_rn(c, d);
    }
  }
  constexpr int kBlock = kHalf < kMixedChannels ? kHalf : kMixedChannels;  // within a half
#pragma unroll
  for (int m = 1; m < kBlock / kPairs; m *= 2) {
    const bool second = (threadIdx.x & m) != 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float l = __shfl_xor_sync(kAll, low[i], m), h = __shfl_xor_sync(kAll, high[i], m);
      low[i] = second ? __fsub_rn(l, low[i]) : __fadd_rn(low[i], l);
      high[i] = second ? __fsub_rn(h, high[i]) : __fadd_rn(high[i], h);
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if constexpr (kHalf < kMixedChannels) {  // the last stage joins the halves
      const float a = low[i], b = high[i];
      low[i] = __fadd_rn(a, b), high[i] = __fsub_rn(a, b);
    }
    low[i] *= factor;
    high[i] *= factor;
  }
}

/// One warp a (row, head): query heads first, then K, then V. A lane holds pairs (i, i + D / 2) of
/// neighbouring i.
template <int D>
__global__ void __launch_bounds__(kWarps * 32) AppendKernel(const __grid_constant__ AppendArgs a) {
  constexpr int kHalf = D / 2;
  constexpr int kPairs = (kHalf + 31) / 32;  // of a lane; with D 32 half of the lanes hold none
  __shared__ __align__(16) std::uint16_t codes[kWarps][D];
  LetNextStart();
  WaitForPrevious();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int total_heads = a.heads + 2 * a.kv_heads;
  const std::int64_t worker = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  const int row = static_cast<int>(worker / total_heads),
            head = static_cast<int>(worker % total_heads);
  if (row >= a.rows) return;
  const int slot = a.slots[row];
  if (slot < 0) return;
  const bool is_q = head < a.heads, is_v = head >= a.heads + a.kv_heads;
  const int kv_head = is_q ? head / (a.heads / a.kv_heads) : (head - a.heads) % a.kv_heads;
  float* const data = a.qkv + static_cast<std::int64_t>(row) * total_heads * D + head * D;
  const bool active = lane * kPairs < kHalf;
  float low[kPairs], high[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    low[i] = active ? data[lane * kPairs + i] : 0.f;
    high[i] = active ? data[kHalf + lane * kPairs + i] : 0.f;
  }
  if (is_q && a.histories != nullptr) {
    const HistoryRow& history = a.histories[row];
    if (active && history.rows == 1 && history.tables.short_mean != nullptr) {
      const QueryMeans means(history, (static_cast<std::size_t>(a.layer) * a.heads + head) * D);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        means.Note(lane * kPairs + i, low[i]);
        means.Note(kHalf + lane * kPairs + i, high[i]);
      }
    }
  }
  if (!is_v) {
    const float* const weight = is_q ? a.q_norm : a.k_norm;
    if (weight != nullptr) {
      float squares = 0.f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) squares += low[i] * low[i] + high[i] * high[i];
#pragma unroll
      for (int m = 1; m < 32; m <<= 1) squares += __shfl_xor_sync(kAll, squares, m);
      const float inverse = 1.f / sqrtf(squares / D + a.norm_eps);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (!active) continue;
        low[i] = low[i] * inverse * weight[lane * kPairs + i];
        high[i] = high[i] * inverse * weight[kHalf + lane * kPairs + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = lane * kPairs + i;
      if (pair >= a.pairs) continue;
      const float2 angle = a.angles[static_cast<std::int64_t>(row) * a.pairs + pair];
      const float x = low[i], y = high[i];
      // Unfused, so that the codes are those of the oracle bit for bit.
      low[i] = __fsub_rn(__fmul_rn(x, angle.x), __fmul_rn(y, angle.y));
      high[i] = __fadd_rn(__fmul_rn(y, angle.x), __fmul_rn(x, angle.y));
    }
    if (is_q) {
      const float* const channel = a.key.scale + kv_head * D;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (!active) continue;
        if (a.query_energy != nullptr) {
          double* const energy = a.query_energy + kv_head * D + lane * kPairs + i;
          atomicAdd(energy, double{low[i]} * low[i]);
          atomicAdd(energy + kHalf, double{high[i]} * high[i]);
        }
        low[i] *= channel[lane * kPairs + i];
        high[i] *= channel[kHalf + lane * kPairs + i];
      }
      Mix<kHalf>(low, high, kQueryMix);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (!active) continue;
        data[lane * kPairs + i] = low[i];
        data[kHalf + lane * kPairs + i] = high[i];
      }
      return;
    }
  }
  const float* const channel = (is_v ? a.value.scale : a.key.scale) + kv_head * D;
  const float* const center = (is_v ? a.value.center : a.key.center) + kv_head * D;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (!active) continue;
    const int c = lane * kPairs + i;
    if (a.key_min != nullptr) {
      const int at = kv_head * D + c;
      Record(a, is_v, at, low[i]);
      Record(a, is_v, at + kHalf, high[i]);
    }
    low[i] = __fdiv_rn(__fsub_rn(low[i], center[c]), channel[c]);
    high[i] = __fdiv_rn(__fsub_rn(high[i], center[kHalf + c]), channel[kHalf + c]);
  }
  if (!is_v) Mix<kHalf>(low, high, kKeyMix);
  // ---- scale and code, bit for bit as RowScale and EncodeRow
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    largest = max(largest, __float_as_uint(low[i]) & 0x7fffffffu);
    largest = max(largest, __float_as_uint(high[i]) & 0x7fffffffu);
  }
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) largest = max(largest, __shfl_xor_sync(kAll, largest, m));
  const std::uint32_t scale_bits = largest >= 0x7f800000u ? 0x7f80u : (largest + 0xffffu) >> 16;
  const float scale = __uint_as_float(scale_bits << 16);
  auto encode = [&](float x) -> std::uint16_t {
    const float code = __fdiv_rn(x, scale) * 32768.f;
    if (!isfinite(code)) return 32768;
    return static_cast<std::uint16_t>(__float2int_rn(fminf(fmaxf(code, -32767.f), 32767.f)) +
                                      32768);
  };
  if (active) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      codes[warp][lane * kPairs + i] = encode(low[i]);
      codes[warp][kHalf + lane * kPairs + i] = encode(high[i]);
    }
  }
  __syncwarp();
  const int token = slot & 31;
  const std::uint32_t* const entries =
      a.blocks + static_cast<std::size_t>(slot >> 5) * 8 + (is_v ? 4 : 0);
  const std::size_t unit = a.layer_offset + static_cast<std::size_t>(kv_head) * UnitStride(D);
  if (is_v) {
    // A token's V is one byte of every word of its group.
    for (int at = lane; at < 4 * kHalf; at += 32) {
      const int plane = at / kHalf, pair = at % kHalf;
      const std::uint32_t page = entries[plane];
      if (page == kAll) break;  // resident planes come first
      const std::uint32_t two =
          reinterpret_cast<const std::uint32_t*>(codes[warp])[pair] >> (12 - 4 * plane);
      a.pages[page * a.page_bytes + unit + VByte(D, token, 2 * pair)] =
          static_cast<std::uint8_t>((two & 15u) | ((two >> 12) & 0xf0u));
    }
  } else {
    for (int at = lane; at < 4 * (D / 8); at += 32) {
      const int plane = at / (D / 8), word = at % (D / 8);
      const std::uint32_t page = entries[plane];
      if (page == kAll) break;
      const uint4 eight = reinterpret_cast<const uint4*>(codes[warp])[word];
      const std::uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
      std::uint32_t out = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t two = pairs[i] >> (12 - 4 * plane);
        out |= ((two & 15u) | ((two >> 12) & 0xf0u)) << (8 * i);
      }
      *reinterpret_cast<std::uint32_t*>(a.pages + page * a.page_bytes + unit +
                                        KByte(D, token, 8 * word)) = out;
    }
  }
  if (lane == 0 && entries[0] != kAll) {
    *reinterpret_cast<std::uint16_t*>(a.pages + entries[0] * a.page_bytes + unit +
                                      ScaleByte(D, token)) = static_cast<std::uint16_t>(scale_bits);
  }
}

}  // namespace

void LaunchRopeAngles(const std::int32_t* positions, int rows, const float* inv_freq, int pairs,
                      float2* angles, cudaStream_t stream) {
  if (rows * pairs == 0) return;
  RopeAnglesKernel<<<(rows * pairs + 255) / 256, 256, 0, stream>>>(positions, rows, inv_freq, pairs,
                                                                   angles);
  PLIANT_CUDA_CHECK_LAUNCH();
}

void LaunchAppend(const AppendArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return;
  const std::int64_t workers =
      static_cast<std::int64_t>(args.rows) * (args.heads + 2 * args.kv_heads);
  const dim3 grid(static_cast<unsigned>((workers + kWarps - 1) / kWarps));
  const auto launch = [&](void (*kernel)(AppendArgs)) {
    LaunchOverlapped(args.rows <= kMostOverlappedRows, kernel, grid, dim3(kWarps * 32), 0, stream,
                     args);
  };
  switch (args.head_dim) {
    case 32:
      launch(AppendKernel<32>);
      break;
    case 64:
      launch(AppendKernel<64>);
      break;
    case 128:
      launch(AppendKernel<128>);
      break;
    case 256:
      launch(AppendKernel<256>);
      break;
    default:
      CheckFailed(__FILE__, __LINE__, "head_dim", "no append kernel for this head dimension");
  }
}

}  // namespace pliant::cuda
