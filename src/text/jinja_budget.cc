#include "text/jinja_budget.h"

#include <utility>

namespace pliant::jinja {
namespace {

// Far below the 8 MiB of a usual thread, far above what real templates need (about 64 KiB).
constexpr std::size_t kMaxStackBytes = 3 << 20;

std::uintptr_t StackPointer() {
  return reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
}

}  // namespace

void Fail(ErrorKind kind, std::string message) { throw Failure{kind, std::move(message)}; }

thread_local Budget* Budget::current_ = nullptr;

Budget::Budget(const TemplateLimits& limits)
    : limits_(limits), outer_(current_), stack_base_(StackPointer()) {
  current_ = this;
}

Budget::~Budget() { current_ = outer_; }

void Budget::Allocate(std::size_t bytes) {
  const std::size_t limit = 4 * limits_.max_output_bytes;
  if (bytes > limit || live_ > limit - bytes) {
    Fail(ErrorKind::kLimit, "the template's values need more than " + std::to_string(limit) +
                                " bytes of memory (4 times max_output_bytes)");
  }
  live_ += bytes;
}

void Budget::CheckStack() const {
  const std::uintptr_t here = StackPointer();
  const std::uintptr_t used = stack_base_ > here ? stack_base_ - here : here - stack_base_;
  if (used > kMaxStackBytes) {
    Fail(ErrorKind::kLimit, "the template's calls and values nest too deep for the stack");
  }
}

void Budget::FailSteps() const {
  Fail(ErrorKind::kLimit,
       "the template needs more than " + std::to_string(limits_.max_steps) + " steps (max_steps)");
}

void CheckStringSize(std::size_t bytes) {
  const Budget* budget = Budget::Current();
  const std::size_t limit = budget ? budget->limits().max_output_bytes : std::size_t{64} << 20;
  if (bytes > limit) {
    Fail(ErrorKind::kLimit, "a string of the template would have more than " +
                                std::to_string(limit) + " bytes (max_output_bytes)");
  }
}

void CheckValueDepth(int depth) {
  const Budget* budget = Budget::Current();
  const int limit = budget ? budget->limits().max_depth : 200;
  if (depth > limit) {
    Fail(ErrorKind::kLimit,
         "a value of the template nests more than " + std::to_string(limit) + " deep (max_depth)");
  }
}

}  // namespace pliant::jinja
