// Room: backend. How the attention of one step is cut into work items. Pure, owner thread; made
// once a step and used for every layer.
//
// Sequences with few columns (decode) give an item for each KV head and each split of their
// context; the worker that ends the last split of a head merges them. With a history there may be
// more of these than balance needs: then an item does all of a head, so that what it leaves for
// scores and returns is still in the cache when they are minded. Sequences with many columns
// (prefill) give an item for each KV head and tile of rows, which does all splits itself. What an
// item computes does not depend on how the cut was made (kv_attention.h); only the balance does.
#pragma once

#include <cstddef>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kv_attention.h"
#include "backend/cpu/kv_history.h"

namespace pliant {

struct AttentionItem {
  int sequence = 0;  // into StepBatch.sequences
  int kv_head = 0;
  int first_row = 0;  // of the tile, within the slice
  int rows = 0;
  int first_head = 0;  // of the tile, within the group
  int group = 0;
  int split = -1;        // or -1: all of them
  int join = -1;         // into AttentionPlan.joins, for split items
  bool scores = false;   // rows of a slice of several add to a history's scores
  bool watches = false;  // a split of the dropped blocks of a history
  bool whole = false;    // all splits of a join, of dropped blocks too
};

/// The split items of one (sequence, KV head).
struct AttentionJoin {
  int splits = 0;
  int items = 0;             // splits, and those of dropped blocks
  std::size_t partials = 0;  // offset in floats of split 0's partial results; the others follow
  // With a history: offsets in floats of QueryTile::weights and bases of each split, and of the
  // logits of dropped blocks. Of a whole item all offsets are in the worker's room.
  std::size_t weights = 0, bases = 0, watched = 0;
};

struct AttentionPlan {
  std::vector<AttentionItem> items;  // costliest first
  std::vector<AttentionJoin> joins;
  std::size_t partial_floats = 0;
  // Rooms of workers for whole items, among partial_floats: where the first one is, and how far
  // apart they are.
  std::size_t first_room = 0, room_floats = 0;
};

AttentionPlan PlanAttention(const StepBatch& batch, const HistoryTables& histories,
                            const KvGeometry& geometry, int heads, const AttentionKernel& kernel,
                            int threads);

constexpr int SplitsOf(int tokens) { return (tokens + kSplitTokens - 1) / kSplitTokens; }

}  // namespace pliant
