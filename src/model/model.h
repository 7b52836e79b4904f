// Room: model. An opened model file or folder, its weights once loaded, and the forward graph over
// a backend. Opening, metadata: any thread. Load and Forward: the thread that owns the backend (the
// engine thread, or main before it starts).
//
//   auto model = Model::Open("model.gguf", {});             // checked; weights still on disk
//   (*model)->Load(*backend, max_rows, max_logit_rows, {});  // weights to the backend, the file is
//   closed
//   (*model)->Forward(*backend, batch);                      // one step; logits are in
//   backend.LogitRows()
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/status.h"
#include "model/config.h"
#include "text/tokenizer.h"

namespace pliant {

class GgufFile;
class WeightSource;
enum class Weight;

class Model {
 public:
  struct OpenOptions {
    bool random_weights =
        false;  // a folder with config.json, or a config.json, is enough; weights are made up
    std::uint64_t random_seed = 0;
  };

  /// Weights of one type, for `pliant inspect`.
  struct TypeSummary {
    DType type = DType::kF32;
    std::int64_t tensors = 0;
    std::uint64_t elements = 0;
    std::uint64_t bytes = 0;
  };

  using Progress = std::function<void(std::uint64_t bytes_done, std::uint64_t bytes_total)>;

  /// `path`: a GGUF file, or a Hugging Face folder (config.json, safetensors, tokenizer.json).
  /// Everything but the weights' values is checked here: keys, sizes, and that every tensor of the
  /// graph is there with its shape. Messages begin with the path.
  static Result<std::unique_ptr<Model>> Open(const std::string& path, OpenOptions options);
  static Result<std::unique_ptr<Model>> Open(const std::string& path) {
    return Open(path, OpenOptions());
  }
  ~Model();

  const ModelConfig& config() const { return config_; }
  const std::string& path() const { return path_; }
  Result<Vocabulary> ReadVocabulary() const;
  /// "" when the model has none.
  const std::string& chat_template() const { return chat_template_; }
  /// Bytes of the files on disk; 0 with random weights.
  std::uint64_t FileBytes() const;
  /// "GGUF v3", "safetensors, 4 files", "random weights".
  std::string FormatName() const;
  std::uint64_t Parameters() const;
  /// By bytes, largest first.
  std::vector<TypeSummary> TensorSummary() const;
  /// 32 hex digits, the same for the same weights wherever the file lies. Reads at most 256 KiB a
  /// file; computed at Open.
  const std::string& Fingerprint() const { return fingerprint_; }

  /// Adds the weights to the backend, and activation tensors for steps of up to `max_rows` tokens
  /// with `max_logit_rows` logits. OutOfMemory before anything is read when the weights cannot fit.
  /// Once. A failure leaves the backend with some weights: drop it.
  Status Load(Backend& backend, int max_rows, int max_logit_rows, const Progress& progress);

  /// One step: BeginStep, every layer's ops, Logits, EndStep. InvalidArgument when the batch is
  /// larger than Load was told. `meanwhile` is called before EndStep while a device works on the
  /// step; never where StartStep says that none does.
  Status Forward(Backend& backend, const StepBatch& batch,
                 const std::function<void()>& meanwhile = {});

 private:
  struct Layer {
    VectorId attn_norm, ffn_norm, qkv_bias, attn_out_bias, gate_up_bias, down_bias, q_norm, k_norm;
    MatrixId qkv, attn_out, gate_up, down;
  };
  struct Activations {
    TensorId residual;   // [rows, hidden]: the residual stream
    TensorId normed;     // [rows, hidden]: input of a projection
    TensorId qkv;        // [rows, (heads + 2 kv_heads) head_dim]
    TensorId attention;  // [rows, heads head_dim]
    TensorId gate_up;    // [rows, 2 intermediate]
    TensorId ffn;        // [rows, intermediate]
  };
  class Loader;

  Model() = default;
  Status OpenGguf();
  Status OpenFolder(OpenOptions options);
  Status Finish();

  std::string path_;
  std::string folder_;  // of a Hugging Face model, else ""
  ModelConfig config_;
  std::shared_ptr<GgufFile> gguf_;
  std::unique_ptr<WeightSource> weights_;
  std::string chat_template_;
  std::string fingerprint_;

  bool loaded_ = false;
  int max_rows_ = 0, max_logit_rows_ = 0;
  MatrixId embedding_, output_;
  VectorId output_norm_;
  std::vector<Layer> layers_;
  Activations activations_;
  RopeTable rope_;
};

/// OutOfMemory naming both sizes when `needed` bytes pass `available`; `what` needs them ("the
/// model's weights").
Status CheckFits(std::string_view what, std::uint64_t needed, std::uint64_t available);

}  // namespace pliant
