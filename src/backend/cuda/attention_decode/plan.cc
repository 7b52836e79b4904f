#include "backend/cuda/attention_decode/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace pliant::cuda {
namespace {

constexpr std::int64_t kPlaneWeight = 16;
constexpr std::int64_t kBlockWeight = 6;  // a block's own cost, in sixteenths of a plane
// A segment's own cost (its query, its sums flushed): about 4 us of a multiprocessor.
constexpr std::int64_t kSegmentWeight = 12 * kPlaneWeight;
// Below this a cut costs more than it wins: about the bytes of a TARGET block.
constexpr std::int64_t kMinRangeWeight = 8 * kPlaneWeight;

static_assert(sizeof(BlockView) == 32 && kPlanes == 4);

/// As vectors, since this looks at every block of every step.
std::int32_t Weight(const BlockView& block) {
  using Four = std::uint32_t __attribute__((vector_size(16)));
  const Four absent = Four{} + PageId::kInvalidValue;
  Four k, v;
  std::memcpy(&k, block.k.data(), sizeof k);
  std::memcpy(&v, block.v.data(), sizeof v);
  const auto missing = (k == absent) + (v == absent);  // -1 for each
  const auto planes = 2 * kPlanes + missing[0] + missing[1] + missing[2] + missing[3];
  return static_cast<std::int32_t>(planes * kPlaneWeight + kBlockWeight);
}

}  // namespace

void PlanDecode(std::span<const QueryItem> items, std::span<const BlockView> blocks, int groups,
                DecodePlan& plan) {
  PLIANT_CHECK(groups >= 1, "a decode plan needs a group of warps");
  plan.segments.clear();
  plan.ranges.clear();
  plan.cut_rows.clear();
  plan.weights.clear();
  std::int64_t total = 0, longest = 0;
  for (const QueryItem& item : items) {
    const int count = (item.tokens + kBlockTokens - 1) / kBlockTokens;
    PLIANT_CHECK(item.first_block >= 0 &&
                     static_cast<std::size_t>(item.first_block) + count <= blocks.size(),
                 "a query row reads blocks beyond the table");
    std::int64_t own = 0;
    const std::size_t at = plan.weights.size();
    plan.weights.resize(at + static_cast<std::size_t>(count));
    for (int b = 0; b < count; ++b)
      own += plan.weights[at + b] = Weight(blocks[item.first_block + b]);
    total += own + kSegmentWeight;
    longest = std::max(longest, own);
  }
  const std::int64_t share =
      std::max({(total + groups - 1) / groups, (longest + kMaxRowSegments - 1) / kMaxRowSegments,
                kMinRangeWeight});
  std::int64_t done = 0;  // weight given out
  constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  // Cut where a range is nearest to its share; the last range takes what is left.
  std::int64_t goal = groups > 1 ? share : kNever;
  int open = 0;  // first segment of the open range
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
    const auto next = static_cast<std::int64_t>(plan.ranges.size()) + 1;
    goal = next < groups ? share * next : kNever;
    open = end;
  };
  const std::int32_t* next_weight = plan.weights.data();
  for (const QueryItem& item : items) {
    const int count = (item.tokens + kBlockTokens - 1) / kBlockTokens;
    const int first = static_cast<int>(plan.segments.size());
    int start = 0;
    // Every range pays for its first segment; this one is another.
    if (first > open) done += kSegmentWeight;
    for (int b = 0; b < count; ++b) {
      const std::int64_t weight = *next_weight++;
      done += weight;
      const bool last = b + 1 == count;
      const bool cut = done + weight / 2 >= goal;
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
