// Room: replay. What a cache below 16 bits does to a model's predictions: long texts are read with
// the middle of the context at lower states, and the predictions compared with those of the whole
// cache. Drives model and backend without a scheduler; runs on the thread that owns the backend.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/model.h"
#include "replay/cache_state.h"
#include "replay/statistics.h"

namespace pliant {

/// One distribution over tokens against another, both as logits.
struct Divergence {
  double kl = 0;         // KL(reference || other), nats, summed in double
  bool same_top = true;  // whether the most likely token is the same
};
Divergence Compare(std::span<const float> reference, std::span<const float> other);
/// -log p(token), nats.
double NegativeLogLikelihood(std::span<const float> logits, std::int64_t token);

struct ContextQualityOptions {
  std::vector<CacheState> states;  // compared with 16/16
  std::int64_t context = 4096;     // tokens of a text, the scored ones among them
  std::int64_t scored = 256;       // last tokens, whose predictions are compared; a multiple of 32
  Protection protection{.sink = 64, .recent_base = 64, .recent_deep = 256};
  int max_rows = 512;  // as given to Model::Load; logit rows: ContextLogitRows
};
/// Logit rows that Model::Load must have been given.
int ContextLogitRows(const ContextQualityOptions& options);
/// Pages that must have been allocated.
std::uint32_t ContextPages(const ContextQualityOptions& options);

/// One state over one text.
struct TextQuality {
  Distribution kl;
  double top1 = 0;        // share of predictions with the same most likely token
  double perplexity = 0;  // of the text's own next tokens
  double degraded = 0;    // mean share of context tokens below 16 bits
};
struct TextReport {
  double reference_perplexity = 0;
  std::vector<TextQuality> states;  // as options.states
};

/// Reads `tokens` (at least context + 1 of them). The text is read once at 16/16; its last `scored`
/// tokens once more for every state, in steps of one block, each with its own continuation of the
/// cache: what a state's own keys and values carry on of its error counts too.
Result<TextReport> MeasureText(Model& model, Backend& backend, std::span<const TokenId> tokens,
                               const ContextQualityOptions& options,
                               const std::function<void(double)>& progress = {});

}  // namespace pliant
