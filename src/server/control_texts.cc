#include "server/control_texts.h"

#include <algorithm>

#include "server/utf8.h"

namespace pliant {

ControlTexts::ControlTexts(const Vocabulary& vocabulary) {
  std::uint32_t nodes = 1;
  for (std::size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const std::string& text = vocabulary.tokens[id];
    if (vocabulary.kinds[id] != TokenKind::kControl || text.empty()) continue;
    begins_[static_cast<unsigned char>(text.front())] = true;
    std::uint32_t node = 0;
    for (unsigned char byte : text) {
      const auto [it, added] = next_.try_emplace(std::uint64_t{node} << 8 | byte, nodes);
      if (added) ++nodes;
      node = it->second;
    }
    ends_.try_emplace(node, static_cast<TokenId>(id));
    for (char32_t edge : {FirstCodePoint(text), LastCodePoint(text)}) {
      if (edges_.size() < kMaxEdges &&
          std::find(edges_.begin(), edges_.end(), edge) == edges_.end()) {
        edges_.push_back(edge);
      }
    }
  }
}

ControlTexts::Match ControlTexts::Longest(std::string_view text, std::size_t at,
                                          std::size_t limit) const {
  Match best;
  if (at >= limit || !MayBegin(static_cast<unsigned char>(text[at]))) return best;
  std::uint32_t node = 0;
  for (std::size_t i = at; i < limit; ++i) {
    const auto it = next_.find(std::uint64_t{node} << 8 | static_cast<unsigned char>(text[i]));
    if (it == next_.end()) break;
    node = it->second;
    if (const auto end = ends_.find(node); end != ends_.end()) best = {i + 1 - at, end->second};
  }
  return best;
}

}  // namespace pliant
