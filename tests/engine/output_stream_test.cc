#include "engine/output_stream.h"

#include <gtest/gtest.h>

#include <random>

#include "engine/support/piece_tokenizer.h"

namespace pliant {
namespace {

struct Answer {
  std::string text;
  std::string stop;
  std::vector<std::string> deltas;
};

Answer Collect(const PieceTokenizer& tokenizer, const std::vector<std::string>& stops, const std::vector<TokenId>& ids,
           std::size_t min_tokens = 0) {
  OutputStream stream(&tokenizer, stops, false);
  Answer answer;
  const auto take = [&](OutputStream::Piece piece) {
    answer.text += piece.text;
    answer.deltas.push_back(piece.text);
    if (piece.stop) answer.stop = *piece.stop;
    return piece.stop.has_value();
  };
  std::size_t count = 0;
  for (const TokenId id : ids) {
    if (take(stream.Push(id, ++count >= min_tokens))) return answer;
  }
  take(stream.Finish());
  return answer;
}

// What should come out, from the whole text at once: cut at the stop string that ends first, character by character.
std::pair<std::string, std::string> Expected(const std::string& text, const std::vector<std::string>& stops) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::size_t best = std::string::npos;
    std::string which;
    for (const std::string& stop : stops) {
      if (std::string_view(text).substr(0, end).ends_with(stop) && end - stop.size() < best) {
        best = end - stop.size();
        which = stop;
      }
    }
    if (best != std::string::npos) return {text.substr(0, best), which};
  }
  return {text, ""};
}

TEST(OutputStream, PassesTextThroughWithoutStops) {
  const PieceTokenizer tokenizer({"a", "b"});
  const Answer answer = Collect(tokenizer, {}, {0, 1, 0});
  EXPECT_EQ(answer.deltas, (std::vector<std::string>{"a", "b", "a", ""}));
}

TEST(OutputStream, HoldsBackWhatMayBecomeAStopAndNeverRepeatsIt) {  // known fault C1
  const PieceTokenizer tokenizer({"a", "b", "~", "never", "x"});
  const Answer missed = Collect(tokenizer, {"ab~never"}, {0, 1, 0, 1, 2, 4, 0, 1});
  EXPECT_EQ(missed.text, "abab~xab");
  EXPECT_EQ(missed.deltas[0], "");
  EXPECT_EQ(missed.stop, "");
  const Answer met = Collect(tokenizer, {"ab~never"}, {4, 0, 1, 2, 3, 4});
  EXPECT_EQ(met.text, "x");
  EXPECT_EQ(met.stop, "ab~never");
}

TEST(OutputStream, EqualsTheWholeTextForOverlappingStops) {
  const PieceTokenizer tokenizer({"a", "b", "c"});  // single characters: a stop is found the moment it ends
  std::mt19937 rng(7);
  int stopped = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops(1 + rng() % 4);
    for (std::string& stop : stops) {
      stop.resize(1 + rng() % 5);
      for (char& c : stop) c = static_cast<char>('a' + rng() % 3);
    }
    std::vector<TokenId> ids(rng() % 20);
    for (TokenId& id : ids) id = static_cast<TokenId>(rng() % 3);
    const auto [text, stop] = Expected(tokenizer.Decode(ids, false), stops);
    const Answer answer = Collect(tokenizer, stops, ids);
    ASSERT_EQ(answer.text, text);
    ASSERT_EQ(answer.stop, stop);
    stopped += stop.empty() ? 0 : 1;
  }
  EXPECT_GT(stopped, 300);
}

TEST(OutputStream, StopsInsideOneTokenCutAtTheFirst) {
  const PieceTokenizer tokenizer({"one STOP two END"});
  const Answer answer = Collect(tokenizer, {"END", "STOP"}, {0});
  EXPECT_EQ(answer.text, "one ");
  EXPECT_EQ(answer.stop, "STOP");
}

TEST(OutputStream, IgnoresStopsBeforeMinTokens) {
  const PieceTokenizer tokenizer({"a", "."});
  EXPECT_EQ(Collect(tokenizer, {"."}, {0, 1, 0, 1, 0}, 3).text, "a.a");
}

TEST(OutputStream, NeverEmitsHalfACharacter) {
  const PieceTokenizer tokenizer({"\xF0", "\x9F", "\x98", "\x80", "!"});
  const Answer whole = Collect(tokenizer, {}, {0, 1, 2, 3, 4});
  EXPECT_EQ(whole.text, "\xF0\x9F\x98\x80!");
  EXPECT_EQ(whole.deltas[0] + whole.deltas[1] + whole.deltas[2], "");
  const Answer cut = Collect(tokenizer, {"never"}, {0, 1});
  EXPECT_EQ(cut.text, "\xEF\xBF\xBD");
}

}  // namespace
}  // namespace pliant
