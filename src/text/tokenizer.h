// Room: text. Byte-level BPE tokenizers of the GPT-2 family (SmolLM2, Llama 3, Qwen 2/3, GPT-2) and
// streaming detokenisation. A Tokenizer is immutable after creation: any number of threads may use
// it. A Detokenizer belongs to one stream.
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
  kControl,  // steers the model (turn markers, end of text); not shown as text, parsed only where
             // allowed
  kUserDefined,  // written out as text, and parsed wherever it stands (<think>)
  kUnused,
};

/// One step of a tokenizer.json pre-tokenizer: it cuts each piece that the step before made.
struct PreTokenizerStep {
  enum class Kind : std::uint8_t {
    kSplit,      // at the matches of `pattern`
    kDigits,     // numeric characters apart, one by one when `individual`
    kByteLevel,  // at GPT-2's pattern when `use_regex`, else not at all; must be the last step
  };
  enum class Behavior : std::uint8_t {
    kIsolated,
    kRemoved,
    kMergedWithPrevious,
    kMergedWithNext,
    kContiguous
  };
  Kind kind = Kind::kSplit;
  std::string pattern;  // a regular expression in the reference's (Oniguruma's) syntax
  Behavior behavior = Behavior::kIsolated;
  bool invert = false;  // what the pattern does not match counts as the match
  bool individual = false;
  bool use_regex = false;
  bool add_prefix_space =
      false;  // in front of every piece that reaches this step and does not begin with one
};

/// How an added token (kControl, kUserDefined) is looked for; tokens without a rule have none of
/// these.
struct AddedTokenRule {
  TokenId id = 0;
  bool single_word = false;             // only where no word character touches it
  bool lstrip = false, rstrip = false;  // takes the whitespace on its left, right with it
  bool normalized = false;              // looked for in the normalised text, after all others
};

/// What a model file says about its vocabulary; read from GGUF keys or tokenizer.json by model/ and
/// text/.
struct Vocabulary {
  std::vector<std::string> tokens;  // index = id; kNormal ones in GPT-2's byte-to-unicode alphabet,
                                    // others literal; "" = a hole
  std::vector<TokenKind> kinds;     // same size
  std::vector<std::string>
      merges;  // "left right", best first; Create takes them, vocabulary() has none
  std::vector<AddedTokenRule> added_token_rules;  // may be empty
  std::string pre_tokenizer;  // GGUF's tokenizer.ggml.pre word ("smollm", "llama-bpe", "qwen2",
                              // "gpt-2", ...), or "" with steps
  std::vector<PreTokenizerStep>
      pre_tokenizer_steps;     // from tokenizer.json; used when pre_tokenizer is ""
  bool ignore_merges = false;  // a whole pre-token that is in the vocabulary is taken as it is
                               // (implied by "llama-bpe")
  bool add_prefix_space =
      false;  // with a pre_tokenizer word: a space in front of text that does not begin with one
  bool normalize_nfc = false;  // implied by "qwen2" and others
  bool unknown_to_unk =
      false;  // bytes without a token become unk; otherwise they are dropped, as the references do
  bool fuse_unk = false;  // several in a row become one
  std::optional<TokenId> bos, eos, pad, unk;
  std::vector<TokenId> end_of_generation;  // all ids that end an answer; Create adds eos and
                                           // control tokens of well-known names
  bool add_bos = false, add_eos = false;  // add_eos is what the file says; Encode never appends eos
};

struct EncodeOptions {
  bool parse_special = false;  // kControl tokens in the text become their ids; otherwise they are
                               // ordinary characters
  bool add_bos = false;        // put bos in front when the vocabulary asks for one
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Checks sizes, ids, merges and patterns; refuses with the key or rule at fault.
  static Result<std::unique_ptr<Tokenizer>> Create(Vocabulary vocabulary);
  /// Reads a byte-level BPE Hugging Face tokenizer.json (its whole text, at most 256 MiB) plus
  /// tokenizer_config.json's text ("" when absent).
  static Result<Vocabulary> ReadTokenizerJson(std::string_view json, std::string_view config_json);

  /// At most 64 MiB of text (kTooLarge). Bytes that are not valid UTF-8 are not refused: each
  /// becomes its byte's token and ends the pre-token before it. Bytes without a token: see
  /// Vocabulary::unknown_to_unk.
  virtual Result<std::vector<TokenId>> Encode(std::string_view text,
                                              EncodeOptions options) const = 0;
  /// The bytes of one token (control tokens: their literal name when `special`, else nothing). Any
  /// bytes, not only valid UTF-8. Ids that are holes, unused or outside the vocabulary have none.
  /// The view lives as long as the tokenizer.
  virtual std::string_view TokenBytes(TokenId id, bool special) const = 0;
  /// Whole text; invalid UTF-8 becomes U+FFFD.
  virtual std::string Decode(std::span<const TokenId> ids, bool special) const = 0;
  virtual const Vocabulary& vocabulary() const = 0;
  virtual std::int32_t size() const = 0;
  virtual bool IsEndOfGeneration(TokenId id) const = 0;
};

/// Turns tokens into text as they come and never emits half a character. Bytes that cannot become a
/// character turn into one U+FFFD a maximal invalid sequence, as soon as that is certain, at the
/// latest in Finish.
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
