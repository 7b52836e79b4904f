#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "text/byte_alphabet.h"
#include "text/support/small_vocabulary.h"
#include "text/utf8.h"

namespace pliant::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// One piece whatever the text: no pre-tokenizer pattern.
Vocabulary Whole(Vocabulary v) {
  v.pre_tokenizer.clear();
  v.pre_tokenizer_steps = {{.kind = PreTokenizerStep::Kind::kByteLevel}};
  return v;
}

void AddToken(Vocabulary* v, std::string token) {
  v->tokens.push_back(std::move(token));
  v->kinds.push_back(TokenKind::kNormal);
}

TEST(Bpe, EqualsTheNaiveOracleOnShortAndLongPieces) {
  const Vocabulary v = Whole(Trained(SampleText(), 300));
  const auto tokenizer = MustCreate(v);
  std::mt19937 rng(11);
  const std::string sample(SampleText());
  for (int i = 0; i < 300; ++i) {
    std::string piece;
    const std::size_t from = rng() % (sample.size() - 200);
    piece = sample.substr(from, 1 + rng() % 150);
    if (i % 3 == 0) piece = RandomUtf8(rng, 1 + static_cast<int>(rng() % 60));
    if (i % 7 == 0) piece.assign(1 + rng() % 200, "aet-"[rng() % 4]);
    // Cut off what is no whole character: invalid bytes are never merged.
    while (!piece.empty() && (piece[0] & 0xC0) == 0x80) piece.erase(0, 1);
    piece.resize(ValidUtf8Prefix(piece));
    EXPECT_EQ(MustEncode(*tokenizer, piece), NaiveBpe(v, piece)) << piece;
    EXPECT_EQ(MustEncode(*tokenizer, piece), NaiveBpe(v, piece)) << "second time, " << piece;
  }
}

TEST(Bpe, LeftmostPairFirstAmongEqualRanks) {
  Vocabulary v = Whole(ByteTokens());
  AddToken(&v, "aa");
  v.merges = {"a a"};
  EXPECT_THAT(MustEncode(*MustCreate(v), "aaa"), ElementsAre(259, 'a'));
  EXPECT_EQ(MustEncode(*MustCreate(v), std::string(101, 'a')).back(), 'a');
}

TEST(Bpe, ATokenThatMergesCannotReachIsTakenOnlyWithIgnoreMerges) {
  Vocabulary v = Whole(ByteTokens());
  AddToken(&v, "abc");
  EXPECT_THAT(MustEncode(*MustCreate(v), "abc"), ElementsAre('a', 'b', 'c'));
  v.ignore_merges = true;
  EXPECT_THAT(MustEncode(*MustCreate(v), "abc"), ElementsAre(259));
  EXPECT_THAT(MustEncode(*MustCreate(v), "abcd"), ElementsAre('a', 'b', 'c', 'd'));
}

TEST(Bpe, AMegabyteOfOneCharacterIsQuick) {
  Vocabulary v = Whole(Trained(SampleText(), 300));
  const auto tokenizer = MustCreate(v);
  for (const char c : {'a', '=', ' ', 'q'}) {
    const std::string text(1 << 20, c);
    const auto ids = MustEncode(*tokenizer, text);  // a quadratic merge would take hours
    EXPECT_EQ(tokenizer->Decode(ids, false), text);
  }
  EXPECT_LT(MustEncode(*tokenizer, std::string(1 << 20, 'a')).size(), std::size_t{1} << 19);
}

TEST(Bpe, MissingBytesAreDroppedOrBecomeUnk) {
  Vocabulary v = ByteTokens();
  v.tokens[4].clear();
  v.kinds[4] = TokenKind::kUnused;
  v.unk = 0;
  EXPECT_THAT(MustEncode(*MustCreate(v), "a\x04\x04z"), ElementsAre('a', 'z'));
  v.unknown_to_unk = true;
  EXPECT_THAT(MustEncode(*MustCreate(v), "a\x04\x04"), ElementsAre('a', 0, 0));
  v.fuse_unk = true;
  EXPECT_THAT(MustEncode(*MustCreate(v), "a\x04\x04"), ElementsAre('a', 0));
}

TEST(Bpe, MergesOfUnknownTokensDoNotCountAndMalformedOnesAreRefused) {
  Vocabulary v = Whole(ByteTokens());
  v.merges = {"\u00fe \u00ff", "a b", "x yy", "\u2581 a"};
  EXPECT_THAT(MustEncode(*MustCreate(v), "ab"), ElementsAre('a', 'b'));
  for (const char* bad : {"ab", "", " ", "a ", " b", "a b c", "a  b"}) {
    v.merges = {"a b", bad};
    const auto result = Tokenizer::Create(v);
    ASSERT_FALSE(result.ok()) << bad;
    EXPECT_THAT(result.status().message(), HasSubstr("merge 1")) << bad;
  }
}

TEST(Bpe, ControlTokensAreNoResultOfMerges) {
  Vocabulary v = Whole(ByteTokens());
  v.tokens.push_back("ab");
  v.kinds.push_back(TokenKind::kControl);
  v.merges = {"a b"};
  EXPECT_THAT(MustEncode(*MustCreate(v), "ab"), ElementsAre('a', 'b'));
}

TEST(Bpe, OfDuplicatesTheLastCounts) {
  Vocabulary v = Whole(ByteTokens());
  AddToken(&v, "ab");
  AddToken(&v, "ab");
  AddToken(&v, "bc");
  v.merges = {"a b", "b c",
              "a b"};  // the second "a b" overwrites the first one's rank, as in the reference
  EXPECT_THAT(MustEncode(*MustCreate(v), "ab"), ElementsAre(260));
  EXPECT_THAT(MustEncode(*MustCreate(v), "abc"), ElementsAre('a', 261));
}

TEST(Bpe, ManyThreadsShareOneTokenizer) {
  const auto tokenizer = MustCreate(Trained(SampleText(), 300));
  const auto expected = MustEncode(*MustCreate(Trained(SampleText(), 300)), SampleText());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 20; ++k) EXPECT_EQ(MustEncode(*tokenizer, SampleText()), expected);
    });
  }
  for (std::thread& t : threads) t.join();
}

TEST(Create, RefusesWhatCannotBeATokenizer) {
  const auto refused = [](Vocabulary v, const char* word) {
    const auto result = Tokenizer::Create(std::move(v));
    ASSERT_FALSE(result.ok()) << word;
    EXPECT_THAT(result.status().message(), HasSubstr(word));
  };
  refused({}, "no tokens");
  Vocabulary v = ByteTokens();
  v.kinds.pop_back();
  refused(v, "259 tokens but 258 token kinds");
  v = ByteTokens("klingon");
  refused(v, "pre-tokenizer \"klingon\" is not supported; known words: smollm");
  v = ByteTokens("");
  refused(v, "names no pre-tokenizer");
  v = ByteTokens();
  v.bos = 259;
  refused(v, "bos id 259");
  v = ByteTokens();
  v.eos = -1;
  refused(v, "eos id -1");
  v = ByteTokens();
  v.end_of_generation = {7, 1000};
  refused(v, "id 1000");
  v = ByteTokens();
  v.added_token_rules = {{.id = 300}};
  refused(v, "added token id 300");
  v = ByteTokens();
  v.bos.reset();
  v.add_bos = true;
  refused(v, "add_bos");
  v = Vocabulary{.tokens = {"hello"}, .kinds = {TokenKind::kNormal}, .pre_tokenizer = "gpt-2"};
  refused(v, "byte");
}

TEST(Create, EndsOfGenerationAreEosTheGivenAndKnownNames) {
  Vocabulary v = ByteTokens();
  v.tokens.insert(v.tokens.end(), {"<|im_end|>", "<|eot_id|>", "</s>"});
  v.kinds.insert(v.kinds.end(), {TokenKind::kControl, TokenKind::kUserDefined, TokenKind::kUnused});
  v.end_of_generation = {256};
  const auto tokenizer = MustCreate(v);
  EXPECT_THAT(tokenizer->vocabulary().end_of_generation, ElementsAre(256, 257, 259));
  EXPECT_TRUE(tokenizer->IsEndOfGeneration(257));
  EXPECT_FALSE(tokenizer->IsEndOfGeneration(260));
}

TEST(Encode, BosOnlyWhereBothSidesWantIt) {
  Vocabulary v = ByteTokens();
  EXPECT_THAT(MustEncode(*MustCreate(v), "a", {.add_bos = true}), ElementsAre('a'));
  v.add_bos = true;
  EXPECT_THAT(MustEncode(*MustCreate(v), "a", {.add_bos = true}), ElementsAre(256, 'a'));
  EXPECT_THAT(MustEncode(*MustCreate(v), "a"), ElementsAre('a'));
  EXPECT_THAT(MustEncode(*MustCreate(v), "", {.add_bos = true}), ElementsAre(256));
}

TEST(Encode, TextOverTheLimitIsRefused) {
  const auto result = MustCreate(ByteTokens())->Encode(std::string((64 << 20) + 1, 'a'), {});
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kTooLarge);
}

}  // namespace
}  // namespace pliant::testing
