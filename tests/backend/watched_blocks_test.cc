// Sequences whose blocks are watched: what a row gets and what it is said to have looked at,
// against the reference over the same bytes, at every level of this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "backend/cpu/cpu_level.h"
#include "backend/cpu/kv.h"
#include "backend/ref/ref_kv.h"
#include "backend/support/kv_case.h"
#include "support/rounds.h"

namespace pliant {
namespace {

using testing_support::Demoted;
using testing_support::KvLikeData;
using testing_support::OwnedStep;
using testing_support::PageMaker;

struct WatchShape {
  int heads, kv_heads, dim, layers;
};

class WatchedBlocksLevel : public ::testing::TestWithParam<std::string> {};

/// One cache of both kinds with the same bytes, and random queries.
class WatchLab {
 public:
  WatchLab(const std::string& level, const WatchShape& shape, std::uint32_t pages)
      : shape_(shape), pool_(2), maker_(pages), pages_(pages), random_(7) {
    const KvGeometry geometry{shape.layers, shape.kv_heads, shape.dim};
    kv_ = CpuKv::Make(&pool_, level).value();
    EXPECT_TRUE(kv_->AllocatePages(geometry, pages).ok());
    EXPECT_TRUE(ref_.AllocatePages(geometry, pages).ok());
    for (int i = 0; i < shape.dim / 2; ++i) {
      rope_.inv_freq.push_back(std::pow(10000.f, -2.f * i / shape.dim));
    }
  }

  int Columns() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.dim; }

  std::vector<BlockView> Sequence(int tokens) {
    std::vector<BlockView> blocks;
    for (int b = 0; b * kBlockTokens < tokens; ++b) blocks.push_back(maker_.Block({}));
    OwnedStep step;
    step.Add(0, tokens, blocks);
    EXPECT_TRUE(kv_->BeginStep(step.Batch()).ok());
    for (int layer = 0; layer < shape_.layers; ++layer) {
      std::vector<float> qkv = KvLikeData(tokens, Columns(), random_);
      kv_->QkvToCache({layer, shape_.heads, {}, {}, 0}, rope_, {qkv.data(), Columns()});
    }
    return blocks;
  }

  /// Runs the step here and in the reference; compares rows and weights.
  void Compare(const OwnedStep& step) {
    for (std::uint32_t p = 0; p < pages_; ++p) {
      const auto page = ref_.Page(PageId(p));
      std::copy_n(kv_->Page(PageId(p)).begin(), page.size(), page.begin());
    }
    ASSERT_TRUE(kv_->BeginStep(step.Batch()).ok());
    const std::int64_t out_columns = std::int64_t{shape_.heads} * shape_.dim;
    const float scale = 1 / std::sqrt(static_cast<float>(shape_.dim));
    std::vector<float> expected_weights(step.blocks.size(), 0.0f);
    for (int layer = 0; layer < shape_.layers; ++layer) {
      std::vector<float> query = KvLikeData(step.tokens.size(), Columns(), random_);
      std::vector<float> out(step.tokens.size() * out_columns, NAN), expected(out);
      kv_->Attention(layer, shape_.heads, scale, {query.data(), Columns()},
                     {out.data(), out_columns});
      for (const SequenceSlice& slice : step.sequences) {
        const auto blocks = std::span(step.blocks).subspan(slice.first_block, slice.blocks);
        const auto weights = std::span(expected_weights)
                                 .subspan(slice.first_block, slice.watched ? slice.blocks : 0);
        for (int i = 0; i < slice.rows; ++i) {
          const std::size_t row = slice.first_row + i;
          ref_.AttendRow(layer, shape_.heads, scale, blocks, slice.context + i,
                         {0, std::span(query).subspan(row * Columns(), Columns()),
                          std::span(expected).subspan(row * out_columns, out_columns)},
                         weights);
        }
      }
      double error = 0, size = 0;
      for (std::size_t i = 0; i < out.size(); ++i) {
        error = std::max(error, std::abs(double{out[i]} - expected[i]));
        size = std::max(size, std::abs(double{expected[i]}));
      }
      EXPECT_LT(error, 2e-3 * size) << "layer " << layer;
    }
    const std::span<const float> weights = kv_->BlockWeights();
    ASSERT_EQ(weights.size(), step.blocks.size());
    for (std::size_t b = 0; b < weights.size(); ++b) {
      // A weight is the exponential of a logit, and that has the error of the kernel's arithmetic.
      EXPECT_NEAR(weights[b], expected_weights[b], 2e-3 + 1e-2 * expected_weights[b])
          << "block " << b;
    }
  }

  CpuKv& kv() { return *kv_; }
  std::mt19937& random() { return random_; }

 private:
  WatchShape shape_;
  ThreadPool pool_;
  PageMaker maker_;
  std::uint32_t pages_;
  std::mt19937 random_;
  std::unique_ptr<CpuKv> kv_;
  RefKv ref_;
  RopeTable rope_;
};

TEST_P(WatchedBlocksLevel, LikeTheReferenceForEveryMixOfDroppedAndWatchedBlocks) {
  const WatchShape shapes[] = {
      {4, 2, 64, 2}, {9, 3, 64, 1}, {4, 1, 128, 1}, {2, 2, 256, 1}, {8, 1, 64, 1}};
  for (const WatchShape& shape : shapes) {
    SCOPED_TRACE(shape.dim);
    WatchLab lab(GetParam(), shape, 1400);
    ASSERT_TRUE(lab.kv().WatchesBlocks(shape.heads));
    OwnedStep step;
    // Contexts around the edges of blocks, steps and splits, the last one in several splits.
    for (const int tokens : {1, 31, 33, 129, 700, Rounds(2200, 1100)}) {
      std::vector<BlockView> blocks = lab.Sequence(tokens);
      for (std::size_t b = 0; b + 1 < blocks.size(); ++b) {
        switch (lab.random()() % 5) {
          case 0:
          case 1:
            blocks[b] = Demoted(blocks[b], {1, 0});
            break;
          case 2:
            blocks[b] = BlockView{};
            break;
          case 3:
            blocks[b] = Demoted(blocks[b], {2, 2});
            break;
          default:
            break;
        }
      }
      step.Add(tokens - 1, 1, blocks);
      step.sequences.back().watched = true;
    }
    // One beside them that is not watched, with many rows.
    std::vector<BlockView> plain = lab.Sequence(60);
    step.Add(40, 20, plain);
    lab.Compare(step);
  }
}

TEST_P(WatchedBlocksLevel, WhatALookedAtBlockWeighsIsItsShare) {
  // Every block takes part: shares of a row's blocks lie within 0 and 1, and at least one block has
  // a fair one.
  WatchLab lab(GetParam(), {4, 2, 64, 1}, 400);
  std::vector<BlockView> blocks = lab.Sequence(500);
  OwnedStep step;
  step.Add(499, 1, blocks);
  step.sequences.back().watched = true;
  lab.Compare(step);
  const std::span<const float> weights = lab.kv().BlockWeights();
  for (const float weight : weights) {
    EXPECT_GE(weight, 0.0f);
    EXPECT_LE(weight, 1.0f + 1e-5f);
  }
  EXPECT_GT(*std::max_element(weights.begin(), weights.end()), 1.0f / 500);
}

TEST_P(WatchedBlocksLevel, RefusesMoreThanOneRow) {
  WatchLab lab(GetParam(), {4, 2, 64, 1}, 100);
  std::vector<BlockView> blocks = lab.Sequence(64);
  OwnedStep step;
  step.Add(62, 2, blocks);
  step.sequences.back().watched = true;
  const Status status = lab.kv().BeginStep(step.Batch());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
}

std::vector<std::string> WatchLevels() {
  std::vector<std::string> levels;
  for (const std::string word : {"plain", "avx2", "avx512", "amx"}) {
    if (CpuLevelName(ChooseCpuLevel(word).value()) == word) levels.push_back(word);
  }
  return levels;
}
INSTANTIATE_TEST_SUITE_P(Levels, WatchedBlocksLevel, ::testing::ValuesIn(WatchLevels()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace pliant
