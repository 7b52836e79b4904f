#include "backend/cuda/attention_decode/plan.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace pliant::cuda {
namespace {

constexpr std::int64_t kPlaneWeight = 16;
constexpr std::int64_t kBlockWeight = 6;  // a block's own cost, in sixteenths of a plane
// Below this a cut costs more than it wins: about the bytes of a TARGET block.
constexpr std::int64_t kMinRangeWeight = 8 * kPlaneWeight;

std::int64_t Weight(const BlockView& block) {
  std::int64_t planes = 0;
  for (int p = 0; p < kPlanes; ++p) planes += block.k[p].valid() + block.v[p].valid();
  return planes * kPlaneWeight + kBlockWeight;
}

}  // namespace

void PlanDecode(std::span<const QueryItem> items, std::span<const BlockView> blocks, int groups,
                DecodePlan& plan) {
  PLIANT_CHECK(groups >= 1, "a decode plan needs a group of warps");
  plan.segments.clear();
  plan.ranges.clear();
  plan.cut_rows.clear();
  std::int64_t total = 0, longest = 0;
  for (const QueryItem& item : items) {
    const int count = (item.tokens + kBlockTokens - 1) / kBlockTokens;
    PLIANT_CHECK(item.first_block >= 0 &&
                     static_cast<std::size_t>(item.first_block) + count <= blocks.size(),
                 "a query row reads blocks beyond the table");
    std::int64_t own = 0;
    for (int b = 0; b < count; ++b) own += Weight(blocks[item.first_block + b]);
    total += own;
    longest = std::max(longest, own);
  }
  const std::int64_t share =
      std::max({(total + groups - 1) / groups, (longest + kMaxRowSegments - 1) / kMaxRowSegments,
                kMinRangeWeight});
  std::int64_t done = 0;  // weight given out
  int open = 0;           // first segment of the open range
  auto close = [&] {
    const int end = static_cast<int>(plan.segments.size());
    if (end == open) return;
    Range range{};
    range.segment = open;
    range.segments = end - open;
    range.first_block = plan.segments[open].first_block;
    range.blocks = plan.segments[open].blocks;
    std::memcpy(range.first_pages, &blocks[range.first_block],
                std::min(4, range.blocks) * sizeof(BlockView));
    plan.ranges.push_back(range);
    open = end;
  };
  for (const QueryItem& item : items) {
    const int count = (item.tokens + kBlockTokens - 1) / kBlockTokens;
    const int first = static_cast<int>(plan.segments.size());
    int start = 0;
    for (int b = 0; b < count; ++b) {
      const std::int64_t weight = Weight(blocks[item.first_block + b]);
      done += weight;
      const bool last = b + 1 == count;
      // Cut where the range is nearest to its share; the last range takes what is left.
      const auto ranges = static_cast<std::int64_t>(plan.ranges.size());
      const bool cut = ranges + 1 < groups && done + weight / 2 >= share * (ranges + 1);
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
    if (made > 1) plan.cut_rows.push_back({item.row, first, made, 0});
  }
  close();
  plan.ranges.resize(groups, Range{});
}

}  // namespace pliant::cuda
