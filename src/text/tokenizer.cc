#include "text/tokenizer.h"

#include <algorithm>
#include <array>
#include <new>

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/byte_alphabet.h"
#include "text/normalizer.h"
#include "text/pretokenizer.h"
#include "text/token_table.h"
#include "text/utf8.h"

namespace pliant {
namespace {

constexpr std::size_t kMaxTokens = 1 << 22;
constexpr std::size_t kMaxMerges = 1 << 24;
constexpr std::size_t kMaxVocabularyBytes = 1 << 30;
constexpr std::size_t kMaxTextBytes =
    64 << 20;  // a pre-token of this size takes about 2 GiB while it is merged

/// Control tokens that end an answer whatever the file says about eos.
constexpr std::array<std::string_view, 12> kEndNames = {
    "<|im_end|>",      "<|endoftext|>", "<|eot_id|>", "<|eom_id|>",    "<|end_of_text|>",
    "<|end|>",         "<|eot|>",       "<EOT>",      "<end_of_turn>", "<|END_OF_TURN_TOKEN|>",
    "<|end_of_turn|>", "</s>"};

Status CheckId(std::string_view key, const std::optional<TokenId>& id, std::size_t size) {
  if (!id || (*id >= 0 && static_cast<std::size_t>(*id) < size)) return {};
  return InvalidArgument("tokenizer: " + std::string(key) + " id " + std::to_string(*id) +
                         " is outside the vocabulary of " + std::to_string(size) + " tokens");
}

Status CheckVocabulary(const Vocabulary& v) {
  const std::size_t size = v.tokens.size();
  if (size == 0) return InvalidArgument("tokenizer: the vocabulary has no tokens");
  if (size > kMaxTokens) {
    return TooLarge("tokenizer: " + std::to_string(size) + " tokens, limit " +
                    std::to_string(kMaxTokens));
  }
  if (v.kinds.size() != size) {
    return InvalidArgument("tokenizer: " + std::to_string(size) + " tokens but " +
                           std::to_string(v.kinds.size()) + " token kinds");
  }
  if (v.merges.size() > kMaxMerges) {
    return TooLarge("tokenizer: " + std::to_string(v.merges.size()) + " merges, limit " +
                    std::to_string(kMaxMerges));
  }
  std::size_t bytes = 0;
  for (const std::string& token : v.tokens) bytes += token.size();
  if (bytes > kMaxVocabularyBytes) {
    return TooLarge("tokenizer: tokens of " + std::to_string(bytes) + " bytes, limit " +
                    std::to_string(kMaxVocabularyBytes));
  }
  PLIANT_RETURN_IF_ERROR(CheckId("bos", v.bos, size));
  PLIANT_RETURN_IF_ERROR(CheckId("eos", v.eos, size));
  PLIANT_RETURN_IF_ERROR(CheckId("pad", v.pad, size));
  PLIANT_RETURN_IF_ERROR(CheckId("unk", v.unk, size));
  for (const TokenId id : v.end_of_generation)
    PLIANT_RETURN_IF_ERROR(CheckId("end of generation", id, size));
  for (const AddedTokenRule& rule : v.added_token_rules)
    PLIANT_RETURN_IF_ERROR(CheckId("added token", rule.id, size));
  if (v.add_bos && !v.bos)
    return InvalidArgument("tokenizer: add_bos is set but there is no bos token");
  return {};
}

/// Turns the pre-tokenizer word into steps and what else it implies.
Status ApplyFamily(Vocabulary* v) {
  if (v->pre_tokenizer.empty()) {
    if (!v->pre_tokenizer_steps.empty()) return {};
    return InvalidArgument(
        "tokenizer: the model names no pre-tokenizer (tokenizer.ggml.pre); known words: " +
        PreTokenizerWords());
  }
  const PreTokenizerFamily* family = FindPreTokenizerFamily(v->pre_tokenizer);
  if (family == nullptr) {
    return Unimplemented("tokenizer: pre-tokenizer \"" + v->pre_tokenizer.substr(0, 80) +
                         "\" is not supported; known words: " + PreTokenizerWords());
  }
  v->pre_tokenizer_steps = family->steps;
  v->pre_tokenizer_steps.front().add_prefix_space = v->add_prefix_space;
  v->ignore_merges |= family->ignore_merges;
  v->normalize_nfc |= family->normalize_nfc;
  return {};
}

/// What a token stands for in text. A normal token outside the byte alphabet stands for itself, as
/// in the reference's decoder.
std::string BytesOf(const std::string& token, TokenKind kind) {
  if (kind == TokenKind::kUnused) return {};
  if (kind == TokenKind::kNormal) {
    if (auto bytes = AlphabetToBytes(token)) return *std::move(bytes);
  }
  return token;
}

class ByteLevelTokenizer final : public Tokenizer {
 public:
  static Result<std::unique_ptr<Tokenizer>> Make(Vocabulary vocabulary) {
    PLIANT_RETURN_IF_ERROR(CheckVocabulary(vocabulary));
    PLIANT_RETURN_IF_ERROR(ApplyFamily(&vocabulary));
    PLIANT_ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer,
                            PreTokenizer::Create(vocabulary.pre_tokenizer_steps));
    std::unique_ptr<ByteLevelTokenizer> t(
        new ByteLevelTokenizer(std::move(vocabulary), std::move(pre_tokenizer)));
    PLIANT_ASSIGN_OR_RETURN(t->bpe_, Bpe::Create(t->vocabulary_, &t->arena_));
    t->vocabulary_.merges = {};
    t->FindEndTokens();
    return std::unique_ptr<Tokenizer>(std::move(t));
  }

  Result<std::vector<TokenId>> Encode(std::string_view text, EncodeOptions options) const override;

  std::string_view TokenBytes(TokenId id, bool special) const override {
    if (id < 0 || id >= size()) return {};
    if (vocabulary_.kinds[static_cast<std::size_t>(id)] == TokenKind::kControl && !special)
      return {};
    return arena_[id];
  }

  std::string Decode(std::span<const TokenId> ids, bool special) const override {
    std::string bytes, text;
    for (const TokenId id : ids) bytes += TokenBytes(id, special);
    if (ValidUtf8Prefix(bytes) == bytes.size()) return bytes;
    DrainUtf8(&bytes, /*flush=*/true, &text);
    return text;
  }

  const Vocabulary& vocabulary() const override { return vocabulary_; }
  std::int32_t size() const override {
    return static_cast<std::int32_t>(vocabulary_.tokens.size());
  }
  bool IsEndOfGeneration(TokenId id) const override {
    return std::binary_search(vocabulary_.end_of_generation.begin(),
                              vocabulary_.end_of_generation.end(), id);
  }

 private:
  /// One call of Encode: the pieces' way from text to ids.
  class Encoding final : public PieceSink {
   public:
    Encoding(const ByteLevelTokenizer& tokenizer, bool parse_special)
        : t_(tokenizer), parse_special_(parse_special), session_(tokenizer.pre_tokenizer_) {}
    Status Run(std::string_view text);
    Status Take(std::string_view piece) override {
      t_.bpe_->Encode(piece, &scratch_, &ids);
      return {};
    }
    std::vector<TokenId> ids;

   private:
    Status AnyBytes(std::string_view text);
    Status Valid(std::string_view text);

    const ByteLevelTokenizer& t_;
    bool parse_special_;
    PreTokenizer::Session session_;
    Bpe::Scratch scratch_;
    std::string normalized_;
  };

  ByteLevelTokenizer(Vocabulary vocabulary, PreTokenizer pre_tokenizer)
      : vocabulary_(std::move(vocabulary)),
        pre_tokenizer_(std::move(pre_tokenizer)),
        raw_added_(vocabulary_, /*normalized=*/false),
        normalized_added_(vocabulary_, /*normalized=*/true) {
    std::size_t bytes = 0;
    for (const std::string& token : vocabulary_.tokens) bytes += token.size();
    arena_.Reserve(vocabulary_.tokens.size(), bytes);
    for (std::size_t i = 0; i < vocabulary_.tokens.size(); ++i) {
      arena_.Add(BytesOf(vocabulary_.tokens[i], vocabulary_.kinds[i]));
    }
  }

  void FindEndTokens() {
    std::vector<TokenId>& ends = vocabulary_.end_of_generation;
    if (vocabulary_.eos) ends.push_back(*vocabulary_.eos);
    for (TokenId id = 0; id < size(); ++id) {
      const auto i = static_cast<std::size_t>(id);
      if (vocabulary_.kinds[i] == TokenKind::kControl &&
          std::find(kEndNames.begin(), kEndNames.end(), vocabulary_.tokens[i]) != kEndNames.end()) {
        ends.push_back(id);
      }
    }
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  }

  Vocabulary vocabulary_;  // end_of_generation sorted, merges empty
  PreTokenizer pre_tokenizer_;
  AddedTokens raw_added_, normalized_added_;
  TokenBytesArena arena_;
  std::unique_ptr<Bpe> bpe_;
};

/// Cuts out the added tokens that are looked for in the text as it came.
Status ByteLevelTokenizer::Encoding::Run(std::string_view text) {
  std::size_t from = 0;
  AddedTokens::Found found;
  while (t_.raw_added_.Find(text, from, parse_special_, &found)) {
    PLIANT_RETURN_IF_ERROR(AnyBytes(text.substr(from, found.begin - from)));
    ids.push_back(found.id);
    from = found.end;
  }
  return AnyBytes(text.substr(from));
}

/// Bytes that are no UTF-8 become their byte tokens; they end the pieces on both sides.
Status ByteLevelTokenizer::Encoding::AnyBytes(std::string_view text) {
  while (!text.empty()) {
    const std::size_t valid = ValidUtf8Prefix(text);
    if (valid > 0) PLIANT_RETURN_IF_ERROR(Valid(text.substr(0, valid)));
    text.remove_prefix(valid);
    if (text.empty()) break;
    const Utf8Unit unit = NextUtf8(text);
    t_.bpe_->EncodeBytes(text.substr(0, unit.size), &ids);
    text.remove_prefix(unit.size);
  }
  return {};
}

Status ByteLevelTokenizer::Encoding::Valid(std::string_view text) {
  if (t_.vocabulary_.normalize_nfc) text = NormalizeNfc(text, &normalized_);
  std::size_t from = 0;
  AddedTokens::Found found;
  while (t_.normalized_added_.Find(text, from, parse_special_, &found)) {
    PLIANT_RETURN_IF_ERROR(session_.Split(text.substr(from, found.begin - from), this));
    ids.push_back(found.id);
    from = found.end;
  }
  return session_.Split(text.substr(from), this);
}

Result<std::vector<TokenId>> ByteLevelTokenizer::Encode(std::string_view text,
                                                        EncodeOptions options) const {
  if (text.size() > kMaxTextBytes) {
    return TooLarge("text of " + std::to_string(text.size()) + " bytes, limit " +
                    std::to_string(kMaxTextBytes));
  }
  try {
    Encoding encoding(*this, options.parse_special);
    encoding.ids.reserve(text.size() / 4 + 2);
    if (options.add_bos && vocabulary_.add_bos) encoding.ids.push_back(*vocabulary_.bos);
    PLIANT_RETURN_IF_ERROR(encoding.Run(text));
    return std::move(encoding.ids);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("no memory to tokenize " + std::to_string(text.size()) + " bytes of text");
  }
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::Create(Vocabulary vocabulary) {
  try {
    return ByteLevelTokenizer::Make(std::move(vocabulary));
  } catch (const std::bad_alloc&) {
    return OutOfMemory("tokenizer: no memory for the vocabulary");
  }
}

}  // namespace pliant
