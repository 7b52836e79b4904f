// Room: backend/cuda. Prefill attention: many query rows of a sequence over its gathered fp16 K and
// V (gather/), tiled with an online softmax on the tensor cores (FlashAttention, arXiv 2205.14135
// and 2307.08691). Called by the thread that owns the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/cuda_types.h"

namespace pliant::cuda {

/// Query rows of a tile: as many as the kernel for this head dimension on this device takes.
int PrefillTileRows(int head_dim);

/// A tile of up to PrefillTileRows neighbouring query rows of one sequence. Row first_row + i
/// reads tokens 0 .. first_position + i.
struct PrefillTile {
  std::int32_t first_row;
  std::int32_t rows;
  std::int32_t first_position;
  std::int32_t first_block;  // of the sequence, in the gathered blocks
  std::int32_t holes = 1;    // 0: all its blocks are present
};

struct PrefillArgs {
  int heads = 0, kv_heads = 0, head_dim = 0;
  const PrefillTile* tiles = nullptr;
  int tile_count = 0;
  const float* q = nullptr;  // [rows][q_stride]
  std::int64_t q_stride = 0;
  const std::uint16_t* k = nullptr;  // fp16 [gathered blocks * 32][kv_heads][head_dim]
  const std::uint16_t* v = nullptr;
  const std::uint8_t* present = nullptr;  // [gathered blocks]
  int gathered_blocks = 0;
  void* out = nullptr;
  std::int64_t out_stride = 0;
  ElementType out_type = ElementType::kBf16;
  float softmax_scale = 1;
  ChannelPointers value;  // V's code of this layer
};

void LaunchPrefillAttention(const PrefillArgs& args, cudaStream_t stream);

}  // namespace pliant::cuda
