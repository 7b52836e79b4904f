// Room: backend. From one row of logits to one token: how a row is drawn, the scalar oracle of the
// sampling op, used by the reference backend and by the engine's own sampler. Pure, any thread.
//
// Before that a row's logits may be changed, token by token (penalties, bias, forbidden tokens).
//
// The draw: weights are exp((logit - largest) / temperature). min_p, top_k and top_p cut the
// tokens, each what the one before left, heavier tokens first and equal ones by id. Of what is
// left, in order of the ids, the token is taken at which the running sum of the weights passes
// uniform * total.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace pliant {

/// How one logit row becomes a token. Plain data, the same bytes on a device.
struct RowSampling {
  double uniform = 0;     // [0, 1): where in the distribution the draw falls
  float temperature = 0;  // 0: the largest logit, of equals the lowest id
  float top_p = 1;
  float min_p = 0;
  std::int32_t top_k = 0;    // 0: off
  std::int32_t on_host = 0;  // 1: no token is taken; the row's logits go to the host (LogitRows)
  std::int32_t first_change = 0, changes = 0;  // of StepBatch.changes
  std::int32_t logprobs = -1;  // n, up to kMostTopLogprobs: RowLogprobs with the n best; -1: none
};
static_assert(sizeof(RowSampling) == 40);

/// How one token's logit x is changed before anything is cut: (x > 0 ? x / penalty : x * penalty) -
/// subtract + add, each step rounded to f32. Plain data, the same bytes on a device.
struct LogitChange {
  std::int32_t id = 0;  // not in the row: nothing happens
  float penalty = 1;    // repetition
  float subtract = 0;   // presence and frequency
  float add = 0;        // bias; -inf forbids the token
};
static_assert(sizeof(LogitChange) == 16);

/// Tokens beside the one taken that a row's logprobs name at most.
inline constexpr int kMostTopLogprobs = 20;

/// What the model itself made of a row: natural logarithms of probabilities, before any change and
/// at temperature 1. Plain data, the same bytes on a device.
struct RowLogprobs {
  float chosen = 0;        // of the token taken
  std::int32_t count = 0;  // of the best tokens: best first, equal ones by id
  std::int32_t ids[kMostTopLogprobs] = {};
  float values[kMostTopLogprobs] = {};
};
static_assert(sizeof(RowLogprobs) == 168);

/// Every id at most once.
void ChangeLogits(std::span<float> logits, std::span<const LogitChange> changes);

/// A sampled row whose logits hold NaN or +inf, or nothing above -inf (also: once they are
/// changed): no token is invented.
inline constexpr std::int32_t kNoToken = -1;

/// What min_p leaves: a token takes part when its logit is at least this far from the largest
/// (0 or below).
float MinPCutoff(const RowSampling& how);
/// 1 / temperature, within what float can divide by.
float InverseTemperature(const RowSampling& how);

struct Peak {
  std::int32_t id = 0;
  float value = 0;
  bool finite = true;  // no NaN and no +inf anywhere, and something above -inf
};
/// -inf is how a model may mask a token; NaN and +inf are faults.
Peak FindPeak(std::span<const float> logits);

/// Draws from rows whose peak is known to be finite; keeps its memory between draws.
class RowSampler {
 public:
  /// The token; temperature must be above 0.
  std::int32_t Draw(std::span<const float> logits, float peak, const RowSampling& how);

 private:
  struct Candidate {
    float weight;
    std::int32_t id;
  };
  void KeepTopK(std::int32_t top_k);
  void KeepTopP(float top_p);
  std::vector<Candidate> candidates_;
};

/// Best `n` tokens of a row by logit, best first, equal logits by id.
std::vector<std::pair<std::int32_t, float>> TopLogits(std::span<const float> logits, int n);
/// log(sum(exp(logits))), in double.
double LogSumExp(std::span<const float> logits, float largest);
/// The row's logits must be finite or -inf (Peak::finite); `top` up to kMostTopLogprobs.
RowLogprobs LogprobsOf(std::span<const float> logits, std::int32_t token, int top);

/// The whole op for one row, whose changes are `changes` (all of them: first_change is not looked
/// at): the token, or kNoToken. `logprobs` is set when a token is taken and the row asks for them.
std::int32_t SampleLogits(std::span<const float> logits, const RowSampling& how,
                          RowSampler& sampler, std::span<const LogitChange> changes = {},
                          RowLogprobs* logprobs = nullptr);

}  // namespace pliant
