// Room: engine. What a client asks for and what it gets back. Values; the engine takes requests by
// a queue and answers through the request's EventSink, on the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "kv/history.h"
#include "text/tokenizer.h"

namespace pliant {

struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  float top_p = 1.0f;
  int top_k = 0;  // 0: off
  float min_p = 0.0f;
  float presence_penalty = 0, frequency_penalty = 0;
  float repetition_penalty = 1.0f;
  std::optional<std::uint64_t> seed;
  std::vector<std::pair<TokenId, float>> logit_bias;
  int top_logprobs = -1;  // -1: no logprobs; n: the chosen token's and the n best (at most 20)
};

struct StopParams {
  std::vector<std::string> strings;  // not part of the output
  std::vector<TokenId> token_ids;
  bool ignore_eos = false;
  std::int64_t max_tokens = 0;  // new tokens, at least 1
  std::int64_t min_tokens = 0;
};

/// How the request lets its cache bend (DESIGN.md section 3).
struct KvParams {
  int min_bits = 0;        // 16, 8 or 4; 0: the server's floor
  std::string cache_salt;  // prefix blocks are shared only between equal salts
  Capacity capacity;       // how much of its history takes part in attention
};

struct GenerateRequest {
  std::vector<TokenId> prompt;  // at least one token; all ids valid
  SamplingParams sampling;
  StopParams stop;
  KvParams kv;
  int priority = 0;              // higher first
  bool special_in_text = false;  // write control tokens out as text
  bool report_prefill =
      false;  // send an event without tokens after each prefill chunk (a terminal shows progress)
};

enum class FinishReason { kStop, kLength, kCancelled, kError };

struct Usage {
  std::int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  std::int64_t tokens_below_16_bits = 0;  // produced while part of the context stood below 16 bits
  int lowest_k_bits = 16, lowest_v_bits = 16;
  std::int64_t preemptions = 0, demotions = 0, restores = 0;
  // With a capacity: blocks that were dropped, pages of 16 tokens of one (layer, KV head) that came
  // back; pages held and those of the whole cache, summed over decode steps.
  std::int64_t dropped = 0, returned = 0;
  std::int64_t held_pages = 0, whole_pages = 0;
};

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0;
  std::vector<std::pair<TokenId, float>> top;  // best first
};

/// A piece of an answer. `text` joined over all events is the answer; a token's text may come with
/// a later token's event, or the last.
struct TokenEvent {
  std::vector<TokenId> tokens;  // produced since the last event (stop tokens are not among them)
  std::vector<TokenLogprob> logprobs;  // one a token, when asked for
  std::string text;                    // certain now: whole characters, no part of a stop string
  std::optional<FinishReason> finish;  // set on the last event only
  std::string stop_match;              // the stop string that ended it, if one did
  Status error;                        // with kError
  Usage usage;                         // final with the last event
  std::int64_t prompt_done = 0;        // prompt tokens computed so far, with report_prefill
};

/// Called on the engine thread; must not block and must not call the engine except Cancel. Not
/// called after the last event.
using EventSink = std::function<void(RequestId, TokenEvent)>;

}  // namespace pliant
