#include "backend/cuda/attention_decode/plan.h"

#include <algorithm>

#include "base/check.h"

namespace pliant::cuda {
namespace {

constexpr std::int64_t kPlaneWeight = 16;
constexpr std::int64_t kBlockWeight = 6;  // a block's own cost, in sixteenths of a plane
// Below this a cut costs more than it wins: about the bytes of a TARGET block.
constexpr std::int64_t kMinRangeWeight = 8 * kPlaneWeight;
// Memory does not serve all multiprocessors equally fast, so part of the work is kept back and given out in ranges that shrink towards
// the end: the one that is late by a range at the end should be late by little.
constexpr std::int64_t kFirstShare = 80;  // percent of a group's share that it gets at once

std::int64_t Weight(const BlockView& block) {
  std::int64_t planes = 0;
  for (int p = 0; p < kPlanes; ++p) planes += block.k[p].valid() + block.v[p].valid();
  return planes * kPlaneWeight + kBlockWeight;
}

}  // namespace

void PlanDecode(std::span<const QueryItem> items, std::span<const BlockView> blocks, int groups, DecodePlan& plan) {
  PLIANT_CHECK(groups >= 1, "a decode plan needs a group of warps");
  plan.segments.clear();
  plan.ranges.clear();
  plan.cut_rows.clear();
  std::int64_t total = 0, longest = 0;
  for (const QueryItem& item : items) {
    const int count = (item.tokens + kBlockTokens - 1) / kBlockTokens;
    PLIANT_CHECK(item.first_block >= 0 && static_cast<std::size_t>(item.first_block) + count <= blocks.size(),
                 "a query row reads blocks beyond the table");
    std::int64_t own = 0;
    for (int b = 0; b < count; ++b) own += Weight(blocks[item.first_block + b]);
    total += own;
    longest = std::max(longest, own);
  }
  const std::int64_t share = (total + groups - 1) / groups;
  const std::int64_t floor = std::max(kMinRangeWeight, (longest + kMaxRowSegments - 1) / kMaxRowSegments);
  const std::int64_t large = share < 6 * floor ? std::max(share, floor) : share * kFirstShare / 100;
  std::int64_t done = 0, limit = large;  // weight given out, and where the open range should end
  int open = 0;                          // first segment of the open range
  auto close = [&] {
    const int end = static_cast<int>(plan.segments.size());
    if (end == open) return;
    plan.ranges.push_back({open, end - open, plan.segments[open].first_block, plan.segments[open].blocks});
    open = end;
    limit += static_cast<int>(plan.ranges.size()) < groups ? large : std::max({floor, share / 32, (total - done) / groups});
  };
  const std::size_t most = MaxRanges(groups);
  for (const QueryItem& item : items) {
    const int count = (item.tokens + kBlockTokens - 1) / kBlockTokens;
    const int first = static_cast<int>(plan.segments.size());
    int start = 0;
    for (int b = 0; b < count; ++b) {
      const std::int64_t weight = Weight(blocks[item.first_block + b]);
      done += weight;
      const bool last = b + 1 == count;
      // Cut where the range is nearest to its share; the last range takes what is left.
      const bool cut = plan.ranges.size() + 1 < most && done + weight / 2 >= limit;
      if (!cut && !last && b + 1 - start < kMaxSegmentBlocks) continue;
      Segment segment{};
      segment.first_block = item.first_block + start;
      segment.blocks = b + 1 - start;
      segment.row = item.row;
      segment.tail = last ? item.tokens - b * kBlockTokens : kBlockTokens;
      segment.first = first;
      plan.segments.push_back(segment);
      start = b + 1;
      if (cut) close();
    }
    const int made = static_cast<int>(plan.segments.size()) - first;
    for (int s = first; s < first + made; ++s) plan.segments[s].count = made;
    if (made > 1) plan.cut_rows.push_back(first);
  }
  close();
}

}  // namespace pliant::cuda
