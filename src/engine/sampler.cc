#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pliant {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// SplitMix64: a well-mixed 64-bit value for each input, so that draw i of a seed needs no state
// (Steele, Lea, Flood 2014).
std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

void SetLogprobs(const RowLogprobs& from, TokenLogprob& to) {
  to.logprob = from.chosen;
  to.top.clear();
  for (int i = 0; i < from.count; ++i) to.top.emplace_back(from.ids[i], from.values[i]);
}

Sampler::Sampler(const SamplingParams& params, std::span<const TokenId> prompt,
                 std::uint64_t random_seed)
    : params_(params), seed_(params.seed.value_or(random_seed)) {
  if (params_.repetition_penalty != 1.0f) {
    for (const TokenId id : prompt) ChangeOf(id).penalty = params_.repetition_penalty;
  }
  for (const auto& [id, bias] : params_.logit_bias) ChangeOf(id).add += bias;
}

LogitChange& Sampler::ChangeOf(TokenId id) {
  const auto [at, fresh] = change_of_.try_emplace(id, changes_.size());
  if (fresh) changes_.push_back({.id = id});
  return changes_[at->second];
}

float Sampler::BiasOf(TokenId id) const {
  float bias = 0;
  for (const auto& [biased, by] : params_.logit_bias) {
    if (biased == id) bias += by;
  }
  return bias;
}

void Sampler::Forbid(std::span<const TokenId> ids) {
  if (std::ranges::equal(ids, forbidden_)) return;
  for (const TokenId id : forbidden_) ChangeOf(id).add = BiasOf(id);
  // What changes nothing is not kept: a row without changes is cheaper on a device.
  std::erase_if(changes_, [](const LogitChange& c) {
    return c.penalty == 1 && c.subtract == 0 && c.add == 0;
  });
  change_of_.clear();
  for (std::size_t i = 0; i < changes_.size(); ++i) change_of_[changes_[i].id] = i;
  forbidden_.assign(ids.begin(), ids.end());
  for (const TokenId id : forbidden_) ChangeOf(id).add = kNegativeInfinity;
}

void Sampler::Took(TokenId token) {
  ++draws_;
  if (params_.repetition_penalty != 1.0f) ChangeOf(token).penalty = params_.repetition_penalty;
  if (params_.presence_penalty != 0 || params_.frequency_penalty != 0) {
    const std::int32_t count = ++output_counts_[token];
    ChangeOf(token).subtract =
        params_.presence_penalty + params_.frequency_penalty * static_cast<float>(count);
  }
}

RowSampling Sampler::ForDevice() const {
  RowSampling row{.temperature = params_.temperature,
                  .top_p = params_.top_p,
                  .min_p = params_.min_p,
                  .top_k = params_.top_k,
                  .logprobs = TopLogprobs()};
  if (params_.temperature != 0)
    row.uniform = static_cast<double>(Mix(Mix(seed_) ^ draws_) >> 11) * 0x1.0p-53;
  return row;
}

Result<TokenLogprob> Sampler::Sample(std::span<const float> logits, std::int64_t vocab_size) {
  const std::span<const float> row =
      logits.first(std::min<std::size_t>(logits.size(), static_cast<std::size_t>(vocab_size)));
  const Peak model_peak = FindPeak(row);
  if (!model_peak.finite) return Internal("the model's logits are not finite for this request");
  Peak peak = model_peak;
  std::span<const float> adjusted = row;
  if (!changes_.empty()) {
    scratch_.assign(row.begin(), row.end());
    ChangeLogits(scratch_, changes_);
    adjusted = scratch_;
    peak = FindPeak(adjusted);
    if (!peak.finite) return Internal("no token is left to sample after bias and penalties");
  }
  TokenLogprob out;
  out.token = params_.temperature == 0 ? peak.id : rows_.Draw(adjusted, peak.value, ForDevice());
  Took(out.token);
  if (params_.top_logprobs >= 0) SetLogprobs(LogprobsOf(row, out.token, TopLogprobs()), out);
  return out;
}

}  // namespace pliant
