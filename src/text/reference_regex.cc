#include "text/reference_regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <new>

namespace pliant {
namespace {

constexpr std::size_t kMaxPatternBytes = 64 << 10;
constexpr std::uint32_t kMatchLimit = 50'000'000;   // steps of backtracking for one match
constexpr std::uint32_t kDepthLimit = 100'000;      // of the interpreter, when there is no JIT
constexpr std::uint32_t kHeapLimitKiB = 256 << 10;  // the same

std::string PcreMessage(int code) {
  PCRE2_UCHAR buffer[256];
  if (pcre2_get_error_message(code, buffer, sizeof buffer) < 0)
    return "error " + std::to_string(code);
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

void ReferenceRegex::Free::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }
void ReferenceRegex::Free::operator()(pcre2_real_match_context_8* context) const {
  pcre2_match_context_free(context);
}
void ReferenceRegex::Matcher::Free::operator()(pcre2_real_match_data_8* data) const {
  pcre2_match_data_free(data);
}

Result<ReferenceRegex> ReferenceRegex::Compile(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return TooLarge("pattern of " + std::to_string(pattern.size()) + " bytes, limit " +
                    std::to_string(kMaxPatternBytes));
  }
  PLIANT_ASSIGN_OR_RETURN(const std::string translated, TranslateReferenceRegex(pattern));
  int error = 0;
  PCRE2_SIZE at = 0;
  ReferenceRegex regex;
  // In the reference's syntax ^ and $ are about lines. Code that reads one byte of a character is
  // not wanted from a model file.
  regex.code_.reset(pcre2_compile(
      reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr));
  if (!regex.code_) {
    return InvalidArgument("pattern does not compile: " + PcreMessage(error) + " at byte " +
                           std::to_string(at) + " of \"" + translated.substr(0, 200) + "\"");
  }
  regex.jit_ =
      pcre2_jit_compile(regex.code_.get(), PCRE2_JIT_COMPLETE) == 0;  // else the interpreter serves
  regex.limits_.reset(pcre2_match_context_create(nullptr));
  if (!regex.limits_) return OutOfMemory("PCRE2 match context");
  pcre2_set_match_limit(regex.limits_.get(), kMatchLimit);
  pcre2_set_depth_limit(regex.limits_.get(), kDepthLimit);
  pcre2_set_heap_limit(regex.limits_.get(), kHeapLimitKiB);
  return regex;
}

ReferenceRegex::Matcher::Matcher(const ReferenceRegex& regex)
    : regex_(&regex), data_(pcre2_match_data_create(1, nullptr)) {
  if (!data_) throw std::bad_alloc();
}

Result<bool> ReferenceRegex::Matcher::Find(std::string_view text, std::size_t start,
                                           std::size_t* begin, std::size_t* end) {
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  int rc = PCRE2_ERROR_JIT_STACKLIMIT;
  if (regex_->jit_) {
    rc = pcre2_jit_match(regex_->code_.get(), subject, text.size(), start, 0, data_.get(),
                         regex_->limits_.get());
  }
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {  // the interpreter backtracks on the heap
    rc = pcre2_match(regex_->code_.get(), subject, text.size(), start,
                     PCRE2_NO_JIT | PCRE2_NO_UTF_CHECK, data_.get(), regex_->limits_.get());
  }
  if (rc == PCRE2_ERROR_NOMATCH) return false;
  if (rc < 0) {
    return TooLarge("pre-tokenizer pattern gave up at byte " + std::to_string(start) + ": " +
                    PcreMessage(rc));
  }
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data_.get());
  // \K in a lookaround can put the start behind the end; such a pattern is not a tokenizer's.
  if (offsets[0] > offsets[1] || offsets[0] < start) {
    return InvalidArgument("pre-tokenizer pattern matches backwards at byte " +
                           std::to_string(start));
  }
  *begin = offsets[0];
  *end = offsets[1];
  return true;
}

}  // namespace pliant
