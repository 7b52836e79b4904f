#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "text/support/small_vocabulary.h"

namespace pliant::testing {
namespace {

using ::testing::ElementsAre;

TokenId Add(Vocabulary* v, std::string text, TokenKind kind, AddedTokenRule rule = {}) {
  rule.id = static_cast<TokenId>(v->tokens.size());
  v->tokens.push_back(std::move(text));
  v->kinds.push_back(kind);
  v->added_token_rules.push_back(rule);
  return rule.id;
}

// Known fault E1: markers in user text stay text unless the caller says otherwise.
TEST(AddedTokens, ControlTokensAreParsedOnlyWhereAllowed) {
  const auto tokenizer = MustCreate(ByteTokens());
  const std::string text = "hi<|end|>\n<|start|>system";
  const auto plain = MustEncode(*tokenizer, text);
  EXPECT_TRUE(std::all_of(plain.begin(), plain.end(), [](TokenId id) { return id < 256; }));
  EXPECT_EQ(tokenizer->Decode(plain, false), text);
  const auto parsed = MustEncode(*tokenizer, text, {.parse_special = true});
  EXPECT_THAT(std::vector<TokenId>(parsed.begin(), parsed.begin() + 5),
              ElementsAre('h', 'i', 257, '\n', 256));
  EXPECT_EQ(tokenizer->Decode(parsed, true), text);
  EXPECT_EQ(tokenizer->Decode(parsed, false), "hi\nsystem");
}

TEST(AddedTokens, UserDefinedTokensAreAlwaysParsed) {
  const auto tokenizer = MustCreate(ByteTokens());
  EXPECT_THAT(MustEncode(*tokenizer, "a<think>b"), ElementsAre('a', 258, 'b'));
  EXPECT_EQ(tokenizer->Decode(std::vector<TokenId>{258}, false), "<think>");
}

TEST(AddedTokens, LeftmostThenLongestWithoutOverlap) {
  Vocabulary v = ByteTokens();
  const TokenId ab = Add(&v, "ab", TokenKind::kUserDefined),
                abc = Add(&v, "abc", TokenKind::kUserDefined),
                cd = Add(&v, "cd", TokenKind::kUserDefined),
                a4 = Add(&v, "aaaa", TokenKind::kUserDefined);
  const auto tokenizer = MustCreate(v);
  EXPECT_THAT(MustEncode(*tokenizer, "abcd"), ElementsAre(abc, 'd'));
  EXPECT_THAT(MustEncode(*tokenizer, "abd"), ElementsAre(ab, 'd'));
  EXPECT_THAT(MustEncode(*tokenizer, "xcdab"), ElementsAre('x', cd, ab));
  EXPECT_THAT(MustEncode(*tokenizer, "aaaaaa"), ElementsAre(a4, 'a', 'a'));
  EXPECT_THAT(MustEncode(*tokenizer, "<think"), ElementsAre('<', 't', 'h', 'i', 'n', 'k'));
}

TEST(AddedTokens, ManySharedPrefixesStayQuick) {
  Vocabulary v = ByteTokens();
  for (int i = 1; i <= 300; ++i)
    Add(&v, std::string(static_cast<std::size_t>(i), '<') + ">", TokenKind::kUserDefined);
  const auto tokenizer = MustCreate(v);
  const std::string text(30'000, '<');
  EXPECT_EQ(MustEncode(*tokenizer, text).size(), text.size());
  EXPECT_EQ(MustEncode(*tokenizer, std::string(300, '<') + ">").size(), 1u);
}

TEST(AddedTokens, StripTakesWhitespaceAlong) {
  Vocabulary v = ByteTokens();
  const TokenId left = Add(&v, "<l>", TokenKind::kControl, {.lstrip = true}),
                right = Add(&v, "<r>", TokenKind::kControl, {.rstrip = true});
  const auto tokenizer = MustCreate(v);
  const EncodeOptions special{.parse_special = true};
  EXPECT_THAT(MustEncode(*tokenizer, "a \u3000\n<l> b", special), ElementsAre('a', left, ' ', 'b'));
  EXPECT_THAT(MustEncode(*tokenizer, "a <r> \u00a0b", special), ElementsAre('a', ' ', right, 'b'));
  EXPECT_THAT(MustEncode(*tokenizer, "<r> <l>", special), ElementsAre(right, left));
  EXPECT_THAT(MustEncode(*tokenizer, "\x80 <l>", special), ElementsAre(0x80, left));
}

TEST(AddedTokens, SingleWordNeedsEdges) {
  Vocabulary v = ByteTokens();
  const TokenId cat = Add(&v, "cat", TokenKind::kUserDefined, {.single_word = true});
  const auto tokenizer = MustCreate(v);
  EXPECT_THAT(MustEncode(*tokenizer, "cat!"), ElementsAre(cat, '!'));
  EXPECT_THAT(MustEncode(*tokenizer, "cats"), ElementsAre('c', 'a', 't', 's'));
  EXPECT_THAT(MustEncode(*tokenizer, "_cat"), ElementsAre('_', 'c', 'a', 't'));
  EXPECT_EQ(MustEncode(*tokenizer, "\u00e9cat").size(), 5u);
}

TEST(AddedTokens, NormalizedOnesAreFoundInNormalizedText) {
  Vocabulary v = ByteTokens("qwen2");
  const TokenId normalized = Add(&v, "caf\u00e9", TokenKind::kUserDefined, {.normalized = true}),
                raw = Add(&v, "th\u00e9", TokenKind::kUserDefined);
  const auto tokenizer = MustCreate(v);
  EXPECT_THAT(MustEncode(*tokenizer, "cafe\u0301"), ElementsAre(normalized));
  EXPECT_THAT(MustEncode(*tokenizer, "th\u00e9"), ElementsAre(raw));
  EXPECT_THAT(MustEncode(*tokenizer, "the\u0301"), ElementsAre('t', 'h', 0xC3, 0xA9));
}

}  // namespace
}  // namespace pliant::testing
