// Room: backend/cuda, decode attention. How the work of one launch is cut: the list (query row,
// block) is divided into ranges of equal bytes, one for every group of warps that works at once. A
// query row that is cut yields partial results, merged by a second kernel. (Ranges taken from a
// queue, shrinking towards the end, were measured: they balance no better and cost a cut each.)
// Built on the host once a step, used by every layer. Pure, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace pliant::cuda {

/// One query row: attends to the first `tokens` tokens of the sequence whose blocks start at
/// `first_block`. tokens 0: padding.
struct QueryItem {
  std::int32_t row = 0;          // of q and of the output
  std::int32_t first_block = 0;  // into the block table
  std::int32_t tokens = 0;
};

/// A run of blocks of one query row. Device and host layout.
struct Segment {
  std::int32_t first_block;  // into the block table
  std::int32_t blocks;
  std::int32_t row;         // of q and of the output
  std::int32_t tail;        // valid tokens of the last block, 1 .. 32
  std::int32_t first;       // index of the row's first segment
  std::int32_t count;       // segments of the row
  std::int32_t pad0, pad1;  // 32 bytes
};
static_assert(sizeof(Segment) == 32);

/// Consecutive segments, worked by one group. What the start needs of the first one stands here
/// too, which saves two loads.
struct Range {
  std::int32_t segment;
  std::int32_t segments;     // 0: nothing to do
  std::int32_t first_block;  // of the first segment
  std::int32_t blocks;
  std::uint32_t first_pages[4][2 * kPlanes];  // of its first (up to) four blocks
};
static_assert(sizeof(Range) == 144);

/// A warp's integer sums stay below 2^31 up to this many blocks.
inline constexpr int kMaxSegmentBlocks = 256;

/// A query row in more than one segment. Device and host layout.
struct CutRow {
  std::int32_t row, first, count;
  std::int32_t pad;
};
static_assert(sizeof(CutRow) == 16);

struct DecodePlan {
  std::vector<Segment> segments;
  std::vector<Range> ranges;
  std::vector<CutRow> cut_rows;
  std::vector<std::int32_t> weights;  // scratch: of the items' blocks
};

/// A row is cut into no more segments than this (beyond what kMaxSegmentBlocks asks for): bounds
/// the merge.
inline constexpr int kMaxRowSegments = 96;

/// `groups`: groups of warps that work at once, at least 1; the plan has so many ranges, the last
/// ones empty if need be. `plan` is overwritten (its memory is reused).
void PlanDecode(std::span<const QueryItem> items, std::span<const BlockView> blocks, int groups,
                DecodePlan& plan);

/// Segments that a plan may have at most.
constexpr std::size_t MaxSegments(std::size_t items, std::size_t blocks, std::size_t groups) {
  return items + groups + blocks / kMaxSegmentBlocks;
}

}  // namespace pliant::cuda
