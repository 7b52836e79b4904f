#include "backend/cpu/kv_watch.h"

#include <algorithm>
#include <cmath>

namespace pliant {

void WatchedBlocks::Start(const StepBatch& batch, int kv_heads) {
  batch_ = &batch;
  kv_heads_ = kv_heads;
  tables_.clear();
  views_.clear();
  origin_.clear();
  table_of_.assign(batch.sequences.size(), -1);
  std::size_t weights = 0;
  for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceSlice& slice = batch.sequences[s];
    if (!slice.watched) continue;
    WatchedTable table;
    const auto append = [&](auto&& wanted) {
      std::int32_t count = 0;
      for (std::int32_t b = slice.first_block; b < slice.first_block + slice.blocks; ++b) {
        const BlockView& view = batch.blocks[b];
        if (!wanted(view)) continue;
        views_.push_back(view);
        origin_.push_back(b);
        ++count;
      }
      return count;
    };
    table.first_taking_part = static_cast<std::int32_t>(views_.size());
    table.taking_part = append([](const BlockView& v) { return v.k[0].valid() && v.v[0].valid(); });
    table.first_watched = static_cast<std::int32_t>(views_.size());
    table.watched = append([](const BlockView& v) { return v.k[0].valid() && !v.v[0].valid(); });
    // The row lies in the last block, and that one has pages (CheckStepBatch).
    table.tokens = (table.taking_part - 1) * kBlockTokens + slice.context % kBlockTokens + 1;
    table.first_weight = weights;
    weights += static_cast<std::size_t>(kv_heads) * (table.taking_part + table.watched);
    table_of_[s] = static_cast<std::int32_t>(tables_.size());
    tables_.push_back(table);
  }
  any_ = !tables_.empty();
  weights_.assign(weights, 0.0f);
}

void WatchedBlocks::Fold(const WatchedTable& table, int kv_head, int head_dim, int columns,
                         float total_unit, const float* tops, const float* total) {
  const std::int32_t blocks = table.taking_part + table.watched;
  float* weights =
      weights_.data() + table.first_weight + static_cast<std::size_t>(kv_head) * blocks;
  const std::size_t split_floats = static_cast<std::size_t>(columns) * kSplitBlocks;
  for (int column = 0; column < columns; ++column) {
    const float* partial = total + column * PartialFloats(head_dim);
    const float maximum = partial[head_dim];
    const float unit = total_unit / partial[head_dim + 1];
    const float* from = tops + column * kSplitBlocks;
    const auto fold = [&](std::int32_t count, float* to) {
      for (std::int32_t first = 0; first < count; first += kSplitBlocks, from += split_floats) {
        const std::int32_t here = std::min<std::int32_t>(kSplitBlocks, count - first);
        for (std::int32_t b = 0; b < here; ++b) {
          to[first + b] = std::max(to[first + b], std::exp2(from[b] - maximum) * unit);
        }
      }
    };
    fold(table.taking_part, weights);
    fold(table.watched, weights + table.taking_part);
  }
}

std::span<const float> WatchedBlocks::Gather() {
  gathered_.assign(batch_ == nullptr ? 0 : batch_->blocks.size(), 0.0f);
  for (const WatchedTable& table : tables_) {
    const std::int32_t blocks = table.taking_part + table.watched;
    for (int head = 0; head < kv_heads_; ++head) {
      const float* from =
          weights_.data() + table.first_weight + static_cast<std::size_t>(head) * blocks;
      for (std::int32_t b = 0; b < blocks; ++b) {
        float& to = gathered_[origin_[table.first_taking_part + b]];
        to = std::max(to, from[b]);
      }
    }
  }
  return gathered_;
}

}  // namespace pliant
