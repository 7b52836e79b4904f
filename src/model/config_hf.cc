// Room: model. ModelConfig from a Hugging Face config.json.
#include <algorithm>
#include <initializer_list>
#include <string>

#include "model/config_reader.h"
#include "model/json.h"

namespace pliant {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kSmallLimit = 1 << 30;

Result<std::int64_t> Required(const Json& json, std::string_view key) {
  PLIANT_ASSIGN_OR_RETURN(const std::optional<std::int64_t> value, JsonInt(json, key));
  if (!value) return NotFound(std::string(key) + " is missing");
  return *value;
}

int Narrow(std::int64_t value) {
  return static_cast<int>(std::clamp<std::int64_t>(value, -1, kSmallLimit));
}

Result<float> FloatOr(const Json& json, std::string_view key, float otherwise) {
  PLIANT_ASSIGN_OR_RETURN(const std::optional<double> value, JsonNumber(json, key));
  return static_cast<float>(value.value_or(otherwise));
}

Result<bool> BoolOr(const Json& json, std::string_view key, bool otherwise) {
  PLIANT_ASSIGN_OR_RETURN(const std::optional<bool> value, JsonBool(json, key));
  return value.value_or(otherwise);
}

/// RoPE stands in rope_theta and rope_scaling, or (transformers 5) both together in
/// rope_parameters.
Status ReadRope(const Json& json, ModelConfig& config) {
  PLIANT_ASSIGN_OR_RETURN(const std::optional<double> theta, JsonNumber(json, "rope_theta"));
  if (theta) config.rope_theta = *theta;
  const Json* scaling = nullptr;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null()) continue;
    if (!found->is_object()) return InvalidArgument(std::string("'") + key + "' must be an object");
    scaling = &*found;
    break;
  }
  if (scaling == nullptr) return Status::Ok();
  PLIANT_ASSIGN_OR_RETURN(const std::optional<double> inner_theta,
                          JsonNumber(*scaling, "rope_theta"));
  if (inner_theta) config.rope_theta = *inner_theta;
  PLIANT_ASSIGN_OR_RETURN(const double rotary, FloatOr(*scaling, "partial_rotary_factor", 1));
  if (rotary != 1)
    return Unimplemented("rotating a part of a head (partial_rotary_factor) is not supported");
  PLIANT_ASSIGN_OR_RETURN(std::optional<std::string> type, JsonString(*scaling, "rope_type"));
  if (!type) {
    PLIANT_ASSIGN_OR_RETURN(type, JsonString(*scaling, "type"));
  }
  RopeScaling& out = config.rope_scaling;
  if (!type || *type == "default") return Status::Ok();
  if (*type != "linear" && *type != "llama3") {
    return Unimplemented("RoPE scaling '" + type->substr(0, 40) +
                         "' is not supported (default, linear and llama3 are)");
  }
  PLIANT_ASSIGN_OR_RETURN(const std::optional<double> factor, JsonNumber(*scaling, "factor"));
  if (!factor) return NotFound("RoPE scaling '" + *type + "' has no 'factor'");
  out.factor = static_cast<float>(*factor);
  if (*type == "linear") {
    out.kind = RopeScaling::Kind::kLinear;
    return Status::Ok();
  }
  out.kind = RopeScaling::Kind::kLlama3;
  PLIANT_ASSIGN_OR_RETURN(out.low_freq_factor, FloatOr(*scaling, "low_freq_factor", 1));
  PLIANT_ASSIGN_OR_RETURN(out.high_freq_factor, FloatOr(*scaling, "high_freq_factor", 4));
  PLIANT_ASSIGN_OR_RETURN(out.original_context,
                          Required(*scaling, "original_max_position_embeddings"));
  return Status::Ok();
}

/// What changes the graph in ways that it does not have.
Status RefuseUnsupported(const Json& json) {
  PLIANT_ASSIGN_OR_RETURN(const std::optional<std::string> act, JsonString(json, "hidden_act"));
  if (act.value_or("silu") != "silu") {
    return Unimplemented("hidden_act '" + act->substr(0, 40) + "' is not supported (silu is)");
  }
  PLIANT_ASSIGN_OR_RETURN(const bool sliding, BoolOr(json, "use_sliding_window", false));
  if (sliding) return Unimplemented("sliding windows (use_sliding_window) are not supported");
  PLIANT_ASSIGN_OR_RETURN(const double rotary, FloatOr(json, "partial_rotary_factor", 1));
  if (rotary != 1)
    return Unimplemented("rotating a part of a head (partial_rotary_factor) is not supported");
  const auto quantization = json.find("quantization_config");
  if (quantization != json.end() && !quantization->is_null()) {
    return Unimplemented(
        "quantized safetensors (quantization_config) are not supported; use a GGUF file");
  }
  return Status::Ok();
}

}  // namespace

Result<ModelConfig> ReadHfConfig(std::string_view text) {
  PLIANT_ASSIGN_OR_RETURN(const Json json, ParseJsonObject(text));
  PLIANT_ASSIGN_OR_RETURN(const std::optional<std::string> model_type,
                          JsonString(json, "model_type"));
  if (!model_type) return NotFound("'model_type' is missing");
  ModelConfig config;
  PLIANT_ASSIGN_OR_RETURN(config.architecture, ParseArchitecture(*model_type));
  PLIANT_RETURN_IF_ERROR(RefuseUnsupported(json));
  PLIANT_ASSIGN_OR_RETURN(config.vocab_size, Required(json, "vocab_size"));
  PLIANT_ASSIGN_OR_RETURN(config.hidden_size, Required(json, "hidden_size"));
  PLIANT_ASSIGN_OR_RETURN(config.intermediate_size, Required(json, "intermediate_size"));
  PLIANT_ASSIGN_OR_RETURN(config.context_length, Required(json, "max_position_embeddings"));
  PLIANT_ASSIGN_OR_RETURN(const std::int64_t layers, Required(json, "num_hidden_layers"));
  PLIANT_ASSIGN_OR_RETURN(const std::int64_t heads, Required(json, "num_attention_heads"));
  PLIANT_ASSIGN_OR_RETURN(const std::optional<std::int64_t> kv_heads,
                          JsonInt(json, "num_key_value_heads"));
  PLIANT_ASSIGN_OR_RETURN(const std::optional<std::int64_t> head_dim, JsonInt(json, "head_dim"));
  config.layers = Narrow(layers);
  config.heads = Narrow(heads);
  config.kv_heads = Narrow(kv_heads.value_or(heads));
  if (head_dim) {
    config.head_dim = Narrow(*head_dim);
  } else if (config.architecture == Architecture::kQwen3) {
    config.head_dim = 128;  // that family's default, whatever the hidden size
  } else if (heads < 1 || config.hidden_size % heads != 0) {
    return InvalidArgument("'num_attention_heads' is " + std::to_string(heads) +
                           ", which does not divide 'hidden_size' " +
                           std::to_string(config.hidden_size));
  } else {
    config.head_dim = Narrow(config.hidden_size / heads);
  }
  PLIANT_ASSIGN_OR_RETURN(config.norm_eps, FloatOr(json, "rms_norm_eps", 1e-6f));
  PLIANT_RETURN_IF_ERROR(ReadRope(json, config));
  PLIANT_ASSIGN_OR_RETURN(config.tie_embeddings, BoolOr(json, "tie_word_embeddings", false));
  PLIANT_ASSIGN_OR_RETURN(const bool attention_bias, BoolOr(json, "attention_bias", false));
  config.qkv_bias = config.architecture == Architecture::kQwen2 || attention_bias;
  config.qk_norm = config.architecture == Architecture::kQwen3;
  PLIANT_RETURN_IF_ERROR(config.Validate());
  return config;
}

}  // namespace pliant
