#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pliant {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// SplitMix64: a well-mixed 64-bit value for each input, so that draw i of a seed needs no state (Steele, Lea, Flood 2014).
std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct Peak {
  TokenId id = 0;
  float value = kNegativeInfinity;
  bool finite = true;  // no NaN and no +inf anywhere, and something above -inf
};

// -inf is how a model may mask a token; NaN and +inf are faults. Several lanes keep the loop free of a serial dependency.
Peak FindPeak(std::span<const float> logits) {
  constexpr std::size_t kLanes = 16;
  float best[kLanes], poison[kLanes];
  std::fill(best, best + kLanes, kNegativeInfinity);
  std::fill(poison, poison + kLanes, 0.0f);
  std::size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const float x = logits[i + lane];
      best[lane] = x > best[lane] ? x : best[lane];
      poison[lane] += x != x ? 1.0f : 0.0f;
    }
  }
  for (; i < logits.size(); ++i) {
    best[0] = logits[i] > best[0] ? logits[i] : best[0];
    poison[0] += logits[i] != logits[i] ? 1.0f : 0.0f;
  }
  Peak peak;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    peak.value = std::max(peak.value, best[lane]);
    if (poison[lane] != 0) peak.finite = false;
  }
  if (!std::isfinite(peak.value)) peak.finite = false;
  if (peak.finite) {
    peak.id = static_cast<TokenId>(std::find(logits.begin(), logits.end(), peak.value) - logits.begin());
  }
  return peak;
}

// Heavier first, equal weights by id.
constexpr auto kBetter = [](const auto& a, const auto& b) { return a.weight != b.weight ? a.weight > b.weight : a.id < b.id; };

template <typename Candidates>
double Total(const Candidates& candidates) {
  double total = 0;
  for (const auto& c : candidates) total += c.weight;
  return total;
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

Sampler::Sampler(const SamplingParams& params, std::span<const TokenId> prompt, std::uint64_t random_seed)
    : params_(params), seed_(params.seed.value_or(random_seed)) {
  if (params_.repetition_penalty != 1.0f) seen_.insert(prompt.begin(), prompt.end());
}

bool Sampler::Adjusts() const {
  return !params_.logit_bias.empty() || !forbidden_.empty() || params_.repetition_penalty != 1.0f ||
         params_.presence_penalty != 0 || params_.frequency_penalty != 0;
}

void Sampler::Adjust(std::vector<float>& logits) const {
  const auto in_range = [&](TokenId id) { return id >= 0 && id < static_cast<TokenId>(logits.size()); };
  for (const TokenId id : seen_) {
    if (!in_range(id)) continue;
    float& x = logits[id];
    x = x > 0 ? x / params_.repetition_penalty : x * params_.repetition_penalty;
  }
  for (const auto& [id, count] : output_counts_) {
    if (in_range(id)) logits[id] -= params_.presence_penalty + params_.frequency_penalty * count;
  }
  for (const auto& [id, bias] : params_.logit_bias) {
    if (in_range(id)) logits[id] += bias;
  }
  for (const TokenId id : forbidden_) {
    if (in_range(id)) logits[id] = kNegativeInfinity;
  }
}

double Sampler::NextUniform() {
  return static_cast<double>(Mix(Mix(seed_) ^ draws_++) >> 11) * 0x1.0p-53;
}

Result<TokenLogprob> Sampler::Sample(std::span<const float> logits, std::int64_t vocab_size) {
  const std::span<const float> row =
      logits.first(std::min<std::size_t>(logits.size(), static_cast<std::size_t>(vocab_size)));
  const Peak model_peak = FindPeak(row);
  if (!model_peak.finite) return Internal("the model's logits are not finite for this request");
  Peak peak = model_peak;
  std::span<const float> adjusted = row;
  if (Adjusts()) {
    scratch_.assign(row.begin(), row.end());
    Adjust(scratch_);
    adjusted = scratch_;
    peak = FindPeak(adjusted);
    if (!peak.finite) return Internal("no token is left to sample after bias and penalties");
  }
  TokenLogprob out;
  out.token = params_.temperature == 0 ? peak.id : Draw(adjusted, peak.value);
  ++output_counts_[out.token];
  if (params_.repetition_penalty != 1.0f) seen_.insert(out.token);
  if (params_.top_logprobs >= 0) {
    const double log_sum = LogSumExp(row, model_peak.value);
    out.logprob = static_cast<float>(row[out.token] - log_sum);
    out.top = TopLogits(row, params_.top_logprobs);
    for (auto& [id, value] : out.top) value = static_cast<float>(value - log_sum);
  }
  return out;
}

TokenId Sampler::Draw(std::span<const float> logits, float max_logit) {
  // Everything is divided by temperature by way of the exponent, so that a tiny temperature cannot overflow.
  const float inverse_temperature = 1.0f / std::max(params_.temperature, 1e-5f);
  const float cutoff = params_.min_p > 0 ? std::log(params_.min_p) / inverse_temperature : kNegativeInfinity;
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float below = logits[i] - max_logit;
    // exp(-104) is below the smallest float: such a token has no weight in any sum that follows.
    if (below < cutoff || below * inverse_temperature < -104.0f) continue;
    candidates_.push_back({std::exp(below * inverse_temperature), static_cast<TokenId>(i)});
  }
  if (params_.top_k > 0 && static_cast<std::size_t>(params_.top_k) < candidates_.size()) KeepTopK();
  if (params_.top_p < 1.0f) KeepTopP();
  double left = NextUniform() * Total(candidates_);
  for (const Candidate& c : candidates_) {
    left -= c.weight;
    if (left < 0) return c.id;
  }
  return candidates_.back().id;
}

void Sampler::KeepTopK() {
  std::nth_element(candidates_.begin(), candidates_.begin() + params_.top_k, candidates_.end(), kBetter);
  candidates_.resize(params_.top_k);
}

void Sampler::KeepTopP() {
  const double needed = static_cast<double>(params_.top_p) * Total(candidates_);
  // All tokens below an even share of what top_p leaves out hold less than that together, so none of them is needed to reach
  // top_p: the sort sees only the others.
  const double even_share = (Total(candidates_) - needed) / static_cast<double>(candidates_.size());
  std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < even_share; });
  std::sort(candidates_.begin(), candidates_.end(), kBetter);
  double kept = 0;
  std::size_t count = 0;
  while (count < candidates_.size() && (count == 0 || kept < needed)) kept += candidates_[count++].weight;
  candidates_.resize(count);  // the token that crosses top_p is kept
}

}  // namespace pliant
