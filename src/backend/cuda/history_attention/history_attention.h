// Room: backend/cuda. Attention of single rows over histories with a capacity: the kept tokens and
// the whole blocks are read, dropped ones are watched by plane 0 of their keys (watched_keys.h), a
// page that a head would give much to returns before the head attends, and what each token got is
// added to its score (retained_history.h). Called by the thread that owns the stream; enqueues
// only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/cuda_types.h"
#include "backend/cuda/history/history_tables.h"

namespace pliant::cuda {

struct HistoryAttentionArgs {
  const HistoryRow* histories = nullptr;  // [count], on the device; those of several rows are left
  HistoryCounts* counts = nullptr;        //   to other kernels. counts: [count]
  int count = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  int layer = 0;
  std::uint8_t* pages = nullptr;
  std::size_t page_bytes = 0;
  const std::uint32_t* blocks = nullptr;  // [blocks][8] page ids, as in DecodeArgs
  const float* q = nullptr;  // [rows][q_stride], head h at h * head_dim, after QkvToCache
  std::int64_t q_stride = 0;
  void* out = nullptr;  // [rows][out_stride], of out_type
  std::int64_t out_stride = 0;
  ElementType out_type = ElementType::kF32;
  float softmax_scale = 1;
  ChannelPointers value;  // V's code of this layer
  // Scratch where shared memory is too small. logits: [count][heads][most_tokens], of what takes
  // part, in the order of attention, log2; masses: [count][heads][most_dropped / 16], of dropped
  // pages.
  float* logits = nullptr;
  float* masses = nullptr;
  int most_tokens = 0, most_dropped = 0;  // multiples of 32
  int staged_units = 0;                   // set by the launch: that shared memory has room for
};

/// Groups of up to kMostGroup (rows.cuh) query heads a KV head.
void LaunchHistoryAttention(const HistoryAttentionArgs& args, cudaStream_t stream);

}  // namespace pliant::cuda
