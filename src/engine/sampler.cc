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

double LogSumExp(std::span<const float> logits, float max_logit) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - max_logit);
  return max_logit + std::log(sum);
}

std::vector<std::pair<TokenId, float>> TopLogits(std::span<const float> logits, int n) {
  const auto better = [](const std::pair<TokenId, float>& a, const std::pair<TokenId, float>& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  };
  std::vector<std::pair<TokenId, float>> heap;  // worst of the best on top
  heap.reserve(n + 1);
  for (std::size_t i = 0; i < logits.size() && n > 0; ++i) {
    const std::pair<TokenId, float> item(static_cast<TokenId>(i), logits[i]);
    if (static_cast<int>(heap.size()) == n && !better(item, heap.front())) continue;
    heap.push_back(item);
    std::push_heap(heap.begin(), heap.end(), better);
    if (static_cast<int>(heap.size()) > n) {
      std::pop_heap(heap.begin(), heap.end(), better);
      heap.pop_back();
    }
  }
  std::sort_heap(heap.begin(), heap.end(), better);
  return heap;
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
  if (params_.repetition_penalty != 1.0f) ChangeOf(token).penalty = params_.repetition_penalty;
  if (params_.presence_penalty != 0 || params_.frequency_penalty != 0) {
    const std::int32_t count = ++output_counts_[token];
    ChangeOf(token).subtract =
        params_.presence_penalty + params_.frequency_penalty * static_cast<float>(count);
  }
}

RowSampling Sampler::NextRow() {
  RowSampling row{.temperature = params_.temperature,
                  .top_p = params_.top_p,
                  .min_p = params_.min_p,
                  .top_k = params_.top_k};
  if (params_.temperature != 0)
    row.uniform = static_cast<double>(Mix(Mix(seed_) ^ draws_++) >> 11) * 0x1.0p-53;
  return row;
}

std::optional<RowSampling> Sampler::ForDevice() {
  if (params_.top_logprobs >= 0) return std::nullopt;
  return NextRow();
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
  out.token = params_.temperature == 0 ? peak.id : rows_.Draw(adjusted, peak.value, NextRow());
  Took(out.token);
  if (params_.top_logprobs >= 0) {
    const double log_sum = LogSumExp(row, model_peak.value);
    out.logprob = static_cast<float>(row[out.token] - log_sum);
    out.top = TopLogits(row, params_.top_logprobs);
    for (auto& [id, value] : out.top) value = static_cast<float>(value - log_sum);
  }
  return out;
}

}  // namespace pliant
