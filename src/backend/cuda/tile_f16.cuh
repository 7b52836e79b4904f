// Room: backend/cuda. fp16 tiles in shared memory and the tensor cores' products of them
// (mma.m16n8k16). Device code only.
//
// Lane (g, t) = (lane / 4, lane % 4) of a 16 x 8 result holds rows g, g + 8, columns 2 t, 2 t + 1;
// of a 16 x 16 left operand the pairs (g, 2 t), (g + 8, 2 t), (g, 2 t + 8), (g + 8, 2 t + 8).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace pliant::cuda {

__device__ __forceinline__ void LoadMatrices(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(std::uint32_t (&r)[4],
                                                       std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void MmaF16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                       std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ std::uint32_t PackF16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// Byte of a row-major fp16 tile with rows of D elements; 16-byte chunks are swizzled so that
/// ldmatrix has no bank conflicts.
template <int D>
__device__ __forceinline__ int TileByte(int row, int chunk) {
  constexpr int kChunks = D / 8;
  return row * D * 2 + ((kChunks >= 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3)) << 4);
}

}  // namespace pliant::cuda
