// Room: model. Moving weights from the file to the backend, one fused matrix at a time.
#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "backend/dequant.h"
#include "base/host_memory.h"
#include "model/byte_source.h"
#include "model/model.h"
#include "model/weights.h"

namespace pliant {

Status CheckFits(std::string_view what, std::uint64_t needed, std::uint64_t available) {
  if (needed <= available) return Status::Ok();
  return OutOfMemory(std::string(what) + " need " + FormatBytes(needed) + ", " +
                     FormatBytes(available) + " of memory are available");
}

/// Reads weights into one staging buffer, which is used again for every matrix, and hands them to
/// the backend.
class Model::Loader {
 public:
  Loader(Model& model, Backend& backend, const Progress& progress)
      : model_(model), source_(*model.weights_), backend_(backend), progress_(progress) {
    for (const TensorInfo& tensor : source_.tensors()) total_ += tensor.bytes;
    if (source_.InterleavedQk()) {
      q_order_ = InterleavedOrder(model.config_.heads, model.config_.head_dim);
      k_order_ = InterleavedOrder(model.config_.kv_heads, model.config_.head_dim);
    }
  }

  Status Run() {
    PLIANT_RETURN_IF_ERROR(CheckMemory());
    const ModelConfig& config = model_.config_;
    PLIANT_ASSIGN_OR_RETURN(model_.embedding_, Matrix({Weight::kEmbedding}, 0));
    model_.output_ = model_.embedding_;
    if (!config.tie_embeddings) {
      PLIANT_ASSIGN_OR_RETURN(model_.output_, Matrix({Weight::kOutput}, 0));
    }
    PLIANT_ASSIGN_OR_RETURN(model_.output_norm_, Vector({Weight::kOutputNorm}, 0));
    const std::size_t before_layers = backend_.WeightBytes();
    for (int i = 0; i < config.layers; ++i) {
      Layer layer;
      PLIANT_RETURN_IF_ERROR(LoadLayer(i, layer));
      model_.layers_.push_back(layer);
      if (i == 0) {
        // How much the backend's own form of a layer takes is known now; refuse before the others
        // are read.
        const std::uint64_t held = backend_.WeightBytes() - before_layers;
        const Status fits =
            CheckFits("the other " + std::to_string(config.layers - 1) + " layers, of " +
                          FormatBytes(held) + " each,",
                      held * static_cast<std::uint64_t>(config.layers - 1), Available());
        PLIANT_RETURN_IF_ERROR(fits);
      }
    }
    return Status::Ok();
  }

 private:
  /// What may still be allocated where the backend keeps its weights. Nothing known counts as
  /// enough.
  std::uint64_t Available() const {
    if (backend_.Name() != "cuda") return AvailableHostMemory().value_or(UINT64_MAX);
    const std::uint64_t device = backend_.Info().memory_free;
    return device > 0 ? device : UINT64_MAX;
  }

  /// The weights as they lie in the file are the least that any backend can hold.
  Status CheckMemory() const {
    std::uint64_t largest = 0;
    for (const TensorInfo& tensor : source_.tensors()) largest = std::max(largest, tensor.bytes);
    PLIANT_RETURN_IF_ERROR(CheckFits("the model's weights", total_, Available()));
    return CheckFits("the buffers for the model's largest weight", largest,
                     AvailableHostMemory().value_or(UINT64_MAX));
  }

  Status LoadLayer(int i, Layer& layer) {
    PLIANT_ASSIGN_OR_RETURN(layer.attn_norm, Vector({Weight::kAttnNorm}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.qkv, Matrix({Weight::kQ, Weight::kK, Weight::kV}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.qkv_bias,
                            Vector({Weight::kQBias, Weight::kKBias, Weight::kVBias}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.q_norm, Vector({Weight::kQNorm}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.k_norm, Vector({Weight::kKNorm}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.attn_out, Matrix({Weight::kAttnOut}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.attn_out_bias, Vector({Weight::kAttnOutBias}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.ffn_norm, Vector({Weight::kFfnNorm}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.gate_up, Matrix({Weight::kGate, Weight::kUp}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.gate_up_bias, Vector({Weight::kGateBias, Weight::kUpBias}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.down, Matrix({Weight::kDown}, i));
    PLIANT_ASSIGN_OR_RETURN(layer.down_bias, Vector({Weight::kDownBias}, i));
    return Status::Ok();
  }

  std::span<const std::int32_t> OrderOf(Weight weight) const {
    if (weight == Weight::kQ || weight == Weight::kQBias) return q_order_;
    if (weight == Weight::kK || weight == Weight::kKBias) return k_order_;
    return {};
  }

  /// Room for `bytes` in the staging buffer; its old contents are lost.
  Status Stage(std::uint64_t bytes) {
    if (bytes <= staged_) return Status::Ok();
    staging_.reset();
    staging_.reset(new (std::nothrow) std::byte[static_cast<std::size_t>(bytes)]);
    staged_ = staging_ == nullptr ? 0 : bytes;
    if (staging_ == nullptr) return OutOfMemory("no memory for a weight of " + FormatBytes(bytes));
    return Status::Ok();
  }

  Result<MatrixId> Matrix(std::initializer_list<Weight> parts, int layer) {
    std::array<HostMatrix, 3> matrices;
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    for (const Weight weight : parts) bytes += source_.Find(weight, layer)->bytes;
    PLIANT_RETURN_IF_ERROR(Stage(bytes));
    std::uint64_t at = 0;
    for (const Weight weight : parts) {
      const TensorInfo& tensor = *source_.Find(weight, layer);
      const std::span data(staging_.get() + at, static_cast<std::size_t>(tensor.bytes));
      PLIANT_RETURN_IF_ERROR(source_.Read(tensor, data));
      matrices[count++] = {tensor.type, tensor.shape[0], tensor.shape[1], data, OrderOf(weight)};
      at += tensor.bytes;
    }
    Result<MatrixId> id = backend_.AddMatrix(std::span(matrices.data(), count));
    if (!id.ok()) return id.status().WithContext(source_.NameOf(*parts.begin(), layer));
    Advance(bytes);
    return id;
  }

  /// Fuses vectors end to end. An invalid id when the model has none of them (optional biases and
  /// norms).
  Result<VectorId> Vector(std::initializer_list<Weight> parts, int layer) {
    std::vector<float> values;
    std::uint64_t bytes = 0;
    for (const Weight weight : parts) {
      const TensorInfo* tensor = source_.Find(weight, layer);
      if (tensor == nullptr) return VectorId();
      PLIANT_RETURN_IF_ERROR(Stage(tensor->bytes));
      const std::span data(staging_.get(), static_cast<std::size_t>(tensor->bytes));
      PLIANT_RETURN_IF_ERROR(source_.Read(*tensor, data));
      std::vector<float> part(static_cast<std::size_t>(tensor->elements));
      DequantizeRow(tensor->type, data.data(), part);
      const std::span<const std::int32_t> order = OrderOf(weight);
      for (std::size_t i = 0; i < part.size(); ++i) {
        values.push_back(part[order.empty() ? i : static_cast<std::size_t>(order[i])]);
      }
      bytes += tensor->bytes;
    }
    Result<VectorId> id = backend_.AddVector(values);
    if (!id.ok()) return id.status().WithContext(source_.NameOf(*parts.begin(), layer));
    Advance(bytes);
    return id;
  }

  void Advance(std::uint64_t bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  }

  Model& model_;
  const WeightSource& source_;
  Backend& backend_;
  const Progress& progress_;
  std::uint64_t done_ = 0;
  std::uint64_t total_ = 0;
  std::unique_ptr<std::byte[]> staging_;
  std::uint64_t staged_ = 0;
  std::vector<std::int32_t> q_order_, k_order_;
};

Status Model::Load(Backend& backend, int max_rows, int max_logit_rows, const Progress& progress) {
  PLIANT_CHECK(!loaded_, "a model is loaded once");
  PLIANT_CHECK(max_rows >= 1 && max_logit_rows >= 1, "a step has at least one row");
  max_rows_ = max_rows;
  max_logit_rows_ = max_logit_rows;
  try {
    Loader loader(*this, backend, progress);
    const Status loaded = loader.Run();
    if (!loaded.ok()) return loaded.WithContext(path_);
  } catch (const std::bad_alloc&) {
    return OutOfMemory(path_ + ": no memory to load the weights");
  }
  const std::int64_t q = std::int64_t{config_.heads} * config_.head_dim;
  const std::int64_t kv = std::int64_t{config_.kv_heads} * config_.head_dim;
  Activations& a = activations_;
  PLIANT_ASSIGN_OR_RETURN(a.residual, backend.AddTensor(max_rows, config_.hidden_size));
  PLIANT_ASSIGN_OR_RETURN(a.normed, backend.AddTensor(max_rows, config_.hidden_size));
  PLIANT_ASSIGN_OR_RETURN(a.qkv, backend.AddTensor(max_rows, q + 2 * kv));
  PLIANT_ASSIGN_OR_RETURN(a.attention, backend.AddTensor(max_rows, q));
  PLIANT_ASSIGN_OR_RETURN(a.gate_up, backend.AddTensor(max_rows, 2 * config_.intermediate_size));
  PLIANT_ASSIGN_OR_RETURN(a.ffn, backend.AddTensor(max_rows, config_.intermediate_size));
  rope_.inv_freq = config_.InverseFrequencies();
  weights_->Release();
  loaded_ = true;
  return Status::Ok();
}

}  // namespace pliant
