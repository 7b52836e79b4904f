#include <cuda_fp16.h>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/gather/gather.h"
#include "backend/cuda/page_layout.h"
#include "base/check.h"

namespace pliant::cuda {
namespace {

constexpr std::uint32_t kAll = 0xffffffffu;

/// Nibbles of `planes` words, dim by dim: u of one dim at bit `shift` of each word.
__device__ __forceinline__ float Decode(const std::uint32_t (&words)[4], int planes, int shift,
                                        float scale) {
  std::uint32_t u = 0;
#pragma unroll
  for (int p = 0; p < 4; ++p) u = u << 4 | (p < planes ? (words[p] >> shift) & 15u : 0u);
  u += 0x8000u >> (4 * planes);  // the middle of what is absent
  const float x = scale * ((static_cast<float>(u) - 32768.f) * (1.f / 32768.f));
  return fminf(fmaxf(x, -65504.f), 65504.f);  // fp16's range: a weight of 0 times infinity is NaN
}

/// One thread block a (block, head, K or V). K: a thread takes a word, 8 dims of a token. V: a word
/// is 4 tokens by 2 dims.
template <int D>
__global__ void __launch_bounds__(128) GatherKernel(const __grid_constant__ GatherArgs a) {
  constexpr int kWords = 4 * D;  // of a unit's rows
  const int block = blockIdx.x, head = blockIdx.y, is_v = blockIdx.z;
  const std::uint32_t* const entries = a.blocks + static_cast<std::size_t>(a.sources[block].x) * 8;
  int planes[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) planes[i >> 2] += entries[i] != kAll;
  const bool present = planes[0] > 0 && planes[1] > 0;
  if (head == 0 && is_v == 0 && threadIdx.x == 0) a.present[block] = present;
  const int own = present ? planes[is_v] : 0, valid = a.sources[block].y;
  const std::size_t unit = a.layer_offset + static_cast<std::size_t>(head) * UnitStride(D);
  __shared__ float scales[32];
  if (threadIdx.x < 32) {
    float s = 0.f;
    if (present) {
      const std::uint8_t* page = a.pages + entries[4 * is_v] * a.page_bytes + unit;
      s = __uint_as_float(static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(
                              page + ScaleByte(D, threadIdx.x)))
                          << 16);
    }
    scales[threadIdx.x] = s;
  }
  __syncthreads();
  std::uint16_t* const to =
      (is_v ? a.v : a.k) +
      (static_cast<std::int64_t>(block) * kBlockTokens * a.kv_heads + head) * D;
  const std::int64_t stride = static_cast<std::int64_t>(a.kv_heads) * D;
  for (int w = threadIdx.x; w < kWords; w += 128) {
    // (token, dim) of the word: K's rows are natural; V's are grouped, with the pair index varying
    // fastest for coalesced stores.
    const int token = is_v ? w / (D / 2) : w / (D / 8);
    const int dim = is_v ? 2 * (w % (D / 2)) : 8 * (w % (D / 8));
    std::uint32_t words[4] = {0, 0, 0, 0};
    const int byte = is_v ? VByte(D, token, dim) : KByte(D, token, dim);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if (p < own)
        words[p] = *reinterpret_cast<const std::uint32_t*>(
            a.pages + entries[4 * is_v + p] * a.page_bytes + unit + byte);
    }
    if (is_v) {
      // token is the group here (0 .. 7): byte j of the word is token group + 8 j.
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float s = scales[token + 8 * j];
        const bool real =
            own != 0 && token + 8 * j < valid;  // what was never written may be anything, NaN too
        const __half2 pair = __floats2half2_rn(real ? Decode(words, own, 8 * j, s) : 0.f,
                                               real ? Decode(words, own, 8 * j + 4, s) : 0.f);
        *reinterpret_cast<__half2*>(to + (token + 8 * j) * stride + dim) = pair;
      }
    } else {
      const float s = scales[token];
      const bool real = own != 0 && token < valid;
      __half2 out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[i] = __floats2half2_rn(real ? Decode(words, own, 8 * i, s) : 0.f,
                                   real ? Decode(words, own, 8 * i + 4, s) : 0.f);
      }
      *reinterpret_cast<uint4*>(to + token * stride + dim) = *reinterpret_cast<const uint4*>(out);
    }
  }
}

}  // namespace

void LaunchGather(const GatherArgs& args, cudaStream_t stream) {
  if (args.count == 0) return;
  const dim3 grid(args.count, args.kv_heads, 2);
  switch (args.head_dim) {
    case 32:
      GatherKernel<32><<<grid, 128, 0, stream>>>(args);
      break;
    case 64:
      GatherKernel<64><<<grid, 128, 0, stream>>>(args);
      break;
    case 128:
      GatherKernel<128><<<grid, 128, 0, stream>>>(args);
      break;
    case 256:
      GatherKernel<256><<<grid, 128, 0, stream>>>(args);
      break;
    default:
      CheckFailed(__FILE__, __LINE__, "head_dim", "no gather kernel for this head dimension");
  }
  PLIANT_CUDA_CHECK_LAUNCH();
}

}  // namespace pliant::cuda
