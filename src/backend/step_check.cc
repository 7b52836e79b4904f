#include "backend/step_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace pliant {
namespace {

std::string Number(std::int64_t value) { return std::to_string(value); }

static_assert(sizeof(BlockView) == 2 * kPlanes * sizeof(std::uint32_t) && kPlanes == 4);
using Four = std::uint32_t __attribute__((vector_size(16)));

/// Of K's ids and V's: valid ones come first and lie below `pages`; else a lane is not 0. As
/// vectors and without branches, since this looks at every block of every step.
Four Faults(const BlockView& block, std::uint32_t pages) {
  const Four absent = Four{} + PageId::kInvalidValue, first = Four{} + ~0u;
  Four bad = {};
  for (const auto& ids : {&block.k, &block.v}) {
    Four four;
    std::memcpy(&four, ids->data(), sizeof four);
    const Four valid = four != absent, beyond = four >= Four{} + pages;
    bad |= valid & (beyond | ~__builtin_shufflevector(valid, first, 4, 0, 1, 2));
  }
  return bad;
}
bool Any(Four four) { return (four[0] | four[1] | four[2] | four[3]) != 0; }

Status CheckHistory(const StepBatch& batch, const SequenceSlice& slice, std::uint32_t pages) {
  if (slice.history == nullptr) return {};
  const RetainedHistory& history = *slice.history;
  if (history.drops() && slice.rows != 1)
    return InvalidArgument(Number(slice.rows) +
                           " rows over a history of which tokens were dropped");
  const std::int32_t kept = history.kept_blocks();
  if (slice.first_kept < 0 || history.frontier() > slice.context / kBlockTokens ||
      slice.first_kept > static_cast<std::int64_t>(batch.blocks.size()) - kept) {
    return InvalidArgument("kept blocks " + Number(slice.first_kept) + " + " + Number(kept) +
                           " of " + Number(static_cast<std::int64_t>(batch.blocks.size())) +
                           ", first whole block " + Number(history.frontier()) + " at token " +
                           Number(slice.context));
  }
  for (std::int32_t b = 0; b < kept; ++b) {
    const BlockView& block = batch.blocks[slice.first_kept + b];
    if (Any(Faults(block, pages)) || !block.k[0].valid() || !block.v[0].valid())
      return InvalidArgument("kept block " + Number(b) + " has no pages that there are");
  }
  return {};
}

Status CheckSlice(const StepBatch& batch, const SequenceSlice& slice, std::int64_t next_row,
                  std::uint32_t pages) {
  const auto rows = static_cast<std::int64_t>(batch.tokens.size());
  if (slice.first_row != next_row || slice.rows < 1 || slice.first_row > rows - slice.rows) {
    return InvalidArgument("rows " + Number(slice.first_row) + " + " + Number(slice.rows) +
                           " do not continue at row " + Number(next_row) + " of " + Number(rows));
  }
  if (slice.context < 0)
    return InvalidArgument("context " + Number(slice.context) + " is negative");
  PLIANT_RETURN_IF_ERROR(CheckHistory(batch, slice, pages));
  const std::int64_t end = std::int64_t{slice.context} + slice.rows;
  const std::int64_t needed = (end + kBlockTokens - 1) / kBlockTokens;
  if (slice.blocks != needed || slice.first_block < 0 ||
      slice.first_block + needed > static_cast<std::int64_t>(batch.blocks.size())) {
    return InvalidArgument("blocks " + Number(slice.first_block) + " + " + Number(slice.blocks) +
                           " of " + Number(static_cast<std::int64_t>(batch.blocks.size())) +
                           ", but " + Number(end) + " tokens need " + Number(needed));
  }
  const std::span<const BlockView> own = batch.blocks.subspan(
      static_cast<std::size_t>(slice.first_block), static_cast<std::size_t>(needed));
  Four bad = {};
  for (const BlockView& block : own) bad |= Faults(block, pages);
  if (Any(bad)) {
    const auto at = std::find_if(own.begin(), own.end(),
                                 [&](const BlockView& block) { return Any(Faults(block, pages)); });
    return InvalidArgument("block " + Number(at - own.begin()) + " names a page beyond the " +
                           Number(pages) + " there are, or has a gap between its planes");
  }
  if (slice.history != nullptr && slice.rows == 1) {
    const RetainedHistory& history = *slice.history;
    for (std::int64_t b = 0; b < needed; ++b) {
      const BlockView& block = own[static_cast<std::size_t>(b)];
      const bool dropped = b < history.frontier();
      if (dropped ? history.options().returns && !block.k[0].valid()
                  : !block.k[0].valid() || !block.v[0].valid())
        return InvalidArgument("block " + Number(b) + " of a history lacks a plane that is read");
    }
  }
  for (std::int64_t b = slice.context / kBlockTokens; b < needed; ++b) {
    const BlockView& block = own[static_cast<std::size_t>(b)];
    if (!block.k[0].valid() || !block.v[0].valid())
      return InvalidArgument("block " + Number(b) + " is written but has no pages");
  }
  return {};
}

}  // namespace

Status CheckStepBatch(const StepBatch& batch, std::uint32_t pages) {
  PLIANT_RETURN_IF_ERROR(CheckPlaces(batch, pages));
  return CheckSampling(batch);
}

Status CheckPlaces(const StepBatch& batch, std::uint32_t pages) {
  if (batch.positions.size() != batch.tokens.size()) {
    return InvalidArgument("step: " + Number(batch.tokens.size()) + " tokens but " +
                           Number(batch.positions.size()) + " positions");
  }
  std::int64_t next_row = 0;
  for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceSlice& slice = batch.sequences[s];
    PLIANT_RETURN_IF_ERROR(
        CheckSlice(batch, slice, next_row, pages).WithContext("step: sequence " + Number(s)));
    next_row += slice.rows;
  }
  if (next_row != static_cast<std::int64_t>(batch.tokens.size())) {
    return InvalidArgument("step: sequences cover " + Number(next_row) + " of " +
                           Number(batch.tokens.size()) + " rows");
  }
  std::int32_t last = -1;
  for (std::int32_t row : batch.logit_rows) {
    if (row <= last || row >= next_row) {
      return InvalidArgument("step: logit row " + Number(row) + " after " + Number(last) + " of " +
                             Number(next_row) + " rows");
    }
    last = row;
  }
  return {};
}

Status CheckSampling(const StepBatch& batch) {
  if (!batch.sampling.empty() &&
      (batch.sampling.size() != batch.logit_rows.size() || batch.sampled_columns < 1)) {
    return InvalidArgument("step: " + Number(static_cast<std::int64_t>(batch.sampling.size())) +
                           " rows to sample of " +
                           Number(static_cast<std::int64_t>(batch.logit_rows.size())) + ", among " +
                           Number(batch.sampled_columns) + " tokens");
  }
  const auto changes = static_cast<std::int64_t>(batch.changes.size());
  for (const RowSampling& row : batch.sampling) {
    if (row.first_change < 0 || row.changes < 0 || row.changes > changes - row.first_change) {
      return InvalidArgument("step: logit changes " + Number(row.first_change) + " and " +
                             Number(row.changes) + " more, of " + Number(changes));
    }
    if (row.logprobs < -1 || row.logprobs > kMostTopLogprobs) {
      return InvalidArgument("step: " + Number(row.logprobs) + " top logprobs, more than " +
                             Number(kMostTopLogprobs));
    }
  }
  return {};
}

Status CheckKeptBlocks(const RetainedHistory& history, std::span<const BlockView> kept,
                       bool perhaps_more, std::uint32_t pages) {
  for (const BlockView& block : kept) {
    const bool sound = !Any(Faults(block, pages)) && block.k[0].valid() && block.v[0].valid() &&
                       ResidentPlanes(block.k) == ResidentPlanes(kept[0].k) &&
                       ResidentPlanes(block.v) == ResidentPlanes(kept[0].v);
    if (!sound)
      return InvalidArgument("kept blocks of a history: the same planes of K and V, on the device");
  }
  const auto before = static_cast<std::size_t>(history.kept_blocks());
  const bool more = perhaps_more && kept.size() == before + 1;
  if ((perhaps_more && kept.empty()) || (!more && kept.size() != before)) {
    return InvalidArgument(Number(static_cast<std::int64_t>(kept.size())) +
                           " kept blocks for a history that has " + Number(history.kept_blocks()));
  }
  return {};
}

Status OriginalGone(std::int32_t block) {
  return NotFound("block " + Number(block) + " of the history cannot be read any more");
}

Status CheckKvCode(const KvCode& code, std::size_t channels) {
  for (const ChannelCode* side : {&code.key, &code.value}) {
    const std::string name = side == &code.key ? "key code: " : "value code: ";
    if (channels == 0 || side->scale.size() != channels || side->center.size() != channels) {
      return InvalidArgument(name + std::to_string(side->scale.size()) + " scales and " +
                             std::to_string(side->center.size()) + " centers, " +
                             std::to_string(channels) + " expected");
    }
    for (std::size_t i = 0; i < channels; ++i) {
      if (!(side->scale[i] > 0) || !std::isfinite(side->scale[i]) ||
          !std::isfinite(side->center[i])) {
        return InvalidArgument(name + "channel " + std::to_string(i) +
                               " is not finite, or its scale not above 0");
      }
    }
  }
  return {};
}

Status CheckCopies(std::span<const PageCopy> copies, std::uint32_t pages) {
  for (const PageCopy& copy : copies) {
    if (!copy.page.valid() || copy.page.value() >= pages || copy.host == nullptr) {
      return InvalidArgument("page copy: page " + Number(copy.page.value()) + " of " +
                             Number(pages) + ", or no host buffer");
    }
  }
  return {};
}

}  // namespace pliant
