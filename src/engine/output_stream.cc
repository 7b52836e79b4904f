#include "engine/output_stream.h"

#include <algorithm>
#include <utility>

namespace pliant {
namespace {

// Length of the longest proper prefix of `stop` that `text` ends with.
std::size_t OpenSuffix(std::string_view text, std::string_view stop) {
  std::size_t length = std::min(text.size(), stop.size() - 1);
  while (length > 0 && !text.ends_with(stop.substr(0, length))) --length;
  return length;
}

}  // namespace

OutputStream::OutputStream(const Tokenizer* tokenizer, std::vector<std::string> stop_strings, bool special_in_text)
    : detokenizer_(tokenizer, special_in_text), stops_(std::move(stop_strings)) {
  std::erase(stops_, std::string());
}

OutputStream::Piece OutputStream::Push(TokenId id, bool may_stop) {
  return Absorb(detokenizer_.Push(id), may_stop);
}

OutputStream::Piece OutputStream::Finish() {
  Piece piece = Absorb(detokenizer_.Finish(), true);
  if (!piece.stop) piece.text += std::exchange(held_, {});
  return piece;
}

OutputStream::Piece OutputStream::Absorb(std::string text, bool may_stop) {
  Piece piece;
  if (stops_.empty()) {
    piece.text = std::move(text);
    return piece;
  }
  held_ += text;
  if (may_stop) {
    std::size_t best = std::string::npos;
    for (const std::string& stop : stops_) {
      const std::size_t at = held_.find(stop);
      if (at < best) {
        best = at;
        piece.stop = stop;
      }
    }
    if (piece.stop) {
      piece.text = held_.substr(0, best);
      held_.clear();
      return piece;
    }
  }
  std::size_t keep = 0;
  for (const std::string& stop : stops_) keep = std::max(keep, OpenSuffix(held_, stop));
  piece.text = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return piece;
}

}  // namespace pliant
