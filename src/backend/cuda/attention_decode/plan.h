// Room: backend/cuda, decode attention. How the work of one launch is cut: the list (query row, block) is divided into ranges; a group
// of warps takes a range at a time for a run of KV heads, first a large one each, then small ones as they come free. A query row
// that is cut yields partial results, merged by a second kernel. Built on the host once a step, used by every layer.
// Pure, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace pliant::cuda {

/// One query row: attends to the first `tokens` tokens of the sequence whose blocks start at `first_block`. tokens 0: padding.
struct QueryItem {
  std::int32_t row = 0;          // of q and of the output
  std::int32_t first_block = 0;  // into the block table
  std::int32_t tokens = 0;
};

/// A run of blocks of one query row. Device and host layout.
struct Segment {
  std::int32_t first_block;  // into the block table
  std::int32_t blocks;
  std::int32_t row;          // of q and of the output
  std::int32_t tail;         // valid tokens of the last block, 1 .. 32
  std::int32_t first;        // index of the row's first segment
  std::int32_t count;        // segments of the row
  std::int32_t pad0, pad1;   // 32 bytes
};
static_assert(sizeof(Segment) == 32);

/// Consecutive segments, worked by one group; the first one's blocks stand here too, which saves the start a load.
struct Range {
  std::int32_t segment;
  std::int32_t segments;
  std::int32_t first_block;
  std::int32_t blocks;
};
static_assert(sizeof(Range) == 16);

/// A warp's integer sums stay below 2^31 up to this many blocks.
inline constexpr int kMaxSegmentBlocks = 256;
/// Segments that one row is cut into at most (beyond what kMaxSegmentBlocks asks for): bounds the merge.
inline constexpr int kMaxRowSegments = 96;

struct DecodePlan {
  std::vector<Segment> segments;
  std::vector<Range> ranges;
  std::vector<std::int32_t> cut_rows;  // first segments of rows of more than one
};

/// `groups`: groups of warps that work at once, at least 1. `plan` is overwritten (its memory is reused).
void PlanDecode(std::span<const QueryItem> items, std::span<const BlockView> blocks, int groups, DecodePlan& plan);

/// Ranges and segments that a plan may have at most.
constexpr std::size_t MaxRanges(std::size_t groups) { return 6 * groups + 4; }
constexpr std::size_t MaxSegments(std::size_t items, std::size_t blocks, std::size_t groups) {
  return items + MaxRanges(groups) + blocks / kMaxSegmentBlocks;
}

}  // namespace pliant::cuda
