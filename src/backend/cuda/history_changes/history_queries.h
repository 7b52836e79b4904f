// Room: backend/cuda. Running means of a history's queries (RetainedHistory::NoteQuery), and what
// they say. Called by the thread that owns the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/history/history_tables.h"

namespace pliant::cuda {

struct HistoryQueriesArgs {
  const HistoryRow* histories = nullptr;  // [count], on the device; those without means are left
  int count = 0;                          //   alone
  int heads = 0, head_dim = 0;
  int layer = 0;
  const float* q = nullptr;  // [rows][q_stride], head h at h * head_dim, before norm and RoPE
  std::int64_t q_stride = 0;
};
/// Takes the queries of all rows into the means, row after row.
void LaunchHistoryQueries(const HistoryQueriesArgs& args, cudaStream_t stream);

/// counts[index].query_signal of histories that have means and end this step at a multiple of
/// kQuerySignalTokens: RetainedHistory::QuerySignal over `pairs` (layers * heads).
void LaunchHistoryQuerySignal(const HistoryRow* histories, int count, int pairs, int head_dim,
                              HistoryCounts* counts, cudaStream_t stream);

}  // namespace pliant::cuda
