// The CUDA backend against the reference backend: same weights, same steps, same page tables.
#include "backend/cuda/cuda_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/page_layout.h"
#include "backend/dequant.h"

namespace pliant {
namespace {

HostMatrix F32Matrix(const std::vector<float>& values, std::int64_t rows) {
  HostMatrix m;
  m.type = DType::kF32;
  m.rows = rows;
  m.cols = static_cast<std::int64_t>(values.size()) / rows;
  m.data = std::as_bytes(std::span(values));
  return m;
}

struct Case {
  int head_dim = 64, kv_heads = 2, group = 3, layers = 2;
  bool head_norm = false, bias = false, channel = true;
  const char* name = "";
};

/// One backend with a small model's tensors; all values are the same for the same seed.
class World {
 public:
  World(std::unique_ptr<Backend> backend, const Case& c, std::uint32_t pages)
      : backend_(std::move(backend)), c_(c) {
    std::mt19937 random(3);
    geometry_ = {.layers = c.layers, .kv_heads = c.kv_heads, .head_dim = c.head_dim};
    heads_ = c.kv_heads * c.group;
    width_ = heads_ * c.head_dim;
    const int qkv = (heads_ + 2 * c.kv_heads) * c.head_dim;
    // Small integers over a power of two: every product and sum is exact in bf16 operands and f32
    // sums, so both backends cache exactly the same K and V.
    auto exact = [&](std::size_t n, int range, float scale) {
      std::vector<float> v(n);
      for (float& x : v)
        x = static_cast<float>(static_cast<int>(random() % (2 * range + 1)) - range) * scale;
      return v;
    };
    table_ = Add(exact(kVocabulary * kHidden, 15, 1 / 8.f), kVocabulary);
    for (int l = 0; l < c.layers; ++l)
      qkv_.push_back(Add(exact(static_cast<std::size_t>(qkv) * kHidden, 7, 1 / 16.f), qkv));
    if (c.bias) bias_ = *backend_->AddVector(exact(qkv, 7, 1 / 4.f));
    std::vector<float> identity(static_cast<std::size_t>(width_) * width_, 0.f);
    for (int i = 0; i < width_; ++i) identity[static_cast<std::size_t>(i) * width_ + i] = 1.f;
    identity_ = Add(identity, width_);
    ones_ = *backend_->AddVector(std::vector<float>(width_, 1.f));
    std::vector<float> norm(c.head_dim);
    for (float& x : norm) x = 0.5f + static_cast<float>(random() % 256) / 256;
    norm_ = *backend_->AddVector(norm);
    x_ = *backend_->AddTensor(kRows, kHidden);
    qkv_out_ = *backend_->AddTensor(kRows, qkv);
    attention_ = *backend_->AddTensor(kRows, width_);
    result_ = *backend_->AddTensor(kRows, width_);
    EXPECT_TRUE(backend_->AllocatePages(geometry_, pages).ok());
    if (c.channel) {
      std::vector<float> channel(geometry_.Units() * c.head_dim);
      for (std::size_t i = 0; i < channel.size(); ++i) {
        const std::size_t pair = i % c.head_dim % (c.head_dim / 2);
        channel[i] = 0.25f * (1 + (pair * 7 + i / c.head_dim) % 13);
      }
      std::vector<float> center(channel.size());
      for (std::size_t i = 0; i < center.size(); ++i)
        center[i] = 0.25f * (static_cast<int>(i % 9) - 4);
      std::vector<float> value_scale(channel.size()), value_center(channel.size());
      for (std::size_t i = 0; i < channel.size(); ++i) {
        value_scale[i] = 1.f - 0.0625f * (i % 11);
        value_center[i] = 0.125f * (static_cast<int>(i % 7) - 3);
      }
      EXPECT_TRUE(backend_->SetKvCode({{channel, center}, {value_scale, value_center}}).ok());
    }
    for (int i = 0; i < c.head_dim / 2; ++i)
      rope_.inv_freq.push_back(std::pow(10000.f, -2.f * i / c.head_dim));
  }

  /// Attention of layer `layer` for all rows of the step, each row divided by its rms.
  std::vector<float> Step(const StepBatch& batch, int layer,
                          const std::function<void()>& meanwhile = {}) {
    EXPECT_TRUE(backend_->BeginStep(batch).ok());
    backend_->Embed(table_, x_);
    for (int l = 0; l < c_.layers; ++l) {
      backend_->MatMul(x_, qkv_[l], c_.bias ? bias_ : VectorId(), qkv_out_, false);
      const QkvParams params{l, heads_, c_.head_norm ? norm_ : VectorId(),
                             c_.head_norm ? norm_ : VectorId(), 1e-5f};
      backend_->QkvToCache(params, rope_, qkv_out_);
      backend_->Attention(l, heads_, 1.f / std::sqrt(static_cast<float>(c_.head_dim)) / 8, qkv_out_,
                          attention_);
      if (l == layer) {
        backend_->MatMul(attention_, identity_, VectorId(), result_, false);
        backend_->Logits(result_, ones_, 0.f, identity_);
      }
    }
    if (meanwhile && backend_->StartStep()) meanwhile();
    EXPECT_TRUE(backend_->EndStep().ok());
    const auto rows = backend_->LogitRows();
    return {rows.begin(), rows.end()};
  }

  Backend& backend() { return *backend_; }
  const KvGeometry& geometry() const { return geometry_; }
  int width() const { return width_; }

  static constexpr int kVocabulary = 50, kHidden = 64, kRows = 512;

 private:
  MatrixId Add(const std::vector<float>& values, std::int64_t rows) {
    const HostMatrix m = F32Matrix(values, rows);
    auto id = backend_->AddMatrix({&m, 1});
    EXPECT_TRUE(id.ok()) << id.status().ToString();
    return *id;
  }

  std::unique_ptr<Backend> backend_;
  Case c_;
  KvGeometry geometry_;
  int heads_ = 0, width_ = 0;
  MatrixId table_, identity_;
  std::vector<MatrixId> qkv_;
  VectorId bias_, ones_, norm_;
  TensorId x_, qkv_out_, attention_, result_;
  RopeTable rope_;
};

/// Owns a batch over a few sequences and their page tables.
struct Sequences {
  std::mt19937 random{17};
  std::vector<std::uint32_t> free;
  std::vector<std::vector<BlockView>> blocks;
  std::vector<int> context;
  std::vector<std::int32_t> tokens, positions, logit_rows;
  std::vector<SequenceSlice> slices;
  std::vector<BlockView> views;

  Sequences(int count, std::uint32_t pages) : free(pages), blocks(count), context(count, 0) {
    std::iota(free.begin(), free.end(), 0u);
    std::shuffle(free.begin(), free.end(), random);
  }
  PageId Take() {
    const PageId page(free.back());
    free.pop_back();
    return page;
  }
  StepBatch Batch(const std::vector<int>& rows) {
    tokens.clear();
    positions.clear();
    slices.clear();
    views.clear();
    logit_rows.clear();
    for (std::size_t s = 0; s < rows.size(); ++s) {
      if (rows[s] == 0) continue;
      const int needed = (context[s] + rows[s] + kBlockTokens - 1) / kBlockTokens;
      while (static_cast<int>(blocks[s].size()) < needed) {
        BlockView view;
        for (int p = 0; p < kPlanes; ++p) view.k[p] = Take(), view.v[p] = Take();
        blocks[s].push_back(view);
      }
      slices.push_back({static_cast<int>(tokens.size()), rows[s], context[s],
                        static_cast<int>(views.size()), needed});
      views.insert(views.end(), blocks[s].begin(), blocks[s].end());
      for (int i = 0; i < rows[s]; ++i) {
        logit_rows.push_back(static_cast<int>(tokens.size()));
        tokens.push_back(static_cast<int>(random() % World::kVocabulary));
        positions.push_back(context[s] + i + 5);  // positions need not be cache places
      }
      context[s] += rows[s];
    }
    return {tokens, positions, slices, views, logit_rows};
  }
  /// Takes low planes from blocks that are full.
  void Demote() {
    for (std::size_t s = 0; s < blocks.size(); ++s)
      for (int b = 0; b < context[s] / kBlockTokens; ++b) {
        static constexpr int kStates[][2] = {{4, 4}, {3, 3}, {2, 2}, {2, 1},
                                             {1, 1}, {4, 2}, {1, 0}};
        const auto& state = kStates[random() % std::size(kStates)];
        if (b == 0 && state[1] == 0) continue;
        for (int p = state[0]; p < kPlanes; ++p) blocks[s][b].k[p] = PageId();
        for (int p = state[1]; p < kPlanes; ++p) blocks[s][b].v[p] = PageId();
      }
  }
};

/// Largest difference; rows have an rms of 1.
double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(double{a[i]} - b[i]);
    if (!(d <= largest)) largest = d;
  }
  return largest;
}

std::vector<std::byte> ReadPage(Backend& backend, const KvGeometry& geometry, PageId page) {
  std::vector<std::byte> bytes(backend.PageBytes(geometry));
  const PageCopy copy{page, bytes.data()};
  EXPECT_EQ(backend.Wait(backend.CopyOut({&copy, 1})), CopyState::kDone);
  return bytes;
}

class CudaBackend : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!cuda::DeviceAvailable()) GTEST_SKIP() << "no CUDA device";
  }
};

constexpr std::uint32_t kPages = 600;

TEST_P(CudaBackend, AttentionMatchesTheReferenceAtMixedStates) {
  const Case c = GetParam();
  World want(MakeReferenceBackend(), c, kPages), got(*MakeCudaBackend({}), c, kPages);
  Sequences sequences(4, kPages);
  const std::vector<std::vector<int>> steps = {
      {130, 3, 33, 1}, {1, 1, 70, 4}, {5, 1, 1, 1}, {1, 64, 0, 1}};
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const StepBatch batch = sequences.Batch(steps[s]);
    const int layer = static_cast<int>(s) % c.layers;
    const auto a = want.Step(batch, layer), b = got.Step(batch, layer);
    // bf16 results of attention, rounded once more as operands: 2^-8 of values of up to four times
    // the rms.
    EXPECT_LE(Distance(a, b), 0.04) << "step " << s;
    EXPECT_FALSE(a.empty());
    sequences.Demote();
  }
}

TEST_P(CudaBackend, PagesHoldTheReferencesCodes) {
  Case c = GetParam();
  if (c.head_norm) c.head_norm = false;  // the reference sums squares in double
  World want(MakeReferenceBackend(), c, kPages), got(*MakeCudaBackend({}), c, kPages);
  Sequences sequences(2, kPages);
  const StepBatch batch = sequences.Batch({40, 2});
  want.Step(batch, 0);
  got.Step(batch, 0);
  const KvGeometry& geometry = want.geometry();
  const int d = c.head_dim;
  for (int s = 0; s < 2; ++s)
    for (int token = 0; token < sequences.context[s]; ++token)
      for (int is_v = 0; is_v < 2; ++is_v)
        for (int p = 0; p < kPlanes; ++p) {
          const BlockView& view = sequences.blocks[s][token / kBlockTokens];
          const PageId id = is_v ? view.v[p] : view.k[p];
          if (token % kBlockTokens != 0 && token != sequences.context[s] - 1) continue;
          const auto a = ReadPage(want.backend(), geometry, id),
                     b = ReadPage(got.backend(), geometry, id);
          const int slot = token % kBlockTokens;
          for (int layer = 0; layer < c.layers; ++layer)
            for (int head = 0; head < c.kv_heads; ++head) {
              const std::byte* unit = b.data() + cuda::UnitOffset(c.kv_heads, d, layer, head);
              for (int dim = 0; dim < d; ++dim) {
                const auto nibble = [&](std::byte byte) {
                  return (static_cast<int>(byte) >> (dim % 2 * 4)) & 15;
                };
                ASSERT_EQ(
                    nibble(a[geometry.RowOffset(layer, head, slot) + dim / 2]),
                    nibble(unit[is_v ? cuda::VByte(d, slot, dim) : cuda::KByte(d, slot, dim)]))
                    << "token " << token << " V " << is_v << " plane " << p << " layer " << layer
                    << " head " << head << " dim " << dim;
              }
              if (p == 0) {
                EXPECT_EQ(std::memcmp(a.data() + geometry.ScaleOffset(layer, head, slot),
                                      unit + cuda::ScaleByte(d, slot), 2),
                          0);
              }
            }
        }
}

/// Decode steps of changing sizes, as graphs and as ordinary launches: the same tokens, drawn where
/// any change of the logits would show, and the same pages.
/// A step laid out while the one before ran, and one that came in the place of what was laid out.
TEST_P(CudaBackend, PreparedStepsGiveTheTokensOfOthers) {
  const Case c = GetParam();
  World plain(*MakeCudaBackend({.graphs = false}), c, kPages),
      ahead(*MakeCudaBackend({}), c, kPages);
  Sequences now(7, kPages), next(7, kPages);  // the same, one of them a step ahead
  const auto rows_of = [](int s) {
    std::vector<int> rows(7, 1);
    if (s == 0) rows = {40, 3, 33, 1, 70, 2, 20};
    if (s == 9) rows = {1, 60, 1, 1, 1, 1, 1};
    for (int i = s / 6; i > 0; --i) rows[(s + i) % 7] = 0;
    return rows;
  };
  std::mt19937 random(6);
  (void)next.Batch(rows_of(0));
  std::size_t compared = 0;
  int prepared = 0;
  for (int s = 0; s < 24; ++s) {
    StepBatch batch = now.Batch(rows_of(s));
    std::vector<RowSampling> sampling;
    for (std::size_t i = 0; i < batch.logit_rows.size(); ++i) {
      sampling.push_back({.uniform = (random() >> 8) * 0x1p-24, .temperature = 0.5f});
      sampling.back().on_host = s % 8 == 6 && i == 1;  // no graph, unlike what was expected
    }
    batch.sampling = sampling;
    batch.sampled_columns = plain.width() - 1;
    batch.step = s + 1;
    const auto want_logits = plain.Step(batch, 0);
    const auto got_logits = ahead.Step(batch, 0, [&] {
      if (s % 5 == 4) next.Demote();
      StepBatch coming = next.Batch(rows_of(s + 1));
      const std::vector<std::int32_t> unknown(coming.tokens.size(), 0);
      coming.tokens = unknown;
      coming.step = s % 7 == 3 ? s + 3 : s + 2;  // the former: another step comes in its place
      ahead.backend().PrepareStep(coming);
      ++prepared;
    });
    if (s % 5 == 4) now.Demote();
    EXPECT_EQ(got_logits, want_logits);
    const auto want = plain.backend().SampledTokens(), got = ahead.backend().SampledTokens();
    ASSERT_EQ(want.size(), batch.logit_rows.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (sampling[i].on_host != 0) continue;
      EXPECT_EQ(got[i], want[i]) << "step " << s << " row " << i;
      ++compared;
    }
  }
  EXPECT_GT(compared, 100u);
  EXPECT_EQ(prepared, 24);
  for (std::size_t s = 0; s < now.blocks.size(); ++s)
    for (const BlockView& view : now.blocks[s])
      for (const auto* pages : {&view.k, &view.v})
        for (const PageId page : *pages) {
          if (!page.valid()) continue;
          EXPECT_EQ(ReadPage(plain.backend(), plain.geometry(), page),
                    ReadPage(ahead.backend(), ahead.geometry(), page));
        }
}

TEST_P(CudaBackend, GraphsGiveTheTokensOfOrdinaryLaunches) {
  const Case c = GetParam();
  World plain(*MakeCudaBackend({.graphs = false}), c, kPages),
      graphs(*MakeCudaBackend({}), c, kPages);
  Sequences sequences(7, kPages);
  std::mt19937 random(5);
  std::size_t compared = 0;
  for (int s = 0; s < 24; ++s) {
    std::vector<int> rows(7, 1);
    if (s == 0) rows = {40, 3, 33, 1, 70, 2, 20};
    for (int i = s / 6; i > 0; --i) rows[(s + i) % 7] = 0;  // 7, 6, 5, 4 sequences
    if (s == 15) rows = {1, 5, 1, 1, 1, 1, 1};
    StepBatch batch = sequences.Batch(rows);
    std::vector<RowSampling> sampling;
    std::vector<LogitChange> changes;
    for (std::size_t i = 0; i < batch.logit_rows.size(); ++i) {
      sampling.push_back({.uniform = (random() >> 8) * 0x1p-24,
                          .temperature = 0.5f,
                          .first_change = static_cast<std::int32_t>(changes.size()),
                          .logprobs = static_cast<std::int32_t>(random() % 4) - 1});
      if (s < 3) continue;  // the first graphs know of no changes
      for (std::int32_t id = random() % 3; id < plain.width(); id += 3) {
        changes.push_back({.id = id, .penalty = 1.25f, .add = 0.5f});
        ++sampling.back().changes;
      }
    }
    batch.sampling = sampling;
    batch.changes = changes;
    batch.sampled_columns = plain.width() - 1;
    plain.Step(batch, 0);
    graphs.Step(batch, 0);
    const auto want = plain.backend().SampledTokens(), got = graphs.backend().SampledTokens();
    ASSERT_EQ(want.size(), batch.logit_rows.size());
    for (std::size_t i = 0; i < want.size(); ++i, ++compared) {
      EXPECT_EQ(got[i], want[i]) << "step " << s << " row " << i;
      EXPECT_GE(got[i], 0);
      if (sampling[i].logprobs < 0) continue;
      const RowLogprobs &a = plain.backend().SampledLogprobs()[i],
                        &b = graphs.backend().SampledLogprobs()[i];
      EXPECT_EQ(a.count, sampling[i].logprobs);
      EXPECT_EQ(std::memcmp(&a, &b, 8 + a.count * sizeof(int)), 0);
      EXPECT_EQ(std::memcmp(a.values, b.values, a.count * sizeof(float)), 0);
    }
    if (s % 5 == 4) sequences.Demote();
  }
  EXPECT_GT(compared, 100u);
  for (std::size_t s = 0; s < sequences.blocks.size(); ++s)
    for (const BlockView& view : sequences.blocks[s])
      for (const auto* pages : {&view.k, &view.v})
        for (const PageId page : *pages) {
          if (!page.valid()) continue;
          EXPECT_EQ(ReadPage(plain.backend(), plain.geometry(), page),
                    ReadPage(graphs.backend(), graphs.geometry(), page));
        }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CudaBackend,
    testing::Values(
        Case{.name = "d64"}, Case{.head_dim = 128, .kv_heads = 2, .group = 2, .name = "d128"},
        Case{.head_dim = 128, .kv_heads = 1, .group = 6, .bias = true, .name = "d128_group6_bias"},
        Case{.head_dim = 256, .kv_heads = 1, .group = 2, .name = "d256"},
        Case{.head_dim = 32, .kv_heads = 3, .group = 1, .layers = 1, .name = "d32"},
        Case{.head_norm = true, .channel = false, .name = "head_norms"}),
    [](const testing::TestParamInfo<Case>& info) { return std::string(info.param.name); });

class CudaBackendOps : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::DeviceAvailable()) GTEST_SKIP() << "no CUDA device";
  }
};

/// Of few rows, and of so many that what SiLU takes is bf16 and the products' algorithms are
/// chosen. `half`: with weights in fp16.
void CheckFeedForward(int row_count, bool half = false) {
  constexpr int kVocabulary = 40, kHidden = 96, kFeatures = 160;
  const int blocks = (row_count + kBlockTokens - 1) / kBlockTokens;
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0.f, 1.f);
  auto values = [&](std::size_t n, float scale) {
    std::vector<float> v(n);
    for (float& x : v) {
      x = normal(random) * scale;
      x = half ? F16ToFloat(FloatToF16(x)) : Bf16ToFloat(FloatToBf16(x));
    }
    return v;
  };
  const auto table = values(kVocabulary * kHidden, 1), gate = values(kFeatures * kHidden, 0.1f),
             up = values(kFeatures * kHidden, 0.1f), down = values(kHidden * kFeatures, 0.1f),
             norm = values(kHidden, 1), bias = values(kHidden, 0.5f),
             head = values(kVocabulary * kHidden, 0.1f);
  std::vector<std::int32_t> order(kFeatures);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  auto run = [&](Backend& backend) {
    std::deque<std::vector<std::uint16_t>> halves;
    const auto matrix = [&](const std::vector<float>& v, std::int64_t rows) {
      HostMatrix m = F32Matrix(v, rows);
      if (!half) return m;
      auto& to = halves.emplace_back(v.size());
      std::transform(v.begin(), v.end(), to.begin(), FloatToF16);
      m.type = DType::kF16;
      m.data = std::as_bytes(std::span(to));
      return m;
    };
    HostMatrix parts[2] = {matrix(gate, kFeatures), matrix(up, kFeatures)};
    parts[0].order = parts[1].order = order;
    const HostMatrix t = matrix(table, kVocabulary), dn = matrix(down, kHidden),
                     out = matrix(head, kVocabulary);
    const MatrixId table_id = *backend.AddMatrix({&t, 1}), gate_up = *backend.AddMatrix(parts),
                   down_id = *backend.AddMatrix({&dn, 1}), head_id = *backend.AddMatrix({&out, 1});
    const VectorId norm_id = *backend.AddVector(norm), bias_id = *backend.AddVector(bias);
    const TensorId x = *backend.AddTensor(row_count, kHidden),
                   normed = *backend.AddTensor(row_count, kHidden),
                   wide = *backend.AddTensor(row_count, 2 * kFeatures),
                   narrow = *backend.AddTensor(row_count, kFeatures);
    EXPECT_GT(backend.WeightBytes(), 0u);
    EXPECT_TRUE(
        backend.AllocatePages({.layers = 1, .kv_heads = 1, .head_dim = 64}, 8 * blocks).ok());
    std::vector<std::int32_t> tokens(row_count), positions(row_count),
        logits = {0, 5, row_count - 1};
    for (int i = 0; i < row_count; ++i) tokens[i] = (i * 7) % kVocabulary, positions[i] = i;
    std::vector<BlockView> views(blocks);
    for (int b = 0; b < blocks; ++b)
      for (int p = 0; p < kPlanes; ++p)
        views[b].k[p] = PageId(b * 8 + p), views[b].v[p] = PageId(b * 8 + 4 + p);
    const SequenceSlice slice{0, row_count, 0, 0, blocks};
    EXPECT_TRUE(backend.BeginStep({tokens, positions, {&slice, 1}, views, logits}).ok());
    backend.Embed(table_id, x);
    backend.RmsNorm(x, norm_id, 1e-5f, normed);
    backend.MatMul(normed, gate_up, VectorId(), wide, false);
    backend.SiluMul(wide, narrow);
    backend.MatMul(narrow, down_id, bias_id, x, true);
    backend.RmsNorm(x, norm_id, 1e-5f, x);
    backend.Logits(x, norm_id, 1e-5f, head_id);
    EXPECT_TRUE(backend.EndStep().ok());
    const auto rows = backend.LogitRows();
    return std::vector<float>(rows.begin(), rows.end());
  };
  const auto a = run(*MakeReferenceBackend()), b = run(**MakeCudaBackend({}));
  double rms = 0;
  for (const float v : a) rms += double{v} * v;
  rms = std::sqrt(rms / a.size());
  EXPECT_LE(Distance(a, b), 0.02 * rms);
  EXPECT_EQ(a.size(), 3u * kVocabulary);
}

TEST_F(CudaBackendOps, FeedForwardMatchesTheReference) { CheckFeedForward(37); }
TEST_F(CudaBackendOps, FeedForwardOfManyRowsMatchesTheReference) { CheckFeedForward(1100); }
TEST_F(CudaBackendOps, FeedForwardWithHalfWeightsMatchesTheReference) {
  CheckFeedForward(37, true);
  CheckFeedForward(1100, true);
}

TEST_F(CudaBackendOps, CopiesArePageExactInBothDirections) {
  auto backend = *MakeCudaBackend({});
  const KvGeometry geometry{.layers = 3, .kv_heads = 2, .head_dim = 64};
  constexpr std::uint32_t kCount = 4000;  // several staging halves
  ASSERT_TRUE(backend->AllocatePages(geometry, kCount).ok());
  const std::size_t bytes = backend->PageBytes(geometry);
  std::mt19937 random(1);
  std::vector<std::byte> in(bytes * kCount), out(bytes * kCount);
  for (auto& b : in) b = static_cast<std::byte>(random());
  std::vector<PageCopy> copies_in, copies_out;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    copies_in.push_back({PageId(i), in.data() + i * bytes});
    copies_out.push_back({PageId(kCount - 1 - i), out.data() + (kCount - 1 - i) * bytes});
  }
  const CopyTicket first = backend->CopyIn(copies_in), second = backend->CopyOut(copies_out);
  EXPECT_EQ(backend->Wait(second), CopyState::kDone);
  EXPECT_EQ(backend->Poll(first), CopyState::kDone) << "copies end in the order given";
  EXPECT_TRUE(in == out);
  const PageCopy beyond{PageId(kCount), out.data()};
  EXPECT_EQ(backend->Wait(backend->CopyOut({&beyond, 1})), CopyState::kFailed);
  EXPECT_EQ(backend->Wait(backend->CopyIn({})), CopyState::kDone);
}

TEST_F(CudaBackendOps, RefusesWhatDoesNotFit) {
  auto backend = *MakeCudaBackend({});
  const Status odd = backend->AllocatePages({.layers = 1, .kv_heads = 1, .head_dim = 96}, 4);
  EXPECT_EQ(odd.code(), StatusCode::kUnimplemented);
  const Status huge =
      backend->AllocatePages({.layers = 80, .kv_heads = 8, .head_dim = 128}, 4000000);
  EXPECT_EQ(huge.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(huge.message().find("free"), std::string::npos) << huge.message();
  EXPECT_FALSE(backend->AddTensor(0, 4).ok());
  std::vector<float> values(12);
  HostMatrix lying = F32Matrix(values, 3);
  lying.rows = 4;
  EXPECT_EQ(backend->AddMatrix({&lying, 1}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(MakeCudaBackend({.device = 99}).ok());
}

TEST_F(CudaBackendOps, ChannelStatisticsAreTheReferences) {
  const Case c{.layers = 2, .channel = false};
  World want(MakeReferenceBackend(), c, kPages), got(*MakeCudaBackend({}), c, kPages);
  Sequences sequences(1, kPages);
  const StepBatch batch = sequences.Batch({50});
  want.backend().StartChannelStatistics();
  got.backend().StartChannelStatistics();
  want.Step(batch, 0);
  got.Step(batch, 0);
  const ChannelStatistics a = want.backend().TakeChannelStatistics(),
                          b = got.backend().TakeChannelStatistics();
  ASSERT_EQ(a.key_min.size(), b.key_min.size());
  ASSERT_EQ(a.key_max.size(), b.key_max.size());
  ASSERT_EQ(a.query_energy.size(), b.query_energy.size());
  ASSERT_EQ(a.value_energy.size(), b.value_energy.size());
  ASSERT_FALSE(a.key_min.empty());
  for (std::size_t i = 0; i < a.key_min.size(); ++i) {
    EXPECT_EQ(a.key_min[i], b.key_min[i]) << i;
    EXPECT_EQ(a.key_max[i], b.key_max[i]) << i;
    EXPECT_NEAR(a.query_energy[i], b.query_energy[i], 1e-4 * a.query_energy[i]) << i;
    EXPECT_NEAR(a.value_energy[i], b.value_energy[i], 1e-9 * a.value_energy[i]) << i;
  }
}

}  // namespace
}  // namespace pliant
