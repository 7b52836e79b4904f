// Room: engine. From one row of logits to one token. A Sampler belongs to one request and is used
// on the engine thread only.
//
// Order of work: repetition, presence and frequency penalties and logit_bias change the logits;
// temperature divides them; then min_p, top_k and top_p cut the distribution, each on what the one
// before left. Logprobs are those of the model itself, before any of that. Randomness depends on
// the seed and the token's index alone, never on the batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "backend/sampling.h"
#include "engine/request.h"

namespace pliant {

class Sampler {
 public:
  /// `random_seed` is used when the request names no seed. The prompt counts for the repetition
  /// penalty.
  Sampler(const SamplingParams& params, std::span<const TokenId> prompt, std::uint64_t random_seed);

  /// The next token from `logits` [vocabulary] (valid ids: 0 .. vocab_size - 1, the row may be
  /// padded beyond). Internal when a logit that matters is not finite: the request must end, no
  /// token is invented.
  Result<TokenLogprob> Sample(std::span<const float> logits, std::int64_t vocab_size);

  /// How a backend that samples shall take the next token, in Sample's place; with the same draw,
  /// so that both give the same token. The row's changes are Changes().
  RowSampling ForDevice() const;
  /// The token that the backend took: it counts for the penalties of the next one and uses up the
  /// draw. (Sample's own tokens count by themselves.)
  void Took(TokenId token);
  /// What penalties, bias and forbidden tokens do to the next row; every id once.
  std::span<const LogitChange> Changes() const { return changes_; }

  /// Forbids tokens from the next one on, instead of those forbidden before (end-of-sequence ids
  /// before min_tokens).
  void Forbid(std::span<const TokenId> ids);

 private:
  LogitChange& ChangeOf(TokenId id);
  float BiasOf(TokenId id) const;
  int TopLogprobs() const { return std::min(params_.top_logprobs, kMostTopLogprobs); }

  SamplingParams params_;
  std::uint64_t seed_;
  std::uint64_t draws_ = 0;
  std::unordered_map<TokenId, std::int32_t>
      output_counts_;  // kept only for presence and frequency penalties
  std::vector<LogitChange> changes_;
  std::unordered_map<TokenId, std::size_t> change_of_;  // where in changes_ an id is
  std::vector<TokenId> forbidden_;
  std::vector<float> scratch_;
  RowSampler rows_;
};

/// Writes a row's logprobs the way a client gets them.
void SetLogprobs(const RowLogprobs& from, TokenLogprob& to);

}  // namespace pliant
