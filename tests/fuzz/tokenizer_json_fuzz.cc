// Any bytes as tokenizer.json: a Status or a tokenizer that encodes and decodes without fault.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pliant;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  // What stands behind a NUL byte is tokenizer_config.json.
  const std::size_t cut = input.find('\0');
  const std::string_view config =
      cut == std::string_view::npos ? std::string_view() : input.substr(cut + 1);
  auto vocabulary = Tokenizer::ReadTokenizerJson(input.substr(0, cut), config);
  if (!vocabulary.ok()) return 0;
  auto tokenizer = Tokenizer::Create(std::move(vocabulary).value());
  if (!tokenizer.ok()) return 0;
  for (const std::string_view text :
       {std::string_view("It's 1234 <|end|> \xC3\xA9\xFF  x"), input.substr(0, 200)}) {
    const auto ids = (*tokenizer)->Encode(text, {.parse_special = true, .add_bos = true});
    if (!ids.ok()) continue;
    for (const TokenId id : *ids) {
      if (id < 0 || id >= (*tokenizer)->size()) std::abort();
    }
    (*tokenizer)->Decode(*ids, true);
  }
  return 0;
}
