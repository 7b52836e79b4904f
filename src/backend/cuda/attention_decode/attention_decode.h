// Room: backend/cuda. Decode attention over the planes of a paged KV cache: every query row is one
// token that reads all blocks of its sequence, each block in whatever state it stands. Called by
// the thread that owns the stream; enqueues only.
//
// Arithmetic: scores and outputs are integer sums on the 8-bit tensor cores, so nothing is lost to
// the offset of the code and the error does not grow with the length. q is cut into three signed
// base-256 digits relative to the largest |q| of its head (23 bits); p * (V scale) is a 32-bit
// fixed-point number relative to its running maximum, cut into four unsigned digits; two planes
// form a byte of K or V, used as it lies in the page. Offsets and midpoints of absent planes are
// added as exact sums.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/attention_decode/plan.h"
#include "backend/cuda/cuda_types.h"
#include "base/status.h"

namespace pliant::cuda {

/// Query heads that one warp works on at once; a group of more is worked in chunks.
inline constexpr int kHeadsPerChunk = 4;

struct DecodeShape {
  int kv_heads = 0;
  int group = 0;     // query heads a KV head
  int head_dim = 0;  // 32, 64, 128 or 256

  int ChunksPerHead() const { return (group + kHeadsPerChunk - 1) / kHeadsPerChunk; }
  int Chunks() const { return kv_heads * ChunksPerHead(); }
};

/// How the kernel is launched on this device; fixed per shape. A thread block holds `groups` groups
/// of one producer warp, which fills a ring of `slots` pairs of planes, and `consumers` warps, each
/// on a chunk of heads. A group sees `heads` neighbouring KV heads.
struct DecodeLaunch {
  int heads = 0, consumers = 0, groups = 0, slots = 0;
  int columns = 0;  // thread blocks side by side that together see all KV heads
  int grid = 0;     // thread blocks, a multiple of columns
  int smem_bytes = 0;
  constexpr int PlanGroups() const { return grid / columns * groups; }  // for PlanDecode
};
Result<DecodeLaunch> DecodeLaunchFor(const DecodeShape& shape);

/// Device arrays of one launch.
struct DecodeArgs {
  const std::uint8_t* pages = nullptr;
  std::size_t page_bytes = 0;
  std::size_t layer_offset = 0;  // byte of a page where the layer's units start
  const std::uint32_t* blocks =
      nullptr;  // [blocks][8] page ids: K planes 0 .. 3, V planes 0 .. 3; all ones: absent
  const Segment* segments = nullptr;
  const Range* ranges = nullptr;
  const CutRow* cut_rows = nullptr;
  int max_cut_rows = 0;      // the merge is launched for so many; entries with count 0 are none
  const float* q = nullptr;  // [rows][q_stride], head h at h * head_dim; 16-byte aligned rows
  std::int64_t q_stride = 0;
  void* out = nullptr;  // [rows][out_stride], of out_type
  std::int64_t out_stride = 0;
  ElementType out_type = ElementType::kF32;
  float softmax_scale = 1;
  ChannelPointers value;      // V's code of this layer
  float* partials = nullptr;  // [DecodePartialFloats]
};

/// Floats of `partials` for a plan of `segments`.
std::size_t DecodePartialFloats(const DecodeShape& shape, std::size_t segments);

/// Blocks whose K or V has no plane at all do not take part. Rows without a segment are not
/// written.
void LaunchDecodeAttention(const DecodeShape& shape, const DecodeLaunch& launch,
                           const DecodeArgs& args, cudaStream_t stream);

}  // namespace pliant::cuda
