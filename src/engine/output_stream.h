// Room: engine. From tokens to text that may be shown: whole characters, and nothing that could still become part of a stop
// string. Streamed and whole answers use the same code, so they are equal. Belongs to one request, engine thread only.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace pliant {

class OutputStream {
 public:
  OutputStream(const Tokenizer* tokenizer, std::vector<std::string> stop_strings, bool special_in_text);

  struct Piece {
    std::string text;                 // certain now
    std::optional<std::string> stop;  // the stop string that ended the answer; nothing may be pushed after it
  };
  /// `may_stop` is false before min_tokens: stop strings that end there are ignored.
  Piece Push(TokenId id, bool may_stop = true);
  /// What is still held back; a stop string may be found in it.
  Piece Finish();

 private:
  Piece Absorb(std::string text, bool may_stop);

  Detokenizer detokenizer_;
  std::vector<std::string> stops_;
  std::string held_;  // text seen but not certain: a suffix that starts some stop string
};

}  // namespace pliant
