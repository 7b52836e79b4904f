#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "text/support/small_vocabulary.h"
#include "text/utf8.h"

namespace pliant::testing {
namespace {

using ::testing::ElementsAre;

const std::string kBad = "\xEF\xBF\xBD";

/// What each Push gave, then what Finish gave.
std::vector<std::string> Stream(const Tokenizer& tokenizer, const std::vector<TokenId>& ids,
                                bool special = false) {
  Detokenizer detokenizer(&tokenizer, special);
  std::vector<std::string> parts;
  for (const TokenId id : ids) parts.push_back(detokenizer.Push(id));
  parts.push_back(detokenizer.Finish());
  for (const std::string& part : parts)
    EXPECT_EQ(ValidUtf8Prefix(part), part.size()) << "half a character";
  return parts;
}

std::string Joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += part;
  return text;
}

// Known fault C2.
TEST(Detokenizer, FourByteEmojiComesWhole) {
  const auto t = MustCreate(ByteTokens());
  EXPECT_THAT(Stream(*t, {0xF0, 0x9F, 0x98, 0x80, '!'}),
              ElementsAre("", "", "", "\U0001F600", "!", ""));
}

TEST(Detokenizer, ZwjFamilyComesCharacterByCharacter) {
  const auto t = MustCreate(ByteTokens());
  const std::string family = "\U0001F468\u200D\U0001F469\u200D\U0001F467";
  const auto ids = MustEncode(*t, family);
  ASSERT_EQ(ids.size(), family.size());
  EXPECT_EQ(Joined(Stream(*t, ids)), family);
}

TEST(Detokenizer, HangulByByteTokens) {
  const auto t = MustCreate(ByteTokens());
  EXPECT_THAT(Stream(*t, {0xED, 0x95, 0x9C}), ElementsAre("", "", "\ud55c", ""));
}

TEST(Detokenizer, ALoneContinuationByteIsReplacedAtOnce) {
  const auto t = MustCreate(ByteTokens());
  EXPECT_THAT(Stream(*t, {0x80, 'a'}), ElementsAre(kBad, "a", ""));
  EXPECT_THAT(Stream(*t, {0xFF}), ElementsAre(kBad, ""));
}

TEST(Detokenizer, ABrokenCharacterIsOneReplacementAsSoonAsCertain) {
  const auto t = MustCreate(ByteTokens());
  EXPECT_THAT(Stream(*t, {0xF0, 0x9F, 'a'}), ElementsAre("", "", kBad + "a", ""));
  EXPECT_THAT(Stream(*t, {0xE2, 0x82, 0xE2, 0x82, 0xAC}),
              ElementsAre("", "", kBad, "", "\u20ac", ""));
  EXPECT_THAT(Stream(*t, {0xE0, 0x80}),
              ElementsAre("", kBad + kBad, ""));  // E0 80 can begin nothing
}

TEST(Detokenizer, FinishFlushesAndTheDetokenizerCanGoOn) {
  const auto t = MustCreate(ByteTokens());
  EXPECT_THAT(Stream(*t, {'a', 0xF0, 0x9F, 0x98}), ElementsAre("a", "", "", "", kBad));
  Detokenizer d(t.get());
  EXPECT_EQ(d.Push(0xC3), "");
  EXPECT_EQ(d.Finish(), kBad);
  EXPECT_EQ(d.Finish(), "");
  EXPECT_EQ(d.Push('b'), "b");
}

TEST(Detokenizer, ControlTokensShowOnlyWhenAsked) {
  const auto t = MustCreate(ByteTokens());
  EXPECT_EQ(Joined(Stream(*t, {256, 'a', 257})), "a");
  EXPECT_EQ(Joined(Stream(*t, {256, 'a', 257}, true)), "<|start|>a<|end|>");
  EXPECT_EQ(Joined(Stream(*t, {0xC3, 257, 0xA9})), "\u00e9")
      << "a hidden token does not break a character";
}

TEST(TokenBytes, IdsWithoutTextHaveNone) {
  Vocabulary v = ByteTokens();
  v.tokens.insert(v.tokens.end(), {"", "[PAD]", "\u2581word"});
  v.kinds.insert(v.kinds.end(), {TokenKind::kUnused, TokenKind::kUnused, TokenKind::kNormal});
  const auto t = MustCreate(v);
  for (const TokenId id : {-1, 259, 260, 262, 1 << 30})
    EXPECT_EQ(t->TokenBytes(id, true), "") << id;
  EXPECT_EQ(t->TokenBytes(261, false), "\u2581word");
  EXPECT_EQ(t->TokenBytes(' ', false), " ");
  EXPECT_EQ(t->size(), 262);
}

TEST(RoundTrip, EveryValidTextComesBackWholeAndStreamed) {
  for (const char* word : {"smollm", "gpt-2", "llama-bpe"}) {
    const auto t = MustCreate(Trained(SampleText(), 300, word));
    std::mt19937 rng(5);
    for (int i = 0; i < 1000; ++i) {
      const std::string text = RandomUtf8(rng, static_cast<int>(rng() % 80));
      const auto ids = MustEncode(*t, text, {.parse_special = i % 2 == 0});
      ASSERT_EQ(t->Decode(ids, true), text);
      ASSERT_EQ(Joined(Stream(*t, ids, true)), text);
    }
    const std::string sample(SampleText());
    EXPECT_EQ(t->Decode(MustEncode(*t, sample), false), sample);
    EXPECT_LT(MustEncode(*t, sample).size(), sample.size() * 7 / 10) << "nothing was merged";
  }
}

TEST(RoundTrip, AnyIdsStreamToWhatTheyDecodeTo) {
  const auto t = MustCreate(Trained(SampleText(), 300));
  std::mt19937 rng(6);
  for (int i = 0; i < 3000; ++i) {
    std::vector<TokenId> ids(rng() % 30);
    for (TokenId& id : ids)
      id = static_cast<TokenId>(rng() % static_cast<std::uint32_t>(t->size() + 2));
    const std::string whole = t->Decode(ids, i % 2 == 0);
    ASSERT_EQ(ValidUtf8Prefix(whole), whole.size());
    ASSERT_EQ(Joined(Stream(*t, ids, i % 2 == 0)), whole);
  }
}

TEST(RoundTrip, InvalidUtf8KeepsItsBytes) {
  const auto t = MustCreate(Trained(SampleText(), 300));
  std::mt19937 rng(7);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes(rng() % 40, '\0');
    for (char& c : bytes)
      c = static_cast<char>(rng() % 4 == 0 ? rng() % 256 : "the \xE2\x82\xAC"[rng() % 7]);
    std::string back;
    for (const TokenId id : MustEncode(*t, bytes)) back += t->TokenBytes(id, false);
    ASSERT_EQ(back, bytes);
  }
  EXPECT_THAT(MustEncode(*t, "\xC3"), ElementsAre(0xC3));
}

}  // namespace
}  // namespace pliant::testing
