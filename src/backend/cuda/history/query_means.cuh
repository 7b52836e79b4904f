// Room: backend/cuda. Running means of a history's queries, as RetainedHistory::NoteQuery keeps
// them. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "backend/cuda/history/history_tables.h"
#include "backend/retained_history.h"

namespace pliant::cuda {

/// `mean` moved towards x by `share`; unfused, as on the host.
__device__ __forceinline__ float MovedMean(float mean, float x, float share) {
  return __fadd_rn(mean, __fmul_rn(__fsub_rn(x, mean), share));
}

/// Those of one head: `at` is its first channel in the tables.
struct QueryMeans {
  float* quick;
  float* slow;
  bool seen;

  __device__ QueryMeans(const HistoryRow& history, std::size_t at)
      : quick(history.tables.short_mean + at),
        slow(history.tables.long_mean + at),
        seen(history.queries_seen) {}
  /// Takes in channel `channel` of one query.
  __device__ void Note(int channel, float x) const {
    quick[channel] = seen ? MovedMean(quick[channel], x, 1 / RetainedHistory::kShortSteps) : x;
    slow[channel] = seen ? MovedMean(slow[channel], x, 1 / RetainedHistory::kLongSteps) : x;
  }
};

}  // namespace pliant::cuda
