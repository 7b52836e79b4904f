// Room: model. The forward graph of the Llama family: pre-norm attention and gated feed-forward
// over one residual stream.
#include <cmath>
#include <string>

#include "model/model.h"

namespace pliant {

Status Model::Forward(Backend& backend, const StepBatch& batch,
                      const std::function<void()>& meanwhile) {
  PLIANT_CHECK(loaded_, "Load comes before Forward");
  if (batch.tokens.size() > static_cast<std::size_t>(max_rows_) ||
      batch.logit_rows.size() > static_cast<std::size_t>(max_logit_rows_)) {
    return InvalidArgument("a step of " + std::to_string(batch.tokens.size()) + " rows and " +
                           std::to_string(batch.logit_rows.size()) +
                           " logits; the model was loaded for " + std::to_string(max_rows_) +
                           " and " + std::to_string(max_logit_rows_));
  }
  const float softmax_scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  const float eps = config_.norm_eps;
  const Activations& a = activations_;
  PLIANT_RETURN_IF_ERROR(backend.BeginStep(batch));
  backend.Embed(embedding_, a.residual);
  for (int i = 0; i < config_.layers; ++i) {
    const Layer& layer = layers_[static_cast<std::size_t>(i)];
    backend.RmsNorm(a.residual, layer.attn_norm, eps, a.normed);
    backend.MatMul(a.normed, layer.qkv, layer.qkv_bias, a.qkv, /*accumulate=*/false);
    const QkvParams params{i, config_.heads, layer.q_norm, layer.k_norm, eps};
    backend.QkvToCache(params, rope_, a.qkv);
    backend.Attention(i, config_.heads, softmax_scale, a.qkv, a.attention);
    backend.MatMul(a.attention, layer.attn_out, layer.attn_out_bias, a.residual,
                   /*accumulate=*/true);
    backend.RmsNorm(a.residual, layer.ffn_norm, eps, a.normed);
    backend.MatMul(a.normed, layer.gate_up, layer.gate_up_bias, a.gate_up, /*accumulate=*/false);
    backend.SiluMul(a.gate_up, a.ffn);
    backend.MatMul(a.ffn, layer.down, layer.down_bias, a.residual, /*accumulate=*/true);
  }
  backend.Logits(a.residual, output_norm_, eps, output_);
  if (meanwhile && backend.StartStep()) meanwhile();
  return backend.EndStep();
}

}  // namespace pliant
