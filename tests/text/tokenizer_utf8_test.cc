#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "text/byte_alphabet.h"
#include "text/normalizer.h"
#include "text/utf8.h"

namespace pliant {
namespace {

using namespace std::string_literals;

std::string Drained(std::string bytes) {
  std::string out;
  DrainUtf8(&bytes, /*flush=*/true, &out);
  EXPECT_TRUE(bytes.empty());
  return out;
}

const std::string kBad = "\xEF\xBF\xBD";

TEST(Utf8, EveryCodePointSurvivesAppendAndNext) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    AppendUtf8(c, &text);
    const Utf8Unit unit = NextUtf8(text);
    ASSERT_EQ(unit.kind, Utf8Unit::Kind::kCharacter) << std::hex << static_cast<unsigned>(c);
    ASSERT_EQ(unit.code_point, c);
    ASSERT_EQ(unit.size, text.size());
    ASSERT_EQ(LastCodePoint("a" + text), c);
    for (std::size_t cut = 1; cut < text.size(); ++cut) {
      ASSERT_EQ(NextUtf8(std::string_view(text).substr(0, cut)).kind, Utf8Unit::Kind::kIncomplete);
    }
  }
}

// The examples of the Unicode standard, section 3.9, tables 3-8 to 3-11.
TEST(Utf8, MaximalSubpartsBecomeOneReplacementEach) {
  EXPECT_EQ(Drained("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            kBad + kBad + kBad + kBad + kBad + kBad + kBad + kBad + "A");
  EXPECT_EQ(Drained("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"),
            kBad + kBad + kBad + kBad + kBad + kBad + kBad + kBad + "A");
  EXPECT_EQ(Drained("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"),
            kBad + kBad + kBad + kBad + kBad + "A" + kBad + kBad + "B");
  EXPECT_EQ(Drained("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), kBad + kBad + kBad + kBad + "A");
}

TEST(Utf8, LastCodePointIsWholeOrReplacement) {
  EXPECT_EQ(LastCodePoint(" \x80"), U'\xFFFD');
  EXPECT_EQ(LastCodePoint("\x80\x80\x80\x80\x80"), U'\xFFFD');
  EXPECT_EQ(LastCodePoint("\xE3\x80\x80"), U'\x3000');
}

TEST(Utf8, ValidPrefixStopsAtTheFirstFault) {
  EXPECT_EQ(ValidUtf8Prefix("0123456789abcdef\xFFzz"), 16u);
  EXPECT_EQ(ValidUtf8Prefix("0123456789\xC3\xA9\xC3"), 12u);
  EXPECT_EQ(ValidUtf8Prefix(""), 0u);
}

TEST(ByteAlphabet, IsABijectionAndKnowsItsLandmarks) {
  std::string all;
  for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
  EXPECT_EQ(AlphabetToBytes(BytesToAlphabet(all)), all);
  EXPECT_EQ(BytesToAlphabet(" \n\t"), "\u0120\u010a\u0109");
  EXPECT_EQ(BytesToAlphabet("\x7F\xA0\xAD\xFF"), "\u0121\u0142\u0143\u00ff");
  EXPECT_EQ(AlphabetToBytes("a b"), std::nullopt);
  EXPECT_EQ(AlphabetToBytes("\u2581x"), std::nullopt);
  EXPECT_EQ(AlphabetToBytes("\xFF"), std::nullopt);
}

std::string Nfc(std::string_view text) {
  std::string storage;
  return std::string(NormalizeNfc(text, &storage));
}

TEST(Normalizer, ComposesOrdersAndLeavesTheRest) {
  EXPECT_EQ(Nfc("cafe\u0301"), "caf\u00e9");
  EXPECT_EQ(Nfc("a\u0307\u0323"), "\u1ea1\u0307");  // marks in order of class, then composed
  EXPECT_EQ(Nfc("\u212b"), "\u00c5");               // a singleton
  EXPECT_EQ(Nfc("\u1112\u1161\u11ab"), "\ud55c");   // Hangul
  EXPECT_EQ(Nfc("\u0958"), "\u0915\u093c");         // a composition exclusion
  EXPECT_EQ(Nfc("\uff21\u00b2"), "\uff21\u00b2");   // compatibility forms stay
  EXPECT_EQ(Nfc("x\0\u0301y"s), "x\0\u0301y"s);     // NUL is a character
  EXPECT_EQ(Nfc("plain \u00e9 text"), "plain \u00e9 text");
}

TEST(Normalizer, KeepsToTheReferencesOlderData) {
  EXPECT_EQ(Nfc("\U00011935\U00011930"), "\U00011935\U00011930");
  EXPECT_EQ(Nfc("\U00011938"), "\U00011938");
  EXPECT_EQ(
      Nfc("a\u0898\u0323"),
      "a\u0898\u0323");  // U+0898 is a starter there: nothing is reordered or composed across it
}

TEST(Normalizer, LongRunsOfMarksAreSortedOnce) {
  std::string text = "a";
  for (int i = 0; i < 200'000; ++i) text += i % 2 == 0 ? "\u0301" : "\u0316";
  const std::string out = Nfc(text);  // quadratic sorting would not come back
  EXPECT_EQ(out.substr(0, 5), "\u00e1\u0316\u0316"s.substr(0, 5));
  EXPECT_EQ(out.size(), text.size() - 1);
}

}  // namespace
}  // namespace pliant
