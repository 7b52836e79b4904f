// Room: text. What one rendering of a chat template may use: steps, bytes alive, bytes in one
// string, stack. Belongs to the thread that renders; values and operators find it through the
// thread, so that no operation can forget to pay. Failures inside the interpreter are exceptions of
// type Failure; chat_template.cc turns them into a Status, none leaves the room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "text/chat_template.h"

namespace pliant::jinja {

/// What went wrong, after the exception class that the reference engine raises.
enum class ErrorKind : std::uint8_t {
  kSyntax,       // TemplateSyntaxError, TemplateAssertionError
  kRaised,       // raise_exception(message): the template refuses its input
  kUndefined,    // UndefinedError
  kType,         // TypeError
  kValue,        // ValueError, KeyError, IndexError
  kRuntime,      // TemplateRuntimeError, FilterArgumentError
  kSecurity,     // SecurityError
  kOverflow,     // OverflowError, ZeroDivisionError
  kUnsupported,  // valid for the reference engine, left out here on purpose
  kLimit,        // one of TemplateLimits
};

struct Failure {
  ErrorKind kind;
  std::string message;
  int line = 0;  // 0: not known yet
};

[[noreturn]] void Fail(ErrorKind kind, std::string message);

/// Counts what a rendering uses. The newest Budget of a thread is its current one, until it is
/// destroyed.
class Budget {
 public:
  explicit Budget(const TemplateLimits& limits);
  ~Budget();
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  static Budget* Current() { return current_; }
  const TemplateLimits& limits() const { return limits_; }

  void Charge(std::size_t steps) {
    steps_ += steps;
    if (steps_ > limits_.max_steps) FailSteps();
  }
  /// Bytes held by values; fails before the limit of four times the output is passed.
  void Allocate(std::size_t bytes);
  void Release(std::size_t bytes) { live_ -= bytes; }
  /// Fails when the stack of this thread has grown too far since the budget was made.
  void CheckStack() const;

 private:
  [[noreturn]] void FailSteps() const;

  static thread_local Budget* current_;
  TemplateLimits limits_;
  Budget* outer_;
  std::uintptr_t stack_base_;
  std::size_t steps_ = 0;
  std::size_t live_ = 0;
};

/// Pays for `steps` elementary operations.
inline void Charge(std::size_t steps) {
  if (Budget* budget = Budget::Current()) budget->Charge(steps);
}
/// Pays for work that goes once over `bytes` of text.
inline void ChargeBytes(std::size_t bytes) { Charge(bytes / 32); }

/// Fails when a string of `bytes` would be over the limit on output; call before building it.
void CheckStringSize(std::size_t bytes);
/// Fails when `depth` levels of values are too many.
void CheckValueDepth(int depth);
inline void CheckStack() {
  if (Budget* budget = Budget::Current()) budget->CheckStack();
}

/// A string under construction that cannot pass the limit.
class TextBuilder {
 public:
  void Append(std::string_view text) {
    Reserve(text.size());
    text_.append(text);
  }
  void Append(char c) { Append(std::string_view(&c, 1)); }
  void Append(std::size_t count, char c) {
    Reserve(count);
    text_.append(count, c);
  }
  const std::string& text() const { return text_; }
  std::string Take() { return std::move(text_); }
  std::size_t size() const { return text_.size(); }
  void Truncate(std::size_t size) { text_.resize(size); }

 private:
  static constexpr std::size_t kBatch = 4096;  // bytes between two looks at the limits
  // Looks at the limits before `more` bytes are added, but not for every few bytes.
  void Reserve(std::size_t more) {
    if (more <= kBatch && pending_ + more <= kBatch) {
      pending_ += more;
      return;
    }
    CheckStringSize(text_.size() + more);
    ChargeBytes(pending_ + more);
    pending_ = 0;
  }
  std::string text_;
  std::size_t pending_ = 0;
};

}  // namespace pliant::jinja
