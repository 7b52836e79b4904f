// Room: model. Weight names, shapes and the two file sources.
#include "model/weights.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace pliant {
namespace {

struct WeightNames {
  const char* gguf;
  const char* hf;
};

WeightNames NamesOf(Weight weight) {
  switch (weight) {
    case Weight::kEmbedding:
      return {"token_embd.weight", "model.embed_tokens.weight"};
    case Weight::kOutputNorm:
      return {"output_norm.weight", "model.norm.weight"};
    case Weight::kOutput:
      return {"output.weight", "lm_head.weight"};
    case Weight::kAttnNorm:
      return {"attn_norm.weight", "input_layernorm.weight"};
    case Weight::kQ:
      return {"attn_q.weight", "self_attn.q_proj.weight"};
    case Weight::kK:
      return {"attn_k.weight", "self_attn.k_proj.weight"};
    case Weight::kV:
      return {"attn_v.weight", "self_attn.v_proj.weight"};
    case Weight::kQBias:
      return {"attn_q.bias", "self_attn.q_proj.bias"};
    case Weight::kKBias:
      return {"attn_k.bias", "self_attn.k_proj.bias"};
    case Weight::kVBias:
      return {"attn_v.bias", "self_attn.v_proj.bias"};
    case Weight::kQNorm:
      return {"attn_q_norm.weight", "self_attn.q_norm.weight"};
    case Weight::kKNorm:
      return {"attn_k_norm.weight", "self_attn.k_norm.weight"};
    case Weight::kAttnOut:
      return {"attn_output.weight", "self_attn.o_proj.weight"};
    case Weight::kAttnOutBias:
      return {"attn_output.bias", "self_attn.o_proj.bias"};
    case Weight::kFfnNorm:
      return {"ffn_norm.weight", "post_attention_layernorm.weight"};
    case Weight::kGate:
      return {"ffn_gate.weight", "mlp.gate_proj.weight"};
    case Weight::kUp:
      return {"ffn_up.weight", "mlp.up_proj.weight"};
    case Weight::kDown:
      return {"ffn_down.weight", "mlp.down_proj.weight"};
    case Weight::kGateBias:
      return {"ffn_gate.bias", "mlp.gate_proj.bias"};
    case Weight::kUpBias:
      return {"ffn_up.bias", "mlp.up_proj.bias"};
    case Weight::kDownBias:
      return {"ffn_down.bias", "mlp.down_proj.bias"};
  }
  return {"?", "?"};
}

bool IsPerLayer(Weight weight) { return weight >= Weight::kAttnNorm; }

/// Hashes samples spread over a file, so that other weights under the same table give another
/// fingerprint.
template <typename ReadFn>
Status AddSamples(Fingerprinter& hash, std::uint64_t size, ReadFn read) {
  constexpr std::uint64_t kSampleBytes = 4096;
  constexpr std::uint64_t kSamples = 64;
  std::vector<std::byte> buffer;
  for (std::uint64_t i = 0; i < kSamples; ++i) {
    const std::uint64_t offset = size / kSamples * i;
    buffer.resize(static_cast<std::size_t>(std::min(kSampleBytes, size - offset)));
    PLIANT_RETURN_IF_ERROR(read(offset, std::span(buffer)));
    hash.Add(buffer);
  }
  return Status::Ok();
}

void AddTable(Fingerprinter& hash, const std::vector<TensorInfo>& tensors) {
  for (const TensorInfo& tensor : tensors) {
    hash.Add(tensor.name);
    hash.Add(tensor.type_name);
    hash.Add(tensor.ShapeText());
  }
}

class GgufSource final : public WeightSource {
 public:
  GgufSource(std::shared_ptr<GgufFile> file, Architecture architecture)
      : file_(std::move(file)), architecture_(architecture) {}

  const TensorInfo* Find(Weight weight, int layer) const override {
    return file_->FindTensor(NameOf(weight, layer));
  }
  std::string NameOf(Weight weight, int layer) const override {
    return GgufWeightName(weight, layer);
  }
  Status Read(const TensorInfo& tensor, std::span<std::byte> out) const override {
    return file_->ReadTensor(tensor, out);
  }
  const std::vector<TensorInfo>& tensors() const override { return file_->tensors(); }
  std::uint64_t FileBytes() const override { return file_->file_bytes(); }
  std::string FormatName() const override { return "GGUF v" + std::to_string(file_->version()); }
  bool InterleavedQk() const override { return architecture_ == Architecture::kLlama; }

  Result<std::string> Fingerprint() const override {
    Fingerprinter hash;
    hash.Add(file_->file_bytes());
    AddTable(hash, file_->tensors());
    PLIANT_RETURN_IF_ERROR(
        AddSamples(hash, file_->file_bytes(), [&](std::uint64_t offset, std::span<std::byte> out) {
          return file_->ReadBytes(offset, out);
        }));
    return hash.Hex();
  }
  void Release() override { file_->ReleaseFile(); }

 private:
  std::shared_ptr<GgufFile> file_;
  Architecture architecture_;
};

class SafetensorsSource final : public WeightSource {
 public:
  explicit SafetensorsSource(std::unique_ptr<SafetensorsModel> model) : model_(std::move(model)) {}

  const TensorInfo* Find(Weight weight, int layer) const override {
    return model_->FindTensor(NameOf(weight, layer));
  }
  std::string NameOf(Weight weight, int layer) const override {
    return HfWeightName(weight, layer);
  }
  Status Read(const TensorInfo& tensor, std::span<std::byte> out) const override {
    return model_->ReadTensor(tensor, out);
  }
  const std::vector<TensorInfo>& tensors() const override { return model_->tensors(); }
  std::uint64_t FileBytes() const override { return model_->file_bytes(); }
  std::string FormatName() const override {
    return "safetensors" + (model_->files() == 1
                                ? std::string()
                                : ", " + std::to_string(model_->files()) + " files");
  }
  bool InterleavedQk() const override { return false; }

  Result<std::string> Fingerprint() const override {
    Fingerprinter hash;
    AddTable(hash, model_->tensors());
    for (int i = 0; i < model_->files(); ++i) {
      const ByteSource& file = model_->file(i);
      hash.Add(file.size());
      PLIANT_RETURN_IF_ERROR(AddSamples(
          hash, file.size(),
          [&](std::uint64_t offset, std::span<std::byte> out) { return file.Read(offset, out); }));
    }
    return hash.Hex();
  }
  void Release() override { model_->ReleaseFiles(); }

 private:
  std::unique_ptr<SafetensorsModel> model_;
};

Status CheckWeight(const WeightSource& source, const ModelConfig& config, Weight weight, int layer,
                   bool required) {
  const TensorInfo* tensor = source.Find(weight, layer);
  const std::string name = "tensor '" + source.NameOf(weight, layer) + "'";
  if (tensor == nullptr) return required ? NotFound(name + " is missing") : Status::Ok();
  if (!tensor->readable) {
    return Unimplemented(name + " has type " + tensor->type_name +
                         ", which is not supported for weights");
  }
  const WeightShape want = ShapeOf(weight, config);
  const std::vector<std::int64_t> shape =
      want.cols == 0 ? std::vector{want.rows} : std::vector{want.rows, want.cols};
  if (tensor->shape != shape) {
    TensorInfo wanted;
    wanted.shape = shape;
    return InvalidArgument(name + " has shape " + tensor->ShapeText() +
                           ", the configuration asks for " + wanted.ShapeText());
  }
  return Status::Ok();
}

}  // namespace

std::string GgufWeightName(Weight weight, int layer) {
  const std::string name = NamesOf(weight).gguf;
  return IsPerLayer(weight) ? "blk." + std::to_string(layer) + "." + name : name;
}

std::string HfWeightName(Weight weight, int layer) {
  const std::string name = NamesOf(weight).hf;
  return IsPerLayer(weight) ? "model.layers." + std::to_string(layer) + "." + name : name;
}

WeightShape ShapeOf(Weight weight, const ModelConfig& config) {
  const std::int64_t q = std::int64_t{config.heads} * config.head_dim;
  const std::int64_t kv = std::int64_t{config.kv_heads} * config.head_dim;
  switch (weight) {
    case Weight::kEmbedding:
    case Weight::kOutput:
      return {config.vocab_size, config.hidden_size};
    case Weight::kOutputNorm:
    case Weight::kAttnNorm:
    case Weight::kFfnNorm:
    case Weight::kAttnOutBias:
    case Weight::kDownBias:
      return {config.hidden_size, 0};
    case Weight::kQ:
      return {q, config.hidden_size};
    case Weight::kK:
    case Weight::kV:
      return {kv, config.hidden_size};
    case Weight::kQBias:
      return {q, 0};
    case Weight::kKBias:
    case Weight::kVBias:
      return {kv, 0};
    case Weight::kQNorm:
    case Weight::kKNorm:
      return {config.head_dim, 0};
    case Weight::kAttnOut:
      return {config.hidden_size, q};
    case Weight::kGate:
    case Weight::kUp:
      return {config.intermediate_size, config.hidden_size};
    case Weight::kDown:
      return {config.hidden_size, config.intermediate_size};
    case Weight::kGateBias:
    case Weight::kUpBias:
      return {config.intermediate_size, 0};
  }
  return {};
}

std::unique_ptr<WeightSource> GgufWeights(std::shared_ptr<GgufFile> file,
                                          Architecture architecture) {
  return std::make_unique<GgufSource>(std::move(file), architecture);
}

std::unique_ptr<WeightSource> SafetensorsWeights(std::unique_ptr<SafetensorsModel> model) {
  return std::make_unique<SafetensorsSource>(std::move(model));
}

Status CheckWeights(const WeightSource& source, const ModelConfig& config) {
  struct Need {
    Weight weight;
    bool required;
  };
  const Need once[] = {{Weight::kEmbedding, true},
                       {Weight::kOutputNorm, true},
                       {Weight::kOutput, !config.tie_embeddings}};
  const Need every_layer[] = {{Weight::kAttnNorm, true},
                              {Weight::kQ, true},
                              {Weight::kK, true},
                              {Weight::kV, true},
                              {Weight::kQBias, config.qkv_bias},
                              {Weight::kKBias, config.qkv_bias},
                              {Weight::kVBias, config.qkv_bias},
                              {Weight::kQNorm, config.qk_norm},
                              {Weight::kKNorm, config.qk_norm},
                              {Weight::kAttnOut, true},
                              {Weight::kAttnOutBias, false},
                              {Weight::kFfnNorm, true},
                              {Weight::kGate, true},
                              {Weight::kUp, true},
                              {Weight::kDown, true},
                              {Weight::kGateBias, false},
                              {Weight::kUpBias, false},
                              {Weight::kDownBias, false}};
  for (const Need& need : once) {
    PLIANT_RETURN_IF_ERROR(CheckWeight(source, config, need.weight, 0, need.required));
  }
  for (int layer = 0; layer < config.layers; ++layer) {
    for (const Need& need : every_layer) {
      PLIANT_RETURN_IF_ERROR(CheckWeight(source, config, need.weight, layer, need.required));
    }
    // Biases fused into one vector come together or not at all.
    const auto has = [&](Weight weight) { return source.Find(weight, layer) != nullptr; };
    if (has(Weight::kQBias) != has(Weight::kKBias) || has(Weight::kQBias) != has(Weight::kVBias) ||
        has(Weight::kGateBias) != has(Weight::kUpBias)) {
      return InvalidArgument("layer " + std::to_string(layer) +
                             " has a bias for some of its projections but not for all");
    }
    if (has(Weight::kQNorm) && !config.qk_norm) {
      return Unimplemented("tensor '" + source.NameOf(Weight::kQNorm, layer) +
                           "': QK norm is supported for qwen3 only");
    }
  }
  // A count of layers that lies would run, and answer nonsense.
  for (const Need& need : every_layer) {
    if (source.Find(need.weight, config.layers) == nullptr) continue;
    return InvalidArgument("tensor '" + source.NameOf(need.weight, config.layers) +
                           "' is there, but the configuration says " +
                           std::to_string(config.layers) + " layers");
  }
  return Status::Ok();
}

std::vector<std::int32_t> InterleavedOrder(int heads, int head_dim) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(heads) * head_dim);
  const int half = head_dim / 2;
  for (int head = 0; head < heads; ++head) {
    for (int i = 0; i < half; ++i) {
      const int base = head * head_dim;
      order[static_cast<std::size_t>(base + i)] = base + 2 * i;
      order[static_cast<std::size_t>(base + half + i)] = base + 2 * i + 1;
    }
  }
  return order;
}

void Fingerprinter::Add(std::span<const std::byte> bytes) {
  for (const std::byte byte : bytes) {
    a_ = (a_ ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001b3u;
    b_ = (b_ ^ std::to_integer<std::uint64_t>(byte)) * 0x9e3779b97f4a7c15u;
  }
  // The length, so that two pieces do not read as one.
  a_ = (a_ ^ bytes.size()) * 0x100000001b3u;
  b_ = (b_ ^ (b_ >> 29) ^ bytes.size()) * 0x9e3779b97f4a7c15u;
}

std::string Fingerprinter::Hex() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(a_),
                static_cast<unsigned long long>(b_ ^ (b_ >> 31)));
  return text;
}

}  // namespace pliant
