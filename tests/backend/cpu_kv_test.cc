#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "backend/cpu/cpu_level.h"
#include "backend/cpu/kv.h"
#include "backend/dequant.h"
#include "backend/ref/ref_kv.h"
#include "backend/support/kv_case.h"

namespace pliant {
namespace {

using testing_support::Demoted;
using testing_support::KvLikeData;
using testing_support::OwnedStep;
using testing_support::PageMaker;
using testing_support::Planes;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// The levels this machine can run; a level above it would be capped and tested twice.
std::vector<std::string> Levels() {
  std::vector<std::string> levels;
  for (const std::string word : {"plain", "avx2", "avx512", "amx"}) {
    if (CpuLevelName(ChooseCpuLevel(word).value()) == word) levels.push_back(word);
  }
  return levels;
}

/// Shapes of a case. One layer unless said.
struct Shape {
  int heads = 4;
  int kv_heads = 2;
  int dim = 64;
  int layers = 1;
  int Columns() const { return (heads + 2 * kv_heads) * dim; }
  KvGeometry Geometry() const { return {layers, kv_heads, dim}; }
};

RopeTable Rope(int dim) {
  RopeTable rope;
  for (int i = 0; i < dim / 2; ++i) rope.inv_freq.push_back(std::pow(10000.f, -2.f * i / dim));
  return rope;
}

/// A CpuKv, the pages of its reference, and sequences that live in both.
/// A code of V whose scales and centers differ from channel to channel.
ChannelCode ValueCode(std::size_t channels) {
  ChannelCode code;
  for (std::size_t i = 0; i < channels; ++i) {
    code.scale.push_back(1.0f - 0.1f * (i % 9));
    code.center.push_back(0.2f * (static_cast<int>(i % 5) - 2));
  }
  return code;
}

class Case {
 public:
  Case(const std::string& level, const Shape& shape, std::uint32_t pages, int threads = 2)
      : shape_(shape), pool_(threads), maker_(pages), pages_(pages), random_(42) {
    kv_ = CpuKv::Make(&pool_, level).value();
    EXPECT_TRUE(kv_->AllocatePages(shape.Geometry(), pages).ok());
    EXPECT_TRUE(ref_.AllocatePages(shape.Geometry(), pages).ok());
    // Poison: every scale a NaN, every code the largest. What reads a byte it should not shows.
    for (std::uint32_t p = 0; p < pages; ++p)
      std::ranges::fill(kv_->Page(PageId(p)), std::byte{0xff});
  }

  /// Both code V from now on.
  void CodeValues() {
    const std::size_t channels = shape_.Geometry().Units() * shape_.dim;
    const KvCode code{{std::vector<float>(channels, 1.f), std::vector<float>(channels, 0.f)},
                      ValueCode(channels)};
    EXPECT_TRUE(kv_->SetKvCode(code).ok());
    EXPECT_TRUE(ref_.SetKvCode(code).ok());
  }

  CpuKv& kv() { return *kv_; }
  RefKv& ref() { return ref_; }
  std::mt19937& random() { return random_; }
  PageMaker& maker() { return maker_; }

  /// A sequence with `tokens` cached tokens and room for `more`, every block full width.
  std::vector<BlockView> Sequence(int tokens, int more) {
    std::vector<BlockView> blocks;
    for (int b = 0; b * kBlockTokens < tokens + more; ++b) blocks.push_back(maker_.Block({}));
    for (int at = 0; at < tokens; at += 512) {
      Write(blocks, at, std::min(512, tokens - at));
    }
    return blocks;
  }

  /// Writes random rows at positions context .. context + rows - 1 in every layer.
  void Write(const std::vector<BlockView>& blocks, int context, int rows) {
    OwnedStep step;
    step.Add(context, rows, blocks);
    ASSERT_TRUE(kv_->BeginStep(step.Batch()).ok());
    for (int layer = 0; layer < shape_.layers; ++layer) {
      std::vector<float> qkv = KvLikeData(rows, shape_.Columns(), random_);
      kv_->QkvToCache({layer, shape_.heads, {}, {}, 0}, Rope(shape_.dim),
                      {qkv.data(), shape_.Columns()});
    }
  }

  /// Attention over `step` with the given query rows ([rows][Columns()]), the output poisoned
  /// before.
  std::vector<float> Attend(const OwnedStep& step, std::vector<float> query, int layer = 0) {
    EXPECT_TRUE(kv_->BeginStep(step.Batch()).ok());
    const std::int64_t out_columns = shape_.heads * shape_.dim;
    std::vector<float> out(step.tokens.size() * out_columns, NAN);
    kv_->Attention(layer, shape_.heads, Scale(), {query.data(), shape_.Columns()},
                   {out.data(), out_columns});
    return out;
  }

  /// The same by the reference, over the same bytes.
  std::vector<float> Reference(const OwnedStep& step, std::vector<float> query, int layer = 0) {
    for (std::uint32_t p = 0; p < pages_; ++p) {
      const auto page = ref_.Page(PageId(p));
      std::copy_n(kv_->Page(PageId(p)).begin(), page.size(), page.begin());
    }
    const std::size_t out_columns = shape_.heads * shape_.dim;
    std::vector<float> out(step.tokens.size() * out_columns, NAN);
    for (const SequenceSlice& slice : step.sequences) {
      const auto blocks = std::span(step.blocks).subspan(slice.first_block, slice.blocks);
      for (int i = 0; i < slice.rows; ++i) {
        const std::size_t row = slice.first_row + i;
        ref_.AttendRow(layer, shape_.heads, Scale(), blocks, slice.context + i,
                       {0, std::span(query).subspan(row * shape_.Columns(), shape_.Columns()),
                        std::span(out).subspan(row * out_columns, out_columns)});
      }
    }
    return out;
  }

  std::vector<float> Query(const OwnedStep& step) {
    return KvLikeData(step.tokens.size(), shape_.Columns(), random_);
  }
  float Scale() const { return 1 / std::sqrt(static_cast<float>(shape_.dim)); }

  /// The largest scale of V any row may reach: errors are measured against it.
  float LargestValueScale(const OwnedStep& step, int layer = 0) {
    float largest = 0;
    for (const SequenceSlice& slice : step.sequences) {
      for (int t = 0; t < slice.context + slice.rows; ++t) {
        const BlockView& block = step.blocks[slice.first_block + t / kBlockTokens];
        if (!block.v[0].valid()) continue;
        for (int head = 0; head < shape_.kv_heads; ++head) {
          std::uint16_t scale;
          std::memcpy(
              &scale,
              &kv_->Page(block.v[0])[shape_.Geometry().ScaleOffset(layer, head, t % kBlockTokens)],
              sizeof(scale));
          const float value = Bf16ToFloat(scale);
          if (std::isfinite(value)) largest = std::max(largest, value);
        }
      }
    }
    return largest;
  }

 private:
  Shape shape_;
  ThreadPool pool_;
  PageMaker maker_;
  std::uint32_t pages_;
  std::mt19937 random_;
  std::unique_ptr<CpuKv> kv_;
  RefKv ref_;
};

struct Difference {
  double largest = 0;
  double rms = 0;
};
Difference Compare(const std::vector<float>& a, const std::vector<float>& b, float unit) {
  Difference d;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(double{a[i]} - b[i]) / unit;
    if (!(difference <= d.largest)) d.largest = difference;  // NaN sticks
    d.rms += difference * difference;
  }
  d.rms = std::sqrt(d.rms / a.size());
  return d;
}

const Planes kStates[] = {{4, 4}, {3, 2}, {2, 2}, {2, 1}, {1, 1}, {1, 2}, {4, 1}, {3, 3}, {1, 4}};

/// Every block but the last at a random state.
std::vector<BlockView> MixStates(std::vector<BlockView> blocks, std::mt19937& random) {
  for (std::size_t b = 0; b + 1 < blocks.size(); ++b) {
    blocks[b] = Demoted(blocks[b], kStates[random() % std::size(kStates)]);
  }
  return blocks;
}

class CpuKvLevel : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Levels, CpuKvLevel, testing::ValuesIn(Levels()),
                         [](const auto& info) { return info.param; });

// ---- writing

TEST_P(CpuKvLevel, WritesWhatTheReferenceWrites) {
  for (const Shape shape : {Shape{4, 2, 64}, Shape{3, 1, 32}, Shape{8, 1, 96}, Shape{2, 2, 256}}) {
    for (const Planes planes : {Planes{4, 4}, Planes{3, 3}, Planes{2, 2}, Planes{4, 1}}) {
      Case c(GetParam(), shape, 64);
      const int dim = shape.dim;
      std::vector<float> q_norm(dim), k_norm(dim), channel(shape.kv_heads * dim);
      for (int i = 0; i < dim; ++i) q_norm[i] = 1 + 0.01f * i, k_norm[i] = 2 - 0.01f * i;
      for (std::size_t i = 0; i < channel.size(); ++i) channel[i] = 0.5f + 0.1f * (i % (dim / 2));
      std::vector<float> center(channel.size());
      for (std::size_t i = 0; i < center.size(); ++i)
        center[i] = 0.3f * (static_cast<int>(i % 7) - 3);
      const KvCode code{{channel, center}, ValueCode(channel.size())};
      ASSERT_TRUE(c.kv().SetKvCode(code).ok());
      ASSERT_TRUE(c.ref().SetKvCode(code).ok());
      RopeTable rope = Rope(dim);
      if (planes.k == 3) rope.inv_freq.resize(dim / 4);  // the rest of the head is not turned

      OwnedStep step;
      std::vector<BlockView> blocks = {c.maker().Block(planes), c.maker().Block(planes)};
      step.Add(0, 45, blocks);
      for (int& position : step.positions) position += 1000;
      const std::vector<float> qkv = KvLikeData(45, shape.Columns(), c.random());
      std::vector<float> got = qkv, expected = qkv;
      ASSERT_TRUE(c.kv().BeginStep(step.Batch()).ok());
      c.kv().QkvToCache({0, shape.heads, q_norm, k_norm, 1e-5f}, rope,
                        {got.data(), shape.Columns()});
      QkvParams params{0, shape.heads, {}, {}, 1e-5f};
      for (int r = 0; r < 45; ++r) {
        c.ref().WriteRow(params, q_norm, k_norm, rope, blocks, r,
                         {step.positions[r],
                          std::span(expected).subspan(r * shape.Columns(), shape.Columns()),
                          {}});
      }
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], expected[i], 2e-5f * (1 + std::fabs(expected[i]))) << "element " << i;
      }
      // V is coded as it comes: the same bytes. K passes norm and RoPE, whose
      // roundings may move a code by one.
      const KvGeometry geometry = shape.Geometry();
      for (int t = 0; t < 45; ++t) {
        const BlockView& block = blocks[t / 32];
        for (int head = 0; head < shape.kv_heads; ++head) {
          for (int p = 0; p < planes.v; ++p) {
            const std::size_t offset = geometry.RowOffset(0, head, t % 32);
            ASSERT_EQ(0, std::memcmp(&c.kv().Page(block.v[p])[offset],
                                     &c.ref().Page(block.v[p])[offset], geometry.RowBytes()));
          }
          const auto decode = [&](auto&& page_of) {
            const std::uint8_t* rows[kPlanes] = {};
            for (int p = 0; p < planes.k; ++p) {
              rows[p] = reinterpret_cast<const std::uint8_t*>(
                  &page_of(block.k[p])[geometry.RowOffset(0, head, t % 32)]);
            }
            std::uint16_t scale;
            std::memcpy(&scale, &page_of(block.k[0])[geometry.ScaleOffset(0, head, t % 32)], 2);
            std::vector<std::uint16_t> u(dim);
            JoinPlanes(rows, planes.k, u);
            std::vector<float> row(dim);
            DecodeRow(u, scale, row);
            row.push_back(Bf16ToFloat(scale));
            return row;
          };
          const auto a = decode([&](PageId p) { return c.kv().Page(p); });
          const auto b = decode([&](PageId p) { return c.ref().Page(p); });
          const float step_size = a.back() / 32768 * (planes.k == 4 ? 1 : 1 << (16 - 4 * planes.k));
          for (int i = 0; i < dim; ++i) ASSERT_NEAR(a[i], b[i], 1.01f * step_size);
        }
      }
    }
  }
}

TEST_P(CpuKvLevel, WritesRowsThatAreNotNumbersAsTheReferenceDoes) {
  const Shape shape{1, 1, 64};
  Case c(GetParam(), shape, 16);
  OwnedStep step;
  const std::vector<BlockView> blocks = {c.maker().Block({})};
  step.Add(0, 8, blocks);
  std::vector<float> qkv = KvLikeData(8, shape.Columns(), c.random());
  qkv[0 * 192 + 128 + 5] = NAN;
  qkv[1 * 192 + 128 + 63] = -kInf;
  qkv[2 * 192 + 128] = std::numeric_limits<float>::max();
  std::fill_n(&qkv[3 * 192 + 128], 64, 0.f);
  std::fill_n(&qkv[4 * 192 + 128], 64, -1e-41f);
  qkv[5 * 192 + 128 + 1] = 1e30f;
  std::vector<float> expected = qkv;
  ASSERT_TRUE(c.kv().BeginStep(step.Batch()).ok());
  c.kv().QkvToCache({0, 1, {}, {}, 0}, {}, {qkv.data(), shape.Columns()});
  const KvGeometry geometry = shape.Geometry();
  for (int t = 0; t < 8; ++t) {
    c.ref().WriteRow({0, 1, {}, {}, 0}, {}, {}, {}, blocks, t,
                     {t, std::span(expected).subspan(t * 192, 192), {}});
    for (int p = 0; p < kPlanes; ++p) {
      const std::size_t at = geometry.RowOffset(0, 0, t);
      EXPECT_EQ(
          0, std::memcmp(&c.kv().Page(blocks[0].v[p])[at], &c.ref().Page(blocks[0].v[p])[at], 32))
          << "row " << t << " plane " << p;
    }
    const std::size_t at = geometry.ScaleOffset(0, 0, t);
    EXPECT_EQ(0,
              std::memcmp(&c.kv().Page(blocks[0].v[0])[at], &c.ref().Page(blocks[0].v[0])[at], 2));
  }
}

/// Without norm and RoPE nothing rounds before the code: keys too are the reference's, bit for bit.
TEST_P(CpuKvLevel, MixesKeysAsTheReferenceDoes) {
  for (const Shape shape : {Shape{1, 1, 32}, Shape{2, 2, 64}, Shape{1, 1, 96}, Shape{1, 1, 256}}) {
    Case c(GetParam(), shape, 16);
    const int dim = shape.dim;
    std::vector<float> channel(shape.kv_heads * dim), center(channel.size());
    for (std::size_t i = 0; i < channel.size(); ++i) {
      channel[i] = 0.1f + 0.03f * (i % 13);
      center[i] = 0.2f * (static_cast<int>(i % 5) - 2);
    }
    const KvCode code{{channel, center}, ValueCode(channel.size())};
    ASSERT_TRUE(c.kv().SetKvCode(code).ok());
    ASSERT_TRUE(c.ref().SetKvCode(code).ok());
    OwnedStep step;
    const std::vector<BlockView> blocks = {c.maker().Block({})};
    step.Add(0, 32, blocks);
    std::vector<float> qkv = KvLikeData(32, shape.Columns(), c.random());
    std::vector<float> expected = qkv;
    ASSERT_TRUE(c.kv().BeginStep(step.Batch()).ok());
    c.kv().QkvToCache({0, shape.heads, {}, {}, 0}, {}, {qkv.data(), shape.Columns()});
    const KvGeometry geometry = shape.Geometry();
    for (int t = 0; t < 32; ++t) {
      c.ref().WriteRow({0, shape.heads, {}, {}, 0}, {}, {}, {}, blocks, t,
                       {t, std::span(expected).subspan(t * shape.Columns(), shape.Columns()), {}});
      for (int head = 0; head < shape.kv_heads; ++head) {
        for (int p = 0; p < kPlanes; ++p) {
          const std::size_t at = geometry.RowOffset(0, head, t);
          ASSERT_EQ(0, std::memcmp(&c.kv().Page(blocks[0].k[p])[at],
                                   &c.ref().Page(blocks[0].k[p])[at], geometry.RowBytes()))
              << "dim " << dim << " row " << t << " plane " << p;
        }
      }
    }
  }
}

TEST_P(CpuKvLevel, OneRowLeavesItsNeighboursAlone) {
  const Shape shape{4, 2, 64, 3};
  Case c(GetParam(), shape, 32);
  const std::vector<BlockView> blocks = c.Sequence(20, 12);
  std::vector<std::vector<std::byte>> before;
  for (int p = 0; p < 32; ++p) {
    const auto page = c.kv().Page(PageId(p));
    before.emplace_back(page.begin(), page.end());
  }
  OwnedStep step;
  step.Add(20, 1, blocks);
  ASSERT_TRUE(c.kv().BeginStep(step.Batch()).ok());
  std::vector<float> qkv = KvLikeData(1, shape.Columns(), c.random());
  c.kv().QkvToCache({1, 4, {}, {}, 0}, Rope(64), {qkv.data(), shape.Columns()});
  const KvGeometry geometry = shape.Geometry();
  std::size_t changed = 0;
  for (int p = 0; p < 32; ++p) {
    const auto page = c.kv().Page(PageId(p));
    for (std::size_t i = 0; i < page.size(); ++i) {
      if (page[i] == before[p][i]) continue;
      ++changed;
      bool expected = false;
      for (int head = 0; head < 2; ++head) {
        const std::size_t row = geometry.RowOffset(1, head, 20),
                          scale = geometry.ScaleOffset(1, head, 20);
        expected |= (i >= row && i < row + 32) || (i >= scale && i < scale + 2);
      }
      ASSERT_TRUE(expected) << "page " << p << " byte " << i;
    }
  }
  EXPECT_GT(changed, 400u);  // of 8 planes * 2 heads * 32 bytes
}

TEST_P(CpuKvLevel, ChannelStatisticsAreTheReferences) {
  const Shape shape{4, 2, 64, 2};
  Case c(GetParam(), shape, 32);
  const std::vector<BlockView> blocks = {c.maker().Block({}), c.maker().Block({})};
  OwnedStep step;
  step.Add(0, 40, blocks);
  c.kv().StartChannelStatistics();
  c.ref().StartChannelStatistics();
  ASSERT_TRUE(c.kv().BeginStep(step.Batch()).ok());
  for (int layer = 0; layer < 2; ++layer) {
    std::vector<float> qkv = KvLikeData(40, shape.Columns(), c.random());
    std::vector<float> same = qkv;
    c.kv().QkvToCache({layer, 4, {}, {}, 0}, Rope(64), {qkv.data(), shape.Columns()});
    for (int r = 0; r < 40; ++r) {
      c.ref().WriteRow({layer, 4, {}, {}, 0}, {}, {}, Rope(64), blocks, r,
                       {r, std::span(same).subspan(r * shape.Columns(), shape.Columns()), {}});
    }
  }
  const ChannelStatistics got = c.kv().TakeChannelStatistics(),
                          want = c.ref().TakeChannelStatistics();
  ASSERT_EQ(got.key_min.size(), 2u * 2 * 64);
  ASSERT_EQ(got.key_max.size(), 2u * 2 * 64);
  ASSERT_EQ(got.query_energy.size(), 2u * 2 * 64);
  for (std::size_t i = 0; i < got.key_min.size(); ++i) {
    EXPECT_NEAR(got.key_min[i], want.key_min[i], 1e-4) << i;
    EXPECT_NEAR(got.key_max[i], want.key_max[i], 1e-4) << i;
    EXPECT_NEAR(got.query_energy[i] / want.query_energy[i], 1, 1e-4) << i;
  }
  EXPECT_EQ(got.value_energy, want.value_energy);  // both add up row by row
  EXPECT_TRUE(c.kv().TakeChannelStatistics().key_min.empty());
}

// ---- attention against the reference

struct AttentionCase {
  Shape shape;
  std::vector<std::pair<int, int>> slices;  // context, rows
};

/// Errors in units of the largest scale of V, with room above what is measured. AMX rounds the
/// query to 16 bits of its absmax, and these queries have outliers; what that is worth against an
/// fp16 cache is measured by ErrorIsBelowThatOfAnFp16Cache.
struct Bounds {
  double largest;
  double rms;
};
Bounds BoundsOf(const std::string& level) {
  return level == "amx" ? Bounds{1e-3, 6e-5} : Bounds{2e-5, 2e-6};
}

void ExpectLikeReference(const std::string& level, const AttentionCase& test, bool mixed) {
  std::uint32_t pages = 1;
  for (const auto& [context, rows] : test.slices) pages += ((context + rows) / 32 + 1) * 8;
  Case c(level, test.shape, pages);
  if (mixed) c.CodeValues();
  OwnedStep step;
  for (const auto& [context, rows] : test.slices) {
    std::vector<BlockView> blocks = c.Sequence(context + rows, 0);
    if (mixed) blocks = MixStates(blocks, c.random());
    step.Add(context, rows, blocks);
  }
  const std::vector<float> query = c.Query(step);
  const std::vector<float> got = c.Attend(step, query);
  const std::vector<float> expected = c.Reference(step, query);
  const Difference d = Compare(got, expected, c.LargestValueScale(step));
  const std::string what = level + " heads " + std::to_string(test.shape.heads) + "/" +
                           std::to_string(test.shape.kv_heads) + " dim " +
                           std::to_string(test.shape.dim) + " first context " +
                           std::to_string(test.slices[0].first);
  const Bounds bounds = BoundsOf(level);
  EXPECT_LT(d.largest, bounds.largest) << what;
  EXPECT_LT(d.rms, bounds.rms) << what;
}

TEST_P(CpuKvLevel, AttendsLikeTheReferenceAtEveryContextLength) {
  for (const int context : {0, 1, 30, 31, 32, 33, 63, 64, 127, 128, 1000, 1023, 1024, 5000}) {
    ExpectLikeReference(GetParam(), {{6, 2, 64}, {{context, 1}}}, context % 2 == 1);
  }
}

TEST_P(CpuKvLevel, AttendsLikeTheReferenceForEveryShape) {
  for (const int dim : {32, 64, 96, 128, 192, 256}) {
    for (const int group : {1, 3, 4, 5, 8}) {
      ExpectLikeReference(GetParam(), {{2 * group, 2, dim}, {{150, 1}, {0, 37}, {40, 1}}}, true);
    }
  }
}

TEST_P(CpuKvLevel, AttendsLikeTheReferenceInRaggedBatches) {
  for (const bool mixed : {false, true}) {
    ExpectLikeReference(
        GetParam(),
        {{9, 3, 64}, {{0, 1}, {0, 33}, {1000, 1}, {31, 2}, {97, 130}, {64, 1}, {1020, 9}}}, mixed);
    ExpectLikeReference(GetParam(), {{8, 2, 128}, {{300, 1}, {100, 40}, {2047, 1}, {5, 5}}}, mixed);
  }
}

TEST_P(CpuKvLevel, AttendsLikeTheReferenceAtEachUniformState) {
  const Shape shape{6, 2, 64};
  for (const Planes state : kStates) {
    Case c(GetParam(), shape, 400);
    OwnedStep step;
    for (const int context : {500, 77}) {
      std::vector<BlockView> blocks = c.Sequence(context + 20, 0);
      for (BlockView& block : blocks) block = Demoted(block, state);
      step.Add(context, context == 500 ? 1 : 20, blocks);
    }
    const std::vector<float> query = c.Query(step);
    const std::vector<float> got = c.Attend(step, query);
    const Difference d = Compare(got, c.Reference(step, query), c.LargestValueScale(step));
    EXPECT_LT(d.largest, BoundsOf(GetParam()).largest) << state.k << "/" << state.v;
    // Not by chance the same at every state: the planes matter.
    OwnedStep full = step;
    for (BlockView& block : full.blocks) {
      if (state.k < 4 || state.v < 4) block = Demoted(block, {1, 1});
    }
    if (state.k + state.v > 3 && state.k < 4) {
      EXPECT_NE(c.Attend(full, query), got);
    }
  }
}

TEST_P(CpuKvLevel, SharpAttentionAndLargeScales) {
  // Logits of several hundred, scales of V from 1e-6 to 1e6 and rows of zeros: maxima, exponents
  // and underflow all work.
  const Shape shape{4, 2, 64};
  Case c(GetParam(), shape, 200);
  const std::vector<BlockView> blocks = {c.maker().Block({}), c.maker().Block({}),
                                         c.maker().Block({}), c.maker().Block({}),
                                         c.maker().Block({})};
  OwnedStep step;
  step.Add(0, 150, blocks);
  std::vector<float> qkv = KvLikeData(150, shape.Columns(), c.random());
  for (int r = 0; r < 150; ++r) {
    for (int i = 0; i < 4 * 64; ++i) qkv[r * shape.Columns() + i] *= 8;
    const float gain = r % 7 == 0 ? 0.f : std::pow(10.f, static_cast<float>(r % 13) - 6);
    for (int i = 6 * 64; i < 8 * 64; ++i) qkv[r * shape.Columns() + i] *= gain;
  }
  ASSERT_TRUE(c.kv().BeginStep(step.Batch()).ok());
  c.kv().QkvToCache({0, 4, {}, {}, 0}, Rope(64), {qkv.data(), shape.Columns()});
  const std::vector<float> got = c.Attend(step, qkv);
  const std::vector<float> expected = c.Reference(step, qkv);
  // Rows differ by 12 orders of magnitude: compare each with its own size.
  for (int r = 0; r < 150; ++r) {
    for (int h = 0; h < 4; ++h) {
      double size = 0, error = 0;
      for (int i = 0; i < 64; ++i) {
        size = std::max(size, std::fabs(double{expected[(r * 4 + h) * 64 + i]}));
        error = std::max(
            error, std::fabs(double{got[(r * 4 + h) * 64 + i]} - expected[(r * 4 + h) * 64 + i]));
      }
      // A logit of some hundreds is off by its rounding times that: 1e-2 covers 16-bit queries at
      // logits of hundreds.
      ASSERT_LE(error, 1e-2 * size + 1e-30) << "row " << r << " head " << h;
    }
  }
}

TEST_P(CpuKvLevel, SkipsBlocksWithoutPages) {
  const Shape shape{6, 2, 64};
  Case c(GetParam(), shape, 300);
  std::vector<BlockView> blocks = c.Sequence(400, 0);
  blocks[2].v = {};
  blocks[3] = {};
  blocks[7].v = {};
  for (int b = 4; b < 6; ++b) blocks[b].v = {};  // a whole stretch of 64
  OwnedStep step;
  step.Add(399, 1, blocks);
  step.Add(360, 40, blocks);
  const std::vector<float> query = c.Query(step);
  const std::vector<float> got = c.Attend(step, query);
  EXPECT_LT(Compare(got, c.Reference(step, query), c.LargestValueScale(step)).largest,
            BoundsOf(GetParam()).largest);
}

// ---- what a row depends on
/// Attention of one row, in double, over K and V given as floats.
std::vector<double> ExactAttention(const std::vector<float>& q, const std::vector<float>& k,
                                   const std::vector<float>& v, int dim, double scale) {
  const std::size_t tokens = k.size() / dim;
  std::vector<double> weights(tokens), out(dim, 0.0);
  double largest = -1e300, total = 0;
  for (std::size_t t = 0; t < tokens; ++t) {
    double dot = 0;
    for (int i = 0; i < dim; ++i) dot += double{q[i]} * k[t * dim + i];
    weights[t] = dot * scale;
    largest = std::max(largest, weights[t]);
  }
  for (double& weight : weights) total += weight = std::exp(weight - largest);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (int i = 0; i < dim; ++i) out[i] += weights[t] / total * v[t * dim + i];
  }
  return out;
}

/// Sum of squared errors of the last row's attention from the same f32 q, K and V: through this
/// cache (codes and kernel together), and through one of fp16 with exact arithmetic.
struct CacheErrors {
  double planes = 0;
  double fp16 = 0;
};
void AddCacheErrors(const std::string& level, int dim, int seed, CacheErrors& errors) {
  const Shape shape{1, 1, dim};
  Case c(level, shape, 160);
  c.random().seed(seed);
  constexpr int kTokens = 600;
  std::vector<BlockView> blocks;
  for (int b = 0; b * kBlockTokens < kTokens; ++b) blocks.push_back(c.maker().Block({}));
  OwnedStep step;
  step.Add(0, kTokens, blocks);
  std::vector<float> qkv = KvLikeData(kTokens, shape.Columns(), c.random());
  // The channels' maxima, as calibration would find them; no RoPE, so that q and K stay comparable.
  std::vector<float> channel(dim, 0.f), q(dim), k(kTokens * dim), v(kTokens * dim);
  for (int t = 0; t < kTokens; ++t) {
    for (int i = 0; i < dim; ++i) {
      k[t * dim + i] = qkv[(t * 3 + 1) * dim + i];
      v[t * dim + i] = qkv[(t * 3 + 2) * dim + i];
      channel[i] = std::max(channel[i], std::fabs(k[t * dim + i]));
    }
  }
  std::copy_n(&qkv[(kTokens - 1) * 3 * dim], dim, q.begin());
  const std::vector<float> zeros(dim, 0.f), ones(dim, 1.f);
  ASSERT_TRUE(c.kv().SetKvCode({{channel, zeros}, {ones, zeros}}).ok());
  ASSERT_TRUE(c.kv().BeginStep(step.Batch()).ok());
  c.kv().QkvToCache({0, 1, {}, {}, 0}, {}, {qkv.data(), shape.Columns()});
  const std::vector<float> got = c.Attend(step, qkv);
  const std::vector<double> exact = ExactAttention(q, k, v, dim, c.Scale());
  for (float& x : k) x = F16ToFloat(FloatToF16(x));
  for (float& x : v) x = F16ToFloat(FloatToF16(x));
  const std::vector<double> half = ExactAttention(q, k, v, dim, c.Scale());
  for (int i = 0; i < dim; ++i) {
    errors.planes += std::pow(got[(kTokens - 1) * dim + i] - exact[i], 2);
    errors.fp16 += std::pow(half[i] - exact[i], 2);
  }
}

TEST_P(CpuKvLevel, ErrorIsBelowThatOfAnFp16Cache) {
  for (const int dim : {64, 128, 256}) {
    CacheErrors errors;
    for (int seed = 0; seed < 6; ++seed) AddCacheErrors(GetParam(), dim, seed, errors);
    EXPECT_LT(errors.planes, 0.5 * errors.fp16) << "dim " << dim;
    RecordProperty("error_ratio_dim_" + std::to_string(dim),
                   std::to_string(std::sqrt(errors.planes / errors.fp16)));
  }
}

TEST_P(CpuKvLevel, ARowIsTheSameAloneAndInABatchAndForAnyThreads) {
  const Shape shape{9, 3, 64};
  Case c(GetParam(), shape, 4000, 3);
  OwnedStep batch;
  std::vector<std::vector<BlockView>> sequences;
  for (int s = 0; s < 16; ++s) {
    const int context = 37 * s + (s == 5 ? 3000 : 0);
    sequences.push_back(MixStates(c.Sequence(context + 1, 0), c.random()));
    batch.Add(context, 1, sequences.back());
  }
  const std::vector<float> query = c.Query(batch);
  const std::vector<float> together = c.Attend(batch, query);
  for (int s = 0; s < 16; ++s) {
    OwnedStep alone;
    alone.Add(batch.sequences[s].context, 1, sequences[s]);
    const auto row = query.begin() + s * shape.Columns();
    const std::vector<float> got = c.Attend(alone, std::vector<float>(row, row + shape.Columns()));
    ASSERT_EQ(0, std::memcmp(got.data(), &together[s * 9 * 64], 9 * 64 * sizeof(float)))
        << "sequence " << s;
  }
}

TEST_P(CpuKvLevel, AChunkedPromptGivesTheBitsOfAWholeOne) {
  const Shape shape{6, 2, 64};
  Case c(GetParam(), shape, 1000);
  constexpr int kTokens = 1100;
  const std::vector<BlockView> blocks = MixStates(c.Sequence(kTokens, 0), c.random());
  OwnedStep whole;
  whole.Add(0, kTokens, blocks);
  const std::vector<float> query = c.Query(whole);
  const std::vector<float> expected = c.Attend(whole, query);
  for (const int chunk : {1, 2, 7, 32, 100, 512}) {
    // A chunk of one row would take 1100 steps: every 50th is enough.
    for (int at = 0; at < kTokens; at += chunk * (chunk < 3 ? 50 : 1)) {
      OwnedStep step;
      const int rows = std::min(chunk, kTokens - at);
      step.Add(at, rows, blocks);
      const auto first = query.begin() + std::int64_t{at} * shape.Columns();
      const std::vector<float> got =
          c.Attend(step, std::vector<float>(first, first + std::int64_t{rows} * shape.Columns()));
      ASSERT_EQ(0, std::memcmp(got.data(), &expected[at * 6 * 64], got.size() * sizeof(float)))
          << "chunks of " << chunk << " at " << at;
    }
  }
}

TEST_P(CpuKvLevel, ANumberThatIsNoneStaysInItsSequence) {
  const Shape shape{6, 2, 64};
  for (const bool in_key : {true, false}) {
    for (const Planes state : {Planes{4, 4}, Planes{2, 2}, Planes{1, 1}}) {
      Case c(GetParam(), shape, 300);
      OwnedStep step;
      std::vector<std::vector<BlockView>> sequences;
      for (int s = 0; s < 3; ++s) sequences.push_back(c.Sequence(130, 0));
      // Sequence 1, position 100, KV head 0 only.
      OwnedStep write;
      write.Add(100, 1, sequences[1]);
      std::vector<float> qkv = KvLikeData(1, shape.Columns(), c.random());
      qkv[(in_key ? 6 : 8) * 64 + 9] = kInf;
      ASSERT_TRUE(c.kv().BeginStep(write.Batch()).ok());
      c.kv().QkvToCache({0, 6, {}, {}, 0}, Rope(64), {qkv.data(), shape.Columns()});
      for (int s = 0; s < 3; ++s) {
        for (int b = 0; b < 4; ++b) sequences[s][b] = Demoted(sequences[s][b], state);
        step.Add(s == 2 ? 129 : 90, s == 2 ? 1 : 40, sequences[s]);
      }
      const std::vector<float> query = c.Query(step);
      const std::vector<float> got = c.Attend(step, query);
      const std::vector<float> expected = c.Reference(step, query);
      for (std::size_t row = 0; row < step.tokens.size(); ++row) {
        const bool reached = row >= 40 && row < 80 && row - 40 + 90 >= 100;
        for (int head = 0; head < 6; ++head) {
          bool finite = true;
          for (int i = 0; i < 64; ++i) finite &= std::isfinite(got[(row * 6 + head) * 64 + i]);
          ASSERT_EQ(finite, !(reached && head < 3)) << "row " << row << " head " << head;
        }
      }
    }
  }
}

TEST_P(CpuKvLevel, AQueryThatIsNoNumberStaysInItsRow) {
  const Shape shape{6, 2, 64};
  Case c(GetParam(), shape, 300);
  for (const int rows : {1, 40}) {
    OwnedStep step;
    step.Add(90, rows, c.Sequence(130, 0));
    step.Add(10, 1, c.Sequence(20, 0));
    std::vector<float> query = c.Query(step);
    query[2 * 64 + 7] = NAN;  // row 0, head 2
    const std::vector<float> got = c.Attend(step, query);
    for (std::size_t row = 0; row < step.tokens.size(); ++row) {
      for (int head = 0; head < 6; ++head) {
        bool finite = true;
        for (int i = 0; i < 64; ++i) finite &= std::isfinite(got[(row * 6 + head) * 64 + i]);
        ASSERT_EQ(finite, row != 0 || head != 2) << "row " << row << " head " << head;
      }
    }
  }
}

// ---- pages and copies

std::size_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

TEST(CpuKvPages, AreTakenFromTheSystemOnlyWhenUsed) {
  ThreadPool pool(1);
  const auto kv = CpuKv::Make(&pool, "auto").value();
  const KvGeometry geometry{30, 3, 64};
  const std::size_t page = kv->PageBytes(geometry);
  EXPECT_GE(page, geometry.PageBytes());
  const std::size_t before = ResidentBytes();
  ASSERT_TRUE(
      kv->AllocatePages(geometry, static_cast<std::uint32_t>((std::size_t{1} << 30) / page)).ok());
  EXPECT_LT(ResidentBytes(), before + (64u << 20));
  for (int p = 0; p < 100; ++p) std::ranges::fill(kv->Page(PageId(p)), std::byte{1});
  EXPECT_LT(ResidentBytes(), before + (96u << 20));
}

TEST(CpuKvPages, RefuseWhatCannotBe) {
  ThreadPool pool(1);
  EXPECT_EQ(CpuKv::Make(&pool, "sse9").status().code(), StatusCode::kInvalidArgument);
  const auto kv = CpuKv::Make(&pool, "auto").value();
  EXPECT_EQ(kv->AllocatePages({1, 1, 48}, 8).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(kv->AllocatePages({1, 1, 288}, 8).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(kv->AllocatePages({1, -1, 64}, 8).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(kv->AllocatePages({1, 1, 64}, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(kv->AllocatePages({1 << 20, 1 << 20, 256}, 4000000000u).code(),
            StatusCode::kOutOfMemory);
  EXPECT_EQ(kv->AllocatePages({100, 8, 128}, 100000000u).code(), StatusCode::kOutOfMemory);
  // A refusal changes nothing.
  EXPECT_TRUE(kv->AllocatePages({1, 1, 64}, 8).ok());
  EXPECT_EQ(kv->AllocatePages({1, 1, 64}, 8).code(), StatusCode::kInvalidArgument);
  const std::vector<float> zeros(64, 0.f), ones(64, 1.f);
  const ChannelCode good{ones, zeros};
  for (const ChannelCode& bad :
       {ChannelCode{std::vector<float>(63, 1.f), zeros}, ChannelCode{ones, {}},
        ChannelCode{std::vector<float>(64, -1.f), zeros},
        ChannelCode{ones, std::vector<float>(64, NAN)}}) {
    EXPECT_EQ(kv->SetKvCode({bad, good}).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(kv->SetKvCode({good, bad}).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(kv->SetKvCode({good, good}).ok());
  OwnedStep step;
  PageMaker maker(9);
  step.Add(0, 1, {maker.Block({}), maker.Block({0, 0})});
  step.blocks[0].k[3] = PageId(8);
  EXPECT_EQ(kv->BeginStep(step.Batch()).code(), StatusCode::kInvalidArgument);
}

TEST(CpuKvPages, CopiesRunBesideStepsAndRestoreEveryByte) {
  const Shape shape{6, 2, 64};
  Case c("auto", shape, 600);
  std::vector<BlockView> blocks = c.Sequence(640, 0);
  const std::vector<BlockView> other = c.Sequence(320, 64);
  OwnedStep step;
  step.Add(639, 1, blocks);
  const std::vector<float> query = c.Query(step);
  const std::vector<float> before = c.Attend(step, query);

  // Offload every page of the sequence, block by block, while the other sequence writes and
  // attends.
  const std::size_t bytes = c.kv().PageBytes(shape.Geometry());
  std::vector<std::vector<std::byte>> host(blocks.size() * 8, std::vector<std::byte>(bytes));
  std::vector<CopyTicket> tickets;
  OwnedStep busy;
  busy.Add(300, 20, other);
  const auto pieces = [&](const std::vector<BlockView>& from, std::size_t b) {
    std::vector<PageCopy> copies;
    for (int p = 0; p < kPlanes; ++p) {
      copies.push_back({from[b].k[p], host[b * 8 + p].data()});
      copies.push_back({from[b].v[p], host[b * 8 + 4 + p].data()});
    }
    return copies;
  };
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    tickets.push_back(c.kv().CopyOut(pieces(blocks, b)));
    c.Write(other, 300, 20);
    c.Attend(busy, c.Query(busy));
  }
  for (const CopyTicket ticket : tickets) EXPECT_EQ(c.kv().Wait(ticket), CopyState::kDone);

  // Restore to other pages: attention gives the same bits.
  std::vector<BlockView> restored;
  for (std::size_t b = 0; b < blocks.size(); ++b) restored.push_back(c.maker().Block({}));
  for (const BlockView& block : blocks) {
    for (const PageId page : block.k) std::ranges::fill(c.kv().Page(page), std::byte{0xff});
  }
  tickets.clear();
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    tickets.push_back(c.kv().CopyIn(pieces(restored, b)));
    c.Attend(busy, c.Query(busy));
  }
  while (c.kv().Poll(tickets.back()) == CopyState::kPending) std::this_thread::yield();
  for (const CopyTicket ticket : tickets) EXPECT_EQ(c.kv().Poll(ticket), CopyState::kDone);
  OwnedStep again;
  again.Add(639, 1, restored);
  EXPECT_EQ(c.Attend(again, query), before);
}

TEST(CpuKvPages, ACopyThatNamesNoPageFails) {
  const Shape shape{1, 1, 64};
  Case c("auto", shape, 8);
  std::vector<std::byte> host(c.kv().PageBytes(shape.Geometry()));
  const CopyTicket good = c.kv().CopyOut(std::vector{PageCopy{PageId(1), host.data()}});
  const CopyTicket bad = c.kv().CopyOut(std::vector{PageCopy{PageId(8), host.data()}});
  const CopyTicket null = c.kv().CopyIn(std::vector{PageCopy{PageId(1), nullptr}});
  const CopyTicket later = c.kv().CopyIn(std::vector{PageCopy{PageId(2), host.data()}});
  EXPECT_EQ(c.kv().Wait(bad), CopyState::kFailed);
  EXPECT_EQ(c.kv().Wait(null), CopyState::kFailed);
  EXPECT_EQ(c.kv().Wait(later), CopyState::kDone);
  EXPECT_EQ(c.kv().Wait(good), CopyState::kDone);
  EXPECT_EQ(c.kv().Wait(c.kv().CopyOut({})), CopyState::kDone);  // nothing to do is done
}

}  // namespace
}  // namespace pliant
