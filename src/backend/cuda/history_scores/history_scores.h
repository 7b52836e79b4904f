// Room: backend/cuda. The attention of a prompt's rows added to the scores of a history: slices of
// several rows, of which nothing was dropped (their output is ordinary prefill attention's). Called
// by the thread that owns the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/history/history_tables.h"

namespace pliant::cuda {

struct HistoryScoresArgs {
  const HistoryRow* histories = nullptr;  // [count], on the device; those of one row are left alone
  int count = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  int layer = 0;
  const std::uint8_t* pages = nullptr;
  std::size_t page_bytes = 0;
  std::size_t layer_offset = 0;           // byte of a page where the layer's units start
  const std::uint32_t* blocks = nullptr;  // [blocks][8] page ids, as in DecodeArgs
  const float* q = nullptr;  // [rows][q_stride], head h at h * head_dim, after QkvToCache
  std::int64_t q_stride = 0;
  float softmax_scale = 1;
  float2* softmax = nullptr;  // [rows][heads]: scratch, (largest logit, sum) of each
  // Of the largest slice: what the launch covers.
  int most_rows = 0, most_blocks = 0;
};

/// token_score[unit][t] += sum over the slice's rows of the mean over the group's heads of the
/// attention that a row gives to token t, each row to positions 0 .. its own. Sums are in one
/// order, so the result is the same in each run.
void LaunchHistoryScores(const HistoryScoresArgs& args, cudaStream_t stream);

}  // namespace pliant::cuda
