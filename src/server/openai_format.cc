#include "server/openai_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

namespace pliant {
namespace {

/// JSON has no infinities; OpenAI writes this for "next to impossible".
double FiniteLogprob(float value) {
  return std::isfinite(value) ? static_cast<double>(value) : -9999.0;
}

/// A token as text. Half characters are written out as bytes, so that different tokens stay
/// different.
std::string TokenText(std::string_view bytes) {
  if (IsValidUtf8(bytes)) return std::string(bytes);
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "bytes:";
  for (unsigned char byte : bytes) {
    out += "\\x";
    out += kHex[byte >> 4];
    out += kHex[byte & 15];
  }
  return out;
}

Json TokenBytesJson(std::string_view bytes) {
  Json out = Json::array();
  for (unsigned char byte : bytes) out.push_back(byte);
  return out;
}

std::int64_t Characters(std::string_view bytes) {
  return std::count_if(bytes.begin(), bytes.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; });
}

Json ChatLogprobs(const std::vector<TokenLogprob>& logprobs, const Tokenizer& tokenizer) {
  const auto entry = [&](TokenId token, float logprob) {
    const std::string_view bytes = tokenizer.TokenBytes(token, true);
    Json out;
    out["token"] = TokenText(bytes);
    out["logprob"] = FiniteLogprob(logprob);
    out["bytes"] = TokenBytesJson(bytes);
    return out;
  };
  Json content = Json::array();
  for (const TokenLogprob& one : logprobs) {
    Json item = entry(one.token, one.logprob);
    item["top_logprobs"] = Json::array();
    for (const auto& [token, logprob] : one.top)
      item["top_logprobs"].push_back(entry(token, logprob));
    content.push_back(std::move(item));
  }
  Json out;
  out["content"] = std::move(content);
  out["refusal"] = nullptr;
  return out;
}

Json TextLogprobs(const std::vector<TokenLogprob>& logprobs, const Tokenizer& tokenizer,
                  LogprobCursor* cursor) {
  Json tokens = Json::array(), values = Json::array(), tops = Json::array(),
       offsets = Json::array();
  for (const TokenLogprob& one : logprobs) {
    const std::string_view bytes = tokenizer.TokenBytes(one.token, true);
    tokens.push_back(TokenText(bytes));
    values.push_back(FiniteLogprob(one.logprob));
    Json top = Json::object();
    for (const auto& [token, logprob] : one.top) {
      top[TokenText(tokenizer.TokenBytes(token, true))] = FiniteLogprob(logprob);
    }
    tops.push_back(std::move(top));
    offsets.push_back(cursor->text_offset);
    cursor->text_offset += Characters(tokenizer.TokenBytes(one.token, false));
  }
  Json out;
  out["tokens"] = std::move(tokens);
  out["token_logprobs"] = std::move(values);
  out["top_logprobs"] = std::move(tops);
  out["text_offset"] = std::move(offsets);
  return out;
}

Json AnswerObject(const AnswerHeader& header, const char* object) {
  Json out;
  out["id"] = header.id;
  out["object"] = object;
  out["created"] = header.created;
  out["model"] = header.model;
  out["system_fingerprint"] = kSystemFingerprint;
  return out;
}

const char* StreamObject(const AnswerHeader& header) {
  return header.chat ? "chat.completion.chunk" : "text_completion";
}

}  // namespace

Json UsageJson(const Usage& usage) {
  Json out;
  out["prompt_tokens"] = usage.prompt_tokens;
  out["completion_tokens"] = usage.completion_tokens;
  out["total_tokens"] = usage.prompt_tokens + usage.completion_tokens;
  out["prompt_tokens_details"]["cached_tokens"] = usage.cached_tokens;
  Json& kv = out["kv"];
  kv["tokens_below_16_bits"] = usage.tokens_below_16_bits;
  kv["lowest_k_bits"] = usage.lowest_k_bits;
  kv["lowest_v_bits"] = usage.lowest_v_bits;
  kv["preemptions"] = usage.preemptions;
  kv["demotions"] = usage.demotions;
  kv["restores"] = usage.restores;
  kv["dropped"] = usage.dropped;
  kv["returned"] = usage.returned;
  kv["held_share"] = usage.whole_pages > 0 ? static_cast<double>(usage.held_pages) /
                                                 static_cast<double>(usage.whole_pages)
                                           : 1.0;
  return out;
}

const char* FinishReasonName(FinishReason reason) {
  return reason == FinishReason::kLength ? "length" : "stop";
}

Json LogprobsJson(bool chat, bool wanted, const std::vector<TokenLogprob>& logprobs,
                  const Tokenizer& tokenizer, LogprobCursor* cursor) {
  if (!wanted) return nullptr;
  return chat ? ChatLogprobs(logprobs, tokenizer) : TextLogprobs(logprobs, tokenizer, cursor);
}

Json PlainChoice(bool chat, int index, std::string text, Json logprobs, FinishReason reason,
                 const std::string& stop_match) {
  Json out;
  out["index"] = index;
  if (chat) {
    Json& message = out["message"];
    message["role"] = "assistant";
    message["content"] = std::move(text);
    message["refusal"] = nullptr;
  } else {
    out["text"] = std::move(text);
  }
  out["logprobs"] = std::move(logprobs);
  out["finish_reason"] = FinishReasonName(reason);
  if (!stop_match.empty()) out["stop_reason"] = stop_match;
  return out;
}

std::string PlainAnswer(const AnswerHeader& header, Json choices, const Usage& usage) {
  Json out = AnswerObject(header, header.chat ? "chat.completion" : "text_completion");
  out["choices"] = std::move(choices);
  out["usage"] = UsageJson(usage);
  return DumpJson(out);
}

std::string StreamChunk(const AnswerHeader& header, int index, const std::string& text, bool first,
                        Json logprobs, const FinishReason* reason, const std::string& stop_match) {
  Json choice;
  choice["index"] = index;
  if (header.chat) {
    Json& delta = choice["delta"];
    delta = Json::object();
    if (first) delta["role"] = "assistant";
    if (first || !text.empty()) delta["content"] = text;
  } else {
    choice["text"] = text;
  }
  choice["logprobs"] = std::move(logprobs);
  choice["finish_reason"] = reason == nullptr ? Json(nullptr) : Json(FinishReasonName(*reason));
  if (reason != nullptr && !stop_match.empty()) choice["stop_reason"] = stop_match;
  Json out = AnswerObject(header, StreamObject(header));
  out["choices"] = Json::array();
  out["choices"].push_back(std::move(choice));
  if (header.include_usage) out["usage"] = nullptr;
  return DumpJson(out);
}

std::string StreamUsageChunk(const AnswerHeader& header, const Usage& usage) {
  Json out = AnswerObject(header, StreamObject(header));
  out["choices"] = Json::array();
  out["usage"] = UsageJson(usage);
  return DumpJson(out);
}

std::string SseEvent(std::string_view data) {
  std::string out = "data: ";
  out += data;
  out += "\n\n";
  return out;
}

std::string NewAnswerId(bool chat) {
  thread_local std::mt19937_64 random{std::random_device{}()};
  std::string id = chat ? "chatcmpl-" : "cmpl-";
  for (int i = 0; i < 2; ++i) {
    const std::uint64_t bits = random();
    for (int digit = 0; digit < 12; ++digit) id += "0123456789abcdef"[bits >> (4 * digit) & 15];
  }
  return id;
}

}  // namespace pliant
