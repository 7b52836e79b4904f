#include "text/support/small_vocabulary.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "text/byte_alphabet.h"
#include "text/utf8.h"

namespace pliant::testing {

Vocabulary ByteTokens(std::string_view pre_tokenizer) {
  Vocabulary v;
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    v.tokens.push_back(BytesToAlphabet(std::string_view(&byte, 1)));
    v.kinds.push_back(TokenKind::kNormal);
  }
  v.tokens.insert(v.tokens.end(), {"<|start|>", "<|end|>", "<think>"});
  v.kinds.insert(v.kinds.end(),
                 {TokenKind::kControl, TokenKind::kControl, TokenKind::kUserDefined});
  v.bos = 256;
  v.eos = 257;
  v.pre_tokenizer = pre_tokenizer;
  return v;
}

Vocabulary Trained(std::string_view text, int count, std::string_view pre_tokenizer) {
  Vocabulary v = ByteTokens(pre_tokenizer);
  std::map<std::vector<std::string>, int> words;
  std::vector<std::string> word;
  for (const char c : text) {
    if (c == ' ' && !word.empty()) {
      ++words[word];
      word.clear();
    }
    word.push_back(BytesToAlphabet(std::string_view(&c, 1)));
  }
  ++words[word];
  for (int i = 0; i < count; ++i) {
    std::map<std::pair<std::string, std::string>, int> pairs;
    for (const auto& [symbols, n] : words) {
      for (std::size_t k = 0; k + 1 < symbols.size(); ++k) pairs[{symbols[k], symbols[k + 1]}] += n;
    }
    if (pairs.empty()) break;
    auto best = pairs.begin();
    for (auto it = pairs.begin(); it != pairs.end(); ++it) {
      if (it->second > best->second) best = it;
    }
    const auto [left, right] = best->first;
    v.merges.push_back(left + " " + right);
    if (std::find(v.tokens.begin(), v.tokens.end(), left + right) == v.tokens.end()) {
      v.tokens.push_back(left + right);
      v.kinds.push_back(TokenKind::kNormal);
    }
    std::map<std::vector<std::string>, int> next;
    for (const auto& [symbols, n] : words) {
      std::vector<std::string> merged;
      for (std::size_t k = 0; k < symbols.size(); ++k) {
        if (k + 1 < symbols.size() && symbols[k] == left && symbols[k + 1] == right) {
          merged.push_back(left + right);
          ++k;
        } else {
          merged.push_back(symbols[k]);
        }
      }
      next[merged] += n;
    }
    words = std::move(next);
  }
  return v;
}

std::string_view SampleText() {
  return "The cache bends before it breaks. When memory is short, requests keep decoding from "
         "fewer planes; when it returns, the "
         "cache is what it was. It's what we'd want, isn't it? They'll say 1234567 blocks of 32 "
         "tokens, 0.5 of them shared.\n"
         "for (int i = 0; i < n; ++i) {\n\tsum += values[i];\n}\n  return sum -> total;\r\n\r\n"
         "def add(x):\n    return x + 1\n\nclass Node:\n    def __init__(self, value):\n        "
         "self.value = value\n"
         "Der Zwischenspeicher gibt nach, bevor er bricht. Größe, Übung, naïve café. "
         "Кэш гнётся, прежде чем сломаться. キャッシュは壊れる前に曲がる。캐시는 부러지기 전에 "
         "휘어진다. "
         "aaaa aaaaaaaa aaaaaaaaaaaaaaaa ---- ======== ........ !!!! the the the then there these "
         "other mother\n";
}

std::unique_ptr<Tokenizer> MustCreate(Vocabulary vocabulary) {
  auto tokenizer = Tokenizer::Create(std::move(vocabulary));
  if (!tokenizer.ok()) ADD_FAILURE() << tokenizer.status().ToString();
  return std::move(tokenizer).value();
}

std::vector<TokenId> MustEncode(const Tokenizer& tokenizer, std::string_view text,
                                EncodeOptions options) {
  auto ids = tokenizer.Encode(text, options);
  if (!ids.ok()) ADD_FAILURE() << ids.status().ToString();
  return std::move(ids).value();
}

std::vector<TokenId> NaiveBpe(const Vocabulary& vocabulary, std::string_view piece) {
  std::map<std::string, TokenId> ids;
  for (std::size_t i = 0; i < vocabulary.tokens.size(); ++i)
    ids[vocabulary.tokens[i]] = static_cast<TokenId>(i);
  std::map<std::string, std::size_t> ranks;
  for (std::size_t i = 0; i < vocabulary.merges.size(); ++i) ranks[vocabulary.merges[i]] = i;
  std::vector<std::string> symbols;
  for (const char& c : piece) symbols.push_back(BytesToAlphabet(std::string_view(&c, 1)));
  while (true) {
    std::size_t best = SIZE_MAX, where = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto it = ranks.find(symbols[i] + " " + symbols[i + 1]);
      if (it != ranks.end() && it->second < best) {
        best = it->second;
        where = i;
      }
    }
    if (best == SIZE_MAX) break;
    symbols[where] += symbols[where + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(where) + 1);
  }
  std::vector<TokenId> out;
  for (const std::string& s : symbols) out.push_back(ids.at(s));
  return out;
}

std::string RandomUtf8(std::mt19937& rng, int characters) {
  const auto draw = [&](std::uint32_t low, std::uint32_t high) {
    return std::uniform_int_distribution<std::uint32_t>(low, high)(rng);
  };
  static constexpr char32_t kSpaces[] = {' ',  ' ',  ' ',    '\t',   '\n',  '\r',
                                         0xA0, 0x85, 0x3000, 0x2028, 0x180E};
  std::string text;
  for (int i = 0; i < characters; ++i) {
    char32_t c = 0;
    switch (draw(0, 9)) {
      case 0:
      case 1:
      case 2:
        c = draw('a', 'z');
        break;
      case 3:
        c = draw(0x20, 0x7E);
        break;
      case 4:
      case 5:
        c = kSpaces[draw(0, std::size(kSpaces) - 1)];
        break;
      case 6:
        c = draw(0xA0, 0x5FF);
        break;
      case 7:
        c = draw(0x300, 0x36F);
        break;
      case 8:
        c = draw(0x1F300, 0x1FAFF);
        break;
      default:
        c = draw(0, 0x10FFFF);
    }
    if (c >= 0xD800 && c < 0xE000) c = 'x';
    AppendUtf8(c, &text);
  }
  return text;
}

}  // namespace pliant::testing
