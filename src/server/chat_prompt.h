// Room: server. From messages to token ids: the template's own markers become control tokens, the
// same markers inside what a client wrote stay ordinary text. Immutable after creation, any thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "server/control_texts.h"
#include "server/openai_request.h"

namespace pliant {

/// How the separation works. A rendered template is one string; which control texts in it are the
/// template's?
/// 1. Client strings without any character that a control text begins or ends with cannot make one:
/// render, encode, done.
/// 2. Else render twice. Once (A) with only complete control texts in client strings replaced by
/// private-use characters, so
///    that the template still sees everything else; and once (B) with every such edge character
///    replaced. After putting the characters back both must give the same text; then B says for
///    each edge character whether a client wrote it, and a control text counts only if no client
///    wrote either end. This also rules out markers put together from several strings.
/// 3. Where the texts differ (the template looks for such characters, as in splitting at
/// "</think>"), A is used; it may not
///    hold more of any control token than B does, else the request is refused.
class ChatPrompter {
 public:
  using RenderFn = std::function<Result<std::string>(const Json& context)>;

  /// `tokenizer` must outlive this. `bos_text` and `eos_text` are the template's bos_token and
  /// eos_token.
  ChatPrompter(const Tokenizer* tokenizer, RenderFn render, std::string bos_text,
               std::string eos_text);

  /// Token ids of the conversation; begin-of-text stands in front once if the template wrote it or
  /// the vocabulary asks for it. InvalidArgument carries the template's own message when it
  /// refuses.
  Result<std::vector<TokenId>> Encode(const ChatInput& input) const;

 private:
  struct Rendered;  // text, and the byte ranges in it that a client wrote
  struct Control {  // one that the template wrote
    std::size_t begin, end;
    TokenId id;
  };
  struct Mapping;  // private-use characters in use for one request

  Json Context(const ChatInput& input) const;
  Result<Rendered> RenderMapped(const ChatInput& input, const Mapping& mapping) const;
  Result<std::vector<TokenId>> EncodeRendered(const Rendered& rendered) const;
  std::vector<Control> ControlsIn(const Rendered& rendered) const;
  std::vector<bool> ForgedBytes(const Rendered& rendered) const;
  std::vector<TokenId> WithBos(std::vector<TokenId> ids) const;

  const Tokenizer* tokenizer_;
  RenderFn render_;
  std::string bos_text_, eos_text_;
  ControlTexts controls_;
};

}  // namespace pliant
