// Opening models: required keys one by one, foreign and incomplete folders, vocabularies,
// templates, fingerprints.
#include "model/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "model/support/gguf_builder.h"
#include "model/vocabulary.h"

namespace pliant {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::Bytes;
using testing_support::FileBytes;
using testing_support::GgufBuilder;
using testing_support::TempFolder;
using testing_support::WriteBytes;

const std::string kModels = PLIANT_TEST_DATA "/models/";

TEST(ModelTest, OpensEveryFormat) {
  for (const std::string name : {"tiny-llama", "tiny-llama.gguf", "tiny-qwen2", "tiny-qwen2.gguf",
                                 "tiny-qwen3", "tiny-qwen3.gguf"}) {
    const auto model = Model::Open(kModels + name);
    ASSERT_TRUE(model.ok()) << model.status().ToString();
    EXPECT_THAT((*model)->chat_template(), HasSubstr("<|im_start|>"));
    EXPECT_GT((*model)->FileBytes(), 100'000u);
    EXPECT_GT((*model)->Parameters(), 50'000u);
    EXPECT_EQ((*model)->Fingerprint().size(), 32u);
    const auto vocabulary = (*model)->ReadVocabulary();
    ASSERT_TRUE(vocabulary.ok()) << vocabulary.status().ToString();
    EXPECT_EQ(vocabulary->tokens[258], "<|im_end|>");
    EXPECT_EQ(vocabulary->kinds[258], TokenKind::kControl);
    EXPECT_EQ(vocabulary->eos, 258);
    EXPECT_EQ(vocabulary->bos, 256);
    EXPECT_THAT(vocabulary->end_of_generation, testing::Contains(258));
    EXPECT_THAT(vocabulary->merges, testing::Contains("t h"));
  }
  EXPECT_EQ(Model::Open(kModels + "tiny-llama").value()->FormatName(), "safetensors, 3 files");
  const auto summary = Model::Open(kModels + "tiny-llama.gguf").value()->TensorSummary();
  ASSERT_EQ(summary.size(), 2u);
  EXPECT_EQ(summary[0].type, DType::kBF16);
  EXPECT_EQ(summary[0].tensors, 16);
  EXPECT_EQ(summary[1].type, DType::kF32);
}

TEST(ModelTest, TheReckonerOfTheTestsOpens) {
  const auto model = Model::Open(kModels + "reckoner-q8_0.gguf");
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  EXPECT_EQ((*model)->config().layers, 8);
  EXPECT_EQ((*model)->TensorSummary()[0].type, DType::kQ8_0);
}

class DroppedKeyTest : public testing::TestWithParam<const char*> {};

// Known fault G2: every required key, dropped by itself, is named in one line at once.
TEST_P(DroppedKeyTest, IsNamedAtOnce) {
  const TempFolder folder;
  const std::string path = folder.File("model.gguf");
  WriteBytes(path, testing_support::WithoutKey(FileBytes(kModels + "tiny-llama.gguf"), GetParam()));
  const auto model = Model::Open(path);
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.status().code(), StatusCode::kNotFound);
  EXPECT_EQ(model.status().message(), path + ": key '" + GetParam() + "' is missing");
}

INSTANTIATE_TEST_SUITE_P(G2, DroppedKeyTest,
                         testing::Values("general.architecture", "llama.context_length",
                                         "llama.embedding_length", "llama.block_count",
                                         "llama.feed_forward_length", "llama.attention.head_count",
                                         "llama.attention.layer_norm_rms_epsilon",
                                         "tokenizer.ggml.model", "tokenizer.ggml.pre",
                                         "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
                                         "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id",
                                         "tokenizer.ggml.eos_token_id"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

TEST(ModelTest, DroppingAnOptionalKeyChangesNothingElse) {
  const TempFolder folder;
  const std::string path = folder.File("model.gguf");
  WriteBytes(path, testing_support::WithoutKey(FileBytes(kModels + "tiny-llama.gguf"),
                                               "tokenizer.chat_template"));
  const auto model = Model::Open(path);
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  EXPECT_EQ((*model)->chat_template(), "");
}

// Known fault G1: a whole model cut at many places, on disk.
TEST(ModelTest, CutFilesAreRefusedAtOpening) {
  const TempFolder folder;
  const std::string path = folder.File("model.gguf");
  const std::vector<std::byte> whole = FileBytes(kModels + "tiny-qwen2.gguf");
  WriteBytes(path, whole);
  ASSERT_TRUE(Model::Open(path).ok());
  for (std::uint64_t size = whole.size() - 1;; size = size * 7 / 8) {
    std::filesystem::resize_file(path, size);
    const auto model = Model::Open(path);
    ASSERT_FALSE(model.ok()) << size;
    EXPECT_EQ(model.status().code(), StatusCode::kDataLoss) << model.status().message();
    EXPECT_THAT(model.status().message(), HasSubstr(path));
    EXPECT_EQ(model.status().message().find('\n'), std::string::npos);
    if (size == 0) break;
  }
}

// A layer count that lies either way would run, and answer nonsense.
TEST(ModelTest, TheLayerCountMustMatchTheTensors) {
  const TempFolder folder;
  const std::string path = folder.File("model.gguf");
  std::vector<std::byte> bytes = FileBytes(kModels + "tiny-llama.gguf");
  const std::string key = "llama.block_count";
  const auto at =
      std::search(bytes.begin(), bytes.end(), reinterpret_cast<const std::byte*>(key.data()),
                  reinterpret_cast<const std::byte*>(key.data() + key.size()));
  ASSERT_NE(at, bytes.end());
  std::byte* value = bytes.data() + (at - bytes.begin()) + key.size() + 4;  // behind its type
  ASSERT_EQ(*value, std::byte{2});
  *value = std::byte{1};
  WriteBytes(path, bytes);
  EXPECT_EQ(
      Model::Open(path).status().message(),
      path + ": tensor 'blk.1.attn_norm.weight' is there, but the configuration says 1 layers");
  *value = std::byte{3};
  WriteBytes(path, bytes);
  EXPECT_EQ(Model::Open(path).status().message(),
            path + ": tensor 'blk.2.attn_norm.weight' is missing");
}

TEST(ModelTest, MissingAndMisshapenTensorsAreNamed) {
  const TempFolder folder;
  const std::string path = folder.File("model.gguf");
  std::vector<std::byte> bytes = FileBytes(kModels + "tiny-llama.gguf");
  const std::string from = "blk.1.ffn_up.weight";
  const auto at =
      std::search(bytes.begin(), bytes.end(), reinterpret_cast<const std::byte*>(from.data()),
                  reinterpret_cast<const std::byte*>(from.data() + from.size()));
  ASSERT_NE(at, bytes.end());
  const auto index = at - bytes.begin();
  std::memcpy(bytes.data() + index, "blk.1.ffn_xx.weight", from.size());
  WriteBytes(path, bytes);
  EXPECT_EQ(Model::Open(path).status().message(),
            path + ": tensor 'blk.1.ffn_up.weight' is missing");
  std::memcpy(bytes.data() + index, from.data(), from.size());
  // The two sizes stand behind the name and the number of dimensions.
  std::uint64_t dims[2];
  const auto dims_at = static_cast<std::size_t>(index) + from.size() + 4;
  std::memcpy(dims, bytes.data() + dims_at, 16);
  std::swap(dims[0], dims[1]);
  std::memcpy(bytes.data() + dims_at, dims, 16);
  WriteBytes(path, bytes);
  EXPECT_EQ(
      Model::Open(path).status().message(),
      path +
          ": tensor 'blk.1.ffn_up.weight' has shape [64, 96], the configuration asks for [96, 64]");
}

TEST(ModelTest, ForeignPathsAreExplained) {
  const TempFolder folder;
  EXPECT_THAT(Model::Open(folder.File("none")).status().message(),
              HasSubstr("no such file or folder"));
  EXPECT_THAT(Model::Open(folder.path()).status().message(), HasSubstr("config.json is missing"));
  WriteBytes(folder.File("text.gguf"), Bytes().Raw("hello, world").data());
  EXPECT_THAT(Model::Open(folder.File("text.gguf")).status().message(),
              HasSubstr("not a GGUF file"));
  WriteBytes(folder.File("empty.gguf"), {});
  EXPECT_THAT(Model::Open(folder.File("empty.gguf")).status().message(), HasSubstr("empty"));
  EXPECT_THAT(Model::Open(kModels + "tiny-qwen2/model.safetensors").status().message(),
              HasSubstr("give the folder"));
  std::filesystem::copy_file(kModels + "tiny-qwen2/config.json", folder.File("config.json"));
  EXPECT_THAT(Model::Open(folder.path()).status().message(),
              HasSubstr("tokenizer.json is missing"));
  std::filesystem::copy_file(kModels + "tiny-qwen2/tokenizer.json", folder.File("tokenizer.json"));
  EXPECT_THAT(Model::Open(folder.path()).status().message(), HasSubstr("model.safetensors (or"));
  WriteBytes(folder.File("config.json"), Bytes().Raw("{\"model_type\": \"qwen2\"").data());
  EXPECT_THAT(Model::Open(folder.path()).status().message(),
              AllOf(HasSubstr("config.json"), HasSubstr("near byte")));
}

TEST(ModelTest, FingerprintFollowsTheWeightsNotThePlace) {
  const TempFolder folder;
  const std::string path = folder.File("copy.gguf");
  std::vector<std::byte> bytes = FileBytes(kModels + "tiny-llama.gguf");
  WriteBytes(path, bytes);
  const std::string original = Model::Open(kModels + "tiny-llama.gguf").value()->Fingerprint();
  EXPECT_EQ(Model::Open(path).value()->Fingerprint(), original);
  bytes[bytes.size() / 64 * 40] ^= std::byte{1};  // a sampled byte
  WriteBytes(path, bytes);
  EXPECT_NE(Model::Open(path).value()->Fingerprint(), original);
  EXPECT_NE(Model::Open(kModels + "tiny-qwen2.gguf").value()->Fingerprint(), original);
}

/// A vocabulary-only file of six tokens.
GgufBuilder VocabularyFile() {
  GgufBuilder file;
  file.String("tokenizer.ggml.model", "gpt2");
  file.String("tokenizer.ggml.pre", "llama-bpe");
  file.Strings("tokenizer.ggml.tokens", {"a", "b", "ab", "<|begin|>", "<|eot_id|>", "<think>"});
  Bytes types;
  types.Put<std::uint32_t>(9).Put<std::uint32_t>(5).Put<std::uint64_t>(6);
  for (const int type : {1, 1, 1, 3, 3, 4}) types.Put<std::int32_t>(type);
  file.keys.emplace_back("tokenizer.ggml.token_type", types);
  file.Strings("tokenizer.ggml.merges", {"a b"});
  file.Scalar<std::uint32_t>("tokenizer.ggml.bos_token_id", GgufType::kUint32, 3);
  file.Scalar<std::uint32_t>("tokenizer.ggml.eos_token_id", GgufType::kUint32, 4);
  return file;
}

TEST(GgufVocabularyTest, ReadsKindsIdsAndDefaults) {
  GgufBuilder file = VocabularyFile();
  file.Scalar<std::uint32_t>("tokenizer.ggml.eom_token_id", GgufType::kUint32, 5);
  file.Scalar<std::uint32_t>("tokenizer.ggml.padding_token_id", GgufType::kUint32, 0xffffffff);
  const auto parsed = file.Parse().value();
  EXPECT_TRUE(CheckGgufVocabulary(*parsed, Architecture::kLlama, 6).ok());
  const auto read = ReadGgufVocabulary(*parsed);
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(read->pre_tokenizer, "llama-bpe");
  EXPECT_THAT(read->kinds,
              ElementsAre(TokenKind::kNormal, TokenKind::kNormal, TokenKind::kNormal,
                          TokenKind::kControl, TokenKind::kControl, TokenKind::kUserDefined));
  EXPECT_EQ(read->bos, 3);
  EXPECT_EQ(read->eos, 4);
  EXPECT_EQ(read->pad, std::nullopt);
  EXPECT_TRUE(read->add_bos);
  EXPECT_THAT(read->end_of_generation, ElementsAre(4, 5));
  file.Scalar<std::uint8_t>("tokenizer.ggml.add_bos_token", GgufType::kBool, 0);
  EXPECT_FALSE(ReadGgufVocabulary(**file.Parse())->add_bos);
}

TEST(GgufVocabularyTest, LyingVocabulariesAreRefused) {
  const auto message = [](const GgufBuilder& file) {
    const auto parsed = file.Parse().value();
    const Status checked = CheckGgufVocabulary(*parsed, Architecture::kLlama, 6);
    return checked.ok() ? ReadGgufVocabulary(*parsed).status().message() : checked.message();
  };
  GgufBuilder file = VocabularyFile();
  file.keys[0].second = Bytes().Put<std::uint32_t>(8).String("llama");
  EXPECT_THAT(message(file), AllOf(HasSubstr("'llama'"), HasSubstr("tokenizer.ggml.model")));
  file = VocabularyFile();
  file.keys.erase(file.keys.begin() + 2);
  file.Strings("tokenizer.ggml.tokens", {"a"});
  EXPECT_THAT(message(file), AllOf(HasSubstr("has 6 entries"), HasSubstr("has 1")));
  file = VocabularyFile();
  file.keys.pop_back();
  file.Scalar<std::uint32_t>("tokenizer.ggml.eos_token_id", GgufType::kUint32, 6);
  EXPECT_THAT(message(file), AllOf(HasSubstr("eos_token_id' is 6"), HasSubstr("6 tokens")));
  file = VocabularyFile();
  file.keys.erase(file.keys.begin() + 3);
  Bytes types;
  types.Put<std::uint32_t>(9).Put<std::uint32_t>(5).Put<std::uint64_t>(6);
  for (const int type : {1, 1, 9, 3, 3, 4}) types.Put<std::int32_t>(type);
  file.keys.emplace_back("tokenizer.ggml.token_type", types);
  EXPECT_THAT(message(file), HasSubstr("type 9 for token 2"));
  EXPECT_THAT(CheckGgufVocabulary(**VocabularyFile().Parse(), Architecture::kLlama, 5).message(),
              AllOf(HasSubstr("6 entries"), HasSubstr("5 rows")));
}

TEST(GgufVocabularyTest, OnlyLlamaNeedsABeginToken) {
  GgufBuilder file = VocabularyFile();
  file.keys.erase(file.keys.begin() + 5);
  EXPECT_FALSE(CheckGgufVocabulary(**file.Parse(), Architecture::kLlama, 6).ok());
  EXPECT_TRUE(CheckGgufVocabulary(**file.Parse(), Architecture::kQwen2, 6).ok());
}

TEST(HfVocabularyTest, TakesEndsFromTheGenerationConfig) {
  const auto vocabulary = Model::Open(kModels + "tiny-llama").value()->ReadVocabulary().value();
  EXPECT_THAT(vocabulary.end_of_generation, testing::IsSupersetOf({258, 256}));
}

TEST(HfVocabularyTest, TemplatesComeFromEitherFile) {
  const TempFolder folder;
  EXPECT_EQ(ReadHfChatTemplate(folder.path()).value(), "");
  const auto config = [&](std::string_view text) {
    WriteBytes(folder.File("tokenizer_config.json"), Bytes().Raw(text).data());
    return ReadHfChatTemplate(folder.path());
  };
  EXPECT_EQ(config(R"({"chat_template":"one"})").value(), "one");
  EXPECT_EQ(
      config(
          R"({"chat_template":[{"name":"tool_use","template":"t"},{"name":"default","template":"d"}]})")
          .value(),
      "d");
  EXPECT_EQ(config("{}").value(), "");
  EXPECT_THAT(config(R"({"chat_template":5})").status().message(), HasSubstr("chat_template"));
  WriteBytes(folder.File("chat_template.jinja"), Bytes().Raw("file").data());
  EXPECT_EQ(config(R"({"chat_template":"one"})").value(), "file");
}

TEST(ByteVocabularyTest, CoversEveryByteOnce) {
  const auto vocabulary = ByteVocabulary(300).value();
  ASSERT_EQ(vocabulary.tokens.size(), 300u);
  const std::set<std::string> distinct(vocabulary.tokens.begin(), vocabulary.tokens.end());
  EXPECT_EQ(distinct.size(), 300u);
  EXPECT_EQ(vocabulary.tokens['A'], "A");
  EXPECT_EQ(vocabulary.tokens[' '], "\u0120");
  EXPECT_EQ(vocabulary.tokens[0], "\u0100");
  EXPECT_EQ(vocabulary.tokens[0xad], "\u0143");
  EXPECT_EQ(vocabulary.kinds[299], TokenKind::kUnused);
  EXPECT_FALSE(ByteVocabulary(256).ok());
}

}  // namespace
}  // namespace pliant
