#include <cmath>

#include "backend/cuda/attention_prefill/attention_prefill.h"
#include "backend/cuda/attention_prefill/attention_prefill_sm90.h"
#include "backend/cuda/channel_code.cuh"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/tile_f16.cuh"
#include "backend/plane_code.h"
#include "base/check.h"

namespace pliant::cuda {
namespace {

constexpr int kTileRows = 64;
constexpr int kWarps = kTileRows / 16;
constexpr std::uint32_t kAll = 0xffffffffu;

/// Keys of a tile: fewer for wide heads, so that two tiles of K and V and the queries fit 99 KiB.
template <int D>
constexpr int TileKeys() {
  return D == 256 ? 32 : 64;
}
template <int D>
constexpr int SharedBytes() {
  return (kTileRows + 4 * TileKeys<D>()) * D * 2;
}

/// One thread block a (tile of query rows, head); a warp has 16 rows. Lane (g, t) of a 16 x 8
/// result holds rows g, g + 8, columns 2 t, 2 t + 1.
template <int D>
__global__ void __launch_bounds__(kWarps * 32)
    PrefillKernel(const __grid_constant__ PrefillArgs a) {
  constexpr int kKeys = TileKeys<D>(), kChunks = D / 8, kThreads = kWarps * 32;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  // Long tiles first: they come last in the list.
  const PrefillTile tile = a.tiles[a.tile_count - 1 - blockIdx.x];
  const int head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
  const std::uint32_t q_base = SharedAddress(shared), k_base = q_base + kTileRows * D * 2,
                      v_base = k_base + 2 * kKeys * D * 2;
  const std::int64_t kv_stride = static_cast<std::int64_t>(a.kv_heads) * D;
  const std::int64_t kv_first =
      static_cast<std::int64_t>(tile.first_block) * kBlockTokens * kv_stride + kv_head * D;
  const int tokens = tile.first_position + tile.rows;
  const int key_tiles = (tokens + kKeys - 1) / kKeys;

  // Gathered memory is whole blocks, so tokens up to the next multiple of 32 may be read; beyond
  // that the last token is read again.
  const int last_token = (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens - 1;
  auto load = [&](int key_tile) {
    const int buffer = key_tile & 1;
    for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const std::int64_t from =
          kv_first + min(key_tile * kKeys + row, last_token) * kv_stride + chunk * 8;
      const int at = buffer * kKeys * D * 2 + TileByte<D>(row, chunk);
      AsyncCopy16(k_base + at, a.k + from);
      AsyncCopy16(v_base + at, a.v + from);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  load(0);

  const float to_log2 = a.softmax_scale * 1.4426950408889634f;
  for (int i = threadIdx.x; i < kTileRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f), y = x;
    if (row < tile.rows) {
      const float4* p = reinterpret_cast<const float4*>(a.q + (tile.first_row + row) * a.q_stride +
                                                        head * D + chunk * 8);
      x = p[0];
      y = p[1];
    }
    const uint4 packed =
        make_uint4(PackF16(x.x * to_log2, x.y * to_log2), PackF16(x.z * to_log2, x.w * to_log2),
                   PackF16(y.x * to_log2, y.y * to_log2), PackF16(y.z * to_log2, y.w * to_log2));
    *reinterpret_cast<uint4*>(shared + TileByte<D>(row, chunk)) = packed;
  }

  float out[D / 8][4];
#pragma unroll
  for (int i = 0; i < D / 8; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.f;
  float top[2] = {-INFINITY, -INFINITY}, mass[2] = {0.f, 0.f};
  const int own_row = warp * 16 + g;
  const int limit[2] = {tile.first_position + own_row,
                        tile.first_position + own_row + 8};  // last token that the row reads

#pragma unroll 1
  for (int key_tile = 0; key_tile < key_tiles; ++key_tile) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();  // this tile is there, and nobody reads the other buffer any more
    if (key_tile + 1 < key_tiles) load(key_tile + 1);
    const std::uint32_t k_tile = k_base + (key_tile & 1) * kKeys * D * 2,
                        v_tile = v_base + (key_tile & 1) * kKeys * D * 2;
    float score[kKeys / 8][4];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.f;
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      std::uint32_t q[4];
      LoadMatrices(q, q_base + TileByte<D>(warp * 16 + (lane & 15), 2 * d + (lane >> 4)));
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        std::uint32_t k[4];
        LoadMatrices(k, k_tile + TileByte<D>(n * 16 + (lane >> 4) * 8 + (lane & 7),
                                             2 * d + ((lane >> 3) & 1)));
        MmaF16(score[2 * n], q, k[0], k[1]);
        MmaF16(score[2 * n + 1], q, k[2], k[3]);
      }
    }
    const int first_key = key_tile * kKeys;
    if (first_key + kKeys - 1 > tile.first_position) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (first_key + n * 8 + 2 * t + (c & 1) > limit[c >> 1]) score[n][c] = -INFINITY;
    }
#pragma unroll
    for (int b = 0; b < kKeys / kBlockTokens; ++b) {
      const int block = min(first_key / kBlockTokens + b, last_token / kBlockTokens);
      if (a.present[tile.first_block + block]) continue;
#pragma unroll
      for (int n = 0; n < 4; ++n)
        score[4 * b + n][0] = score[4 * b + n][1] = score[4 * b + n][2] = score[4 * b + n][3] =
            -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float best = top[h];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        best = fmaxf(best, fmaxf(score[n][2 * h], score[n][2 * h + 1]));
      best = fmaxf(best, __shfl_xor_sync(kAll, best, 1));
      best = fmaxf(best, __shfl_xor_sync(kAll, best, 2));
      const float base =
          best == -INFINITY ? 0.f : best;  // nothing seen yet: every weight is 0, not NaN
      const float keep = Exp2(top[h] - base);
      top[h] = best;
      mass[h] *= keep;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        score[n][2 * h] = Exp2(score[n][2 * h] - base);
        score[n][2 * h + 1] = Exp2(score[n][2 * h + 1] - base);
        mass[h] += score[n][2 * h] + score[n][2 * h + 1];
      }
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        out[i][2 * h] *= keep;
        out[i][2 * h + 1] *= keep;
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const std::uint32_t p[4] = {PackF16(score[2 * n][0], score[2 * n][1]),
                                  PackF16(score[2 * n][2], score[2 * n][3]),
                                  PackF16(score[2 * n + 1][0], score[2 * n + 1][1]),
                                  PackF16(score[2 * n + 1][2], score[2 * n + 1][3])};
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        std::uint32_t v[4];
        LoadMatricesTransposed(v, v_tile + TileByte<D>(n * 16 + (lane & 15), 2 * i + (lane >> 4)));
        MmaF16(out[2 * i], p, v[0], v[1]);
        MmaF16(out[2 * i + 1], p, v[2], v[3]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    mass[h] += __shfl_xor_sync(kAll, mass[h], 1);
    mass[h] += __shfl_xor_sync(kAll, mass[h], 2);
    const int row = own_row + 8 * h;
    if (row >= tile.rows) continue;
    const float scale = mass[h] == 0.f ? 0.f : 1.f / mass[h];
    const std::int64_t at = (tile.first_row + row) * a.out_stride + head * D + 2 * t;
    const int first = head / (a.heads / a.kv_heads) * D + 2 * t;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const float x = Uncoded(a.value, first + 8 * i, out[i][2 * h] * scale);
      const float y = Uncoded(a.value, first + 8 * i + 1, out[i][2 * h + 1] * scale);
      if (a.out_type == ElementType::kF32) {
        *reinterpret_cast<float2*>(static_cast<float*>(a.out) + at + 8 * i) = make_float2(x, y);
      } else {
        *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(a.out) + at + 8 * i) =
            PackBf16(x, y);
      }
    }
  }
}

template <int D>
void Launch(const PrefillArgs& args, cudaStream_t stream) {
  static const bool raised = [] {
    PLIANT_CUDA_CHECK(cudaFuncSetAttribute(
        PrefillKernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedBytes<D>()));
    return true;
  }();
  (void)raised;
  PrefillKernel<D>
      <<<dim3(args.tile_count, args.heads), kWarps * 32, SharedBytes<D>(), stream>>>(args);
  PLIANT_CUDA_CHECK_LAUNCH();
}

}  // namespace

int PrefillTileRows(int head_dim) {
  return HasWarpgroupPrefill(head_dim) ? kWarpgroupTileRows : kTileRows;
}

void LaunchPrefillAttention(const PrefillArgs& args, cudaStream_t stream) {
  if (args.tile_count == 0) return;
  if (HasWarpgroupPrefill(args.head_dim)) return LaunchWarpgroupPrefill(args, stream);
  switch (args.head_dim) {
    case 32:
      return Launch<32>(args, stream);
    case 64:
      return Launch<64>(args, stream);
    case 128:
      return Launch<128>(args, stream);
    case 256:
      return Launch<256>(args, stream);
  }
  CheckFailed(__FILE__, __LINE__, "head_dim",
              "no prefill attention kernel for this head dimension");
}

}  // namespace pliant::cuda
