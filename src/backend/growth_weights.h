// Room: backend. Weights that make a growth signal of the running means of a model's queries:
// RetainedHistory::QuerySignal. Plain values; any thread may read them.
#pragma once

#include <vector>

namespace pliant {

/// Fitted to one model (bench/fit_signal.py; read by model/growth_weights.h). With unit vectors s
/// and l of the short and long running mean of a query head, before norm and RoPE, the signal is
/// 1 / (1 + exp(-(bias + sum over layers and heads of short_mean . s + long_mean . l))), the chance
/// that more of the history will be needed soon.
struct GrowthWeights {
  int layers = 0, heads = 0, head_dim = 0;
  std::vector<float> short_mean, long_mean;  // [layers][heads][head_dim]
  float bias = 0;
  float above = 0.5f;  // a history grows above this unless its owner says otherwise
};

}  // namespace pliant
