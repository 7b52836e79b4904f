// Room: text. Chat templates: a Jinja interpreter with the sandbox rules and extras of Hugging Face transformers (trim_blocks,
// lstrip_blocks, loop controls, tojson, strftime_now, raise_exception, generation blocks).
// A ChatTemplate is immutable after Parse: any thread may render it. Templates and messages are untrusted: depth, steps and
// output are bounded.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "base/status.h"

namespace pliant {

struct TemplateLimits {
  int max_depth = 200;                    // nesting of the source, of calls and of values
  std::size_t max_source_bytes = 1 << 20;
  std::size_t max_output_bytes = 64 << 20;
  std::size_t max_steps = 20'000'000;     // statements and expressions evaluated
};

class ChatTemplate {
 public:
  /// Syntax errors: InvalidArgument with the line.
  static Result<std::unique_ptr<ChatTemplate>> Parse(std::string_view source, TemplateLimits limits = {});
  ~ChatTemplate();

  /// `context` is an object whose members are the template's variables: messages, tools, add_generation_prompt, bos_token, ...
  /// Order of object members is kept. What the template refuses (raise_exception), or gets wrong (undefined attribute, type
  /// error), is InvalidArgument with the template's message.
  Result<std::string> Render(const nlohmann::ordered_json& context) const;

  /// Whether the source mentions a top-level variable (e.g. "tools").
  bool Uses(std::string_view variable) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pliant
