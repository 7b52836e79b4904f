#include "text/chat_template.h"

#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>
#include <utility>

#include "text/jinja_eval.h"
#include "text/jinja_parser.h"
#include "text/jinja_unicode.h"

namespace pliant {
namespace {

// What recursion over source and values can bear on a thread with the usual 8 MiB of stack, with
// room for sanitizers.
constexpr int kMaxDepth = 400;

Status ToStatus(const jinja::Failure& failure, int line) {
  // What the template itself says is passed on as it is; the rest needs the place.
  if (failure.kind == jinja::ErrorKind::kRaised) return InvalidArgument(failure.message);
  if (failure.line != 0) line = failure.line;
  std::string message = "chat template, line " + std::to_string(line) + ": " + failure.message;
  return failure.kind == jinja::ErrorKind::kLimit ? TooLarge(std::move(message))
                                                  : InvalidArgument(std::move(message));
}

}  // namespace

struct ChatTemplate::Impl {
  std::unique_ptr<jinja::Program> program;
  TemplateLimits limits;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChatTemplate::~ChatTemplate() = default;

Result<std::unique_ptr<ChatTemplate>> ChatTemplate::Parse(std::string_view source,
                                                          TemplateLimits limits) {
  if (source.size() > limits.max_source_bytes) {
    return TooLarge("a chat template has " + std::to_string(source.size()) + " bytes, more than " +
                    std::to_string(limits.max_source_bytes) + " (max_source_bytes)");
  }
  if (!jinja::IsValidUtf8(source)) return InvalidArgument("a chat template is not valid UTF-8");
  limits.max_depth = std::min(limits.max_depth, kMaxDepth);
  try {
    auto impl = std::make_unique<Impl>();
    impl->program = jinja::Parser::Parse(source, limits);
    impl->limits = limits;
    return std::unique_ptr<ChatTemplate>(new ChatTemplate(std::move(impl)));
  } catch (const jinja::Failure& failure) {
    return ToStatus(failure, 0);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("no memory to parse a chat template of " + std::to_string(source.size()) +
                       " bytes");
  }
}

Result<std::string> ChatTemplate::Render(const nlohmann::ordered_json& context,
                                         std::chrono::system_clock::time_point now) const {
  if (!context.is_object())
    return InvalidArgument("the variables of a chat template are not an object");
  int line = 0;
  try {
    jinja::Budget budget(impl_->limits);
    jinja::Evaluator evaluator(*impl_->program, now);
    try {
      return evaluator.Render(context);
    } catch (...) {
      line = evaluator.line();
      throw;
    }
  } catch (const jinja::Failure& failure) {
    return ToStatus(failure, line);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("no memory to render a chat template");
  }
}

bool ChatTemplate::Uses(std::string_view variable) const {
  return impl_->program->free_names.contains(variable);
}

}  // namespace pliant
