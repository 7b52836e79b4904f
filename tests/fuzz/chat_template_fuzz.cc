// Fuzzes the template engine: the input is a template, rendered with a fixed conversation under
// small limits. Whatever it does, it must end soon, with a text within the limits or with a clear
// error.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/check.h"
#include "text/chat_template.h"

namespace {

const nlohmann::ordered_json& Context() {
  static const auto context = nlohmann::ordered_json::parse(R"({
    "messages": [
      {"role": "system", "content": "Be brief."},
      {"role": "user", "content": "Größe 日本 <b>?"},
      {"role": "assistant", "content": null, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, 2.5, null, true]}}}]},
      {"role": "tool", "content": "4", "tool_call_id": "c1"},
      {"role": "user", "content": [{"type": "text", "text": "part"}]}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "add_generation_prompt": true, "bos_token": "<s>", "eos_token": "</s>",
    "s": "a b c", "n": 3, "x": 0.5, "l": [3, 1, 2], "d": {"k": "v"}, "t": true})");
  return context;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pliant::TemplateLimits limits;
  limits.max_source_bytes = 1 << 16;
  limits.max_output_bytes = 1 << 20;
  limits.max_steps = 200'000;
  const std::string_view source(reinterpret_cast<const char*>(data), size);
  const auto parsed = pliant::ChatTemplate::Parse(source, limits);
  if (!parsed.ok()) {
    PLIANT_CHECK(!parsed.status().message().empty(), "an error without a message");
    return 0;
  }
  static_cast<void>((*parsed)->Uses("tools"));
  const auto rendered = (*parsed)->Render(Context(), std::chrono::system_clock::time_point());
  if (rendered.ok())
    PLIANT_CHECK(rendered->size() <= limits.max_output_bytes, "output over the limit");
  return 0;
}
