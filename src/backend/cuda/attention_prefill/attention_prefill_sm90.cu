// Prefill attention for sm_90a. A thread block has a tile of 128 query rows of one head: a warp
// that brings tiles of keys and values by the tensor copy engine, and two warpgroups of 64 rows
// each that work them. Both products are wgmma; while the scores of one key tile are worked into
// weights, the values of the tile before are still being multiplied (within a warpgroup the
// schedule of FlashAttention-3, arXiv 2407.08608). Letting the warpgroups take turns at the tensor
// cores, as it does too, changed nothing here: they fall into step by themselves.
#include <cuda.h>
#include <cuda_fp16.h>

#include <cmath>

#include "backend/cuda/attention_prefill/attention_prefill_sm90.h"
#include "backend/cuda/attention_prefill/wgmma.cuh"
#include "backend/cuda/channel_code.cuh"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/ptx.cuh"
#include "backend/plane_code.h"
#include "base/check.h"

namespace pliant::cuda {
namespace {

constexpr int kRows = 64;  // of a warpgroup
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kStages = 2;
static_assert(kRows * kConsumers == kWarpgroupTileRows);

template <int D>
struct Shape {
  static constexpr int kKeys = D == 256 ? 64 : 128;  // of a tile
  static constexpr int kHalves = D / 64;             // columns of 64 elements
  static constexpr int kColumn = kKeys * 128;        // bytes of one of a key tile
  static constexpr int kTile = kHalves * kColumn;    // bytes of a key (or value) tile
  static constexpr int kQueries = kRows * D * 2;     // bytes of a warpgroup's queries
  static constexpr int kBytes = kConsumers * kQueries + 2 * kStages * kTile + 1024;
};

/// What a key tile's barriers count: "full" by the bytes that have landed, "empty" by the warps
/// that are done with it.
struct Barriers {
  std::uint64_t key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
};

struct Maps {
  CUtensorMap k, v;  // [tokens][kv_heads][D], boxes of [kKeys][1][64]
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int D>
struct Output {
  static constexpr int kPart = D == 64 ? 64 : 128;  // columns of one product
  static constexpr int kParts = D / kPart;
};

__device__ __forceinline__ std::uint32_t PackF16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

template <int D>
__device__ __forceinline__ void Produce(const Maps& maps, const Barriers& barriers,
                                        std::uint32_t keys, std::uint32_t values, int kv_head,
                                        int first_token, int key_tiles) {
  using S = Shape<D>;
  const auto bring = [&](const CUtensorMap& map, std::uint32_t to, const std::uint64_t* full,
                         const std::uint64_t* empty, int i) {
    const int stage = i % kStages;
    const std::uint32_t barrier = SharedAddress(full + stage);
    BarrierWait(SharedAddress(empty + stage), ((i / kStages) & 1) ^ 1);
    BarrierExpect(barrier, S::kTile);
    const int token = first_token + (key_tiles - 1 - i) * S::kKeys;
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
      TensorCopy(to + stage * S::kTile + h * S::kColumn, map, 64 * h, kv_head, token, barrier);
  };
  for (int i = 0; i < key_tiles; ++i) {
    bring(maps.k, keys, barriers.key_full, barriers.key_empty, i);
    if (i > 0) bring(maps.v, values, barriers.value_full, barriers.value_empty, i - 1);
  }
  bring(maps.v, values, barriers.value_full, barriers.value_empty, key_tiles - 1);
}

/// A warpgroup's 64 query rows, times what makes softmax a power of two, as fp16.
template <int D>
__device__ __forceinline__ void LoadQueries(const PrefillArgs& a, const PrefillTile& tile,
                                            int first_row, int head, std::uint8_t* to) {
  constexpr int kChunks = D / 8;
  const float to_log2 = a.softmax_scale * 1.4426950408889634f;
#pragma unroll 4
  for (int i = threadIdx.x & 127; i < kRows * kChunks; i += 128) {
    const int row = i / kChunks, chunk = i % kChunks;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f), y = x;
    if (first_row + row < tile.rows) {
      const float4* p = reinterpret_cast<const float4*>(
          a.q + static_cast<std::int64_t>(tile.first_row + first_row + row) * a.q_stride +
          head * D + chunk * 8);
      x = p[0];
      y = p[1];
    }
    *reinterpret_cast<uint4*>(to + (chunk >> 3) * (kRows * 128) + row * 128 +
                              (((chunk & 7) ^ (row & 7)) << 4)) =
        make_uint4(PackF16(x.x * to_log2, x.y * to_log2), PackF16(x.z * to_log2, x.w * to_log2),
                   PackF16(y.x * to_log2, y.y * to_log2), PackF16(y.z * to_log2, y.w * to_log2));
  }
}

/// Scores of keys that a row does not read become minus infinity. limit[h]: the last key of the
/// lane's row g + 8 h; `lowest`: that of the warp's first row.
template <int kKeys>
__device__ __forceinline__ void Mask(float (&score)[kKeys / 2], const PrefillArgs& a,
                                     const PrefillTile& tile, int first_key, int lowest,
                                     const int (&limit)[2], int last_block) {
  const int t = threadIdx.x & 3;
  if (first_key + kKeys - 1 > lowest) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (first_key + (i >> 2) * 8 + 2 * t + (i & 1) > limit[(i >> 1) & 1]) score[i] = -INFINITY;
    }
  }
  if (tile.holes == 0) return;
#pragma unroll
  for (int b = 0; b < kKeys / kBlockTokens; ++b) {
    const int block = min(first_key / kBlockTokens + b, last_block);
    if (a.present[tile.first_block + block] != 0) continue;
#pragma unroll
    for (int i = 0; i < kBlockTokens / 2; ++i) score[b * (kBlockTokens / 2) + i] = -INFINITY;
  }
}

/// Scores to weights; keep[h] is what sums so far are to be multiplied by.
template <int N>
__device__ __forceinline__ void Softmax(float (&score)[N], float (&top)[2], float (&mass)[2],
                                        float (&keep)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float best = top[h];
#pragma unroll
    for (int i = 0; i < N; i += 4)
      best = fmaxf(best, fmaxf(score[i + 2 * h], score[i + 2 * h + 1]));
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
    best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
    const float base = best == -INFINITY ? 0.f : best;  // nothing seen yet: all weights are 0
    keep[h] = Exp2(top[h] - base);
    top[h] = best;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      score[i + 2 * h] = Exp2(score[i + 2 * h] - base);
      score[i + 2 * h + 1] = Exp2(score[i + 2 * h + 1] - base);
      sum += score[i + 2 * h] + score[i + 2 * h + 1];
    }
    mass[h] = mass[h] * keep[h] + sum;
  }
}

/// Weights of 16 keys a piece, as the left operand of the product with the values.
template <int N>
__device__ __forceinline__ void Pack(const float (&score)[N], std::uint32_t (&p)[N / 8][4]) {
#pragma unroll
  for (int i = 0; i < N / 8; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) p[i][c] = PackF16(score[8 * i + 2 * c], score[8 * i + 2 * c + 1]);
}

template <int D>
__device__ __forceinline__ void Store(const PrefillArgs& a, const PrefillTile& tile, int first_row,
                                      int head,
                                      float (&out)[Output<D>::kParts][Output<D>::kPart / 2],
                                      float (&mass)[2]) {
  using S = Shape<D>;
  const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    mass[h] += __shfl_xor_sync(0xffffffffu, mass[h], 1);
    mass[h] += __shfl_xor_sync(0xffffffffu, mass[h], 2);
    const int row = first_row + (lane >> 2) + 8 * h;
    if (row >= tile.rows) continue;
    const float scale = mass[h] == 0.f ? 0.f : 1.f / mass[h];
    const std::int64_t at =
        static_cast<std::int64_t>(tile.first_row + row) * a.out_stride + head * D + 2 * t;
    const int first = head / (a.heads / a.kv_heads) * D + 2 * t;
#pragma unroll
    for (int part = 0; part < Output<D>::kParts; ++part)
#pragma unroll
      for (int i = 0; i < Output<D>::kPart / 8; ++i) {
        const int c = part * Output<D>::kPart + 8 * i;
        const float x = Uncoded(a.value, first + c, out[part][4 * i + 2 * h] * scale);
        const float y = Uncoded(a.value, first + c + 1, out[part][4 * i + 2 * h + 1] * scale);
        const std::int64_t to = at + c;
        if (a.out_type == ElementType::kF32) {
          *reinterpret_cast<float2*>(static_cast<float*>(a.out) + to) = make_float2(x, y);
        } else {
          *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(a.out) + to) =
              PackBf16(x, y);
        }
      }
  }
}

/// One warpgroup's rows. Named barrier 1 + consumer is its own.
template <int D>
__device__ __forceinline__ void Consume(const PrefillArgs& a, const PrefillTile& tile,
                                        const Barriers& barriers, std::uint8_t* query_bytes,
                                        std::uint32_t keys, std::uint32_t values, int head,
                                        int consumer, int tokens, int key_tiles) {
  using S = Shape<D>;
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  LoadQueries<D>(a, tile, consumer * kRows, head, query_bytes);
  SharedStoresFence();
  NamedSync(1 + consumer, 128);

  const std::uint32_t queries = SharedAddress(query_bytes);
  const int warp_row = consumer * kRows + warp * 16, lowest = tile.first_position + warp_row;
  const int limit[2] = {lowest + (lane >> 2), lowest + (lane >> 2) + 8};
  const int last_block = (tokens - 1) / kBlockTokens;
  float score[S::kKeys / 2], out[Output<D>::kParts][Output<D>::kPart / 2];
  std::uint32_t p[S::kKeys / 16][4];
#pragma unroll
  for (int part = 0; part < Output<D>::kParts; ++part)
#pragma unroll
    for (int i = 0; i < Output<D>::kPart / 2; ++i) out[part][i] = 0.f;
  float top[2] = {-INFINITY, -INFINITY}, mass[2] = {0.f, 0.f}, keep[2];

  const auto multiply_keys = [&](int i) {
    const std::uint32_t tile_at = keys + (i % kStages) * S::kTile;
    HoldRegisters(score);
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      WgmmaScores(score, SharedMatrix(queries + (d >> 2) * (kRows * 128) + (d & 3) * 32),
                  SharedMatrix(tile_at + (d >> 2) * S::kColumn + (d & 3) * 32), d > 0);
    }
    WgmmaCommit();
  };
  const auto multiply_values = [&](int i) {
    const std::uint32_t tile_at = values + (i % kStages) * S::kTile;
#pragma unroll
    for (int part = 0; part < Output<D>::kParts; ++part) HoldRegisters(out[part]);
    WgmmaFence();
#pragma unroll
    for (int n = 0; n < S::kKeys / 16; ++n)
#pragma unroll
      for (int part = 0; part < Output<D>::kParts; ++part) {
        WgmmaValues(out[part], p[n],
                    SharedMatrix(tile_at + part * (Output<D>::kPart / 64) * S::kColumn + n * 2048,
                                 S::kColumn));
      }
    WgmmaCommit();
  };
  const auto landed = [&](const std::uint64_t* full, int i) {
    BarrierWait(SharedAddress(full + i % kStages), (i / kStages) & 1);
  };
  const auto release = [&](const std::uint64_t* empty, int i) {
    if (lane == 0) BarrierArrive(SharedAddress(empty + i % kStages));
  };
  const auto mask = [&](int i) {
    Mask<S::kKeys>(score, a, tile, (key_tiles - 1 - i) * S::kKeys, lowest, limit, last_block);
  };

  landed(barriers.key_full, 0);
  multiply_keys(0);
  WgmmaWait<0>();
  HoldRegisters(score);
  release(barriers.key_empty, 0);
  mask(0);
  Softmax(score, top, mass, keep);
  Pack(score, p);
#pragma unroll 1
  for (int i = 1; i < key_tiles; ++i) {
    landed(barriers.key_full, i);
    multiply_keys(i);
    landed(barriers.value_full, i - 1);
    multiply_values(i - 1);
    WgmmaWait<1>();
    HoldRegisters(score);
    release(barriers.key_empty, i);
    mask(i);
    Softmax(score, top, mass, keep);
    ComputedBefore(mass[0] + mass[1], queries);
    WgmmaWait<0>();
#pragma unroll
    for (int part = 0; part < Output<D>::kParts; ++part) HoldRegisters(out[part]);
    release(barriers.value_empty, i - 1);
#pragma unroll
    for (int part = 0; part < Output<D>::kParts; ++part)
#pragma unroll
      for (int c = 0; c < Output<D>::kPart / 2; ++c) out[part][c] *= keep[(c >> 1) & 1];
    Pack(score, p);
  }
  landed(barriers.value_full, key_tiles - 1);
  multiply_values(key_tiles - 1);
  WgmmaWait<0>();
#pragma unroll
  for (int part = 0; part < Output<D>::kParts; ++part) HoldRegisters(out[part]);
  Store<D>(a, tile, warp_row, head, out, mass);
}

#endif

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    WarpgroupPrefillKernel(const __grid_constant__ PrefillArgs a,
                           const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<D>;
  extern __shared__ std::uint8_t raw[];
  __shared__ Barriers barriers;
  std::uint8_t* const shared = raw + ((1024 - (SharedAddress(raw) & 1023)) & 1023);
  const std::uint32_t keys = SharedAddress(shared) + kConsumers * S::kQueries,
                      values = keys + kStages * S::kTile;
  // Long tiles first: they come last in the list.
  const PrefillTile tile = a.tiles[a.tile_count - 1 - blockIdx.y];
  const int head = blockIdx.x, kv_head = head / (a.heads / a.kv_heads);
  const int tokens = tile.first_position + tile.rows;
  const int key_tiles = (tokens + S::kKeys - 1) / S::kKeys;
  const int consumers = tile.rows > kRows ? 2 : 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(SharedAddress(&barriers.key_full[i]), 1);
      BarrierInit(SharedAddress(&barriers.value_full[i]), 1);
      BarrierInit(SharedAddress(&barriers.key_empty[i]), 4 * consumers);
      BarrierInit(SharedAddress(&barriers.value_empty[i]), 4 * consumers);
    }
    BarrierInitFence();
  }
  __syncthreads();
  const int group = threadIdx.x >> 7;
  if (group == 0) {
    GiveRegisters<24>();
    if (threadIdx.x == 0) {
      PrefetchMap(maps.k);
      PrefetchMap(maps.v);
      Produce<D>(maps, barriers, keys, values, kv_head, tile.first_block * kBlockTokens, key_tiles);
    }
  } else {
    TakeRegisters<240>();
    if (group <= consumers) {
      Consume<D>(a, tile, barriers, shared + (group - 1) * S::kQueries, keys, values, head,
                 group - 1, tokens, key_tiles);
    }
  }
#endif
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled FindEncode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  PLIANT_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                     cudaEnableDefault, &result));
  PLIANT_CHECK(result == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<EncodeTiled>(found);
}

CUtensorMap Map(const PrefillArgs& args, const std::uint16_t* data, int keys) {
  static const EncodeTiled encode = FindEncode();
  CUtensorMap map{};
  const auto heads = static_cast<cuuint64_t>(args.kv_heads);
  const auto row = static_cast<cuuint64_t>(args.head_dim) * sizeof(std::uint16_t);
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(args.head_dim), heads,
                               static_cast<cuuint64_t>(args.gathered_blocks) * kBlockTokens};
  const cuuint64_t strides[2] = {row, row * heads};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(keys)}, steps[3] = {1, 1, 1};
  const CUresult made =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, const_cast<std::uint16_t*>(data), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  PLIANT_CHECK(made == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused the gathered K and V");
  return map;
}

template <int D>
void Launch(const PrefillArgs& args, cudaStream_t stream) {
  using S = Shape<D>;
  static const bool raised = [] {
    PLIANT_CUDA_CHECK(cudaFuncSetAttribute(WarpgroupPrefillKernel<D>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes));
    return true;
  }();
  (void)raised;
  const Maps maps{Map(args, args.k, S::kKeys), Map(args, args.v, S::kKeys)};
  // Heads next to each other in time: they share keys and values.
  for (int first = 0; first < args.tile_count; first += 65535) {
    PrefillArgs part = args;
    part.tiles += first;
    part.tile_count = std::min(65535, args.tile_count - first);
    WarpgroupPrefillKernel<D>
        <<<dim3(args.heads, part.tile_count), kThreads, S::kBytes, stream>>>(part, maps);
    PLIANT_CUDA_CHECK_LAUNCH();
  }
}

}  // namespace

bool HasWarpgroupPrefill(int head_dim) {
  static const bool hopper = [] {
    int device = 0, major = 0, minor = 0;
    PLIANT_CUDA_CHECK(cudaGetDevice(&device));
    PLIANT_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    PLIANT_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    return major == 9 && minor == 0;
  }();
  return hopper && (head_dim == 64 || head_dim == 128 || head_dim == 256);
}

void LaunchWarpgroupPrefill(const PrefillArgs& args, cudaStream_t stream) {
  switch (args.head_dim) {
    case 64:
      return Launch<64>(args, stream);
    case 128:
      return Launch<128>(args, stream);
    case 256:
      return Launch<256>(args, stream);
  }
  CheckFailed(__FILE__, __LINE__, "head_dim", "no warpgroup attention for this head dimension");
}

}  // namespace pliant::cuda
