// Test support: builds steps over a set of sequences whose blocks stand at chosen states. One
// thread.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "backend/backend.h"

namespace pliant::testing_support {

/// Leading planes of K and of V of a block.
struct Planes {
  int k = kPlanes;
  int v = kPlanes;
};

/// A block view with pages taken from `next_page` on, page ids spread by `stride` modulo `pages` so
/// that neighbours in a sequence are not neighbours in memory.
class PageMaker {
 public:
  explicit PageMaker(std::uint32_t pages) : pages_(pages) {}
  PageId Take();
  BlockView Block(Planes planes);

 private:
  std::uint32_t pages_;
  std::uint32_t taken_ = 0;
};

/// The same block with only its leading planes left: what demotion does to the table.
BlockView Demoted(const BlockView& block, Planes planes);

/// Owns what a StepBatch borrows.
struct OwnedStep {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> positions;
  std::vector<SequenceSlice> sequences;
  std::vector<BlockView> blocks;
  std::vector<std::int32_t> logit_rows;

  /// Appends `rows` new tokens of a sequence with `context` cached ones.
  void Add(int context, int rows, const std::vector<BlockView>& sequence_blocks);
  StepBatch Batch() const;
};

/// Gaussian rows in which some channels are larger and some rows are much larger, as K and V are.
std::vector<float> KvLikeData(std::size_t rows, std::size_t cols, std::mt19937& random);

}  // namespace pliant::testing_support
