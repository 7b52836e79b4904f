// A tokenizer for tests: token i is the literal bytes of pieces[i]; encoding takes the longest piece at every place.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "text/tokenizer.h"

namespace pliant {

class PieceTokenizer final : public Tokenizer {
 public:
  explicit PieceTokenizer(std::vector<std::string> pieces, std::vector<TokenId> end = {}) {
    vocabulary_.tokens = std::move(pieces);
    vocabulary_.kinds.assign(vocabulary_.tokens.size(), TokenKind::kNormal);
    vocabulary_.end_of_generation = std::move(end);
  }

  Result<std::vector<TokenId>> Encode(std::string_view text, EncodeOptions) const override {
    std::vector<TokenId> ids;
    while (!text.empty()) {
      TokenId best = -1;
      for (TokenId id = 0; id < size(); ++id) {
        const std::string& piece = vocabulary_.tokens[id];
        if (!piece.empty() && text.starts_with(piece) &&
            (best < 0 || piece.size() > vocabulary_.tokens[best].size())) {
          best = id;
        }
      }
      if (best < 0) return InvalidArgument("no piece for the text");
      ids.push_back(best);
      text.remove_prefix(vocabulary_.tokens[best].size());
    }
    return ids;
  }
  std::string_view TokenBytes(TokenId id, bool) const override { return vocabulary_.tokens[id]; }
  std::string Decode(std::span<const TokenId> ids, bool special) const override {
    std::string out;
    for (const TokenId id : ids) out += TokenBytes(id, special);
    return out;
  }
  const Vocabulary& vocabulary() const override { return vocabulary_; }
  std::int32_t size() const override { return static_cast<std::int32_t>(vocabulary_.tokens.size()); }
  bool IsEndOfGeneration(TokenId id) const override {
    for (const TokenId end : vocabulary_.end_of_generation) {
      if (end == id) return true;
    }
    return false;
  }

 private:
  Vocabulary vocabulary_;
};

}  // namespace pliant
