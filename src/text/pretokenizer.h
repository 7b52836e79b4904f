// Room: text. Pre-tokenizers: they cut text into the pieces inside which BPE may merge. A
// PreTokenizer is immutable after creation; any thread may use it, each with a Session of its own.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/reference_regex.h"
#include "text/tokenizer.h"

namespace pliant {

/// GPT-2's pattern, which the reference's ByteLevel step uses.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// What a GGUF pre-tokenizer word stands for.
struct PreTokenizerFamily {
  std::string_view word;
  std::vector<PreTokenizerStep> steps;
  bool ignore_merges = false;
  bool normalize_nfc = false;
};

/// nullptr for words this build does not know. The families are those whose ids are checked against
/// the reference.
const PreTokenizerFamily* FindPreTokenizerFamily(std::string_view word);
/// The known words, "a, b, c", for messages.
std::string PreTokenizerWords();

/// Receives the pieces in order. A failure stops the split and is returned by it.
class PieceSink {
 public:
  virtual Status Take(std::string_view piece) = 0;

 protected:
  ~PieceSink() = default;
};

class PreTokenizer {
 public:
  /// Compiles the patterns; refuses more than 16 steps and steps after ByteLevel.
  static Result<PreTokenizer> Create(const std::vector<PreTokenizerStep>& steps);

  class Session {
   public:
    explicit Session(const PreTokenizer& pre_tokenizer);
    /// Cuts `text`, valid UTF-8. Pieces are views of `text`, or of a copy that lives until the sink
    /// returns.
    Status Split(std::string_view text, PieceSink* sink) { return RunStep(0, text, sink); }

   private:
    struct Span {
      std::size_t begin, end;
      bool match;
    };
    Status RunStep(std::size_t step, std::string_view text, PieceSink* sink);
    Status Isolate(std::size_t step, std::string_view text, PieceSink* sink);
    Status Regroup(std::size_t step, std::string_view text, PieceSink* sink);
    Result<bool> FindMatch(std::size_t step, std::string_view text, std::size_t from,
                           std::size_t last_end, std::size_t* begin, std::size_t* end);

    const PreTokenizer* pre_tokenizer_;
    std::vector<ReferenceRegex::Matcher> matchers_;  // one a step that has a pattern, in order
  };

 private:
  struct Step {
    PreTokenizerStep::Behavior behavior;
    bool invert = false, add_prefix_space = false;
    int matcher = -1;  // index into regexes_, or -1: no cut
  };
  std::vector<Step> steps_;
  std::vector<std::unique_ptr<ReferenceRegex>> regexes_;
};

}  // namespace pliant
