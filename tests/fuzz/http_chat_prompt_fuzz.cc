// A message with any text: as many control tokens as the template wrote, and every character where
// it was.
#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "server/chat_prompt.h"
#include "server/support/tiny_tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pliant;  // NOLINT
  static const testing::TinyTokenizer tokenizer(false, {"</s>", "[INST]",
                                                        "<\xEF\xBD\x9C"
                                                        "end\xEF\xBD\x9C>"});
  static const ChatPrompter prompter(
      &tokenizer,
      [](const Json& context) {
        std::string out;
        for (const Json& message : context["messages"]) {
          out += "<|im_start|>" + message["content"].get<std::string>() + "<|im_end|>";
        }
        return out;
      },
      "<s>", "<|im_end|>");
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (!IsValidUtf8(text)) return 0;  // refused at the door
  // Two contents next to each other, cut at a character.
  std::size_t cut = size / 2;
  while (cut > 0 && cut < size && (data[cut] & 0xC0) == 0x80) --cut;
  ChatInput input;
  input.messages.push_back({{"role", "user"}, {"content", text.substr(0, cut)}});
  input.messages.push_back({{"role", "user"}, {"content", text.substr(cut)}});
  const Result<std::vector<TokenId>> ids = prompter.Encode(input);
  PLIANT_CHECK(ids.ok(), "text is never refused");
  const auto controls = std::count_if(ids->begin(), ids->end(), [&](TokenId id) {
    return tokenizer.vocabulary().kinds[static_cast<std::size_t>(id)] == TokenKind::kControl;
  });
  PLIANT_CHECK(controls == 4, "only the template makes control tokens");
  PLIANT_CHECK(tokenizer.Decode(*ids, true) == "<|im_start|>" + std::string(text.substr(0, cut)) +
                                                   "<|im_end|><|im_start|>" +
                                                   std::string(text.substr(cut)) + "<|im_end|>",
               "nothing is lost");
  return 0;
}
