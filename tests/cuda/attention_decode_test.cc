#include "backend/cuda/attention_decode/attention_decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "backend/cuda/device_memory.h"
#include "cuda/support/paged_cache.h"

namespace pliant::cuda {
namespace {

using test::PagedCache;
using test::State;

// ---- the plan, no device needed

TEST(DecodePlan, CoversEveryBlockOnceAndBalances) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const int items = 1 + random() % 40;
    std::vector<QueryItem> queries;
    std::vector<BlockView> blocks;
    for (int i = 0; i < items; ++i) {
      QueryItem item{.row = i,
                     .first_block = static_cast<int>(blocks.size()),
                     .tokens = static_cast<int>(random() % 3000)};
      if (random() % 8 == 0) item.tokens = 0;
      if (random() % 20 == 0) item.tokens = 20000;
      for (int b = 0; b < (item.tokens + 31) / 32; ++b) {
        BlockView view;
        for (unsigned p = 0; p < 1 + random() % 4; ++p) view.k[p] = view.v[p] = PageId(1);
        blocks.push_back(view);
      }
      queries.push_back(item);
    }
    const int groups = 1 + random() % 300;
    DecodePlan plan;
    PlanDecode(queries, blocks, groups, plan);
    ASSERT_EQ(plan.ranges.size(), static_cast<std::size_t>(groups));
    EXPECT_LE(plan.segments.size(), MaxSegments(queries.size(), blocks.size(), groups));
    int expected = 0;
    for (const Range& range : plan.ranges) {
      if (range.segments == 0) continue;  // fills up to the number of groups
      EXPECT_EQ(range.segment, expected);
      expected += range.segments;
      EXPECT_EQ(range.first_block, plan.segments[range.segment].first_block);
      EXPECT_EQ(range.blocks, plan.segments[range.segment].blocks);
      EXPECT_EQ(std::memcmp(range.first_pages, &blocks[range.first_block],
                            std::min(4, range.blocks) * sizeof(BlockView)),
                0);
    }
    EXPECT_EQ(expected, static_cast<int>(plan.segments.size()));
    std::size_t s = 0;
    for (const QueryItem& item : queries) {
      int block = item.first_block;
      const int end = item.first_block + (item.tokens + 31) / 32;
      const std::size_t first = s;
      while (block < end) {
        ASSERT_LT(s, plan.segments.size());
        const Segment& segment = plan.segments[s++];
        EXPECT_EQ(segment.row, item.row);
        EXPECT_EQ(segment.first_block, block);
        EXPECT_EQ(segment.first, static_cast<int>(first));
        EXPECT_LE(segment.blocks, kMaxSegmentBlocks);
        EXPECT_GE(segment.blocks, 1);
        block += segment.blocks;
        EXPECT_EQ(segment.tail,
                  block == end ? item.tokens - 32 * (end - item.first_block - 1) : 32);
      }
      EXPECT_EQ(block, end);
      for (std::size_t i = first; i < s; ++i)
        EXPECT_EQ(plan.segments[i].count, static_cast<int>(s - first));
      const auto cut = std::find_if(plan.cut_rows.begin(), plan.cut_rows.end(),
                                    [&](const CutRow& c) { return c.row == item.row; });
      ASSERT_EQ(cut != plan.cut_rows.end(), s - first > 1);
      if (s - first > 1) {
        EXPECT_EQ(cut->first, static_cast<int>(first));
        EXPECT_EQ(cut->count, static_cast<int>(s - first));
      }
    }
    EXPECT_EQ(s, plan.segments.size());
  }
}

// ---- the kernel

struct Case {
  int head_dim = 128, kv_heads = 2, group = 4, layers = 1, layer = 0;
  std::vector<int> lengths;
  int state = 0;  // 0: random mix of all legal states; else both at this many planes
  float q_scale = 2.f;
  bool wide_v = false;  // V scales over 24 octaves
  ElementType out = ElementType::kF32;
  const char* name = "";
};

struct Outcome {
  double error = 0;  // largest difference over the rms of the oracle
  bool padding_untouched = true;
};

Outcome RunCase(const Case& c, std::uint32_t seed) {
  std::mt19937 random(seed);
  const KvGeometry geometry{.layers = c.layers, .kv_heads = c.kv_heads, .head_dim = c.head_dim};
  int blocks = 0;
  std::vector<QueryItem> items;
  for (std::size_t i = 0; i < c.lengths.size(); ++i) {
    // Row 2 i + 1 belongs to nobody and must keep what it holds.
    items.push_back(
        {.row = static_cast<int>(2 * i), .first_block = blocks, .tokens = c.lengths[i]});
    blocks += (c.lengths[i] + 31) / 32;
  }
  PagedCache cache(geometry, blocks, seed + 1);
  if (c.wide_v) {
    std::uniform_real_distribution<float> exponent(-12.f, 12.f);
    for (int b = 0; b < blocks; ++b)
      for (int l = 0; l < c.layers; ++l)
        for (int h = 0; h < c.kv_heads; ++h)
          for (int t = 0; t < kBlockTokens; ++t)
            cache.SetScale(b, 1, l, h, t, std::exp2(exponent(random)));
  }
  std::vector<State> states(blocks);
  const State kinds[] = {{4, 4}, {3, 3}, {2, 2}, {2, 1}, {1, 1},
                         {3, 2}, {4, 1}, {1, 4}, {1, 0}, {0, 0}};
  for (auto& s : states)
    s = c.state == 0 ? kinds[random() % std::size(kinds)] : State{c.state, c.state};
  cache.Place(states);

  const int heads = c.kv_heads * c.group, width = heads * c.head_dim;
  const std::int64_t q_stride = width + 64, rows = 2 * c.lengths.size();
  std::normal_distribution<float> normal(0.f, c.q_scale);
  std::vector<float> q(rows * q_stride);
  for (auto& x : q) x = normal(random);

  const DecodeShape shape{.kv_heads = c.kv_heads, .group = c.group, .head_dim = c.head_dim};
  const DecodeLaunch launch = *DecodeLaunchFor(shape);
  DecodePlan plan;
  PlanDecode(items, cache.views(), launch.PlanGroups(), plan);
  auto d_pages = DeviceArray<std::uint8_t>::Make(cache.pages().size(), "pages");
  auto d_blocks = DeviceArray<BlockView>::Make(blocks, "blocks");
  auto d_segments = DeviceArray<Segment>::Make(plan.segments.size(), "segments");
  auto d_ranges = DeviceArray<Range>::Make(plan.ranges.size(), "ranges");
  auto d_cut = DeviceArray<CutRow>::Make(plan.cut_rows.size() + 1, "cut rows");
  auto d_q = DeviceArray<float>::Make(q.size(), "q");
  auto d_out = DeviceArray<float>::Make(rows * width, "out");
  auto d_partials =
      DeviceArray<float>::Make(DecodePartialFloats(shape, plan.segments.size()), "partials");
  Upload<std::uint8_t>(cache.pages(), d_pages->data());
  Upload<BlockView>(cache.views(), d_blocks->data());
  Upload<Segment>(plan.segments, d_segments->data());
  Upload<Range>(plan.ranges, d_ranges->data());
  auto cut_rows = plan.cut_rows;
  cut_rows.push_back({0, 0, 0, 0});  // one that is none, as a replayed graph may have
  Upload<CutRow>(cut_rows, d_cut->data());
  Upload<float>(q, d_q->data());
  DecodeArgs args;
  args.pages = d_pages->data();
  args.page_bytes = geometry.PageBytes();
  args.layer_offset = UnitOffset(c.kv_heads, c.head_dim, c.layer, 0);
  args.blocks = reinterpret_cast<const std::uint32_t*>(d_blocks->data());
  args.segments = d_segments->data();
  args.ranges = d_ranges->data();
  args.cut_rows = d_cut->data();
  args.max_cut_rows = static_cast<int>(cut_rows.size());
  args.q = d_q->data();
  args.q_stride = q_stride;
  args.out = d_out->data();
  args.out_stride = width;
  args.out_type = c.out;
  args.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
  args.partials = d_partials->data();

  Outcome outcome;
  const std::size_t bytes = rows * width * ElementBytes(c.out);
  std::vector<std::uint8_t> raw(rows * width * 4);
  for (int repeat = 0; repeat < 2; ++repeat) {
    PLIANT_CUDA_CHECK(cudaMemset(d_out->data(), 0xff, d_out->bytes()));
    PLIANT_CUDA_CHECK(cudaDeviceSynchronize());
    Stream stream;
    LaunchDecodeAttention(shape, launch, args, stream.get());
    stream.Synchronize();
    Download<std::uint8_t>(reinterpret_cast<const std::uint8_t*>(d_out->data()), raw);
    auto value = [&](std::size_t i) {
      return c.out == ElementType::kF32
                 ? reinterpret_cast<const float*>(raw.data())[i]
                 : Bf16ToFloat(reinterpret_cast<const std::uint16_t*>(raw.data())[i]);
    };
    for (std::size_t i = 0; i < c.lengths.size(); ++i)
      for (std::size_t b = 0; b < width * ElementBytes(c.out); ++b)
        outcome.padding_untouched &= raw[(2 * i + 1) * width * ElementBytes(c.out) + b] == 0xff;
    for (std::size_t b = bytes; b < raw.size(); ++b) outcome.padding_untouched &= raw[b] == 0xff;
    double square = 0, largest = 0;
    std::size_t n = 0;
    for (std::size_t i = 0; i < c.lengths.size(); ++i) {
      if (c.lengths[i] == 0) continue;
      for (int h = 0; h < heads; ++h) {
        const std::span<const float> own(q.data() + 2 * i * q_stride + h * c.head_dim, c.head_dim);
        const auto want = cache.Attend(own, items[i].first_block, c.lengths[i], c.layer,
                                       h / c.group, args.softmax_scale);
        double row_square = 0, row_largest = 0;
        for (int d = 0; d < c.head_dim; ++d) {
          const double got = value(2 * i * width + h * c.head_dim + d);
          const double e = std::abs(got - want[d]);
          if (!(e <= row_largest)) row_largest = e;
          row_square += want[d] * want[d];
        }
        // Relative to the row, so that a short row's large values do not hide a long row's error.
        const double relative =
            row_square > 0 ? row_largest / std::sqrt(row_square / c.head_dim) : row_largest;
        if (!(relative <= largest)) largest = relative;
        square += row_square;
        n += c.head_dim;
      }
    }
    EXPECT_GT(square, 0.0);
    if (!(largest <= outcome.error)) outcome.error = largest;
  }
  return outcome;
}

class DecodeAttention : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!DeviceAvailable()) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(DecodeAttention, MatchesTheOracle) {
  const Outcome outcome = RunCase(GetParam(), 11);
  // 2e-5 of the row's rms: what f32 scores and ex2.approx leave. An fp16 cache is off by 5e-4
  // before any arithmetic.
  EXPECT_LE(outcome.error, GetParam().out == ElementType::kF32 ? 2e-5 : 2e-2);
  EXPECT_TRUE(outcome.padding_untouched);
  RecordProperty("error", std::to_string(outcome.error));
  std::printf("           %s: error / rms %.2e\n", GetParam().name, outcome.error);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, DecodeAttention,
    testing::Values(
        Case{.lengths = {1, 31, 32, 33, 1000, 0, 64, 257}, .name = "d128_mix"},
        Case{.lengths = {700, 100}, .state = 4, .name = "d128_16bit"},
        Case{.lengths = {700, 100}, .state = 3, .name = "d128_12bit"},
        Case{.lengths = {700, 100}, .state = 2, .name = "d128_8bit"},
        Case{.lengths = {700, 100}, .state = 1, .name = "d128_4bit"},
        Case{.head_dim = 64,
             .kv_heads = 3,
             .group = 3,
             .layers = 3,
             .layer = 2,
             .lengths = {5, 900, 33, 0, 450},
             .name = "d64_smollm"},
        Case{.head_dim = 64, .kv_heads = 2, .group = 3, .lengths = {2000}, .name = "d64_one"},
        Case{.head_dim = 256,
             .kv_heads = 1,
             .group = 4,
             .layers = 2,
             .layer = 1,
             .lengths = {5, 300, 33, 0, 777},
             .name = "d256"},
        Case{.head_dim = 32,
             .kv_heads = 2,
             .group = 1,
             .lengths = {5, 300, 33, 0, 777},
             .name = "d32"},
        Case{.kv_heads = 2, .group = 8, .lengths = {5, 300, 33}, .name = "group8"},
        Case{.kv_heads = 1, .group = 7, .lengths = {5, 300, 33}, .name = "group7"},
        Case{.kv_heads = 2, .group = 1, .lengths = {5, 300, 33}, .name = "group1"},
        Case{.kv_heads = 8, .group = 2, .lengths = {5, 300, 33}, .name = "group2"},
        Case{.lengths = {600, 40}, .q_scale = 30.f, .name = "peaked"},
        Case{.lengths = {600, 40}, .q_scale = 0.f, .name = "flat"},
        Case{.lengths = {600, 40}, .wide_v = true, .name = "wide_v"},
        Case{.kv_heads = 1, .lengths = {12000}, .name = "long"},
        Case{.lengths = {1, 200, 64}, .out = ElementType::kBf16, .name = "bf16_out"}),
    [](const testing::TestParamInfo<Case>& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace pliant::cuda
