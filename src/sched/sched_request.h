// Room: sched. What the engine hands to the scheduler and gets back, as values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "kv/history.h"

namespace pliant {

struct SchedRequest {
  RequestId id;
  std::vector<std::int32_t> prompt;  // at least one token
  std::int64_t max_new_tokens = 1;   // at least 1
  int priority = 0;                  // higher first
  int min_bits = 0;                  // 16, 12, 8 or 4; 0: the server's floor
  std::string cache_salt;            // prefix blocks are shared only between equal salts
  Capacity capacity;                 // of its history; the server's default where it says nothing
};

/// One per logit row of the plan, in the same order.
struct SampledToken {
  RequestId request;
  std::int32_t token = 0;
  bool finished =
      false;  // a stop condition, or the engine gives the request up; its blocks are freed
};

/// Something that happened to a request without the engine having asked for it.
struct SchedEvent {
  enum class Kind {
    kLength,  // max_new_tokens reached, or the context is full
    kFailed,  // `error` says why (alone and the pool too small, exact copy lost twice, ...)
  } kind = Kind::kLength;
  RequestId request;
  Status error;
};

/// What a request's answer reports about its cache (Usage in engine/request.h).
struct RequestKvFacts {
  std::int64_t cached_tokens = 0;  // prompt tokens taken from the prefix cache at first admission
  std::int64_t tokens_below_16_bits = 0;  // sampled while part of the context stood below 16 bits
  int lowest_k_bits = 16, lowest_v_bits = 16;
  std::int64_t preemptions = 0, offloads = 0, demotions = 0, restores = 0;
  // With a capacity: blocks dropped, growths; pages of 16 tokens that came back and that could not,
  // of one (layer, KV head) each; and of its decode steps, summed, the pages it held and those of
  // its whole history.
  std::int64_t dropped = 0, growths = 0, returned = 0, lost = 0;
  std::int64_t held_pages = 0, whole_pages = 0;
  std::int32_t capacity_blocks = 0, taking_part = 0;  // now; 0 without a capacity
};

}  // namespace pliant
