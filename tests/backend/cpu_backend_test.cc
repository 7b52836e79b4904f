// The CPU backend against the reference backend, op by op and over a whole small step.
#include "backend/cpu/cpu_backend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "backend/support/kv_case.h"
#include "backend/support/random_weights.h"

namespace pliant {
namespace {

using testing::OwnedMatrix;
using testing::RandomMatrix;
using testing_support::OwnedStep;
using testing_support::PageMaker;

constexpr std::int64_t kHidden = 64;
constexpr std::int64_t kFeatures = 96;
constexpr std::int64_t kVocabulary = 100;
constexpr KvGeometry kGeometry{1, 1, 32};
constexpr int kHeads = 2;

// A model of one layer on one backend.
struct Rig {
  explicit Rig(std::unique_ptr<Backend> b, int max_rows) : backend(std::move(b)) {
    const auto matrix = [&](const OwnedMatrix& m) {
      const HostMatrix view = m.View();
      return backend->AddMatrix({&view, 1}).value();
    };
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const auto vector = [&](std::int64_t n) {
      std::vector<float> values(n);
      for (float& v : values) v = 1 + 0.2f * normal(random);
      return backend->AddVector(values).value();
    };
    table = matrix(RandomMatrix(DType::kQ8_0, kVocabulary, kHidden, 1));
    const OwnedMatrix q = RandomMatrix(DType::kQ4_1, kHeads * 32, kHidden, 2);
    const OwnedMatrix k = RandomMatrix(DType::kQ4_1, 32, kHidden, 3);
    const OwnedMatrix v = RandomMatrix(DType::kQ8_0, 32, kHidden, 4);
    const HostMatrix parts[] = {q.View(), k.View(), v.View()};
    qkv_weight = backend->AddMatrix(parts).value();
    out_weight = matrix(RandomMatrix(DType::kQ4_0, kHidden, kHidden, 5));
    const OwnedMatrix gate = RandomMatrix(DType::kQ4_1, kFeatures, kHidden, 6);
    const OwnedMatrix up = RandomMatrix(DType::kQ4_1, kFeatures, kHidden, 7);
    const HostMatrix gated[] = {gate.View(), up.View()};
    gate_up_weight = backend->AddMatrix(gated).value();
    down_weight = matrix(RandomMatrix(DType::kQ5_1, kHidden, kFeatures, 8));
    norm = vector(kHidden);
    bias = vector((kHeads + 2) * 32);
    residual = backend->AddTensor(max_rows, kHidden).value();
    normed = backend->AddTensor(max_rows, kHidden).value();
    qkv = backend->AddTensor(max_rows, (kHeads + 2) * 32).value();
    attention = backend->AddTensor(max_rows, kHidden).value();
    gate_up = backend->AddTensor(max_rows, 2 * kFeatures).value();
    gated_out = backend->AddTensor(max_rows, kFeatures).value();
    EXPECT_TRUE(backend->AllocatePages(kGeometry, 512).ok());
    for (int i = 0; i < 16; ++i) rope.inv_freq.push_back(std::pow(10000.0f, -i / 16.0f));
  }

  std::vector<float> Step(const StepBatch& batch) {
    const Status begun = backend->BeginStep(batch);
    EXPECT_TRUE(begun.ok()) << begun.ToString();
    backend->Embed(table, residual);
    backend->RmsNorm(residual, norm, 1e-5f, normed);
    backend->MatMul(normed, qkv_weight, bias, qkv, false);
    QkvParams params;
    params.heads = kHeads;
    backend->QkvToCache(params, rope, qkv);
    backend->Attention(0, kHeads, 0.17f, qkv, attention);
    backend->MatMul(attention, out_weight, VectorId(), residual, true);
    backend->RmsNorm(residual, norm, 1e-5f, normed);
    backend->MatMul(normed, gate_up_weight, VectorId(), gate_up, false);
    backend->SiluMul(gate_up, gated_out);
    backend->MatMul(gated_out, down_weight, VectorId(), residual, true);
    backend->Logits(residual, norm, 1e-5f, table);
    EXPECT_TRUE(backend->EndStep().ok());
    const auto rows = backend->LogitRows();
    return {rows.begin(), rows.end()};
  }

  std::unique_ptr<Backend> backend;
  MatrixId table, qkv_weight, out_weight, gate_up_weight, down_weight;
  VectorId norm, bias;
  TensorId residual, normed, qkv, attention, gate_up, gated_out;
  RopeTable rope;
};

OwnedStep RandomStep(const std::vector<int>& lengths, std::uint32_t seed) {
  std::mt19937 random(seed);
  PageMaker pages(512);
  OwnedStep step;
  for (const int length : lengths) {
    std::vector<BlockView> blocks;
    for (int b = 0; b * kBlockTokens < length; ++b) blocks.push_back(pages.Block({}));
    step.Add(0, length, blocks);
    step.logit_rows.push_back(static_cast<std::int32_t>(step.tokens.size()) - 1);
  }
  for (std::int32_t& token : step.tokens) {
    token = static_cast<std::int32_t>(random() % kVocabulary);
  }
  return step;
}

// Root mean square of a - b over that of b.
double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0;
  double size = 1e-30;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    size += double{b[i]} * b[i];
  }
  return std::sqrt(difference / size);
}

std::vector<CpuOptions> MachineOptions() {
  std::vector<CpuOptions> all;
  for (const char* level : {"plain", "avx2", "avx512", "amx"}) {
    if (CpuLevelName(*ChooseCpuLevel(level)) != level) continue;  // the machine has less
    all.push_back({2, level, false});
    all.push_back({1, level, true});
  }
  return all;
}

TEST(CpuBackend, AStepMatchesTheReference) {
  for (const std::vector<int>& lengths : {std::vector<int>{1}, {5, 1, 1}, {40, 3}, {70, 31}}) {
    const OwnedStep step = RandomStep(lengths, 11);
    Rig reference(MakeReferenceBackend(), 128);
    const auto want = reference.Step(step.Batch());
    ASSERT_EQ(want.size(), lengths.size() * kVocabulary);
    for (const CpuOptions& options : MachineOptions()) {
      Rig cpu(MakeCpuBackend(options).value(), 128);
      const auto got = cpu.Step(step.Batch());
      const bool exact = options.precise || options.level == "plain" || options.level == "avx2";
      EXPECT_LT(RelativeError(got, want), exact ? 1e-4 : 1.5e-2)
          << options.level << " precise " << options.precise << " rows " << step.tokens.size();
    }
  }
}

// Every sequence gives the same bits alone and in any company.
TEST(CpuBackend, BatchedEqualsOneAtATime) {
  for (const CpuOptions& options : MachineOptions()) {
    const OwnedStep together = RandomStep({1, 3, 70, 2, 17}, 5);
    Rig batched(MakeCpuBackend(options).value(), 128);
    const auto all = batched.Step(together.Batch());
    for (std::size_t s = 0; s < together.sequences.size(); ++s) {
      const SequenceSlice& slice = together.sequences[s];
      OwnedStep alone;
      alone.Add(0, slice.rows,
                {together.blocks.begin() + slice.first_block,
                 together.blocks.begin() + slice.first_block + slice.blocks});
      std::copy_n(together.tokens.begin() + slice.first_row, slice.rows, alone.tokens.begin());
      alone.logit_rows.push_back(slice.rows - 1);
      Rig single(MakeCpuBackend(options).value(), 128);
      const auto one = single.Step(alone.Batch());
      for (std::int64_t i = 0; i < kVocabulary; ++i) {
        ASSERT_EQ(one[i], all[s * kVocabulary + i])
            << options.level << " precise " << options.precise << " sequence " << s;
      }
    }
  }
}

TEST(CpuBackend, RefusesBadInput) {
  EXPECT_FALSE(MakeCpuBackend({-1, "auto", false}).ok());
  EXPECT_FALSE(MakeCpuBackend({1, "mmx", false}).ok());
  Rig rig(MakeCpuBackend({1, "auto", false}).value(), 16);
  EXPECT_FALSE(rig.backend->AddTensor(0, 5).ok());
  EXPECT_FALSE(rig.backend->AddTensor(std::int64_t{1} << 40, std::int64_t{1} << 40).ok());
  OwnedStep step = RandomStep({4}, 1);
  step.logit_rows = {4};
  EXPECT_FALSE(rig.backend->BeginStep(step.Batch()).ok());
  step.logit_rows = {-1};
  EXPECT_FALSE(rig.backend->BeginStep(step.Batch()).ok());
}

TEST(CpuBackend, CountsItsWeights) {
  Rig rig(MakeCpuBackend({1, "auto", false}).value(), 16);
  const std::size_t before = rig.backend->WeightBytes();
  const OwnedMatrix more = RandomMatrix(DType::kQ4_1, 320, 640, 1);
  const HostMatrix view = more.View();
  ASSERT_TRUE(rig.backend->AddMatrix({&view, 1}).ok());
  EXPECT_EQ(rig.backend->WeightBytes() - before, more.bytes.size());
}

TEST(CpuBackend, AStepWithoutLogitsHasNone) {
  Rig rig(MakeCpuBackend({1, "auto", false}).value(), 16);
  OwnedStep step = RandomStep({4}, 1);
  EXPECT_EQ(rig.Step(step.Batch()).size(), static_cast<std::size_t>(kVocabulary));
  step.logit_rows.clear();
  EXPECT_TRUE(rig.Step(step.Batch()).empty());
}

}  // namespace
}  // namespace pliant
