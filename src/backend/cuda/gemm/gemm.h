// Room: backend/cuda. Products with weights by cuBLASLt: bf16 or fp16 operands, f32 sums, f32 or
// bf16 results. One plan (layouts and algorithm) a (rows, weight shape, mode), made at first use
// and kept. Called by the thread that owns the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "backend/cuda/cuda_types.h"
#include "backend/cuda/device_memory.h"
#include "base/status.h"

namespace pliant::cuda {

class Gemm {
 public:
  static Result<std::unique_ptr<Gemm>> Make();
  ~Gemm();

  /// out[rows][n] = x[rows][k] weightᵀ (+ bias[n]), weight [n][k]; with `accumulate`, out += that.
  /// x is bf16, the weight of `type`, bias and out f32. `half_x`: with fp16 weights, room for x's
  /// rows * k elements.
  void Run(const std::uint16_t* x, std::uint16_t* half_x, const std::uint16_t* weight,
           WeightType type, const float* bias, std::int64_t rows, std::int64_t n, std::int64_t k,
           float* out, bool accumulate, cudaStream_t stream);
  /// The same with bf16 weights and a bf16 result, for several rows.
  void RunToBf16(const std::uint16_t* x, const std::uint16_t* weight, std::int64_t rows,
                 std::int64_t n, std::int64_t k, std::uint16_t* out, cudaStream_t stream);

  /// Picks the algorithm for this shape by running what the library proposes, and takes another
  /// than its first only where that is clearly faster. Overwrites `out` (f32, or bf16); waits.
  void Tune(const std::uint16_t* x, const std::uint16_t* weight, std::int64_t rows, std::int64_t n,
            std::int64_t k, void* out, bool to_bf16, const Stream& stream);

 private:
  struct State;
  explicit Gemm(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace pliant::cuda
