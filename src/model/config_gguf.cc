// Room: model. ModelConfig from GGUF keys.
#include <algorithm>
#include <string>
#include <vector>

#include "backend/dequant.h"
#include "model/config_reader.h"

namespace pliant {
namespace {

/// Reads an integer key that must fit `limit`.
Result<std::int64_t> Size(const GgufFile& file, const std::string& key) {
  PLIANT_ASSIGN_OR_RETURN(const std::uint64_t value, file.Uint(key));
  constexpr std::uint64_t kLimit = std::uint64_t{1} << 40;
  if (value > kLimit) {
    return InvalidArgument("key '" + key + "' is " + std::to_string(value) + ", over " +
                           std::to_string(kLimit));
  }
  return static_cast<std::int64_t>(value);
}

Result<int> Small(const GgufFile& file, const std::string& key) {
  PLIANT_ASSIGN_OR_RETURN(const std::int64_t value, Size(file, key));
  return static_cast<int>(std::min<std::int64_t>(value, 1 << 30));
}

Status RefuseUnlessAbsentOrZero(const GgufFile& file, const std::string& key,
                                std::string_view feature) {
  if (!file.Has(key)) return Status::Ok();
  PLIANT_ASSIGN_OR_RETURN(const std::uint64_t value, file.Uint(key));
  if (value == 0) return Status::Ok();
  return Unimplemented("key '" + key + "' is " + std::to_string(value) + ": " +
                       std::string(feature) + " not supported");
}

Status ReadRope(const GgufFile& file, const std::string& arch, ModelConfig& config) {
  const std::string prefix = arch + ".rope.";
  if (file.Has(prefix + "freq_base")) {
    PLIANT_ASSIGN_OR_RETURN(config.rope_theta, file.Float(prefix + "freq_base"));
  }
  if (file.Has(prefix + "dimension_count")) {
    PLIANT_ASSIGN_OR_RETURN(const std::uint64_t dims, file.Uint(prefix + "dimension_count"));
    if (dims != static_cast<std::uint64_t>(config.head_dim)) {
      return Unimplemented("key '" + prefix + "dimension_count' is " + std::to_string(dims) +
                           " and the head dimension " + std::to_string(config.head_dim) +
                           ": rotating a part of a head is not supported");
    }
  }
  std::string type = "none";
  if (file.Has(prefix + "scaling.type")) {
    PLIANT_ASSIGN_OR_RETURN(type, file.String(prefix + "scaling.type"));
  } else if (file.Has(prefix + "scale_linear")) {  // files of 2023
    PLIANT_ASSIGN_OR_RETURN(const double factor, file.Float(prefix + "scale_linear"));
    if (factor != 1) {
      config.rope_scaling.kind = RopeScaling::Kind::kLinear;
      config.rope_scaling.factor = static_cast<float>(factor);
    }
    return Status::Ok();
  }
  if (type == "linear") {
    config.rope_scaling.kind = RopeScaling::Kind::kLinear;
    PLIANT_ASSIGN_OR_RETURN(const double factor, file.Float(prefix + "scaling.factor"));
    config.rope_scaling.factor = static_cast<float>(factor);
  } else if (type != "none") {
    return Unimplemented("key '" + prefix + "scaling.type' is '" + type.substr(0, 40) +
                         "', which is not supported (none and linear are)");
  }
  return Status::Ok();
}

/// Llama 3 scaling comes as a tensor of factors by which the inverse frequencies are divided.
Status ReadFrequencyFactors(const GgufFile& file, ModelConfig& config) {
  const TensorInfo* tensor = file.FindTensor("rope_freqs.weight");
  if (tensor == nullptr) return Status::Ok();
  if (tensor->type != DType::kF32 ||
      tensor->elements != static_cast<std::uint64_t>(config.head_dim / 2)) {
    return InvalidArgument("tensor 'rope_freqs.weight' is " + tensor->type_name + " " +
                           tensor->ShapeText() + "; F32 [" + std::to_string(config.head_dim / 2) +
                           "] is needed");
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor->bytes));
  PLIANT_RETURN_IF_ERROR(file.ReadTensor(*tensor, bytes));
  config.rope_scaling.freq_factors.resize(static_cast<std::size_t>(tensor->elements));
  DequantizeRow(DType::kF32, bytes.data(), config.rope_scaling.freq_factors);
  return Status::Ok();
}

Status ReadHeads(const GgufFile& file, const std::string& arch, ModelConfig& config) {
  const std::string prefix = arch + ".attention.";
  PLIANT_ASSIGN_OR_RETURN(config.heads, Small(file, prefix + "head_count"));
  config.kv_heads = config.heads;
  if (file.Has(prefix + "head_count_kv")) {
    PLIANT_ASSIGN_OR_RETURN(config.kv_heads, Small(file, prefix + "head_count_kv"));
  }
  if (file.Has(prefix + "key_length")) {
    PLIANT_ASSIGN_OR_RETURN(config.head_dim, Small(file, prefix + "key_length"));
  } else {
    if (config.heads < 1 || config.hidden_size % config.heads != 0) {
      return InvalidArgument("key '" + prefix + "head_count' is " + std::to_string(config.heads) +
                             ", which does not divide the embedding length " +
                             std::to_string(config.hidden_size));
    }
    config.head_dim = static_cast<int>(config.hidden_size / config.heads);
  }
  if (file.Has(prefix + "value_length")) {
    PLIANT_ASSIGN_OR_RETURN(const int value_length, Small(file, prefix + "value_length"));
    if (value_length != config.head_dim) {
      return Unimplemented("key '" + prefix + "value_length' is " + std::to_string(value_length) +
                           " and the key length " + std::to_string(config.head_dim) +
                           "; they must be equal");
    }
  }
  return Status::Ok();
}

}  // namespace

Result<ModelConfig> ReadGgufConfig(const GgufFile& file) {
  PLIANT_ASSIGN_OR_RETURN(const std::string arch, file.String("general.architecture"));
  ModelConfig config;
  PLIANT_ASSIGN_OR_RETURN(config.architecture, ParseArchitecture(arch));
  for (const char* key :
       {".context_length", ".embedding_length", ".block_count", ".feed_forward_length",
        ".attention.head_count", ".attention.layer_norm_rms_epsilon"}) {
    if (!file.Has(arch + key)) return NotFound("key '" + arch + key + "' is missing");
  }
  if (file.Has("general.name")) {
    PLIANT_ASSIGN_OR_RETURN(config.name, file.String("general.name"));
  }
  PLIANT_ASSIGN_OR_RETURN(config.context_length, Size(file, arch + ".context_length"));
  PLIANT_ASSIGN_OR_RETURN(config.hidden_size, Size(file, arch + ".embedding_length"));
  PLIANT_ASSIGN_OR_RETURN(config.layers, Small(file, arch + ".block_count"));
  PLIANT_ASSIGN_OR_RETURN(config.intermediate_size, Size(file, arch + ".feed_forward_length"));
  PLIANT_ASSIGN_OR_RETURN(const double eps, file.Float(arch + ".attention.layer_norm_rms_epsilon"));
  config.norm_eps = static_cast<float>(eps);
  PLIANT_RETURN_IF_ERROR(ReadHeads(file, arch, config));
  PLIANT_RETURN_IF_ERROR(ReadRope(file, arch, config));
  PLIANT_RETURN_IF_ERROR(
      RefuseUnlessAbsentOrZero(file, arch + ".expert_count", "mixtures of experts are"));
  PLIANT_RETURN_IF_ERROR(
      RefuseUnlessAbsentOrZero(file, arch + ".attention.sliding_window", "sliding windows are"));

  const TensorInfo* embedding = file.FindTensor("token_embd.weight");
  if (embedding == nullptr) return NotFound("tensor 'token_embd.weight' is missing");
  config.vocab_size = embedding->shape.size() == 2 ? embedding->shape[0] : 0;
  config.tie_embeddings = file.FindTensor("output.weight") == nullptr;
  config.qkv_bias = config.architecture == Architecture::kQwen2 ||
                    file.FindTensor("blk.0.attn_q.bias") != nullptr;
  config.qk_norm = config.architecture == Architecture::kQwen3;
  PLIANT_RETURN_IF_ERROR(config.Validate());
  PLIANT_RETURN_IF_ERROR(ReadFrequencyFactors(file, config));
  PLIANT_RETURN_IF_ERROR(config.Validate());
  return config;
}

}  // namespace pliant
