// Growth weights: read back as written, and that files which lie or do not fit the model are
// refused with one line.
#include "model/growth_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "model/support/gguf_builder.h"

namespace pliant {
namespace {

using testing::HasSubstr;
using testing_support::Bytes;

ModelConfig SmallModel() {
  ModelConfig config;
  config.layers = 2;
  config.heads = 3;
  config.head_dim = 4;
  return config;
}

constexpr int kWeightCount = 2 * 3 * 4;

/// Tensors one behind the other, all F32 unless said otherwise.
struct WeightsFile {
  struct Tensor {
    std::string name, shape;
    std::vector<float> values;
    std::string type = "F32";
  };
  std::vector<Tensor> tensors;

  WeightsFile() {
    std::vector<float> quick(kWeightCount), slow(kWeightCount);
    for (int i = 0; i < kWeightCount; ++i) {
      quick[i] = 0.5f * static_cast<float>(i);
      slow[i] = -static_cast<float>(i);
    }
    tensors = {{"short_mean", "[2,3,4]", quick},
               {"long_mean", "[2,3,4]", slow},
               {"bias", "[1]", {-0.75f}},
               {"above", "[1]", {0.25f}}};
  }
  Tensor& operator[](std::string_view name) {
    return *std::ranges::find(tensors, name, &Tensor::name);
  }
  std::vector<std::byte> Make() const {
    std::string header = "{";
    std::size_t at = 0;
    for (const Tensor& tensor : tensors) {
      const std::size_t bytes = tensor.values.size() * sizeof(float);
      if (at > 0) header += ",";
      header += "\"" + tensor.name + "\":{\"dtype\":\"" + tensor.type +
                "\",\"shape\":" + tensor.shape + ",\"data_offsets\":[" + std::to_string(at) + "," +
                std::to_string(at + bytes) + "]}";
      at += bytes;
    }
    Bytes bytes;
    bytes.String(header + "}");
    for (const Tensor& tensor : tensors)
      for (const float value : tensor.values) bytes.Put(value);
    return bytes.data();
  }
};

void ExpectWeightsRefused(const WeightsFile& file, std::initializer_list<std::string> words,
                          const ModelConfig& config = SmallModel()) {
  const auto read = ReadGrowthWeights(*MemorySource(file.Make()), config);
  ASSERT_FALSE(read.ok());
  EXPECT_EQ(read.status().message().find('\n'), std::string::npos);
  for (const std::string& word : words) EXPECT_THAT(read.status().message(), HasSubstr(word));
}

TEST(GrowthWeightsTest, AreReadAsWritten) {
  WeightsFile file;
  const auto read = ReadGrowthWeights(*MemorySource(file.Make()), SmallModel());
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  const GrowthWeights& weights = **read;
  EXPECT_EQ(weights.layers, 2);
  EXPECT_EQ(weights.heads, 3);
  EXPECT_EQ(weights.head_dim, 4);
  EXPECT_EQ(weights.short_mean, file["short_mean"].values);
  EXPECT_EQ(weights.long_mean, file["long_mean"].values);
  EXPECT_EQ(weights.bias, -0.75f);
  EXPECT_EQ(weights.above, 0.25f);
}

TEST(GrowthWeightsTest, OfAnotherModelAreRefused) {
  ModelConfig other = SmallModel();
  other.heads = 4;
  ExpectWeightsRefused({}, {"short_mean", "[2, 3, 4]", "[2, 4, 4]"}, other);
  other = SmallModel();
  other.layers = 12;
  ExpectWeightsRefused({}, {"short_mean", "[12, 3, 4]"}, other);
}

TEST(GrowthWeightsTest, WhatDoesNotFitIsRefused) {
  for (const char* name : {"short_mean", "long_mean", "bias", "above"}) {
    SCOPED_TRACE(name);
    WeightsFile lacks, number, type, shape;
    lacks[name].name = "other";
    ExpectWeightsRefused(lacks, {"without", name});
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      number[name].values.back() = value;
      ExpectWeightsRefused(number, {name, "not finite"});
    }
    type[name].type = "I32";
    ExpectWeightsRefused(type, {name, "I32", "F32"});
    shape[name].shape = "[" + std::to_string(shape[name].values.size()) + ",1]";
    ExpectWeightsRefused(shape, {name, "needs F32"});
  }
  WeightsFile more;
  more.tensors.push_back({"more", "[1]", {1}});
  ExpectWeightsRefused(more, {"5 tensors"});
  for (const float above : {0.0f, 1.0f, -3.0f}) {
    WeightsFile file;
    file["above"].values = {above};
    ExpectWeightsRefused(file, {"above", "between 0 and 1"});
  }
}

TEST(GrowthWeightsTest, CutFilesAreRefusedWhereverTheyEnd) {
  const std::vector<std::byte> whole = WeightsFile().Make();
  for (std::size_t size = 0; size < whole.size(); size += 7) {
    const auto read = ReadGrowthWeights(
        *MemorySource({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}),
        SmallModel());
    EXPECT_FALSE(read.ok()) << size;
  }
}

TEST(GrowthWeightsTest, ErrorsNameTheFile) {
  const auto read = OpenGrowthWeights("/no/such/file.safetensors", SmallModel());
  ASSERT_FALSE(read.ok());
  EXPECT_THAT(read.status().message(), HasSubstr("/no/such/file.safetensors"));
}

}  // namespace
}  // namespace pliant
