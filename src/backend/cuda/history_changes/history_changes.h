// Room: backend/cuda. What happens to histories with a capacity between steps: their keys are taken
// note of, blocks are dropped, kept blocks are written anew (retained_history.h, retained_rows.h).
// Called by the thread that owns the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/cuda_types.h"
#include "backend/cuda/history/history_tables.h"

namespace pliant::cuda {

/// token_score 0, token_weight 1, and nothing kept or lost, in tables of `units`.
void LaunchHistoryClear(const HistoryTables& tables, int units, cudaStream_t stream);

/// Planes of K that are read to take note of keys: eight bits tell the sign of all but the smallest
/// differences.
inline constexpr int kNotedPlanes = 2;
struct NotedKeys {
  std::uint64_t plane[kNotedPlanes];  // addresses of pages
};

struct HistoryNoteArgs {
  HistoryTables tables;
  int units = 0, head_dim = 0;
  const NotedKeys* keys = nullptr;           // [blocks - first_block], on the device
  std::int32_t first_block = 0, blocks = 0;  // full blocks first_block .. blocks - 1
  std::int32_t frontier = 0, kept_blocks = 0;
  ChannelPointers key;  // K's code, of all units
  const float* inv_freq =
      nullptr;  // RoPE's, [pairs]; token t of the cache is at angle t * inv_freq
  int pairs = 0;
};
/// When first_block is 0, tables.key_sum becomes the sum of all these keys; tables.keys_summed is
/// their number already.
void LaunchHistoryNote(const HistoryNoteArgs& args, cudaStream_t stream);
/// Its form without returns (RetainedHistory::NoteExactly).
void LaunchHistoryNoteExactly(const HistoryNoteArgs& args, cudaStream_t stream);

struct HistoryMoveArgs {
  HistoryTables tables;
  int units = 0, head_dim = 0;
  std::int32_t frontier = 0;            // the block that is dropped; its places are in the tables
  std::int32_t kept_blocks = 0;         // before
  bool into_new = false;                // there is one more, which takes all of the block
  const std::uint32_t* kept = nullptr;  // [kept blocks][8] page ids, on the device
  std::uint8_t* pages = nullptr;
  std::size_t page_bytes = 0;
};
void LaunchHistoryDrop(const HistoryMoveArgs& args, cudaStream_t stream);
/// Writes all kept tokens into the kept blocks.
void LaunchHistoryRefill(const HistoryMoveArgs& args, cudaStream_t stream);

}  // namespace pliant::cuda
