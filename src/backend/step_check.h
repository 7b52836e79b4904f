// Room: backend. Checks of a StepBatch that every backend makes before it touches memory. Pure, any
// thread.
#pragma once

#include <cstdint>
#include <span>

#include "backend/backend.h"

namespace pliant {

/// Planes resident in one side of a block: its valid ids, which come first.
constexpr int ResidentPlanes(const std::array<PageId, kPlanes>& pages) {
  int planes = 0;
  while (planes < kPlanes && pages[planes].valid()) ++planes;
  return planes;
}

/// OK when the slices tile `tokens` without gap, every slice has the blocks its positions need, and
/// the blocks of every slice name pages below `pages`, resident ones first, with at least one plane
/// of K and of V where the step writes. InvalidArgument otherwise, naming the sequence and the
/// number at fault.
Status CheckStepBatch(const StepBatch& batch, std::uint32_t pages);
/// Its two parts: all but what is said about sampling, and that.
Status CheckPlaces(const StepBatch& batch, std::uint32_t pages);
Status CheckSampling(const StepBatch& batch);

/// OK when `kept` are as many blocks as the history has for kept tokens, or with `perhaps_more` one
/// more, all with the same planes of K and of V in pages below `pages`.
Status CheckKeptBlocks(const RetainedHistory& history, std::span<const BlockView> kept,
                       bool perhaps_more, std::uint32_t pages);
/// NotFound: an original of a history is needed and cannot be read.
Status OriginalGone(std::int32_t block);

/// OK when both sides of `code` have `channels` scales and centers as ChannelCode says.
Status CheckKvCode(const KvCode& code, std::size_t channels);

/// OK when every page id is below `pages` and every host pointer is set.
Status CheckCopies(std::span<const PageCopy> copies, std::uint32_t pages);

}  // namespace pliant
