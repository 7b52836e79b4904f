// Room: text. Chat templates: a Jinja interpreter with the sandbox rules and extras of Hugging Face
// transformers (trim_blocks, lstrip_blocks, loop controls, tojson, strftime_now, raise_exception,
// generation blocks). A ChatTemplate is immutable after Parse: any thread may render it. Templates
// and messages are untrusted: depth, steps and output are bounded.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace pliant {

struct TemplateLimits {
  int max_depth = 200;  // nesting of the source, of calls and of values; at most 400
  std::size_t max_source_bytes = 1 << 20;
  std::size_t max_output_bytes = 64 << 20;
  std::size_t max_steps = 20'000'000;  // statements and expressions evaluated
};

class ChatTemplate {
 public:
  /// Syntax errors: InvalidArgument with the line. Over a limit (size, depth): TooLarge.
  static Result<std::unique_ptr<ChatTemplate>> Parse(std::string_view source,
                                                     TemplateLimits limits = {});
  ~ChatTemplate();

  /// `context` is an object whose members are the template's variables: messages, tools,
  /// add_generation_prompt, bos_token, ... Order of object members is kept. What the template
  /// refuses (raise_exception) is InvalidArgument with exactly the template's message; what it gets
  /// wrong (undefined attribute, type error) is InvalidArgument with the line; what passes one of
  /// the limits is TooLarge. `now` is what strftime_now shows, in local time.
  Result<std::string> Render(
      const nlohmann::ordered_json& context,
      std::chrono::system_clock::time_point now = std::chrono::system_clock::now()) const;

  /// Whether the source reads a variable that it does not set itself before (e.g. "tools").
  bool Uses(std::string_view variable) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pliant
