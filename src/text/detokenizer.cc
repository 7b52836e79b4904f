#include "text/tokenizer.h"
#include "text/utf8.h"

namespace pliant {

std::string Detokenizer::Push(TokenId id) {
  std::string text;
  pending_ += tokenizer_->TokenBytes(id, special_);
  DrainUtf8(&pending_, /*flush=*/false, &text);
  return text;
}

std::string Detokenizer::Finish() {
  std::string text;
  DrainUtf8(&pending_, /*flush=*/true, &text);
  return text;
}

}  // namespace pliant
