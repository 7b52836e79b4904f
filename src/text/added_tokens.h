// Room: text. Finds added tokens (control and user-defined ones) in text: leftmost, longest, not
// overlapping, as the reference does. Immutable after construction; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace pliant {

class AddedTokens {
 public:
  /// The tokens of `vocabulary` whose rule says `normalized`, or those whose rule does not.
  AddedTokens(const Vocabulary& vocabulary, bool normalized);

  struct Found {
    std::size_t begin = 0, end = 0;  // bytes taken, stripped whitespace included
    TokenId id = -1;
  };
  /// The first token in text[from..]; text before `from` is looked at for word edges only. Control
  /// tokens count only with `parse_special`, yet hide what they overlap either way, as in the
  /// reference.
  bool Find(std::string_view text, std::size_t from, bool parse_special, Found* found) const;
  bool empty() const { return entries_.empty(); }

 private:
  struct Entry {
    std::string text;
    AddedTokenRule rule;
    bool control = false;
  };
  const Entry* Longest(std::string_view text) const;

  std::vector<Entry> entries_;  // sorted by text
  struct Range {
    std::uint32_t begin = 0, end = 0;
  };
  std::array<Range, 256> by_first_byte_{};
};

}  // namespace pliant
