#include "backend/support/kv_case.h"

#include <cmath>

#include "base/check.h"

namespace pliant::testing_support {

PageId PageMaker::Take() {
  PLIANT_CHECK(taken_ < pages_, "the test needs more pages");
  // 7919 is prime: a permutation of the ids unless `pages` is a multiple of it.
  return PageId(static_cast<std::uint32_t>(std::uint64_t{taken_++} * 7919 % pages_));
}

BlockView PageMaker::Block(Planes planes) {
  BlockView block;
  for (int p = 0; p < planes.k; ++p) block.k[p] = Take();
  for (int p = 0; p < planes.v; ++p) block.v[p] = Take();
  return block;
}

BlockView Demoted(const BlockView& block, Planes planes) {
  BlockView out;
  for (int p = 0; p < planes.k; ++p) out.k[p] = block.k[p];
  for (int p = 0; p < planes.v; ++p) out.v[p] = block.v[p];
  return out;
}

void OwnedStep::Add(int context, int rows, const std::vector<BlockView>& sequence_blocks) {
  SequenceSlice slice;
  slice.first_row = static_cast<std::int32_t>(tokens.size());
  slice.rows = rows;
  slice.context = context;
  slice.first_block = static_cast<std::int32_t>(blocks.size());
  slice.blocks = (context + rows + kBlockTokens - 1) / kBlockTokens;
  sequences.push_back(slice);
  blocks.insert(blocks.end(), sequence_blocks.begin(), sequence_blocks.begin() + slice.blocks);
  for (int i = 0; i < rows; ++i) {
    tokens.push_back(0);
    positions.push_back(context + i);
  }
}

StepBatch OwnedStep::Batch() const { return {tokens, positions, sequences, blocks, logit_rows}; }

std::vector<float> KvLikeData(std::size_t rows, std::size_t cols, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> gain(cols);
  for (float& g : gain) g = std::exp(0.5f * normal(random));
  std::vector<float> data(rows * cols);
  for (std::size_t r = 0; r < rows; ++r) {
    const float size = std::exp(0.4f * normal(random));
    for (std::size_t c = 0; c < cols; ++c) data[r * cols + c] = normal(random) * gain[c] * size;
  }
  return data;
}

}  // namespace pliant::testing_support
