// Quality on the shipped reckoner model: what the measures must show, and right answers below 16
// bits.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "engine/calibration.h"
#include "replay/report.h"
#include "replay/texts.h"

namespace pliant {
namespace {

struct Lab {
  std::unique_ptr<Model> model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Backend> backend;

  Lab(int max_rows, int logit_rows, std::uint32_t pages, bool precise) {
    model = *Model::Open(std::string(PLIANT_TEST_DATA) + "/models/reckoner-q8_0.gguf");
    tokenizer = *Tokenizer::Create(model->ReadVocabulary().value());
    backend =
        *MakeCpuBackend({.threads = 1, .level = precise ? "avx512" : "auto", .precise = precise});
    Status status = model->Load(*backend, max_rows, logit_rows, {});
    PLIANT_CHECK(status.ok(), status.message());
    status = backend->AllocatePages(model->config().Kv(), pages);
    PLIANT_CHECK(status.ok(), status.message());
    status = Calibrate(*backend, *model, *tokenizer, pages, max_rows);
    PLIANT_CHECK(status.ok(), status.message());
  }
};

TEST(ContextQuality, FewerBitsAreFurtherAway) {
  ContextQualityOptions options;
  options.states = {{4, 4}, {3, 3}, {2, 2}, {1, 1}};
  options.context = 512;
  options.scored = 64;
  options.max_rows = 128;  // fewer than all sequences need together: two steps a block
  Lab lab(options.max_rows, ContextLogitRows(options), ContextPages(options), /*precise=*/true);
  const std::string text = BuiltInTexts(600)[5].text;
  std::vector<TokenId> tokens = lab.tokenizer->Encode(text, {}).value();
  ASSERT_GT(tokens.size(), 512u);
  const auto report = MeasureText(*lab.model, *lab.backend, tokens, options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  const std::vector<TextQuality>& states = report->states;
  ASSERT_EQ(states.size(), 4u);
  EXPECT_LT(states[0].kl.max, 1e-9) << "the whole cache against itself";
  EXPECT_EQ(states[0].top1, 1);
  EXPECT_EQ(states[0].degraded, 0);
  EXPECT_NEAR(states[0].perplexity, report->reference_perplexity, 1e-3);
  EXPECT_GT(states[1].kl.mean, states[0].kl.mean);
  EXPECT_GT(states[2].kl.mean, 4 * states[1].kl.mean);
  EXPECT_GT(states[3].kl.mean, 4 * states[2].kl.mean);
  EXPECT_LT(states[1].kl.mean, 1e-4);
  // Blocks 2 .. 11 of 14 (448 tokens), then 2 .. 12 of 15.
  EXPECT_NEAR(states[2].degraded, (10 / 14.0 + 11 / 15.0) / 2, 1e-9);
  EXPECT_LT(states[3].degraded, states[2].degraded) << "more recent tokens are protected";

  tokens.resize(512);
  const auto refused = MeasureText(*lab.model, *lab.backend, tokens, options);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("513"), std::string::npos);
}

TEST(Reckoner, ProblemsFile) {
  const std::string path = std::string(PLIANT_TEST_DATA) + "/problems/reckoner.jsonl";
  const auto problems = ReadReckonerProblems(path);
  ASSERT_TRUE(problems.ok()) << problems.status().message();
  EXPECT_EQ(problems->size(), 300u);
  const std::vector<ReckonerProblem> few = LimitPerLevel(*problems, 2);
  ASSERT_EQ(few.size(), 6u);
  EXPECT_EQ(few[0].level, "easy");
  EXPECT_EQ(few[5].level, "hard");

  const std::string bad = ::testing::TempDir() + "/bad_problems.jsonl";
  std::ofstream(bad)
      << "{\"level\":\"a\",\"prompt\":\"b\",\"answer\":\"c\"}\n{\"level\":\"a\",\"prompt\":1}\n";
  const auto refused = ReadReckonerProblems(bad);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().message(), bad + ": line 2: \"prompt\" must be a string");
}

TEST(Reckoner, SolvedBelowSixteenBits) {
  const auto problems =
      ReadReckonerProblems(std::string(PLIANT_TEST_DATA) + "/problems/reckoner.jsonl");
  ASSERT_TRUE(problems.ok()) << problems.status().message();
  std::vector<ReckonerProblem> few = LimitPerLevel(*problems, 4);
  std::erase_if(few, [](const ReckonerProblem& one) { return one.level != "easy"; });
  ASSERT_EQ(few.size(), 4u);
  few[3].answer = "a wrong one";  // must be counted as such
  ReckonerOptions options;
  options.states = {{2, 2}, {1, 1}};
  options.slots = 5;  // fewer than the answers: slots are used again
  options.max_tokens = 1024;
  options.max_rows = 64;
  Lab lab(options.max_rows, options.slots, ReckonerPages(options), /*precise=*/false);
  const PromptEncoder encode = [&](const std::string& prompt) {
    return lab.tokenizer->Encode(
        "<|im_start|>user\n" + prompt + "<|im_end|>\n<|im_start|>assistant\n<think>\n",
        {.parse_special = true});
  };
  std::int64_t last = 0;
  const auto scores = MeasureReckoner(*lab.model, *lab.backend, *lab.tokenizer, encode, few,
                                      options, [&](std::int64_t done, std::int64_t total) {
                                        EXPECT_GE(done, last);
                                        EXPECT_EQ(total, 8);
                                        last = done;
                                      });
  ASSERT_TRUE(scores.ok()) << scores.status().message();
  EXPECT_EQ(last, 8);
  ASSERT_EQ(scores->size(), 2u);
  for (const ReckonerScore& score : *scores) {
    EXPECT_EQ(score.level, "easy");
    EXPECT_EQ(score.problems, 4);
    EXPECT_EQ(score.right, 3) << CacheStateName(score.state);
    EXPECT_EQ(score.unfinished, 0);
    EXPECT_EQ(score.wrong, std::vector<std::string>{few[3].id});
  }
  const std::string table = ReckonerTable(*scores);
  EXPECT_NE(table.find("4/4"), std::string::npos);
  EXPECT_NE(table.find("3 of 4"), std::string::npos);
}

TEST(Texts, BuiltInOnesAreTheSameEverywhere) {
  const std::vector<SampleText> texts = BuiltInTexts(4000);
  ASSERT_GE(texts.size(), 6u);
  for (const SampleText& text : texts) {
    EXPECT_GE(text.text.size(), 4000u) << text.name;
    EXPECT_EQ(text.text.find('{'), std::string::npos) << text.name << ": a pattern was not filled";
  }
  EXPECT_EQ(texts[2].text, BuiltInTexts(4000)[2].text);
  EXPECT_NE(texts[2].text, BuiltInTexts(4000, 2)[2].text);
  // FNV-1a of all texts: the numbers in docs/quality.md belong to these very bytes.
  std::uint64_t hash = 14695981039346656037ull;
  for (const SampleText& text : texts) {
    for (const char c : text.text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  }
  EXPECT_EQ(hash, 2981356250023087890ull);
}

TEST(Texts, Folder) {
  EXPECT_FALSE(ReadTexts("/nowhere/at/all", 100).ok());
  const std::string folder = ::testing::TempDir() + "/replay_texts";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/b.txt") << "second";
  std::ofstream(folder + "/a.txt") << "first one";
  const auto texts = ReadTexts(folder, 5);
  ASSERT_TRUE(texts.ok());
  ASSERT_EQ(texts->size(), 2u);
  EXPECT_EQ((*texts)[0].name, "a.txt");
  EXPECT_EQ((*texts)[0].text, "first");
}

}  // namespace
}  // namespace pliant
