// Room: server. Answers in OpenAI's shapes. Values in, text out; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/json.h"
#include "text/tokenizer.h"

namespace pliant {

/// What every answer of one HTTP request has in common.
struct AnswerHeader {
  bool chat = false;
  std::string id;            // chatcmpl-... or cmpl-...
  std::int64_t created = 0;  // seconds since 1970
  std::string model;
  bool include_usage = false;  // streams: every chunk but the last says "usage": null
};

/// Length of `text` in characters, where the tokens of a choice's logprobs stand (OpenAI's
/// text_offset).
struct LogprobCursor {
  std::int64_t text_offset = 0;
};

/// {"prompt_tokens", ..., "prompt_tokens_details", "kv"}.
Json UsageJson(const Usage& usage);

/// "stop", "length".
const char* FinishReasonName(FinishReason reason);

/// The logprobs member of a choice: null when `wanted` is false. Moves the cursor past the tokens.
Json LogprobsJson(bool chat, bool wanted, const std::vector<TokenLogprob>& logprobs,
                  const Tokenizer& tokenizer, LogprobCursor* cursor);

/// One choice of a plain answer.
Json PlainChoice(bool chat, int index, std::string text, Json logprobs, FinishReason reason,
                 const std::string& stop_match);
/// The whole plain answer.
std::string PlainAnswer(const AnswerHeader& header, Json choices, const Usage& usage);

/// A part of a stream: choices[index] with a delta (chat) or text. `first` adds the role to a
/// chat's delta. `reason` may be null.
std::string StreamChunk(const AnswerHeader& header, int index, const std::string& text, bool first,
                        Json logprobs, const FinishReason* reason, const std::string& stop_match);
/// The extra chunk with no choices.
std::string StreamUsageChunk(const AnswerHeader& header, const Usage& usage);
/// "data: ...\n\n".
std::string SseEvent(std::string_view data);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";

/// "chatcmpl-" or "cmpl-" and 24 random hex digits.
std::string NewAnswerId(bool chat);

inline constexpr const char* kSystemFingerprint = "pliant-0.1.0";

}  // namespace pliant
