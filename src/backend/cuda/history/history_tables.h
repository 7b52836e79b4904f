// Room: backend/cuda. What the kernels of histories with a capacity (retained_history.h) work on:
// the tables of one sequence on the device, and a step's list of them. Plain structs, host and
// device. Tables are written by the stream of the steps only.
//
// A token that is whole or has left is found by its number, a kept one by its slot: what
// RetainedHistory keeps one behind the other (slots, then whole tokens) lies in two tables here, so
// that a block that is dropped moves nothing.
#pragma once

#include <cstdint>

#include "backend/cuda/page_layout.h"
#include "backend/plane_code.h"

namespace pliant::cuda {

/// Query heads a KV head that histories can have.
inline constexpr int kMostHistoryGroup = 8;

/// Where the planes of an original block lie: addresses of pages, on the device or in pinned host
/// memory; 0: not to be had. K's planes, then V's.
struct BlockPlaces {
  std::uint64_t plane[2 * kPlanes];
  friend bool operator==(const BlockPlaces&, const BlockPlaces&) = default;
};

/// Device arrays; a unit is a (layer, KV head): layer * kv_heads + head.
struct HistoryTables {
  float* token_score = nullptr;   // [units][token_room]: attention so far; of those that have
  float* token_weight = nullptr;  //   left, until they did. Of kept ones: undefined. No token_score
                                  //   (benches only): attention adds to no score
  // With returns.
  std::uint64_t* signs = nullptr;  // [units][token_room][words]
  std::uint32_t* kept = nullptr;   // [units][token_room / 32]; bit t: token 32 block + t is kept
  std::uint8_t* lost = nullptr;    // [units][token_room / 16]; 1: the page cannot be read
  // Without: keys around their mean in 8 bits, and the inverse of their codes' length.
  std::int8_t* token_codes = nullptr;  // [units][token_room][head_dim]
  float* token_norm = nullptr;         // [units][token_room]
  std::int8_t* slot_codes = nullptr;   // [units][slot_room][head_dim]
  float* slot_norm = nullptr;          // [units][slot_room]

  std::int32_t* slot_token = nullptr;  // [units][slot_room]
  float* slot_score = nullptr;
  float* slot_weight = nullptr;
  double* key_sum = nullptr;         // [units][head_dim]: of the prompt's keys
  const float* weight_at = nullptr;  // [head_dim + 1]: a token's weight by differing signs
  BlockPlaces* places = nullptr;     // [token_room / 32]: of dropped blocks
  // Running means of the queries, [layers][heads][head_dim]; null where nobody asks for them.
  float* short_mean = nullptr;
  float* long_mean = nullptr;
  // GrowthWeights: the same shape; null where the signal is the means' divergence.
  const float* short_weight = nullptr;
  const float* long_weight = nullptr;
  float weight_bias = 0;
  std::int32_t token_room = 0, slot_room = 0, words = 0;
  /// Where a token is in arrays of token_room: without returns these are rings, of a power of two,
  /// that hold whole tokens only. Of tokens to come: score 0, weight 1.
  std::int32_t token_mask = -1;
  std::int32_t keys_summed = 0;  // tokens in key_sum
  std::int32_t sink_tokens = 0, most_returns = 0;
  float return_weight = 0, redundancy = 0;
  bool returns = false;
  bool squared = false;  // scores are of squared attention

  PLIANT_HOST_DEVICE std::int32_t At(std::int32_t token) const { return token & token_mask; }
};

/// What a step tells of a history. Counts are added up by its kernels.
struct HistoryCounts {
  std::uint32_t returned_pages, returned_tokens, lost_pages, pad;
  double query_signal;  // where it was asked for
};

/// A sequence with a history in a step. Device and host layout.
struct HistoryRow {
  HistoryTables tables;
  std::int32_t row = 0;          // the first one, of q and of the output
  std::int32_t rows = 0;         // more than one: only while nothing was dropped
  std::int32_t context = 0;      // tokens cached before this step
  std::int32_t first_block = 0;  // into the step's block table: the sequence's blocks
  std::int32_t first_kept = 0;   // and its kept blocks
  std::int32_t kept_blocks = 0;
  std::int32_t frontier = 0;  // blocks before it are dropped
  std::int32_t index = 0;     // into the step's counts
  bool queries_seen = false;  // tables.short_mean and long_mean hold something
};

}  // namespace pliant::cuda
