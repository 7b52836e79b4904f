#include "backend/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace pliant {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Heavier first, equal weights by id.
constexpr auto kBetter = [](const auto& a, const auto& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
};
constexpr auto kById = [](const auto& a, const auto& b) { return a.id < b.id; };

template <typename Candidates>
double Total(const Candidates& candidates) {
  double total = 0;
  for (const auto& c : candidates) total += c.weight;
  return total;
}

}  // namespace

float InverseTemperature(const RowSampling& how) { return 1.0f / std::max(how.temperature, 1e-5f); }

float MinPCutoff(const RowSampling& how) {
  return how.min_p > 0 ? std::log(how.min_p) / InverseTemperature(how) : kNegativeInfinity;
}

// Several lanes keep the loop free of a serial dependency.
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
  peak.value = kNegativeInfinity;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    peak.value = std::max(peak.value, best[lane]);
    if (poison[lane] != 0) peak.finite = false;
  }
  if (!std::isfinite(peak.value)) peak.finite = false;
  if (peak.finite) {
    peak.id = static_cast<std::int32_t>(std::find(logits.begin(), logits.end(), peak.value) -
                                        logits.begin());
  }
  return peak;
}

std::int32_t RowSampler::Draw(std::span<const float> logits, float peak, const RowSampling& how) {
  // Everything is divided by temperature by way of the exponent, so that a tiny temperature cannot
  // overflow.
  const float inverse_temperature = InverseTemperature(how), cutoff = MinPCutoff(how);
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float below = logits[i] - peak;
    // exp(-104) is below the smallest float: such a token has no weight in any sum that follows.
    if (below < cutoff || below * inverse_temperature < -104.0f) continue;
    candidates_.push_back({std::exp(below * inverse_temperature), static_cast<std::int32_t>(i)});
  }
  bool sorted = true;
  if (how.top_k > 0 && static_cast<std::size_t>(how.top_k) < candidates_.size()) {
    KeepTopK(how.top_k);
    sorted = false;
  }
  if (how.top_p < 1.0f) {
    KeepTopP(how.top_p);
    sorted = false;
  }
  // The order of the walk is the ids', so that a device can do it without sorting.
  if (!sorted) std::sort(candidates_.begin(), candidates_.end(), kById);
  double left = how.uniform * Total(candidates_);
  for (const Candidate& c : candidates_) {
    left -= c.weight;
    if (left < 0) return c.id;
  }
  return candidates_.back().id;
}

void RowSampler::KeepTopK(std::int32_t top_k) {
  std::nth_element(candidates_.begin(), candidates_.begin() + top_k, candidates_.end(), kBetter);
  candidates_.resize(static_cast<std::size_t>(top_k));
}

void RowSampler::KeepTopP(float top_p) {
  const double total = Total(candidates_), needed = static_cast<double>(top_p) * total;
  // All tokens below an even share of what top_p leaves out hold less than that together, so none
  // of them is needed to reach top_p: the sort sees only the others.
  const double even_share = (total - needed) / static_cast<double>(candidates_.size());
  std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < even_share; });
  std::sort(candidates_.begin(), candidates_.end(), kBetter);
  double kept = 0;
  std::size_t count = 0;
  while (count < candidates_.size() && (count == 0 || kept < needed))
    kept += candidates_[count++].weight;
  candidates_.resize(count);  // the token that crosses top_p is kept
}

void ChangeLogits(std::span<float> logits, std::span<const LogitChange> changes) {
  for (const LogitChange& change : changes) {
    if (change.id < 0 || static_cast<std::size_t>(change.id) >= logits.size()) continue;
    float& x = logits[static_cast<std::size_t>(change.id)];
    x = x > 0 ? x / change.penalty : x * change.penalty;
    x -= change.subtract;
    x += change.add;
  }
}

double LogSumExp(std::span<const float> logits, float largest) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - largest);
  return largest + std::log(sum);
}

std::vector<std::pair<std::int32_t, float>> TopLogits(std::span<const float> logits, int n) {
  const auto better = [](const std::pair<std::int32_t, float>& a,
                         const std::pair<std::int32_t, float>& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  };
  std::vector<std::pair<std::int32_t, float>> heap;  // worst of the best on top
  heap.reserve(static_cast<std::size_t>(n) + 1);
  for (std::size_t i = 0; i < logits.size() && n > 0; ++i) {
    const std::pair<std::int32_t, float> item(static_cast<std::int32_t>(i), logits[i]);
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

RowLogprobs LogprobsOf(std::span<const float> logits, std::int32_t token, int top) {
  PLIANT_CHECK(top >= 0 && top <= kMostTopLogprobs, "more top logprobs than a row has room for");
  const double log_sum = LogSumExp(logits, FindPeak(logits).value);
  RowLogprobs out;
  out.chosen = static_cast<float>(logits[static_cast<std::size_t>(token)] - log_sum);
  for (const auto& [id, logit] : TopLogits(logits, top)) {
    out.ids[out.count] = id;
    out.values[out.count++] = static_cast<float>(logit - log_sum);
  }
  return out;
}

std::int32_t SampleLogits(std::span<const float> logits, const RowSampling& how,
                          RowSampler& sampler, std::span<const LogitChange> changes,
                          RowLogprobs* logprobs) {
  const std::span<const float> own = logits;
  Peak peak = FindPeak(logits);
  if (!peak.finite) return kNoToken;
  std::vector<float> changed;
  if (!changes.empty()) {
    changed.assign(logits.begin(), logits.end());
    ChangeLogits(changed, changes);
    logits = changed;
    peak = FindPeak(logits);
    if (!peak.finite) return kNoToken;
  }
  const std::int32_t token = how.temperature == 0 ? peak.id : sampler.Draw(logits, peak.value, how);
  if (how.logprobs >= 0 && logprobs != nullptr) *logprobs = LogprobsOf(own, token, how.logprobs);
  return token;
}

}  // namespace pliant
