// Room: text. Regular expressions of tokenizer files. They are written for the reference's engine
// (Oniguruma, Ruby syntax) and run here on PCRE2 with its JIT: patterns are translated where the
// two differ, and refused where no faithful translation is known. A ReferenceRegex is immutable;
// any thread may match with it, each with a Matcher of its own.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;

namespace pliant {

/// Rewrites \s \S \w \W \p{...} so that they have the reference's Unicode data. Refuses set
/// operations and nested sets in [...], \h, and (?m), whose meanings differ.
Result<std::string> TranslateReferenceRegex(std::string_view pattern);

class ReferenceRegex {
 public:
  /// `pattern` in the reference's syntax, at most 64 KiB.
  static Result<ReferenceRegex> Compile(std::string_view pattern);

  /// Buffers of one matching thread; cheap to make, not shared.
  class Matcher {
   public:
    explicit Matcher(const ReferenceRegex& regex);
    /// First match in `text`, valid UTF-8, at or after `start`. Found: *begin and *end are set. A
    /// pattern that backtracks beyond the limits is kTooLarge.
    Result<bool> Find(std::string_view text, std::size_t start, std::size_t* begin,
                      std::size_t* end);

   private:
    struct Free {
      void operator()(pcre2_real_match_data_8* data) const;
    };
    const ReferenceRegex* regex_;
    std::unique_ptr<pcre2_real_match_data_8, Free> data_;
  };

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
    void operator()(pcre2_real_match_context_8* context) const;
  };
  std::unique_ptr<pcre2_real_code_8, Free> code_;
  std::unique_ptr<pcre2_real_match_context_8, Free> limits_;
  bool jit_ = false;
};

}  // namespace pliant
