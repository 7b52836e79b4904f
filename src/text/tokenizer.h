// Room: text. Byte-level BPE tokenizers of the GPT-2 family (SmolLM2, Llama 3, Qwen 2/3, GPT-2) and streaming detokenisation.
// A Tokenizer is immutable after creation: any number of threads may use it. A Detokenizer belongs to one stream.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace pliant {

using TokenId = std::int32_t;

enum class TokenKind : std::uint8_t {
  kNormal,
  kControl,      // steers the model (turn markers, end of text); not shown as text, parsed only where allowed
  kUserDefined,  // written out as text, and parsed wherever it stands (<think>)
  kUnused,
};

/// What a model file says about its vocabulary; read from GGUF keys or tokenizer.json by model/ and text/.
struct Vocabulary {
  std::vector<std::string> tokens;  // index = id; kNormal ones in GPT-2's byte-to-unicode alphabet, others literal
  std::vector<TokenKind> kinds;     // same size
  std::vector<std::string> merges;  // "left right", best first
  std::string pre_tokenizer;        // GGUF's tokenizer.ggml.pre word ("smollm", "llama-bpe", "qwen2", "gpt-2", ...), or "" with regexes
  std::vector<std::string> split_regexes;  // from tokenizer.json, applied one after the other; used when pre_tokenizer is ""
  bool individual_digits = false;   // tokenizer.json's Digits(individual_digits) step before the split
  bool ignore_merges = false;       // a whole pre-token that is in the vocabulary is taken as it is (Llama 3)
  bool add_prefix_space = false;
  bool normalize_nfc = false;       // Qwen
  std::optional<TokenId> bos, eos, pad, unk;
  std::vector<TokenId> end_of_generation;  // all ids that end an answer (eos, <|im_end|>, <|eot_id|>, ...)
  bool add_bos = false, add_eos = false;
};

struct EncodeOptions {
  bool parse_special = false;  // kControl tokens in the text become their ids; otherwise they are ordinary characters
  bool add_bos = false;        // put bos in front when the vocabulary asks for one
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Checks sizes, ids, merges and patterns; refuses with the key or rule at fault.
  static Result<std::unique_ptr<Tokenizer>> Create(Vocabulary vocabulary);
  /// Reads a Hugging Face tokenizer.json (its whole text) plus tokenizer_config.json's text ("" when absent).
  static Result<Vocabulary> ReadTokenizerJson(std::string_view json, std::string_view config_json);

  virtual Result<std::vector<TokenId>> Encode(std::string_view text, EncodeOptions options) const = 0;
  /// The bytes of one token (control tokens: their literal name when `special`, else nothing). Any bytes, not only valid UTF-8.
  virtual std::string_view TokenBytes(TokenId id, bool special) const = 0;
  /// Whole text; invalid UTF-8 becomes U+FFFD.
  virtual std::string Decode(std::span<const TokenId> ids, bool special) const = 0;
  virtual const Vocabulary& vocabulary() const = 0;
  virtual std::int32_t size() const = 0;
  virtual bool IsEndOfGeneration(TokenId id) const = 0;
};

/// Turns tokens into text as they come and never emits half a character. Bytes that cannot become a character turn into one
/// U+FFFD a maximal invalid sequence, as soon as that is certain, at the latest in Finish.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer* tokenizer, bool special = false)
      : tokenizer_(tokenizer), special_(special) {}
  /// Text that is certain now; may be empty.
  std::string Push(TokenId id);
  /// What is still held back.
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  bool special_;
  std::string pending_;  // at most 3 bytes: the start of a character
};

}  // namespace pliant
