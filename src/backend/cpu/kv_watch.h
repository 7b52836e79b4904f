// Room: backend. Logits of dropped tokens, of which only plane 0 of K is there: what decides about
// returns (watched_keys.h). Pure, any thread.
#pragma once

#include "backend/cpu/cpu_level.h"
#include "backend/cpu/kv_attention.h"

namespace pliant {

/// Logits, in units of log2, of tokens [first, end) of head.blocks, all of one split, for the one
/// row of `tile`: logits [columns][kSplitTokens], minus infinity where a block has no plane 0.
/// `first` and `end` begin blocks.
using WatchKernel = void (*)(const AttentionHead& head, const QueryTile& tile, int first, int end,
                             float* logits);
WatchKernel ChooseWatchKernel(CpuLevel level);

}  // namespace pliant
