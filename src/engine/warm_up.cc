#include "engine/warm_up.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

namespace pliant {
namespace {

constexpr std::int32_t kPromptRows = 64;
// A step of one size is launched the first time, made a graph the second, and one the third.
constexpr int kDecodes = 3;
constexpr std::int32_t kBlocks = (kPromptRows + kDecodes + kBlockTokens - 1) / kBlockTokens;

}  // namespace

Status WarmUp(Backend& backend, Model& model, std::uint32_t pages, int max_rows) {
  const auto context = model.config().context_length;
  if (!backend.SamplesTokens() || pages < kBlocks * 2 * kPlanes || max_rows < kPromptRows ||
      context < kPromptRows + kDecodes)
    return Status::Ok();
  std::array<BlockView, kBlocks> blocks;
  std::uint32_t next = 0;
  for (BlockView& block : blocks) {
    for (PageId& page : block.k) page = PageId(next++);
    for (PageId& page : block.v) page = PageId(next++);
  }
  const RowSampling greedy;
  std::int32_t done = 0;
  for (int step = 0; step <= kDecodes; ++step) {
    const std::int32_t rows = step == 0 ? kPromptRows : 1;
    const std::vector<std::int32_t> tokens(static_cast<std::size_t>(rows), 0);
    std::vector<std::int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), done);
    const std::int32_t last = rows - 1;
    const SequenceSlice slice{
        .rows = rows, .context = done, .blocks = (done + rows + kBlockTokens - 1) / kBlockTokens};
    PLIANT_RETURN_IF_ERROR(model.Forward(backend, {.tokens = tokens,
                                                   .positions = positions,
                                                   .sequences = {&slice, 1},
                                                   .blocks = blocks,
                                                   .logit_rows = {&last, 1},
                                                   .sampling = {&greedy, 1},
                                                   .sampled_columns = 1}));
    done += rows;
  }
  return Status::Ok();
}

}  // namespace pliant
