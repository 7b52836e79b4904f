// Attention over a history with a capacity: what a row gets, what returns and what is scored,
// against the reference over the same bytes, at every level of this machine; and that kept rows are
// the originals' bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <random>
#include <string>

#include "backend/cpu/cpu_level.h"
#include "backend/cpu/kv.h"
#include "backend/cpu/kv_keys.h"
#include "backend/cpu/kv_watch.h"
#include "backend/ref/ref_kv.h"
#include "backend/support/kv_case.h"
#include "backend/watched_keys.h"
#include "support/rounds.h"

namespace pliant {
namespace {

using testing_support::Demoted;
using testing_support::KvLikeData;
using testing_support::OwnedStep;
using testing_support::PageMaker;
using testing_support::Planes;

struct Shape {
  int heads, kv_heads, dim, layers;
};

/// The originals stay where they were written.
class Whole final : public RowSource {
 public:
  std::vector<BlockView> blocks;
  bool readable = true;
  PlanePlace Find(std::int32_t block, bool is_v, int plane, int, std::span<std::byte>) override {
    const BlockView& view = blocks.at(static_cast<std::size_t>(block));
    return readable ? PlanePlace{.page = (is_v ? view.v : view.k)[plane]} : PlanePlace{};
  }
};

std::shared_ptr<RowSource> Borrowed(RowSource& source) {
  return std::shared_ptr<RowSource>(std::shared_ptr<void>(), &source);
}

/// One sequence with a history in a CPU cache, and a reference cache that is given the same bytes.
class Lab {
 public:
  Lab(const std::string& level, const Shape& shape, RetentionOptions options, Planes kept_planes,
      int threads = 2)
      : shape_(shape),
        kept_planes_(kept_planes),
        geometry_{shape.layers, shape.kv_heads, shape.dim},
        pool_(threads),
        maker_(kPages),
        random_(7),
        history_(geometry_, shape.heads, options, Borrowed(whole_)) {
    kv_ = CpuKv::Make(&pool_, level).value();
    EXPECT_TRUE(kv_->AllocatePages(geometry_, kPages).ok());
    EXPECT_TRUE(ref_.AllocatePages(geometry_, kPages).ok());
    for (int i = 0; i < shape.dim / 2; ++i)
      rope_.inv_freq.push_back(std::pow(10000.f, -2.f * i / shape.dim));
  }

  int Columns() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.dim; }
  RetainedHistory& history() { return history_; }
  Whole& whole() { return whole_; }
  CpuKv& kv() { return *kv_; }

  void Prefill(int tokens) {
    while (static_cast<int>(whole_.blocks.size()) * kBlockTokens < tokens)
      whole_.blocks.push_back(maker_.Block({}));
    OwnedStep step;
    step.Add(0, tokens, whole_.blocks);
    ASSERT_TRUE(kv_->BeginStep(step.Batch()).ok());
    for (int layer = 0; layer < shape_.layers; ++layer) {
      std::vector<float> qkv = KvLikeData(tokens, Columns(), random_);
      kv_->QkvToCache({layer, shape_.heads, {}, {}, 0}, rope_, {qkv.data(), Columns()});
    }
    context_ = tokens;
    Note();
  }

  void Note() {
    history_.Reserve(context_ + kBlockTokens);
    ASSERT_TRUE(kv_->NoteHistory(history_, context_ / kBlockTokens).ok());
  }

  void Drop(bool into_new) {
    if (into_new) kept_.push_back(maker_.Block(kept_planes_));
    ASSERT_TRUE(kv_->DropFromHistory(history_, kept_).ok());
  }

  /// One more token, here and in the reference from the same state.
  void Step(float query_size) {
    if (context_ % kBlockTokens == 0) whole_.blocks.push_back(maker_.Block({}));
    history_.Reserve(context_ + 1);
    OwnedStep step;
    std::vector<BlockView> blocks = whole_.blocks;
    for (int b = 0; b < history_.frontier(); ++b)
      blocks[b] = history_.options().returns ? Demoted(blocks[b], {1, 0}) : BlockView{};
    step.Add(context_, 1, blocks);
    step.sequences.back().history = &history_;
    step.sequences.back().first_kept = static_cast<std::int32_t>(step.blocks.size());
    step.blocks.insert(step.blocks.end(), kept_.begin(), kept_.end());
    ASSERT_TRUE(kv_->BeginStep(step.Batch()).ok());
    const std::int64_t out_columns = std::int64_t{shape_.heads} * shape_.dim;
    const float scale = 1 / std::sqrt(static_cast<float>(shape_.dim));
    for (int layer = 0; layer < shape_.layers; ++layer) {
      std::vector<float> qkv = KvLikeData(1, Columns(), random_);
      for (std::int64_t i = 0; i < out_columns; ++i) qkv[i] *= query_size;
      kv_->QkvToCache({layer, shape_.heads, {}, {}, 0}, rope_, {qkv.data(), Columns()});
      CopyPages();
      RetainedHistory expected_history = history_;
      std::vector<float> out(out_columns, NAN), expected(out);
      kv_->Attention(layer, shape_.heads, scale, {qkv.data(), Columns()},
                     {out.data(), out_columns});
      ref_.AttendHistory(layer, shape_.heads, scale, expected_history, kept_,
                         std::span(step.blocks).first(blocks.size()), context_, {0, qkv, expected});
      ++rows_;
      if (ref_.closest_decision() < 0.005) {
        ++undecided_;  // roundings may tip it either way; what follows starts from the state here
        continue;
      }
      Compare(layer, out, expected, expected_history);
    }
    ++context_;
    ExpectOriginalRows();
  }

  int context() const { return context_; }
  /// Share of rows that were not compared.
  double undecided() const { return static_cast<double>(undecided_) / rows_; }

 private:
  void CopyPages() {
    for (std::uint32_t p = 0; p < kPages; ++p) {
      const auto page = ref_.Page(PageId(p));
      std::copy_n(kv_->Page(PageId(p)).begin(), page.size(), page.begin());
    }
  }

  void Compare(int layer, const std::vector<float>& out, const std::vector<float>& expected,
               const RetainedHistory& expected_history) {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_TRUE(std::isfinite(out[i]));
      error = std::max(error, std::abs(double{out[i]} - expected[i]));
      size = std::max(size, std::abs(double{expected[i]}));
    }
    EXPECT_LT(error, 4e-3 * size) << "layer " << layer << ", context " << context_;
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const int unit = history_.UnitOf(layer, head);
      EXPECT_TRUE(std::ranges::equal(history_.KeptTokens(unit), expected_history.KeptTokens(unit)))
          << "unit " << unit << " brought back something else";
      for (std::int32_t t = 0; t <= context_; ++t) {
        EXPECT_NEAR(history_.score(unit, t), expected_history.score(unit, t),
                    2e-3 + 1e-2 * expected_history.score(unit, t))
            << "unit " << unit << ", token " << t;
      }
    }
    if (::testing::Test::HasFailure()) context_ = 1 << 30;  // it would repeat
  }

  void ExpectOriginalRows() {
    for (int unit = 0; unit < history_.units(); ++unit) {
      const auto tokens = history_.KeptTokens(unit);
      for (std::size_t slot = 0; slot < tokens.size(); ++slot) {
        const int layer = unit / shape_.kv_heads, head = unit % shape_.kv_heads;
        const BlockView& from = whole_.blocks[tokens[slot] / kBlockTokens];
        const BlockView& to = kept_[slot / kBlockTokens];
        const auto same = [&](PageId a, PageId b, bool scale) {
          const auto at = [&](std::int64_t token) {
            return scale ? geometry_.ScaleOffset(layer, head, static_cast<int>(token % 32))
                         : geometry_.RowOffset(layer, head, static_cast<int>(token % 32));
          };
          const std::size_t bytes = scale ? 2 : geometry_.RowBytes();
          return std::ranges::equal(
              kv_->Page(a).subspan(at(tokens[slot]), bytes),
              kv_->Page(b).subspan(at(static_cast<std::int64_t>(slot)), bytes));
        };
        for (int p = 0; p < kept_planes_.k; ++p) EXPECT_TRUE(same(from.k[p], to.k[p], false));
        for (int p = 0; p < kept_planes_.v; ++p) EXPECT_TRUE(same(from.v[p], to.v[p], false));
        EXPECT_TRUE(same(from.k[0], to.k[0], true) && same(from.v[0], to.v[0], true));
      }
    }
  }

  static constexpr std::uint32_t kPages = 1200;
  Shape shape_;
  Planes kept_planes_;
  KvGeometry geometry_;
  ThreadPool pool_;
  PageMaker maker_;
  std::mt19937 random_;
  std::unique_ptr<CpuKv> kv_;
  RefKv ref_;
  RopeTable rope_;
  Whole whole_;
  std::vector<BlockView> kept_;
  RetainedHistory history_;
  int context_ = 0;
  int rows_ = 0, undecided_ = 0;
};

class RetainedAttentionLevel : public ::testing::TestWithParam<std::string> {};

TEST_P(RetainedAttentionLevel, LikeTheReferenceWhileTokensLeaveAndReturn) {
  const Shape shapes[] = {{4, 2, 64, 2},  {9, 3, 64, 1}, {4, 1, 128, 1},
                          {2, 2, 256, 1}, {8, 1, 64, 1}, {2, 1, 32, 2}};
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(testing::Message() << shape.heads << " heads, dim " << shape.dim);
    const Planes planes = shape.kv_heads == 2 ? Planes{2, 2} : Planes{4, 4};
    Lab lab(GetParam(), shape, {.return_weight = 0.2f}, planes);
    ASSERT_TRUE(lab.kv().RetainsHistory(shape.heads));
    lab.Prefill(215);
    lab.Step(1);  // nothing is dropped yet
    for (int i = 0; i < 4; ++i) lab.Drop(i < 2);
    const int steps = Rounds(50, 12);
    for (int i = 0; i < steps; ++i) {
      lab.Step(i % 3 == 0 ? 3.0f : 1.0f);
      if (::testing::Test::HasFailure()) return;
      if (lab.context() % kBlockTokens != 0) continue;
      lab.Note();
      lab.Drop(false);
    }
    EXPECT_GT(lab.history().returned_pages(), 3);
    EXPECT_LT(lab.undecided(), 0.2);
  }
}

TEST_P(RetainedAttentionLevel, SeveralSplitsOfBothKinds) {
  Lab lab(GetParam(), {4, 2, 64, 1}, {.return_weight = 0.2f}, {1, 1});
  lab.Prefill(2400);
  for (int i = 0; i < 36; ++i) lab.Drop(i < 20);
  for (int i = 0; i < 6; ++i) lab.Step(3);
  EXPECT_GT(lab.history().returned_pages(), 0);
}

/// Heads enough for the threads there are: each is an item by itself.
TEST_P(RetainedAttentionLevel, WholeHeadsAtOnce) {
  Lab lab(GetParam(), {8, 4, 64, 1}, {.return_weight = 0.2f}, {2, 1}, /*threads=*/1);
  lab.Prefill(1600);
  for (int i = 0; i < 40; ++i) lab.Drop(i < 34);  // splits: two of what takes part, two of the rest
  const int steps = Rounds(12, 4);
  for (int i = 0; i < steps; ++i) lab.Step(3);
  EXPECT_GT(lab.history().returned_pages(), 0);
  EXPECT_LT(lab.undecided(), 0.3);
}

TEST_P(RetainedAttentionLevel, WithoutReturnsNothingComesBack) {
  for (const bool squared : {false, true}) {
    SCOPED_TRACE(squared ? "scores of squares" : "scores");
    Lab lab(GetParam(), {6, 2, 64, 1}, {.returns = false, .squared = squared}, {4, 4});
    lab.Prefill(200);
    for (int i = 0; i < 4; ++i) lab.Drop(i < 2);
    for (int i = 0; i < 20; ++i) lab.Step(3);
    EXPECT_EQ(lab.history().returned_pages(), 0);
    EXPECT_EQ(lab.history().dropped_tokens() / lab.history().units(), 64);
  }
}

TEST_P(RetainedAttentionLevel, WhatCannotBeReadIsLostAndTheRowGoesOn) {
  Lab lab(GetParam(), {4, 2, 64, 1}, {.return_weight = 0.1f}, {4, 4});
  lab.Prefill(200);
  for (int i = 0; i < 4; ++i) lab.Drop(i < 2);
  lab.whole().readable = false;
  for (int i = 0; i < 10; ++i) lab.Step(3);
  EXPECT_EQ(lab.history().returned_pages(), 0);
  EXPECT_GT(lab.history().lost_pages(), 0);
  EXPECT_EQ(lab.kv().DropFromHistory(lab.history(), {}).code(), StatusCode::kInvalidArgument);
}

constexpr int kPromptTokens = Rounds(1150, 300);

/// Scores [unit][token] of a prompt of kPromptTokens read in `chunks`, by one backend or the other.
template <typename Run>
std::vector<float> ScoresOfPrompt(const std::vector<int>& chunks, bool squared, Run&& run) {
  constexpr KvGeometry kGeometry{1, 2, 64};
  constexpr int kHeads = 6, kTokens = kPromptTokens, kColumns = (kHeads + 4) * 64;
  std::mt19937 random(5);
  const std::vector<float> all = KvLikeData(kTokens, kColumns, random);
  Whole whole;
  PageMaker maker(400);
  RetainedHistory history(kGeometry, kHeads, {.squared = squared}, Borrowed(whole));
  history.Reserve(kTokens);
  int context = 0;
  for (const int rows : chunks) {
    while (static_cast<int>(whole.blocks.size()) * kBlockTokens < context + rows)
      whole.blocks.push_back(maker.Block({}));
    OwnedStep step;
    step.Add(context, rows, whole.blocks);
    step.sequences.back().history = &history;
    std::vector<float> qkv(all.begin() + std::ptrdiff_t{context} * kColumns,
                           all.begin() + std::ptrdiff_t{context + rows} * kColumns);
    run(step, qkv, kHeads, kColumns);
    context += rows;
  }
  EXPECT_EQ(context, kTokens);
  std::vector<float> scores;
  for (int unit = 0; unit < history.units(); ++unit) {
    for (int t = 0; t < kTokens; ++t) scores.push_back(history.score(unit, t));
  }
  return scores;
}

TEST_P(RetainedAttentionLevel, APromptIsScoredInWhateverChunksItComes) {
  ThreadPool pool(2);
  RopeTable rope;
  for (int i = 0; i < 32; ++i) rope.inv_freq.push_back(std::pow(10000.f, -2.f * i / 64));
  const float scale = 0.125f;
  const auto cpu = [&](const std::vector<int>& chunks, bool squared) {
    const auto kv = CpuKv::Make(&pool, GetParam()).value();
    EXPECT_TRUE(kv->AllocatePages({1, 2, 64}, 400).ok());
    return ScoresOfPrompt(
        chunks, squared,
        [&](const OwnedStep& step, std::vector<float>& qkv, int heads, int columns) {
          std::vector<float> out(step.tokens.size() * heads * 64);
          ASSERT_TRUE(kv->BeginStep(step.Batch()).ok());
          kv->QkvToCache({0, heads, {}, {}, 0}, rope, {qkv.data(), columns});
          kv->Attention(0, heads, scale, {qkv.data(), columns},
                        {out.data(), std::int64_t{heads} * 64});
        });
  };
  const auto ref = [&](bool squared) {
    RefKv kv;
    EXPECT_TRUE(kv.AllocatePages({1, 2, 64}, 400).ok());
    return ScoresOfPrompt(
        {kPromptTokens}, squared,
        [&](const OwnedStep& step, std::vector<float>& qkv, int heads, int columns) {
          for (std::size_t r = 0; r < step.tokens.size(); ++r) {
            const std::span<float> row = std::span(qkv).subspan(r * columns, columns);
            const auto at = static_cast<std::int32_t>(r);
            kv.WriteRow({0, heads, {}, {}, 0}, {}, {}, rope, step.blocks, at, {at, row, {}});
            kv.ScoreRow(0, heads, scale, *step.sequences[0].history, step.blocks, at,
                        {at, row, {}});
          }
        });
  };
  for (const bool squared : {false, true}) {
    SCOPED_TRACE(squared ? "scores of squares" : "scores");
    const std::vector<float> whole = cpu({kPromptTokens}, squared);
    EXPECT_EQ(cpu({1, 6, 1, 100, 1, 1, kPromptTokens - 150, 39, 1}, squared), whole);
    const std::vector<float> expected = ref(squared);
    double sum = 0;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_NEAR(whole[i], expected[i], (squared ? 5e-4 : 5e-3) + 1e-2 * expected[i]) << i;
      sum += whole[i];
    }
    // What a row looks at sums to one, in each of two units; squares to less.
    if (!squared) EXPECT_NEAR(sum, 2 * kPromptTokens, 1);
    if (squared) EXPECT_LT(sum, 1.9 * kPromptTokens);
  }
}

TEST_P(RetainedAttentionLevel, LikenessIsThatOfKeysBeforeRope) {
  constexpr int kDim = 64, kTokens = 96, kColumns = 3 * kDim;
  ThreadPool pool(1);
  const auto kv = CpuKv::Make(&pool, GetParam()).value();
  ASSERT_TRUE(kv->AllocatePages({1, 1, kDim}, 100).ok());
  ChannelCode code;
  std::mt19937 random(9);
  for (int c = 0; c < kDim; ++c) {
    code.scale.push_back(0.5f + static_cast<float>((c % 32) % 5));
    code.center.push_back(static_cast<float>(random() % 100) * 0.01f);
  }
  ASSERT_TRUE(
      kv->SetKvCode({code, {std::vector<float>(kDim, 1.f), std::vector<float>(kDim, 0.f)}}).ok());
  RopeTable rope;
  for (int i = 0; i < kDim / 2; ++i) rope.inv_freq.push_back(std::pow(10000.f, -2.f * i / kDim));
  std::vector<float> qkv = KvLikeData(kTokens, kColumns, random);
  for (int t = 0; t < 16; ++t) {  // tokens 8 + t have the key of tokens 70 + t
    std::copy_n(qkv.begin() + (70 + t) * kColumns + kDim, kDim,
                qkv.begin() + (8 + t) * kColumns + kDim);
  }
  Whole whole;
  PageMaker maker(100);
  for (int b = 0; b < 3; ++b) whole.blocks.push_back(maker.Block({}));
  OwnedStep step;
  step.Add(0, kTokens, whole.blocks);
  ASSERT_TRUE(kv->BeginStep(step.Batch()).ok());
  kv->QkvToCache({0, 1, {}, {}, 0}, rope, {qkv.data(), kColumns});
  for (const bool returns : {true, false}) {
    RetainedHistory history({1, 1, kDim}, 1, {.returns = returns, .redundancy = 1},
                            Borrowed(whole));
    ASSERT_TRUE(kv->NoteHistory(history, 3).ok());
    // Keys are read at 8 bits: the signs of small channels may be others, 6 of 64 at most.
    const float near = returns ? 0.05f : 0.01f;
    for (int t = 0; t < 16; ++t) EXPECT_LE(history.weight(0, 8 + t), near) << t;
    int far = 0;
    for (int t = 30; t < 64; ++t) far += history.weight(0, t) > (returns ? 0.17f : 0.1f);
    EXPECT_GE(far, 30);
  }
}

TEST_P(RetainedAttentionLevel, WatchesByTheIntegersThatAreWrittenDown) {
  const CpuLevel level = ChooseCpuLevel(GetParam()).value();
  std::mt19937 random(21);
  for (const int dim : {32, 64, 96, 128, 256}) {
    for (const int columns : {1, 3, 4, 5, 9}) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", columns " << columns);
      constexpr int kBlocks = 3;
      const KvGeometry geometry{1, 1, dim};
      std::vector<std::byte> pages(kBlocks * geometry.PageBytes());
      for (std::byte& byte : pages) byte = static_cast<std::byte>(random());
      BlockView blocks[kBlocks];
      for (int b = 0; b < kBlocks; ++b) {
        if (b != 1) blocks[b].k[0] = PageId(b);  // the middle one has gone
        for (int t = 0; t < kBlockTokens; ++t) {
          const std::uint16_t scale = FloatToBf16(static_cast<float>(random() % 999) * 1e-2f);
          std::memcpy(&pages[b * geometry.PageBytes() + geometry.ScaleOffset(0, 0, t)], &scale, 2);
        }
      }
      AttentionHead head;
      head.pages = pages.data();
      head.page_bytes = geometry.PageBytes();
      head.scales_offset = geometry.ScaleOffset(0, 0, 0);
      head.head_dim = dim;
      head.blocks = blocks;
      std::vector<float> query = KvLikeData(columns, dim, random);
      if (columns == 9) std::fill_n(query.begin() + 4 * dim, dim, 0.0f);
      query[dim - 1] = 100;  // codes of 127, and many of 0
      QueryTile tile;
      tile.query = query.data();
      tile.rows = 1;
      tile.group = columns;
      tile.softmax_scale = 0.125f;
      std::vector<float> logits(static_cast<std::size_t>(columns) * kSplitTokens, NAN);
      ChooseWatchKernel(level)(head, tile, 0, kBlocks * kBlockTokens, logits.data());
      std::vector<std::int8_t> codes(dim);
      for (int c = 0; c < columns; ++c) {
        const float step =
            CodeWatchingQuery(std::span<const float>(query).subspan(c * dim, dim), codes);
        for (int t = 0; t < kBlocks * kBlockTokens; ++t) {
          const float got = logits[c * kSplitTokens + t];
          if (t / kBlockTokens == 1) {
            EXPECT_EQ(got, -INFINITY);
            continue;
          }
          const std::byte* page = pages.data() + t / kBlockTokens * geometry.PageBytes();
          std::uint16_t scale;
          std::memcpy(&scale, page + geometry.ScaleOffset(0, 0, t % kBlockTokens), 2);
          const auto* row = reinterpret_cast<const std::uint8_t*>(page) +
                            geometry.RowOffset(0, 0, t % kBlockTokens);
          const std::int32_t product = WatchProduct(codes, row);
          // What is left is a few roundings of f32: the integer is the same.
          const double want = static_cast<double>(product) * Bf16ToFloat(scale) * step / 16 *
                              0.125 * std::numbers::log2e;
          EXPECT_NEAR(got, want, 4e-7 * std::abs(want)) << "column " << c << ", token " << t;
        }
      }
    }
  }
}

TEST_P(RetainedAttentionLevel, KeysOfLikenessAreTheOracles) {
  const KeyKernel& oracle = ScalarKeyKernel();
  const KeyKernel& kernel = ChooseKeyKernel(ChooseCpuLevel(GetParam()).value());
  std::mt19937 random(31);
  for (const int dim : {32, 64, 96, 128, 256}) {
    SCOPED_TRACE(testing::Message() << "dim " << dim);
    const std::size_t size = static_cast<std::size_t>(kBlockTokens) * dim;
    std::vector<std::uint8_t> rows[kLikenessPlanes];
    for (auto& plane : rows) {
      plane.resize(size / 2);
      for (std::uint8_t& byte : plane) byte = static_cast<std::uint8_t>(random());
    }
    std::vector<std::uint16_t> scales(kBlockTokens);
    for (int t = 0; t < kBlockTokens; ++t) scales[t] = FloatToBf16(t == 3 ? 0 : 0.5f + 0.1f * t);
    const std::vector<float> channel = KvLikeData(1, dim, random),
                             mean = KvLikeData(1, dim, random);
    std::vector<float> cosine(size / 2), sine(size / 2);
    for (std::size_t i = 0; i < cosine.size(); ++i) {
      const float angle = static_cast<float>(random() % 1000) * 0.01f;
      cosine[i] = std::cos(angle);
      sine[i] = std::sin(angle);
    }
    CodedKeys coded{.head_dim = dim,
                    .rows = {rows[0].data(), rows[1].data()},
                    .scales = reinterpret_cast<const std::byte*>(scales.data()),
                    .channel_scale = channel.data(),
                    .channel_center = mean.data(),
                    .cosine = cosine.data(),
                    .sine = sine.data()};
    std::vector<float> keys(size, NAN), expected(size);
    for (const bool channels : {true, false}) {
      if (!channels) coded.channel_scale = coded.channel_center = nullptr;
      kernel.decode(coded, keys.data());
      oracle.decode(coded, expected.data());
      float largest = 0;
      for (const float x : expected) largest = std::max(largest, std::abs(x));
      for (std::size_t i = 0; i < size; ++i)
        ASSERT_NEAR(keys[i], expected[i], 1e-6f * largest) << "element " << i;
    }
    const int words = (dim + 63) / 64;
    expected[5] = mean[5];  // not above it
    std::vector<std::uint64_t> signs(kBlockTokens * words, ~0ull), expected_signs(signs);
    kernel.signs(kBlockTokens, dim, expected.data(), mean.data(), signs.data());
    oracle.signs(kBlockTokens, dim, expected.data(), mean.data(), expected_signs.data());
    EXPECT_EQ(signs, expected_signs);
    EXPECT_EQ(signs[0] >> 5 & 1, 0u);
    std::vector<std::uint64_t> older(77 * words);
    for (std::uint64_t& word : older) word = std::uint64_t{random()} << 32 | random();
    for (const int count : {0, 1, 15, 32, 77}) {
      std::vector<std::int32_t> fewest(77, -1), expected_fewest(77, -1);
      kernel.fewest(words, count, older.data(), kBlockTokens, signs.data(), fewest.data());
      oracle.fewest(words, count, older.data(), kBlockTokens, signs.data(), expected_fewest.data());
      EXPECT_EQ(fewest, expected_fewest) << count;
    }
  }
}

TEST_P(RetainedAttentionLevel, TheNearestCodesAreTheOracles) {
  const KeyKernel& oracle = ScalarKeyKernel();
  const KeyKernel& kernel = ChooseKeyKernel(ChooseCpuLevel(GetParam()).value());
  std::mt19937 random(43);
  for (const int dim : {4, 32, 64, 96, 128, 256, 260, 70}) {
    std::vector<std::int8_t> rows(79 * static_cast<std::size_t>(dim)), later(kBlockTokens * dim);
    for (std::vector<std::int8_t>* codes : {&rows, &later}) {
      for (std::int8_t& code : *codes) code = static_cast<std::int8_t>(random() % 255 - 127);
    }
    std::fill_n(rows.begin(), dim, std::int8_t{-127});  // as far as codes go, and no likeness
    std::fill_n(later.begin(), dim, std::int8_t{127});
    std::copy_n(rows.begin() + 2 * dim, dim, later.end() - dim);
    std::vector<float> norms(kBlockTokens);
    for (float& norm : norms) norm = std::ldexp(1.0f, -static_cast<int>(random() % 12));
    for (const int count : {0, 1, 3, 79}) {
      for (const int from : {-79, -3, 0, 1, 1 - 47, 30}) {
        std::vector<float> nearest(79, -1), expected(79, -1);
        kernel.nearest(dim, count, rows.data(), from, later.data(), norms.data(), nearest.data());
        oracle.nearest(dim, count, rows.data(), from, later.data(), norms.data(), expected.data());
        EXPECT_EQ(nearest, expected) << "dim " << dim << ", " << count << " from " << from;
      }
    }
  }
}

TEST_P(RetainedAttentionLevel, TheLeastUsefulAreTheOracles) {
  const KeyKernel& oracle = ScalarKeyKernel();
  const KeyKernel& kernel = ChooseKeyKernel(ChooseCpuLevel(GetParam()).value());
  std::mt19937 random(41);
  for (const int tokens : {32, 64, 352, 1024, 77}) {
    std::vector<float> score(tokens), weight(tokens);
    std::vector<std::int32_t> token(tokens);
    for (int i = 0; i < tokens; ++i) {
      // Many equals, and sizes of all orders.
      score[i] =
          std::ldexp(1.0f + static_cast<float>(random() % 4), static_cast<int>(random() % 9));
      weight[i] = random() % 5 == 0 ? 0.0f : static_cast<float>(random() % 3);
      token[i] = i;
    }
    std::shuffle(token.begin(), token.end(), random);
    score[7] = NAN;
    weight[9] = -1;
    const UseTable table{.tokens = tokens,
                         .score = score.data(),
                         .weight = weight.data(),
                         .token = token.data(),
                         .never_before = 4,
                         .never_from = 48,
                         .never_to = 64};
    for (const int count : {1, 2, 16, 32, tokens}) {
      if (count > tokens) continue;
      SCOPED_TRACE(testing::Message() << count << " of " << tokens);
      std::vector<std::int32_t> uses(tokens, -7), places(tokens, -7), expected_uses(uses),
          expected_places(places);
      kernel.least_useful(table, count, uses.data(), places.data());
      oracle.least_useful(table, count, expected_uses.data(), expected_places.data());
      EXPECT_EQ(uses, expected_uses);
      places.resize(count);
      expected_places.resize(count);
      EXPECT_EQ(places, expected_places);
    }
  }
}

TEST_P(RetainedAttentionLevel, RefusesSeveralRowsAfterADrop) {
  Lab lab(GetParam(), {4, 2, 64, 1}, {}, {4, 4});
  lab.Prefill(100);
  lab.Drop(true);
  OwnedStep step;
  std::vector<BlockView> blocks = lab.whole().blocks;
  step.Add(100, 2, blocks);
  step.sequences.back().history = &lab.history();
  EXPECT_EQ(lab.kv().BeginStep(step.Batch()).code(), StatusCode::kInvalidArgument);
}

std::vector<std::string> Levels() {
  std::vector<std::string> levels;
  for (const std::string word : {"plain", "avx2", "avx512", "amx"}) {
    if (CpuLevelName(ChooseCpuLevel(word).value()) == word) levels.push_back(word);
  }
  return levels;
}
INSTANTIATE_TEST_SUITE_P(Levels, RetainedAttentionLevel, ::testing::ValuesIn(Levels()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace pliant
