// Room: model. What a model is: sizes, RoPE, norms; read from GGUF keys or a Hugging Face config.json, checked before use.
// Plain values, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/plane_code.h"
#include "base/status.h"

namespace pliant {

enum class Architecture { kLlama, kQwen2, kQwen3 };

struct RopeScaling {
  enum class Kind { kNone, kLinear, kLlama3 } kind = Kind::kNone;
  float factor = 1;
  float low_freq_factor = 1, high_freq_factor = 4;  // Llama 3
  std::int64_t original_context = 8192;
  std::vector<float> freq_factors;  // GGUF's rope_freqs tensor: divide each inverse frequency; overrides the rest
};

struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  std::string name;
  std::int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, context_length = 0;
  int layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
  float norm_eps = 1e-5f;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  bool tie_embeddings = false, qkv_bias = false, qk_norm = false;

  KvGeometry Kv() const { return {layers, kv_heads, head_dim}; }
  /// Inverse frequencies with the scaling applied, [head_dim / 2].
  std::vector<float> InverseFrequencies() const;
  /// Every size positive, below its limit, and consistent (heads a multiple of kv_heads, head_dim a multiple of 32, ...).
  Status Validate() const;
};

}  // namespace pliant
