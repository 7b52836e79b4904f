// Prefill attention (the form this device takes) against softmax in double.
#include "backend/cuda/attention_prefill/attention_prefill.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"
#include "backend/dequant.h"
#include "backend/plane_code.h"

namespace pliant::cuda {
namespace {

struct Part {
  int context = 0, rows = 1;  // of one sequence
};
struct Case {
  int head_dim = 128, kv_heads = 2, group = 2;
  std::vector<Part> parts;
  bool holes = false;
  float q_scale = 1.f;
  ElementType out = ElementType::kF32;
  const char* name = "";
};

struct World {
  Case c;
  int width, kv_width, rows = 0, blocks = 0;
  std::vector<PrefillTile> tiles;
  std::vector<float> q;
  std::vector<std::uint16_t> k, v;
  std::vector<float> kf, vf;
  std::vector<std::uint8_t> present;
  std::vector<int> first_row, first_block;

  explicit World(const Case& one, std::uint32_t seed)
      : c(one), width(c.kv_heads * c.group * c.head_dim), kv_width(c.kv_heads * c.head_dim) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.f, 1.f);
    const int tile_rows = PrefillTileRows(c.head_dim);
    for (const Part& part : c.parts) {
      first_row.push_back(rows);
      first_block.push_back(blocks);
      const int own = (part.context + part.rows + kBlockTokens - 1) / kBlockTokens;
      bool holes = false;
      for (int b = 0; b < own; ++b) {
        // The first block stays, so that every row reads something.
        const bool hole = c.holes && b > 0 && random() % 3 == 0;
        holes |= hole;
        present.push_back(hole ? 0 : 1);
      }
      for (int i = 0; i < part.rows; i += tile_rows)
        tiles.push_back({rows + i, std::min(tile_rows, part.rows - i), part.context + i, blocks,
                         holes ? 1 : 0});
      rows += part.rows + 1;  // a row of nobody between two sequences
      blocks += own;
    }
    q.resize(static_cast<std::size_t>(rows) * width);
    for (float& x : q) x = normal(random) * c.q_scale;
    const std::size_t tokens = static_cast<std::size_t>(blocks) * kBlockTokens;
    // What lies behind the last block is not this step's: not a number, so that reading it shows.
    k.assign((tokens + 256) * kv_width, 0x7e00);
    v = k;
    kf.resize(tokens * kv_width);
    vf.resize(tokens * kv_width);
    for (std::size_t i = 0; i < kf.size(); ++i) {
      k[i] = FloatToF16(normal(random));
      v[i] = FloatToF16(normal(random));
      kf[i] = F16ToFloat(k[i]);
      vf[i] = F16ToFloat(v[i]);
    }
  }

  /// Largest difference of a row and head from `got`, over the rms of its right values.
  double Error(const std::vector<float>& got) const {
    const double scale = 1 / std::sqrt(double(c.head_dim));
    double worst = 0;
    std::vector<double> weight;
    for (std::size_t s = 0; s < c.parts.size(); ++s) {
      for (int i = 0; i < c.parts[s].rows; ++i) {
        // Rows around the edges of tiles and some others; all would take minutes.
        if (c.parts[s].rows > 40 && i % 64 > 1 && i % 64 < 62 && i % 37 != 0 &&
            i + 1 != c.parts[s].rows)
          continue;
        const int row = first_row[s] + i, tokens = c.parts[s].context + i + 1;
        for (int h = 0; h < c.kv_heads * c.group; ++h) {
          const float* query = &q[static_cast<std::size_t>(row) * width + h * c.head_dim];
          const std::size_t base =
              static_cast<std::size_t>(first_block[s]) * kBlockTokens * kv_width +
              static_cast<std::size_t>(h / c.group) * c.head_dim;
          weight.assign(tokens, -1);
          double best = -1e300, mass = 0;
          for (int t = 0; t < tokens; ++t) {
            if (present[first_block[s] + t / kBlockTokens] == 0) continue;
            double dot = 0;
            for (int d = 0; d < c.head_dim; ++d)
              dot += double{query[d]} * kf[base + static_cast<std::size_t>(t) * kv_width + d];
            weight[t] = dot * scale;
            best = std::max(best, weight[t]);
          }
          for (int t = 0; t < tokens; ++t) {
            const bool takes_part = present[first_block[s] + t / kBlockTokens] != 0;
            weight[t] = takes_part ? std::exp(weight[t] - best) : 0;
            mass += weight[t];
          }
          double largest = 0, squares = 0;
          for (int d = 0; d < c.head_dim; ++d) {
            double want = 0;
            for (int t = 0; t < tokens; ++t)
              if (weight[t] != 0)
                want += weight[t] * vf[base + static_cast<std::size_t>(t) * kv_width + d];
            want /= mass;
            const double error =
                std::abs(want - got[static_cast<std::size_t>(row) * width + h * c.head_dim + d]);
            if (!(error <= largest)) largest = error;  // not a number stays
            squares += want * want;
          }
          const double own = largest / std::sqrt(squares / c.head_dim);
          if (!(own <= worst)) worst = own;
        }
      }
    }
    return worst;
  }
};

template <typename T>
DeviceArray<T> ToDevice(const std::vector<T>& from) {
  auto array = *DeviceArray<T>::Make(from.size(), "test");
  Upload<T>(from, array.data());
  return array;
}

std::vector<float> RunKernel(const World& world) {
  const Case& c = world.c;
  const auto tiles = ToDevice(world.tiles);
  const auto q = ToDevice(world.q);
  const auto k = ToDevice(world.k), v = ToDevice(world.v);
  const auto present = ToDevice(world.present);
  std::vector<float> result(world.q.size(), 7.f);
  auto out = ToDevice(result);
  PrefillArgs args;
  args.heads = c.kv_heads * c.group;
  args.kv_heads = c.kv_heads;
  args.head_dim = c.head_dim;
  args.tiles = tiles.data();
  args.tile_count = static_cast<int>(world.tiles.size());
  args.q = q.data();
  args.q_stride = world.width;
  args.k = k.data();
  args.v = v.data();
  args.present = present.data();
  args.gathered_blocks = world.blocks;
  args.out = out.data();
  args.out_stride = world.width;
  args.out_type = c.out;
  args.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.head_dim));
  LaunchPrefillAttention(args, nullptr);
  PLIANT_CUDA_CHECK(cudaDeviceSynchronize());
  if (c.out == ElementType::kF32) {
    Download<float>(out.data(), result);
    return result;
  }
  std::vector<std::uint16_t> narrow(result.size());
  Download<std::uint16_t>(reinterpret_cast<const std::uint16_t*>(out.data()), narrow);
  for (std::size_t i = 0; i < narrow.size(); ++i) result[i] = Bf16ToFloat(narrow[i]);
  return result;
}

class PrefillAttention : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!DeviceAvailable()) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(PrefillAttention, MatchesSoftmaxInDouble) {
  const Case& c = GetParam();
  const World world(c, 11);
  const std::vector<float> got = RunKernel(world);
  const double error = world.Error(got);
  RecordProperty("error", std::to_string(error));
  // The query is rounded to fp16, so scores, whose spread is q_scale, are off by 2^-11 of it at
  // most times the products' share: a few times 2^-11 q_scale of the weights. A bf16 result adds
  // 2^-9 of values of up to five times the rms.
  EXPECT_LE(error, 3e-3 * std::max(1.f, c.q_scale) + (c.out == ElementType::kF32 ? 0 : 1e-2));
  if (c.out != ElementType::kF32) return;
  for (std::size_t s = 0; s < c.parts.size(); ++s) {
    const std::size_t nobody = static_cast<std::size_t>(world.first_row[s] + c.parts[s].rows);
    for (int d = 0; d < world.width; ++d)
      ASSERT_EQ(got[nobody * world.width + d], 7.f) << "a row of nobody was written";
  }
}

/// The same rows, many times at once: another result would be a race.
TEST_P(PrefillAttention, GivesTheSameEveryTime) {
  const World world(GetParam(), 12);
  const std::vector<float> first = RunKernel(world);
  for (int i = 0; i < 5; ++i) {
    const std::vector<float> again = RunKernel(world);
    ASSERT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, PrefillAttention,
    testing::Values(
        Case{.parts = {{0, 128}}, .name = "one_tile"}, Case{.parts = {{0, 5}}, .name = "five_rows"},
        Case{.parts = {{0, 300}, {77, 64}, {1000, 129}, {31, 1}, {0, 65}, {640, 6}},
             .name = "ragged"},
        Case{.parts = {{0, 300}, {77, 64}, {1000, 129}}, .holes = true, .name = "holes"},
        Case{.parts = {{3000, 700}, {12, 500}}, .q_scale = 6.f, .name = "sharp"},
        Case{.kv_heads = 1,
             .group = 8,
             .parts = {{5, 200}, {0, 33}},
             .out = ElementType::kBf16,
             .name = "bf16_group8"},
        Case{.head_dim = 64,
             .kv_heads = 3,
             .group = 3,
             .parts = {{0, 300}, {77, 64}, {1000, 129}, {31, 1}, {640, 6}},
             .name = "d64"},
        Case{.head_dim = 64, .parts = {{100, 400}}, .holes = true, .name = "d64_holes"},
        Case{.head_dim = 256,
             .kv_heads = 1,
             .group = 2,
             .parts = {{0, 300}, {77, 64}, {1000, 129}, {31, 1}},
             .name = "d256"},
        Case{.head_dim = 256, .parts = {{100, 200}}, .holes = true, .name = "d256_holes"},
        Case{.head_dim = 32,
             .kv_heads = 2,
             .group = 1,
             .parts = {{0, 300}, {77, 64}, {31, 1}},
             .name = "d32"}),
    [](const testing::TestParamInfo<Case>& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace pliant::cuda
