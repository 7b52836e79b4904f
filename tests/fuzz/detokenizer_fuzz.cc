// Any byte tokens: the stream is valid UTF-8 at every step and equals the whole; valid input comes
// back as it was.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/byte_alphabet.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace {

std::unique_ptr<pliant::Tokenizer> MakeTokenizer() {
  using namespace pliant;
  Vocabulary v;
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    v.tokens.push_back(BytesToAlphabet(std::string_view(&byte, 1)));
    v.kinds.push_back(TokenKind::kNormal);
  }
  for (const std::string_view pair : {"\xF0\x9F", "\x9F\x98", "th", "\xE2\x82", "\x82\xAC"}) {
    v.tokens.push_back(BytesToAlphabet(pair));
    v.kinds.push_back(TokenKind::kNormal);
    v.merges.push_back(BytesToAlphabet(pair.substr(0, 1)) + " " + BytesToAlphabet(pair.substr(1)));
  }
  v.pre_tokenizer = "llama-bpe";
  return Tokenizer::Create(std::move(v)).value();
}

void Require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pliant;
  static const std::unique_ptr<Tokenizer> tokenizer = MakeTokenizer();
  const std::string_view input(reinterpret_cast<const char*>(data), size);

  const auto encoded = tokenizer->Encode(input, {});
  Require(encoded.ok());
  std::string bytes;
  for (const TokenId id : *encoded) bytes += tokenizer->TokenBytes(id, false);
  Require(bytes == input);

  std::vector<TokenId> raw(data, data + size);
  for (const std::vector<TokenId>& ids : {*encoded, raw}) {
    Detokenizer detokenizer(tokenizer.get());
    std::string stream;
    for (const TokenId id : ids) {
      const std::string part = detokenizer.Push(id);
      Require(ValidUtf8Prefix(part) == part.size());
      stream += part;
    }
    stream += detokenizer.Finish();
    Require(stream == tokenizer->Decode(ids, false));
    if (ValidUtf8Prefix(input) == input.size()) Require(stream == input);
  }
  return 0;
}
