#include "ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "backend/cpu/arena.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pliant {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point from) {
  return std::chrono::duration<double>(Clock::now() - from).count();
}

#if defined(__x86_64__)

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

constexpr int kLoops = 200000;

__attribute__((target("amx-tile,amx-bf16"))) double TileLoop() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = 16;
    config.row_bytes[t] = 64;
  }
  __asm__ volatile("" : : "m"(config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int i = 0; i < kLoops; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4.0 * 2 * 16 * 16 * 32 * kLoops;
}

__attribute__((target("avx512f,avx512bf16"))) double Bf16Loop() {
  __m512 sums[12];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  for (int i = 0; i < kLoops; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)ones, (__m512bh)ones);
      __asm__ volatile("" : "+v"(sums[j]));
    }
  }
  return 12.0 * 2 * 32 * kLoops;
}

__attribute__((target("avx2,fma"))) double FmaLoop() {
  __m256 sums[12];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  const __m256 half = _mm256_set1_ps(0.5f);
  for (int i = 0; i < kLoops; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      sums[j] = _mm256_fmadd_ps(sums[j], half, half);
      __asm__ volatile("" : "+x"(sums[j]));
    }
  }
  return 12.0 * 2 * 8 * kLoops;
}

#endif

double PlainLoop() {
  constexpr int kCount = 2000000;
  float sums[16] = {};
  for (int i = 0; i < kCount; ++i) {
    for (float& sum : sums) sum = sum * 0.5f + 0.5f;
  }
  volatile float sink = sums[0] + sums[15];
  (void)sink;
  return 16.0 * 2 * kCount;
}

double Loop(CpuLevel level) {
#if defined(__x86_64__)
  if (level == CpuLevel::kAmx) return TileLoop();
  if (level == CpuLevel::kAvx512) return Bf16Loop();
  if (level == CpuLevel::kAvx2) return FmaLoop();
#endif
  (void)level;
  return PlainLoop();
}

}  // namespace

double MeasureReadBytes(ThreadPool& pool) {
  constexpr std::size_t kEach = std::size_t{96} << 20;
  Arena arena;
  auto memory = arena.Allocate(kEach * pool.threads());
  if (!memory.ok()) return 0;
  std::byte* base = *memory;
  pool.Run([&](int worker) { std::memset(base + worker * kEach, worker + 1, kEach); });
  double best = 1e9;
  for (int round = 0; round < 8; ++round) {
    const auto from = Clock::now();
    pool.Run([&](int worker) {
      const auto* words = reinterpret_cast<const std::uint64_t*>(base + worker * kEach);
      std::uint64_t sums[8] = {};
      for (std::size_t i = 0; i < kEach / 8; i += 8) {
        for (int j = 0; j < 8; ++j) sums[j] ^= words[i + j];
      }
      volatile std::uint64_t sink =
          sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
      (void)sink;
    });
    best = std::min(best, Seconds(from));
  }
  return static_cast<double>(kEach) * pool.threads() / best;
}

double MeasureFlops(ThreadPool& pool, CpuLevel level) {
  double best = 1e9;
  double flops = 0;
  for (int round = 0; round < 8; ++round) {
    const auto from = Clock::now();
    pool.Run([&](int worker) {
      const double done = Loop(level);
      if (worker == 0) flops = done;
    });
    best = std::min(best, Seconds(from));
  }
  return flops * pool.threads() / best;
}

}  // namespace pliant
