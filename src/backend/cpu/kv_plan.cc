#include "backend/cpu/kv_plan.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace pliant {
namespace {

constexpr int kColumnVector = 16;       // columns that a kernel handles at once
constexpr int kWatchedPerAttended = 8;  // tokens, at the same cost
constexpr int kWholePerThread = 4;      // heads of sequences with a history: enough for balance

/// A column costs about one unit a token; decoding a token for a tile costs about as much as 8
/// columns.
std::int64_t Cost(const AttentionItem& item, const SequenceSlice& slice,
                  const HistoryTable* table) {
  const int last = item.watches       ? table->watched()
                   : table != nullptr ? table->tokens
                                      : slice.context + item.first_row + item.rows;
  if (item.scores) return std::int64_t{last} * (8 + item.group) * item.rows;
  const int tokens = item.whole       ? table->tokens + table->watched() / kWatchedPerAttended
                     : item.split < 0 ? last
                                      : std::min(kSplitTokens, last - item.split * kSplitTokens);
  const std::int64_t cost = std::int64_t{tokens} * (8 + item.rows * item.group);
  return item.watches ? cost / kWatchedPerAttended : cost;
}

/// Items of a sequence with few columns. KV heads run inside splits: their rows lie one behind the
/// other in a page, so that what the hardware fetches past the end of one head is used by the next.
void AddSplits(int sequence, const SequenceSlice& slice, const HistoryTable* table, bool whole,
               const KvGeometry& geometry, int group, AttentionPlan& plan) {
  const int splits = SplitsOf(table != nullptr ? table->tokens : slice.context + slice.rows);
  const int items = splits + (table != nullptr ? HistoryTable::SplitsFor(table->dropped) : 0);
  const int first_join = static_cast<int>(plan.joins.size());
  const std::size_t columns = static_cast<std::size_t>(slice.rows) * group;
  for (int head = 0; head < geometry.kv_heads; ++head) {
    std::size_t room = 0;
    std::size_t& taken = whole ? room : plan.partial_floats;
    const auto take = [&](std::size_t floats) { return std::exchange(taken, taken + floats); };
    AttentionJoin& join = plan.joins.emplace_back();
    join = {.splits = splits,
            .items = items,
            .partials = take(splits * columns * PartialFloats(geometry.head_dim))};
    if (table == nullptr) continue;
    join.weights = take(splits * columns * kSplitTokens);
    join.bases = take(splits * columns * kSplitBlocks);
    join.watched = take((items - splits) * columns * kSplitTokens);
    plan.room_floats = std::max(plan.room_floats, room);
  }
  AttentionItem item;
  item.sequence = sequence;
  item.rows = slice.rows;
  item.group = group;
  item.whole = whole;
  for (int i = 0; i < (whole ? 1 : items); ++i) {
    item.watches = i >= splits;
    item.split = item.watches ? i - splits : i;
    for (item.kv_head = 0; item.kv_head < geometry.kv_heads; ++item.kv_head) {
      item.join = first_join + item.kv_head;
      plan.items.push_back(item);
    }
  }
}

}  // namespace

AttentionPlan PlanAttention(const StepBatch& batch, const HistoryTables& histories,
                            const KvGeometry& geometry, int heads, const AttentionKernel& kernel,
                            int threads) {
  const int group = heads / geometry.kv_heads;
  PLIANT_CHECK(group >= 1 && heads == group * geometry.kv_heads,
               "heads are a multiple of KV heads");
  AttentionPlan plan;
  std::int64_t wide_rows = 0, with_history = 0;
  for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceSlice& slice = batch.sequences[s];
    if (slice.rows * group > kernel.narrow_columns) wide_rows += slice.rows;
    with_history += histories.TableOf(s) != nullptr;
  }
  const bool whole = with_history * geometry.kv_heads >= std::int64_t{kWholePerThread} * threads;
  // Wide tiles: as large as the kernel takes (decoding is shared by a tile's columns), but enough
  // of them to balance.
  const int tile_group = std::min(group, kernel.max_columns);
  const int row_step = kColumnVector / std::gcd(kColumnVector, tile_group);
  const std::int64_t balanced = wide_rows * geometry.kv_heads / (std::int64_t{4} * threads);
  std::int64_t tile_rows =
      std::min<std::int64_t>(kernel.max_columns / tile_group, std::max<std::int64_t>(balanced, 1));
  if (tile_rows < row_step) tile_rows = std::min(row_step, kernel.max_columns / tile_group);
  tile_rows -= tile_rows > row_step ? tile_rows % row_step : 0;

  for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceSlice& slice = batch.sequences[s];
    if (slice.history != nullptr && slice.rows > 1) {
      for (int head = 0; head < geometry.kv_heads; ++head) {
        AttentionItem item;
        item.sequence = static_cast<int>(s);
        item.kv_head = head;
        item.rows = slice.rows;
        item.group = group;
        item.scores = true;
        plan.items.push_back(item);
      }
    }
    const bool narrow = slice.rows * group <= kernel.narrow_columns;
    PLIANT_CHECK(narrow || histories.TableOf(s) == nullptr,
                 "a sequence with a history has too many query heads a KV head");
    if (narrow) {
      const HistoryTable* table = histories.TableOf(s);
      AddSplits(static_cast<int>(s), slice, table, whole && table != nullptr, geometry, group,
                plan);
      continue;
    }
    for (int head = 0; head < geometry.kv_heads; ++head) {
      AttentionItem item;
      item.sequence = static_cast<int>(s);
      item.kv_head = head;
      for (int row = 0; row < slice.rows; row += static_cast<int>(tile_rows)) {
        item.first_row = row;
        item.rows = std::min(static_cast<int>(tile_rows), slice.rows - row);
        for (int first = 0; first < group; first += tile_group) {
          item.first_head = first;
          item.group = std::min(tile_group, group - first);
          plan.items.push_back(item);
        }
      }
    }
  }
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [&](const AttentionItem& a, const AttentionItem& b) {
                     return Cost(a, batch.sequences[a.sequence], histories.TableOf(a.sequence)) >
                            Cost(b, batch.sequences[b.sequence], histories.TableOf(b.sequence));
                   });
  plan.first_room = plan.partial_floats;
  plan.partial_floats += plan.room_floats * static_cast<std::size_t>(threads);
  return plan;
}

}  // namespace pliant
