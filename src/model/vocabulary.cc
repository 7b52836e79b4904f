// Room: model. Vocabularies from GGUF keys, and what ends an answer.
#include "model/vocabulary.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace pliant {
namespace {

constexpr std::string_view kModelKey = "tokenizer.ggml.model";
constexpr std::string_view kPreKey = "tokenizer.ggml.pre";
constexpr std::string_view kTokensKey = "tokenizer.ggml.tokens";
constexpr std::string_view kTypesKey = "tokenizer.ggml.token_type";
constexpr std::string_view kMergesKey = "tokenizer.ggml.merges";
constexpr std::string_view kBosKey = "tokenizer.ggml.bos_token_id";
constexpr std::string_view kEosKey = "tokenizer.ggml.eos_token_id";

/// Pre-tokenizer words whose models are Llama 3's: whole pre-tokens first, and a begin token unless
/// the file says otherwise.
bool IsLlama3(std::string_view pre) {
  return pre == "llama-bpe" || pre == "llama3" || pre == "llama-v3";
}

Result<std::optional<TokenId>> OptionalId(const GgufFile& file, std::string_view key,
                                          std::size_t tokens) {
  if (!file.Has(key)) return std::optional<TokenId>();
  PLIANT_ASSIGN_OR_RETURN(const std::uint64_t id, file.Uint(key));
  // Writers use 2^32 - 1 for "none".
  if (id == std::numeric_limits<std::uint32_t>::max()) return std::optional<TokenId>();
  if (id >= tokens) {
    return InvalidArgument("key '" + std::string(key) + "' is " + std::to_string(id) +
                           ", the vocabulary has " + std::to_string(tokens) + " tokens");
  }
  return std::optional(static_cast<TokenId>(id));
}

Result<TokenKind> KindOf(std::int64_t type, std::size_t index) {
  switch (type) {
    case 1:  // normal
    case 6:  // byte
      return TokenKind::kNormal;
    case 2:  // unknown: a marker, never text
    case 3:
      return TokenKind::kControl;
    case 4:
      return TokenKind::kUserDefined;
    case 5:
      return TokenKind::kUnused;
    default:
      return InvalidArgument("key '" + std::string(kTypesKey) + "' has type " +
                             std::to_string(type) + " for token " + std::to_string(index) +
                             " (1 to 6 are known)");
  }
}

}  // namespace

Status CheckGgufVocabulary(const GgufFile& file, Architecture architecture,
                           std::int64_t vocab_size) {
  for (const std::string_view key :
       {kModelKey, kPreKey, kTokensKey, kTypesKey, kMergesKey, kEosKey}) {
    if (!file.Has(key)) return NotFound("key '" + std::string(key) + "' is missing");
  }
  // Qwen models have no begin token; the others name theirs even where it is not added.
  if (architecture == Architecture::kLlama && !file.Has(kBosKey)) {
    return NotFound("key '" + std::string(kBosKey) + "' is missing");
  }
  PLIANT_ASSIGN_OR_RETURN(const std::string model, file.String(kModelKey));
  if (model != "gpt2") {
    return Unimplemented("tokenizer kind '" + model.substr(0, 40) + "' (key '" +
                         std::string(kModelKey) + "') is not supported; byte-level BPE (gpt2) is");
  }
  PLIANT_ASSIGN_OR_RETURN(const std::uint64_t tokens, file.Count(kTokensKey));
  PLIANT_ASSIGN_OR_RETURN(const std::uint64_t types, file.Count(kTypesKey));
  if (tokens == 0) return InvalidArgument("key '" + std::string(kTokensKey) + "' is an empty list");
  if (types != tokens) {
    return InvalidArgument("key '" + std::string(kTypesKey) + "' has " + std::to_string(types) +
                           " entries, '" + std::string(kTokensKey) + "' has " +
                           std::to_string(tokens));
  }
  const std::uint64_t limit = vocab_size > 0 ? static_cast<std::uint64_t>(vocab_size) : 1 << 24;
  if (tokens > limit) {
    return InvalidArgument("key '" + std::string(kTokensKey) + "' has " + std::to_string(tokens) +
                           " entries, the embedding has " + std::to_string(limit) + " rows");
  }
  return Status::Ok();
}

Result<Vocabulary> ReadGgufVocabulary(const GgufFile& file) {
  Vocabulary vocabulary;
  PLIANT_ASSIGN_OR_RETURN(vocabulary.pre_tokenizer, file.String(kPreKey));
  PLIANT_ASSIGN_OR_RETURN(vocabulary.tokens, file.Strings(kTokensKey));
  PLIANT_ASSIGN_OR_RETURN(vocabulary.merges, file.Strings(kMergesKey));
  PLIANT_ASSIGN_OR_RETURN(const std::vector<std::int64_t> types, file.Ints(kTypesKey));
  const std::size_t size = vocabulary.tokens.size();
  if (types.size() != size) {
    return InvalidArgument("key '" + std::string(kTypesKey) + "' has " +
                           std::to_string(types.size()) + " entries, '" + std::string(kTokensKey) +
                           "' has " + std::to_string(size));
  }
  vocabulary.kinds.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    PLIANT_ASSIGN_OR_RETURN(const TokenKind kind, KindOf(types[i], i));
    vocabulary.kinds.push_back(kind);
  }
  PLIANT_ASSIGN_OR_RETURN(vocabulary.bos, OptionalId(file, kBosKey, size));
  PLIANT_ASSIGN_OR_RETURN(vocabulary.eos, OptionalId(file, kEosKey, size));
  PLIANT_ASSIGN_OR_RETURN(vocabulary.pad,
                          OptionalId(file, "tokenizer.ggml.padding_token_id", size));
  PLIANT_ASSIGN_OR_RETURN(vocabulary.unk,
                          OptionalId(file, "tokenizer.ggml.unknown_token_id", size));
  vocabulary.ignore_merges = IsLlama3(vocabulary.pre_tokenizer);
  vocabulary.add_bos = IsLlama3(vocabulary.pre_tokenizer);
  if (file.Has("tokenizer.ggml.add_bos_token")) {
    PLIANT_ASSIGN_OR_RETURN(vocabulary.add_bos, file.Bool("tokenizer.ggml.add_bos_token"));
  }
  if (file.Has("tokenizer.ggml.add_eos_token")) {
    PLIANT_ASSIGN_OR_RETURN(vocabulary.add_eos, file.Bool("tokenizer.ggml.add_eos_token"));
  }
  if (vocabulary.eos) AddEndOfGeneration(vocabulary, *vocabulary.eos);
  for (const char* key : {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    PLIANT_ASSIGN_OR_RETURN(const std::optional<TokenId> id, OptionalId(file, key, size));
    if (id) AddEndOfGeneration(vocabulary, *id);
  }
  return vocabulary;
}

void AddEndOfGeneration(Vocabulary& vocabulary, TokenId id) {
  auto& ends = vocabulary.end_of_generation;
  if (std::find(ends.begin(), ends.end(), id) == ends.end()) ends.push_back(id);
}

Result<Vocabulary> ByteVocabulary(std::int64_t vocab_size) {
  if (vocab_size < 257) {
    return InvalidArgument("a byte vocabulary needs 257 tokens, the model has " +
                           std::to_string(vocab_size));
  }
  Vocabulary vocabulary;
  vocabulary.pre_tokenizer = "gpt-2";
  // GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up,
  // in order.
  int shifted = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    const int code = printable ? byte : 256 + shifted++;
    std::string token;
    if (code < 128) {
      token += static_cast<char>(code);
    } else {
      token += static_cast<char>(0xc0 | code >> 6);
      token += static_cast<char>(0x80 | (code & 63));
    }
    vocabulary.tokens.push_back(std::move(token));
    vocabulary.kinds.push_back(TokenKind::kNormal);
  }
  vocabulary.tokens.emplace_back("<|endoftext|>");
  vocabulary.kinds.push_back(TokenKind::kControl);
  for (std::int64_t id = 257; id < vocab_size; ++id) {
    vocabulary.tokens.push_back("<|unused_" + std::to_string(id) + "|>");
    vocabulary.kinds.push_back(TokenKind::kUnused);
  }
  vocabulary.eos = 256;
  AddEndOfGeneration(vocabulary, 256);
  return vocabulary;
}

}  // namespace pliant
