// Room: backend. out = x Wᵀ (+ bias) (+ out) over packed weights. The kernels differ in instruction
// set only; each gives a row the same bits whatever the number of rows, the number of threads, and
// the place of the row in the batch: every output element is summed over its columns in one fixed
// order, and bias and residual are added after that.
//
// Rounding: kernels kAmx and kAvx512Bf16 round weights (after d q + m in f32) and activations to
// bf16 and sum in f32; the f32 kernels round nothing but their sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/cpu_level.h"
#include "backend/cpu/packed_matrix.h"

namespace pliant {

/// One product. Rows of `x` are [cols] f32; `x_bf16`, where set, holds the same rounded to bf16,
/// padded with zeros to a multiple of 32 columns and with anything to a multiple of 32 rows.
struct GemmCall {
  const PackedMatrix* weight = nullptr;
  std::int64_t rows = 0;
  const float* x = nullptr;
  std::int64_t x_stride = 0;
  const std::uint16_t* x_bf16 = nullptr;
  std::int64_t x_bf16_stride = 0;
  const float* bias = nullptr;  // [weight rows] or null
  bool accumulate = false;      // out += instead of out =
  float* out = nullptr;
  std::int64_t out_stride = 0;
  /// When set (see GemmKernel::gates), the upper half of the weight's rows is a gate, the lower
  /// half what it gates: silu(gate) * up goes to `gated` as [rows][weight rows / 2] bf16, and out,
  /// bias and accumulate are not used. A prefill's gate and up are the largest activations by far;
  /// so they never leave L1.
  std::uint16_t* gated = nullptr;
  std::int64_t gated_stride = 0;
  void (*silu_mul)(const float* gate, const float* up, std::int64_t count, float* out) = nullptr;
};

struct GemmKernel {
  const char* name;
  /// Bytes of scratch (aligned to 64) that one thread needs for products of `blocks` column blocks.
  std::size_t (*scratch_bytes)(std::int64_t blocks);
  /// The kernel reads x_bf16 for this many rows (and f32 x otherwise).
  bool (*wants_bf16)(std::int64_t rows);
  /// The kernel can do `gated` for this many rows of x and this weight.
  bool (*gates)(std::int64_t rows, const PackedMatrix& weight);
  /// Computes the output columns of panels [begin, end); of the gate's panels when `gated` is set.
  /// Threads may run disjoint ranges at once.
  void (*run)(const GemmCall& call, std::int64_t begin, std::int64_t end, std::byte* scratch);
};

/// The kernel for a level; `precise` asks for f32 arithmetic at that level.
const GemmKernel& ChooseGemmKernel(CpuLevel level, bool precise);

/// The kernels themselves. Calling one on a machine below its level is undefined.
const GemmKernel& AmxGemmKernel();
const GemmKernel& Avx512Bf16GemmKernel();
const GemmKernel& F32GemmKernel(CpuLevel level);

/// Rows [begin, end) of x as bf16 (round to nearest even), padded to `padded_cols`. Levels kAvx512
/// and up only.
void ConvertRowsToBf16(const float* x, std::int64_t x_stride, std::int64_t cols, std::int64_t begin,
                       std::int64_t end, std::uint16_t* out, std::int64_t padded_cols);

}  // namespace pliant
