// A tokenizer small enough to reason about: ids 0..255 are bytes, then a few control and
// user-defined tokens.
#pragma once

#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace pliant::testing {

class TinyTokenizer : public Tokenizer {
 public:
  static constexpr TokenId kBos = 256, kStart = 257, kEnd = 258, kThink = 259, kUnused = 260;
  /// `more_controls` become control tokens from 261 on.
  explicit TinyTokenizer(bool add_bos = false, const std::vector<std::string>& more_controls = {}) {
    for (int byte = 0; byte < 256; ++byte) {
      vocabulary_.tokens.push_back(std::string(1, static_cast<char>(byte)));
      vocabulary_.kinds.push_back(TokenKind::kNormal);
    }
    const auto add = [&](const std::string& text, TokenKind kind) {
      vocabulary_.tokens.push_back(text);
      vocabulary_.kinds.push_back(kind);
    };
    add("<s>", TokenKind::kControl);
    add("<|im_start|>", TokenKind::kControl);
    add("<|im_end|>", TokenKind::kControl);
    add("<think>", TokenKind::kUserDefined);
    add("[unused]", TokenKind::kUnused);
    for (const std::string& text : more_controls) add(text, TokenKind::kControl);
    vocabulary_.bos = kBos;
    vocabulary_.eos = kEnd;
    vocabulary_.end_of_generation = {kEnd};
    vocabulary_.add_bos = add_bos;
  }

  Result<std::vector<TokenId>> Encode(std::string_view text, EncodeOptions options) const override {
    std::vector<TokenId> out;
    if (options.add_bos && vocabulary_.add_bos) out.push_back(kBos);
    for (std::size_t i = 0; i < text.size();) {
      TokenId best = static_cast<unsigned char>(text[i]);
      std::size_t length = 1;
      for (std::size_t id = 256; id < vocabulary_.tokens.size(); ++id) {
        const TokenKind kind = vocabulary_.kinds[id];
        const bool taken = kind == TokenKind::kUserDefined ||
                           (kind == TokenKind::kControl && options.parse_special);
        const std::string& token = vocabulary_.tokens[id];
        if (taken && token.size() > length && text.substr(i).starts_with(token)) {
          best = static_cast<TokenId>(id);
          length = token.size();
        }
      }
      out.push_back(best);
      i += length;
    }
    return out;
  }
  std::string_view TokenBytes(TokenId id, bool special) const override {
    const auto index = static_cast<std::size_t>(id);
    if (vocabulary_.kinds[index] == TokenKind::kControl && !special) return {};
    return vocabulary_.tokens[index];
  }
  std::string Decode(std::span<const TokenId> ids, bool special) const override {
    std::string out;
    for (TokenId id : ids) out += TokenBytes(id, special);
    return out;
  }
  const Vocabulary& vocabulary() const override { return vocabulary_; }
  std::int32_t size() const override {
    return static_cast<std::int32_t>(vocabulary_.tokens.size());
  }
  bool IsEndOfGeneration(TokenId id) const override { return id == kEnd; }

 private:
  Vocabulary vocabulary_;
};

}  // namespace pliant::testing
