// Room: backend/cuda. Planes of whole sequences to contiguous fp16 K and V, for prefill attention.
// Called by the thread that owns the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pliant::cuda {

struct GatherArgs {
  int kv_heads = 0, head_dim = 0;
  const std::uint8_t* pages = nullptr;
  std::size_t page_bytes = 0;
  std::size_t layer_offset = 0;
  const std::uint32_t* blocks = nullptr;  // [..][8], as in DecodeArgs
  const int2* sources =
      nullptr;    // [count] x: index into blocks, y: valid tokens; the others read as zero
  int count = 0;  // blocks to gather; block i fills tokens 32 i .. of the output
  std::uint16_t* k = nullptr;  // fp16 [count * 32][kv_heads][head_dim]; K without its channel scale
  std::uint16_t* v = nullptr;
  std::uint8_t* present = nullptr;  // [count]: 0 where K or V has no plane; such tokens read as
                                    // zero and do not take part
};

void LaunchGather(const GatherArgs& args, cudaStream_t stream);

}  // namespace pliant::cuda
