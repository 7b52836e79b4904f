// Room: backend/cuda. What happens between a layer's QKV product and its attention, fused: per-head
// RMSNorm of Q and K (optional), RoPE, the static code of the channels, the mixing of Q and K, and
// the writing of K and V as scale, code and planes into the pages. Called by the thread that owns
// the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/cuda_types.h"
#include "backend/cuda/history/history_tables.h"

namespace pliant::cuda {

/// Cosine and sine of position * inv_freq, computed in double: [rows][pairs]. Once a step, used by
/// every layer.
void LaunchRopeAngles(const std::int32_t* positions, int rows, const float* inv_freq, int pairs,
                      float2* angles, cudaStream_t stream);

struct AppendArgs {
  int rows = 0, heads = 0, kv_heads = 0, head_dim = 0;
  float* qkv = nullptr;  // [rows][(heads + 2 kv_heads) * head_dim]; afterwards the first heads *
                         // head_dim hold the query
  const float* q_norm = nullptr;  // [head_dim] or nothing
  const float* k_norm = nullptr;
  float norm_eps = 0;
  const float2* angles = nullptr;  // [rows][pairs]; pair i is dims i and i + head_dim / 2
  int pairs = 0;
  ChannelPointers key, value;  // KvCode of this layer
  // The same shape, or nothing: ChannelStatistics, the keys' as integers that order like them.
  int* key_min = nullptr;
  int* key_max = nullptr;
  double* query_energy = nullptr;
  double* value_energy = nullptr;
  std::uint8_t* pages = nullptr;
  std::size_t page_bytes = 0;
  std::size_t layer_offset = 0;
  const std::uint32_t* blocks = nullptr;  // [blocks][8], as in DecodeArgs
  // [rows] or nothing: of rows that are a history's, the query goes into its running means, before
  // norm and RoPE (RetainedHistory::NoteQuery).
  const HistoryRow* histories = nullptr;
  int layer = 0;
  const std::int32_t* slots =
      nullptr;  // [rows] block * 32 + token; negative: a padded row, left alone
};

/// Planes that the block does not have are not written. Codes and scales are those of MixChannels
/// (K), RowScale and EncodeRow (plane_code.h).
void LaunchAppend(const AppendArgs& args, cudaStream_t stream);

}  // namespace pliant::cuda
