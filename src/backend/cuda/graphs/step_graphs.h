// Room: backend/cuda. Decode steps as CUDA graphs: the launches of one step are captured once for
// each number of padded rows and replayed by one call. What changes from step to step is data in
// device memory at fixed addresses (step_inputs.h). Owned by the engine thread.
//
// The first step of a size runs as ordinary launches, so that buffers have grown and plans are
// made; the second is captured; later ones are replayed. When a buffer has moved, the size starts
// again.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <utility>

#include "backend/cuda/device_memory.h"

namespace pliant::cuda {

/// Rows that a step of `rows` is padded to: few different numbers, so that few plans and graphs are
/// needed; at most an eighth more from 64 rows on.
constexpr std::int64_t PaddedRows(std::int64_t rows) {
  const std::int64_t to = rows <= 2     ? 1
                          : rows <= 4   ? 2
                          : rows <= 8   ? 4
                          : rows <= 64  ? 8
                          : rows <= 128 ? 16
                          : rows <= 256 ? 32
                                        : 64;
  return (rows + to - 1) / to * to;
}

class StepGraphs {
 public:
  enum class Mode { kLaunch, kCapture, kReplay };

  StepGraphs() = default;
  ~StepGraphs();
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  /// Starts a step that may be a graph. `kind`: steps of so many rows that launch other kernels than
  /// each other. `moves` counts the times that buffers of the step have
  /// moved so far. kCapture: what is launched from now on is recorded. kReplay: launch nothing.
  Mode Begin(int rows, int kind, std::uint64_t moves, const Stream& stream);
  /// Ends the step that Begin began; enqueues a captured or replayed one. `ops` identifies the ops
  /// that were given: every step of a size must have the same.
  void End(std::uint64_t moves, std::uint64_t ops, const Stream& stream);

 private:
  struct Entry {
    bool ran = false;
    std::uint64_t moves = 0, ops = 0;
    cudaGraphExec_t graph = nullptr;
  };
  std::map<std::pair<int, int>, Entry> entries_;  // by padded rows and kind
  Entry* current_ = nullptr;
  Mode mode_ = Mode::kLaunch;
};

}  // namespace pliant::cuda
