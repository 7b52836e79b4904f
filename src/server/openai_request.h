// Room: server. The bodies of the API as checked values, and the parsers that check them. Free of
// sockets. Any thread.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "server/json.h"
#include "text/tokenizer.h"

namespace pliant {

/// Ranges of the API, stated in docs/api.md. A value outside is refused, never clamped.
inline constexpr int kMaxChoices = 128;  // prompts times n
inline constexpr int kMaxStopStrings = 16;
inline constexpr std::size_t kMaxStopBytes = 1024;
inline constexpr int kMaxStopTokens = 64;
inline constexpr int kMaxLogitBias = 1024;
inline constexpr int kMaxTopLogprobs = 20;
inline constexpr double kMinTemperature = 1e-5;  // below it only 0, which is greedy
inline constexpr double kMaxTemperature = 100;
inline constexpr std::int64_t kMaxTokensField = 1'000'000'000;
inline constexpr std::size_t kMaxSaltBytes = 256;
inline constexpr int kMaxPriority = 1000;
inline constexpr std::int64_t kDefaultCompletionTokens = 16;  // as OpenAI's /v1/completions

/// One prompt of /v1/completions: text, or ids.
struct PromptInput {
  std::string text;
  std::vector<TokenId> ids;
  bool is_ids = false;
};

/// What a chat template gets to see.
struct ChatInput {
  Json messages =
      Json::array();  // content is a string or null; roles are system, user, assistant, tool
  Json tools;         // null without tools
  Json template_kwargs = Json::object();
  bool add_generation_prompt = true;
};

/// POST /v1/chat/completions and /v1/completions.
struct CompletionRequest {
  bool chat = false;
  std::string model;  // empty: not given
  ChatInput chat_input;
  std::vector<PromptInput> prompts;
  bool echo = false;
  bool parse_special = true;  // raw prompts: control tokens in the text are parsed
  bool add_special =
      true;  // raw text prompts: begin-of-text in front when the vocabulary asks for it
  std::optional<std::int64_t> max_tokens;  // as given
  /// Without max_tokens: so many, or what the context leaves when that is less.
  std::int64_t default_max_tokens = std::numeric_limits<std::int64_t>::max();
  int n = 1;
  bool stream = false;
  bool include_usage = false;
  /// sampling, stop (without max_tokens), kv, priority and special_in_text filled; prompt and
  /// max_tokens per choice later.
  GenerateRequest base;
};

struct TokenizeRequest {
  std::optional<std::string> text;  // else chat
  ChatInput chat_input;
  bool add_special = false;
  bool parse_special = true;
  bool with_pieces = false;
};

struct DetokenizeRequest {
  std::vector<TokenId> tokens;
  bool special = true;  // control tokens are written out
};

/// Each returns the first fault found, naming its field. `tokenizer` gives the range of token ids.
std::optional<ApiError> ParseChatRequest(const Json& body, const Tokenizer& tokenizer,
                                         CompletionRequest* out);
std::optional<ApiError> ParseTextRequest(const Json& body, const Tokenizer& tokenizer,
                                         CompletionRequest* out);
std::optional<ApiError> ParseTokenizeRequest(const Json& body, TokenizeRequest* out);
std::optional<ApiError> ParseDetokenizeRequest(const Json& body, const Tokenizer& tokenizer,
                                               DetokenizeRequest* out);

}  // namespace pliant
