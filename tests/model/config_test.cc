// Configurations from both formats, RoPE frequencies against known values, and refusals.
#include "model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "model/byte_source.h"
#include "model/config_reader.h"
#include "model/support/gguf_builder.h"

namespace pliant {
namespace {

using testing::HasSubstr;
using testing_support::GgufBuilder;

// As published with Llama 3.2 1B.
nlohmann::json LlamaJson() {
  return nlohmann::json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 128000, "eos_token_id": [128001, 128008],
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true,
    "vocab_size": 128256})");
}

TEST(HfConfigTest, ReadsLlama) {
  const auto read = ReadHfConfig(LlamaJson().dump());
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(read->architecture, Architecture::kLlama);
  EXPECT_EQ(read->hidden_size, 2048);
  EXPECT_EQ(read->intermediate_size, 8192);
  EXPECT_EQ(read->layers, 16);
  EXPECT_EQ(read->heads, 32);
  EXPECT_EQ(read->kv_heads, 8);
  EXPECT_EQ(read->head_dim, 64);
  EXPECT_EQ(read->context_length, 131072);
  EXPECT_EQ(read->rope_theta, 500000.0);
  EXPECT_TRUE(read->tie_embeddings);
  EXPECT_FALSE(read->qkv_bias);
  EXPECT_EQ(read->rope_scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(read->rope_scaling.factor, 32);
  EXPECT_EQ(read->rope_scaling.original_context, 8192);
}

TEST(HfConfigTest, FamiliesDifferInBiasesNormsAndHeadSize) {
  auto json = LlamaJson();
  json.erase("head_dim");
  json["rope_scaling"] = nullptr;
  json["model_type"] = "qwen2";
  const auto qwen2 = ReadHfConfig(json.dump()).value();
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.qk_norm);
  EXPECT_EQ(qwen2.head_dim, 64);
  json["model_type"] = "qwen3";
  const auto qwen3 = ReadHfConfig(json.dump()).value();
  EXPECT_FALSE(qwen3.qkv_bias);
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_EQ(qwen3.head_dim, 128);
  json["model_type"] = "llama";
  json["attention_bias"] = true;
  EXPECT_TRUE(ReadHfConfig(json.dump())->qkv_bias);
}

TEST(HfConfigTest, ReadsRopeInBothSpellings) {
  auto json = LlamaJson();
  json["rope_parameters"] = json["rope_scaling"];
  json["rope_parameters"]["rope_theta"] = 123.0;
  json.erase("rope_scaling");
  json.erase("rope_theta");
  const auto read = ReadHfConfig(json.dump()).value();
  EXPECT_EQ(read.rope_theta, 123.0);
  EXPECT_EQ(read.rope_scaling.kind, RopeScaling::Kind::kLlama3);
  json["rope_parameters"] = {{"type", "linear"}, {"factor", 2.0}};
  EXPECT_EQ(ReadHfConfig(json.dump())->rope_scaling.kind, RopeScaling::Kind::kLinear);
}

TEST(HfConfigTest, EveryMissingSizeIsNamed) {
  for (const char* key : {"model_type", "vocab_size", "hidden_size", "intermediate_size",
                          "max_position_embeddings", "num_hidden_layers", "num_attention_heads"}) {
    auto json = LlamaJson();
    json.erase(key);
    const Status status = ReadHfConfig(json.dump()).status();
    EXPECT_EQ(status.code(), StatusCode::kNotFound) << key;
    EXPECT_THAT(status.message(), HasSubstr(key));
    json[key] = nlohmann::json::array();
    EXPECT_THAT(ReadHfConfig(json.dump()).status().message(), HasSubstr(key));
  }
}

TEST(HfConfigTest, WhatTheGraphLacksIsRefusedByName) {
  const std::pair<const char*, nlohmann::json> cases[] = {
      {"model_type", "mamba"},
      {"hidden_act", "gelu"},
      {"use_sliding_window", true},
      {"partial_rotary_factor", 0.5},
      {"quantization_config", {{"quant_method", "awq"}}},
      {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}},
  };
  for (const auto& [key, value] : cases) {
    auto json = LlamaJson();
    json[key] = value;
    const Status status = ReadHfConfig(json.dump()).status();
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << key;
    EXPECT_THAT(status.message(), HasSubstr("not supported")) << key;
  }
}

TEST(HfConfigTest, SizesOutOfBoundsAreRefused) {
  const std::pair<const char*, nlohmann::json> cases[] = {
      {"vocab_size", 0},
      {"vocab_size", -5},
      {"vocab_size", 1LL << 40},
      {"hidden_size", 1LL << 40},
      {"num_hidden_layers", 0},
      {"num_hidden_layers", 1LL << 40},
      {"num_attention_heads", 0},
      {"num_key_value_heads", 7},
      {"num_key_value_heads", 0},
      {"head_dim", 48},
      {"head_dim", 1LL << 33},
      {"rms_norm_eps", 0},
      {"rms_norm_eps", -1},
      {"rope_theta", 0},
      {"rope_theta", 1e300},
      {"intermediate_size", -1},
      {"max_position_embeddings", 0},
  };
  for (const auto& [key, value] : cases) {
    auto json = LlamaJson();
    json[key] = value;
    EXPECT_FALSE(ReadHfConfig(json.dump()).ok()) << key << " " << value;
  }
}

TEST(RopeTest, PlainFrequencies) {
  ModelConfig config;
  config.head_dim = 64;
  config.rope_theta = 10000;
  const auto freq = config.InverseFrequencies();
  ASSERT_EQ(freq.size(), 32u);
  EXPECT_FLOAT_EQ(freq[0], 1.0f);
  EXPECT_FLOAT_EQ(freq[16], 0.01f);
  config.rope_scaling.kind = RopeScaling::Kind::kLinear;
  config.rope_scaling.factor = 4;
  EXPECT_FLOAT_EQ(config.InverseFrequencies()[16], 0.0025f);
  config.rope_scaling.freq_factors.assign(32, 2.0f);
  EXPECT_FLOAT_EQ(config.InverseFrequencies()[16], 0.005f);
}

// inv_freq of transformers' LlamaRotaryEmbedding for Llama 3.2 1B at eight pairs: kept, blended,
// stretched.
TEST(RopeTest, Llama3FrequenciesEqualTransformers) {
  const auto freq = ReadHfConfig(LlamaJson().dump())->InverseFrequencies();
  const std::pair<std::size_t, float> expected[] = {{0, 1.0f},
                                                    {8, 0.0376060307f},
                                                    {13, 0.00483942125f},
                                                    {14, 0.00321144611f},
                                                    {16, 0.000429556705f},
                                                    {17, 9.70828623e-05f},
                                                    {20, 8.57025589e-06f},
                                                    {31, 9.41830649e-08f}};
  for (const auto& [pair, value] : expected) EXPECT_NEAR(freq[pair] / value, 1.0, 2e-6) << pair;
}

GgufBuilder LlamaGguf() {
  GgufBuilder file;
  file.String("general.architecture", "llama");
  file.Scalar<std::uint32_t>("llama.context_length", GgufType::kUint32, 128);
  file.Scalar<std::uint32_t>("llama.embedding_length", GgufType::kUint32, 64);
  file.Scalar<std::uint32_t>("llama.block_count", GgufType::kUint32, 2);
  file.Scalar<std::uint32_t>("llama.feed_forward_length", GgufType::kUint32, 96);
  file.Scalar<std::uint32_t>("llama.attention.head_count", GgufType::kUint32, 2);
  file.Scalar<float>("llama.attention.layer_norm_rms_epsilon", GgufType::kFloat32, 1e-5f);
  file.tensors.push_back({"token_embd.weight", {64, 10}, 0, 0});
  file.data_bytes = 64 * 10 * 4;
  return file;
}

TEST(GgufConfigTest, ReadsRequiredKeysAndDefaults) {
  const auto config = ReadGgufConfig(**LlamaGguf().Parse());
  ASSERT_TRUE(config.ok()) << config.status().ToString();
  EXPECT_EQ(config->vocab_size, 10);
  EXPECT_EQ(config->head_dim, 32);
  EXPECT_EQ(config->kv_heads, 2);
  EXPECT_EQ(config->rope_theta, 10000);
  EXPECT_TRUE(config->tie_embeddings);
}

TEST(GgufConfigTest, EveryMissingKeyIsNamed) {
  const GgufBuilder whole = LlamaGguf();
  for (std::size_t i = 0; i < whole.keys.size(); ++i) {
    GgufBuilder file = whole;
    file.keys.erase(file.keys.begin() + static_cast<std::ptrdiff_t>(i));
    const Status status = ReadGgufConfig(**file.Parse()).status();
    EXPECT_EQ(status.code(), StatusCode::kNotFound);
    EXPECT_THAT(status.message(), HasSubstr("'" + whole.keys[i].first + "' is missing"));
  }
  GgufBuilder file = whole;
  file.tensors.clear();
  EXPECT_THAT(ReadGgufConfig(**file.Parse()).status().message(),
              HasSubstr("'token_embd.weight' is missing"));
}

TEST(GgufConfigTest, WhatTheGraphLacksIsRefusedByName) {
  const auto refused = [](auto change, const char* word) {
    GgufBuilder file = LlamaGguf();
    change(file);
    const Status status = ReadGgufConfig(**file.Parse()).status();
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << word;
    EXPECT_THAT(status.message(), HasSubstr(word));
  };
  refused(
      [](GgufBuilder& f) {
        f.keys[0].second = testing_support::Bytes().Put<std::uint32_t>(8).String("gemma3");
      },
      "'gemma3'");
  refused(
      [](GgufBuilder& f) { f.Scalar<std::uint32_t>("llama.expert_count", GgufType::kUint32, 8); },
      "llama.expert_count");
  refused(
      [](GgufBuilder& f) {
        f.Scalar<std::uint32_t>("llama.rope.dimension_count", GgufType::kUint32, 16);
      },
      "llama.rope.dimension_count");
  refused([](GgufBuilder& f) { f.String("llama.rope.scaling.type", "yarn"); }, "'yarn'");
  refused(
      [](GgufBuilder& f) {
        f.Scalar<std::uint32_t>("llama.attention.value_length", GgufType::kUint32, 64);
      },
      "llama.attention.value_length");
}

TEST(GgufConfigTest, FrequencyFactorsAreReadAndChecked) {
  GgufBuilder file = LlamaGguf();
  file.tensors.push_back({"rope_freqs.weight", {16}, 0, 64 * 10 * 4});
  file.data_bytes += 64;
  // The builder's data bytes are no positive floats.
  EXPECT_THAT(ReadGgufConfig(**file.Parse()).status().message(), HasSubstr("frequency factor"));
  file.tensors.back().dims = {8};
  EXPECT_THAT(ReadGgufConfig(**file.Parse()).status().message(),
              HasSubstr("'rope_freqs.weight' is F32 [8]"));
  const auto tiny = GgufFile::Open(PLIANT_TEST_DATA "/models/tiny-llama.gguf").value();
  EXPECT_EQ(ReadGgufConfig(*tiny)->rope_scaling.freq_factors.size(), 16u);
}

TEST(GgufConfigTest, BothFormatsOfAModelAgree) {
  for (const std::string name : {"llama", "qwen2", "qwen3"}) {
    const std::string base = std::string(PLIANT_TEST_DATA "/models/tiny-") + name;
    const auto gguf = ReadGgufConfig(*GgufFile::Open(base + ".gguf").value()).value();
    const auto hf = ReadHfConfig(ReadTextFile(base + "/config.json", 1 << 20).value()).value();
    EXPECT_EQ(gguf.architecture, hf.architecture);
    EXPECT_EQ(gguf.vocab_size, hf.vocab_size);
    EXPECT_EQ(gguf.hidden_size, hf.hidden_size);
    EXPECT_EQ(gguf.intermediate_size, hf.intermediate_size);
    EXPECT_EQ(gguf.context_length, hf.context_length);
    EXPECT_EQ(gguf.Kv(), hf.Kv());
    EXPECT_EQ(gguf.heads, hf.heads);
    EXPECT_EQ(gguf.norm_eps, hf.norm_eps);
    EXPECT_EQ(gguf.tie_embeddings, hf.tie_embeddings);
    EXPECT_EQ(gguf.qkv_bias, hf.qkv_bias);
    EXPECT_EQ(gguf.qk_norm, hf.qk_norm);
    const auto a = gguf.InverseFrequencies();
    const auto b = hf.InverseFrequencies();
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i)
      EXPECT_NEAR(a[i] / b[i], 1.0, 1e-5) << name << " pair " << i;
  }
}

}  // namespace
}  // namespace pliant
