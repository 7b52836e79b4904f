// Room: server. Finds the texts of control tokens in other text. Immutable after creation, any
// thread.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "text/tokenizer.h"

namespace pliant {

/// A trie over the literal texts of a vocabulary's control tokens.
class ControlTexts {
 public:
  explicit ControlTexts(const Vocabulary& vocabulary);

  struct Match {
    std::size_t length = 0;  // 0: none
    TokenId id = 0;
  };
  /// The longest control text at `text[at]` that ends at or before `limit`.
  Match Longest(std::string_view text, std::size_t at, std::size_t limit) const;

  /// Characters (code points) that a control text begins or ends with. At most kMaxEdges; when a
  /// vocabulary has more, the rest is left out (see ChatPrompter: complete control texts are found
  /// in any case).
  static constexpr std::size_t kMaxEdges = 64;
  const std::vector<char32_t>& edges() const { return edges_; }
  /// Whether a byte can begin a control text.
  bool MayBegin(unsigned char byte) const { return begins_[byte]; }

 private:
  std::unordered_map<std::uint64_t, std::uint32_t> next_;  // (node << 8 | byte) -> node
  std::unordered_map<std::uint32_t, TokenId> ends_;        // node -> token
  std::vector<char32_t> edges_;
  bool begins_[256] = {};
};

}  // namespace pliant
