// Room: backend/cuda. The instructions of prefill attention on sm_90a: matrix products of a
// warpgroup (wgmma), tiles by the tensor copy engine, register quotas and named barriers. Shared
// matrices are fp16 in columns of 64 elements, rows of 128 bytes, the 16-byte chunks of row r
// swizzled by r mod 8 (the copy engine's 128-byte mode). Device code only.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace pliant::cuda {

/// Of a matrix in shared memory. `leading`: bytes from 64 columns to the next 64, only looked at
/// when the columns are not what is summed over; 8 rows are 1,024 bytes.
__device__ __forceinline__ std::uint64_t SharedMatrix(std::uint32_t address,
                                                      std::uint32_t leading = 16) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return ((address & 0x3ffffu) >> 4) | static_cast<std::uint64_t>(leading >> 4) << 16 |
         static_cast<std::uint64_t>(1024 >> 4) << 32 | kSwizzle128;
}

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `kPending` committed groups are still at work.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Registers that a product reads or writes must not be moved across this point.
template <int N>
__device__ __forceinline__ void HoldRegisters(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// x, which is never negative, is computed before what follows: without this the assembler moves
/// the exponentials behind the wait that they are to fill. (A store that never happens, to shared
/// memory.)
__device__ __forceinline__ void ComputedBefore(float x, std::uint32_t shared) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(x),
      "r"(shared)
      : "memory");
}

#define PLIANT_D8(d, i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define PLIANT_D32(d, i) \
  PLIANT_D8(d, i), PLIANT_D8(d, i + 8), PLIANT_D8(d, i + 16), PLIANT_D8(d, i + 24)
#define PLIANT_R32                                                                             \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define PLIANT_R64                                                                                \
  PLIANT_R32                                                                                      \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63"

/// d (64 x 128) = a bᵀ, or += with `add`: a 64 x 16 and b 128 x 16 in shared memory, 16 columns of
/// rows as above. A lane's part of d: [8 columns][row g: columns 2 t, 2 t + 1; row g + 8: the
/// same].
__device__ __forceinline__ void WgmmaScores(float (&d)[64], std::uint64_t a, std::uint64_t b,
                                            bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" PLIANT_R64
      "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : PLIANT_D32(d, 0), PLIANT_D32(d, 32)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
/// The same with 64 rows of b.
__device__ __forceinline__ void WgmmaScores(float (&d)[32], std::uint64_t a, std::uint64_t b,
                                            bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" PLIANT_R32
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : PLIANT_D32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
/// d (64 x 128) += a b: a 64 x 16 in registers (rows g, g + 8; columns 2 t .. and 2 t + 8 ..), b 16
/// x 128 in shared memory.
__device__ __forceinline__ void WgmmaValues(float (&d)[64], const std::uint32_t (&a)[4],
                                            std::uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" PLIANT_R64
      "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}"
      : PLIANT_D32(d, 0), PLIANT_D32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void WgmmaValues(float (&d)[32], const std::uint32_t (&a)[4],
                                            std::uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" PLIANT_R32
      "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}"
      : PLIANT_D32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef PLIANT_D8
#undef PLIANT_D32
#undef PLIANT_R32
#undef PLIANT_R64

/// A box of the mapped array to shared memory; what lies outside of it reads as zero.
__device__ __forceinline__ void TensorCopy(std::uint32_t to, const CUtensorMap& map, int x, int y,
                                           int z, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void PrefetchMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
/// Ordinary stores to shared memory so far are seen by wgmma and the copy engine.
__device__ __forceinline__ void SharedStoresFence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void NamedSync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace pliant::cuda
