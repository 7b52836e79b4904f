// Likeness of keys where what is dropped does not return: cosines of keys in 8 bits, by integer
// products. A thread block a unit. Bound, of a block that fills: 32 * head_dim / 4 dp4a for each
// token that takes part and unit, and one read of its codes; 4,096 tokens of 256 units with 128
// dims: 1.1e9 dp4a and 134 MB, 0.1 ms on an H200.
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/head_dims.cuh"
#include "backend/cuda/history_changes/history_changes.h"
#include "backend/cuda/history_changes/noted_keys.cuh"
#include "backend/retained_history.h"

namespace pliant::cuda {
namespace {

constexpr int kThreads = kNoteThreads, kWarps = kThreads / 32;
constexpr std::uint32_t kAll = 0xffffffffu;

template <int D>
struct ExactShared : KeyRows<D> {
  int4 codes[kBlockTokens][D / 16];
  float norms[kBlockTokens];
  float mean[D];
};

/// Rounds the block's keys, around their mean, to 8 bits of each one's largest channel: into shared
/// memory and the tables. Unfused, as on the host.
template <int D>
__device__ void CodeKeys(const HistoryTables& t, std::int32_t block, ExactShared<D>& s) {
  constexpr int kWords = D / 4, kEach = (kWords + 31) / 32;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int token = warp; token < kBlockTokens; token += kWarps) {
    float most = 0;
    for (int c = lane; c < D; c += 32)
      most = fmaxf(most, fabsf(__fsub_rn(s.keys[token][c], s.mean[c])));
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) most = fmaxf(most, __shfl_xor_sync(kAll, most, m));
    const float step = most > 0 ? __fdiv_rn(127.f, most) : 0.f;
    const std::size_t at =
        static_cast<std::size_t>(blockIdx.x) * t.token_room + t.At(block * kBlockTokens + token);
    int squares = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int word = lane + 32 * j;
      if (word >= kWords) break;
      int packed = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = 4 * word + i;
        const float x = __fsub_rn(s.keys[token][c], s.mean[c]);
        const int code = __float2int_rn(__fmul_rn(x, step));
        squares += code * code;
        packed |= (code & 255) << (8 * i);
      }
      reinterpret_cast<int*>(s.codes[token])[word] = packed;
      reinterpret_cast<int*>(t.token_codes + at * D)[word] = packed;
    }
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) squares += __shfl_xor_sync(kAll, squares, m);
    if (lane != 0) continue;
    const float norm = squares > 0 ? __fdiv_rn(1.f, __fsqrt_rn(static_cast<float>(squares))) : 0.f;
    s.norms[token] = norm;
    t.token_norm[at] = norm;
  }
}

/// Lowers weights of what takes part by the keys of `block`, which are in s: a thread a token.
template <int D>
__device__ void Compare(const HistoryNoteArgs& a, std::int32_t block, const ExactShared<D>& s) {
  constexpr int kChunks = D / 16;
  const HistoryTables& t = a.tables;
  const std::size_t unit = blockIdx.x;
  const std::int32_t first = block * kBlockTokens, slots = a.kept_blocks * kBlockTokens;
  const std::int32_t whole = a.frontier * kBlockTokens;
  const std::int32_t count = slots + first + kBlockTokens - whole;
  for (std::int32_t i = threadIdx.x; i < count; i += kThreads) {
    const std::int32_t token = i < slots ? -1 : whole + i - slots;  // kept ones are all older
    const std::size_t at = i < slots ? unit * t.slot_room + i : unit * t.token_room + t.At(token);
    const auto* const codes =
        reinterpret_cast<const int4*>((i < slots ? t.slot_codes : t.token_codes) + at * D);
    int4 own[kChunks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) own[j] = codes[j];
    float nearest = 0;
    for (int later = max(0, token + 1 - first); later < kBlockTokens; ++later) {
      int dot = 0;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const int4 its = s.codes[later][j];
        dot = __dp4a(own[j].x, its.x, dot);
        dot = __dp4a(own[j].y, its.y, dot);
        dot = __dp4a(own[j].z, its.z, dot);
        dot = __dp4a(own[j].w, its.w, dot);
      }
      nearest = fmaxf(nearest, __fmul_rn(static_cast<float>(dot), s.norms[later]));
    }
    if (!(nearest > 0)) continue;
    const float norm = i < slots ? t.slot_norm[at] : t.token_norm[at];
    float& weight = i < slots ? t.slot_weight[at] : t.token_weight[at];
    weight = fminf(weight, UnlikenessPower(__fmul_rn(nearest, norm), t.redundancy));
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads)
    NoteExactlyKernel(const __grid_constant__ HistoryNoteArgs a) {
  __shared__ __align__(16) ExactShared<D> s;
  SumKeys<D>(a, s);
  const HistoryTables& t = a.tables;
  const double share = t.keys_summed > 0 ? 1.0 / t.keys_summed : 0.0;
  for (int c = threadIdx.x; c < D; c += kThreads)
    s.mean[c] = static_cast<float>(t.key_sum[static_cast<std::size_t>(blockIdx.x) * D + c] * share);
  for (std::int32_t block = a.first_block; block < a.blocks; ++block) {
    DecodeKeys<D>(a, block, s);
    CodeKeys<D>(t, block, s);
    __syncthreads();
    Compare<D>(a, block, s);
  }
}

}  // namespace

void LaunchHistoryNoteExactly(const HistoryNoteArgs& args, cudaStream_t stream) {
  ForHeadDim(args.head_dim,
             [&]<int D>() { NoteExactlyKernel<D><<<args.units, kThreads, 0, stream>>>(args); });
  PLIANT_CUDA_CHECK_LAUNCH();
}

}  // namespace pliant::cuda
