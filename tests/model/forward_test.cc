// The forward graph of all three architectures in both file formats, on the reference backend,
// against transformers' fp32 logits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "model/model.h"
#include "model/support/gguf_builder.h"
#include "model/support/step.h"
#include "model/weights.h"

namespace pliant {
namespace {

using testing::HasSubstr;
using testing_support::Golden;
using testing_support::OneSequence;

// K and V are held as 16-bit codes and the reference sums in another order; a wrong graph is off by
// 0.1 and more.
constexpr float kTolerance = 2e-3f;

struct Loaded {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Model> model;
};

Loaded LoadModel(const std::string& path, int max_rows, Model::OpenOptions options = {}) {
  Loaded loaded{MakeReferenceBackend(), nullptr};
  Result<std::unique_ptr<Model>> model = Model::Open(path, options);
  PLIANT_CHECK(model.ok(), model.status().message());
  loaded.model = std::move(model).value();
  const Status status = loaded.model->Load(*loaded.backend, max_rows, max_rows, {});
  PLIANT_CHECK(status.ok(), status.message());
  const Status pages = loaded.backend->AllocatePages(loaded.model->config().Kv(), 64);
  PLIANT_CHECK(pages.ok(), pages.message());
  return loaded;
}

float LargestDifference(std::span<const float> got, std::span<const float> expected) {
  PLIANT_CHECK(got.size() == expected.size(), "equal sizes");
  float largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    largest = std::max(largest, std::abs(got[i] - expected[i]));
  }
  return largest;
}

/// "llama.gguf" or "llama": a file or a folder under tests/data/models.
class GoldenTest : public testing::TestWithParam<std::string> {
 protected:
  std::string Path() const { return PLIANT_TEST_DATA "/models/tiny-" + GetParam(); }
  Golden Expected() const {
    const std::string name = GetParam().substr(0, GetParam().find('.'));
    return testing_support::ReadGolden(PLIANT_TEST_DATA "/models/tiny-" + name + ".golden");
  }
};

TEST_P(GoldenTest, OneStepEqualsTransformers) {
  const Golden golden = Expected();
  const Loaded loaded = LoadModel(Path(), static_cast<int>(golden.tokens.size()));
  OneSequence sequence(*loaded.model, *loaded.backend);
  ASSERT_TRUE(sequence.Feed(golden.tokens, golden.rows).ok());
  EXPECT_LT(LargestDifference(loaded.backend->LogitRows(), golden.logits), kTolerance);
}

TEST_P(GoldenTest, ChunksAndSingleTokensEqualTransformers) {
  const Golden golden = Expected();
  const Loaded loaded = LoadModel(Path(), 20);
  OneSequence sequence(*loaded.model, *loaded.backend);
  std::size_t at = 0;
  std::size_t checked = 0;
  for (const std::size_t rows : {17u, 14u, 1u, 1u, 15u}) {
    const std::vector<std::int32_t> tokens(
        golden.tokens.begin() + static_cast<std::ptrdiff_t>(at),
        golden.tokens.begin() + static_cast<std::ptrdiff_t>(at + rows));
    ASSERT_TRUE(sequence.Feed(tokens, {static_cast<std::int32_t>(rows - 1)}).ok());
    at += rows;
    const auto row =
        std::find(golden.rows.begin(), golden.rows.end(), static_cast<std::int32_t>(at - 1));
    if (row == golden.rows.end()) continue;
    const auto index = static_cast<std::size_t>(row - golden.rows.begin());
    const auto vocabulary = static_cast<std::size_t>(golden.vocabulary);
    EXPECT_LT(LargestDifference(loaded.backend->LogitRows(),
                                std::span(golden.logits).subspan(index * vocabulary, vocabulary)),
              kTolerance)
        << "token " << at - 1;
    ++checked;
  }
  EXPECT_GE(checked, 2u);
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest,
                         testing::Values("llama", "llama.gguf", "qwen2", "qwen2.gguf", "qwen3",
                                         "qwen3.gguf"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

TEST(ForwardTest, InterleavedOrderPutsPairsHalfAHeadApart) {
  const std::vector<std::int32_t> order = InterleavedOrder(2, 6);
  EXPECT_THAT(order, testing::ElementsAre(0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11));
}

TEST(ForwardTest, StepsLargerThanLoadedForAreRefused) {
  const Loaded loaded = LoadModel(PLIANT_TEST_DATA "/models/tiny-llama.gguf", 4);
  OneSequence sequence(*loaded.model, *loaded.backend);
  EXPECT_THAT(sequence.Feed({1, 2, 3, 4, 5}, {4}).message(), HasSubstr("a step of 5 rows"));
  EXPECT_TRUE(sequence.Feed({1, 2, 3, 4}, {3}).ok());
}

TEST(LoadTest, ReportsProgressUpToTheSumOfAllWeights) {
  auto model = Model::Open(PLIANT_TEST_DATA "/models/tiny-qwen2.gguf").value();
  auto backend = MakeReferenceBackend();
  std::uint64_t last = 0, total = 0;
  ASSERT_TRUE(model
                  ->Load(*backend, 4, 4,
                         [&](std::uint64_t done, std::uint64_t all) {
                           EXPECT_GT(done, last);
                           last = done;
                           total = all;
                         })
                  .ok());
  EXPECT_EQ(last, total);
  EXPECT_GT(total, 0u);
}

TEST(LoadTest, AFileShortenedAfterOpeningIsRefusedNamingTheTensor) {
  const testing_support::TempFolder folder;
  const std::string path = folder.File("model.gguf");
  std::filesystem::copy_file(PLIANT_TEST_DATA "/models/tiny-qwen3.gguf", path);
  auto model = Model::Open(path).value();
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  auto backend = MakeReferenceBackend();
  const Status status = model->Load(*backend, 4, 4, {});
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_THAT(status.message(),
              testing::AllOf(HasSubstr(path), HasSubstr("tensor '"), HasSubstr("shortened")));
}

TEST(LoadTest, WhatDoesNotFitIsRefusedWithBothSizes) {
  EXPECT_TRUE(CheckFits("the model's weights", 100, 100).ok());
  const Status status = CheckFits("the model's weights", 16'000'000'000, 4'000'000'000);
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(
      status.message(),
      "the model's weights need 16,000,000,000 bytes, 4,000,000,000 bytes of memory are available");
}

TEST(RandomWeightsTest, RunsFromAConfigurationAloneAndIsDeterministic) {
  const testing_support::TempFolder folder;
  std::filesystem::copy_file(PLIANT_TEST_DATA "/models/tiny-qwen3/config.json",
                             folder.File("config.json"));
  const auto logits = [&](const std::string& path, std::uint64_t seed) {
    const Loaded loaded = LoadModel(path, 8, {.random_weights = true, .random_seed = seed});
    OneSequence sequence(*loaded.model, *loaded.backend);
    PLIANT_CHECK(sequence.Feed({1, 2, 3, 4, 5, 6, 7, 8}, {7}).ok(), "a step");
    const auto rows = loaded.backend->LogitRows();
    return std::vector<float>(rows.begin(), rows.end());
  };
  const std::vector<float> first = logits(folder.path(), 1);
  EXPECT_EQ(first, logits(folder.path(), 1));
  EXPECT_EQ(first, logits(folder.File("config.json"), 1));
  EXPECT_NE(first, logits(folder.path(), 2));
  double square = 0;
  for (const float logit : first) {
    ASSERT_TRUE(std::isfinite(logit));
    square += logit * logit;
  }
  const double deviation = std::sqrt(square / static_cast<double>(first.size()));
  EXPECT_GT(deviation, 0.3);
  EXPECT_LT(deviation, 3);
}

TEST(RandomWeightsTest, ActivationsStaySaneInADeepModel) {
  const testing_support::TempFolder folder;
  testing_support::WriteBytes(folder.File("config.json"),
                              testing_support::Bytes()
                                  .Raw(R"({"model_type":"llama","vocab_size":300,
      "hidden_size":64,"intermediate_size":160,"num_hidden_layers":48,"num_attention_heads":2,"num_key_value_heads":1,
      "max_position_embeddings":128,"tie_word_embeddings":false})")
                                  .data());
  const Loaded loaded = LoadModel(folder.path(), 4, {.random_weights = true, .random_seed = 3});
  OneSequence sequence(*loaded.model, *loaded.backend);
  ASSERT_TRUE(sequence.Feed({1, 2, 3, 299}, {0, 1, 2, 3}).ok());
  for (const float logit : loaded.backend->LogitRows()) {
    ASSERT_TRUE(std::isfinite(logit));
    ASSERT_LT(std::abs(logit), 10.0f);
  }
}

}  // namespace
}  // namespace pliant
