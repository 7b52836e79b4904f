// Room: model. The weights of a model under one set of names, whatever file they come from. Owned
// by a Model; any thread may read, but Read of one source is not called by two threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "model/gguf.h"
#include "model/safetensors.h"
#include "model/tensor_info.h"

namespace pliant {

/// The weights of the graph. Those from kAttnNorm on exist once a layer.
enum class Weight {
  kEmbedding,
  kOutputNorm,
  kOutput,
  kAttnNorm,
  kQ,
  kK,
  kV,
  kQBias,
  kKBias,
  kVBias,
  kQNorm,
  kKNorm,
  kAttnOut,
  kAttnOutBias,
  kFfnNorm,
  kGate,
  kUp,
  kDown,
  kGateBias,
  kUpBias,
  kDownBias,
};

/// "blk.3.attn_q.weight" and "model.layers.3.self_attn.q_proj.weight".
std::string GgufWeightName(Weight weight, int layer);
std::string HfWeightName(Weight weight, int layer);

/// Rows and columns a weight must have under `config`; a vector has cols 0.
struct WeightShape {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};
WeightShape ShapeOf(Weight weight, const ModelConfig& config);

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// Null when the source has no such weight.
  virtual const TensorInfo* Find(Weight weight, int layer) const = 0;
  virtual std::string NameOf(Weight weight, int layer) const = 0;
  /// Fills `out` (tensor.bytes long).
  virtual Status Read(const TensorInfo& tensor, std::span<std::byte> out) const = 0;
  virtual const std::vector<TensorInfo>& tensors() const = 0;
  virtual std::uint64_t FileBytes() const = 0;
  virtual std::string FormatName() const = 0;
  /// Whether the rows of Q and K stand in the order of adjacent RoPE pairs (GGUF files of the llama
  /// architecture).
  virtual bool InterleavedQk() const = 0;
  /// 32 hex digits that change when the weights do: the tables and samples of the data.
  virtual Result<std::string> Fingerprint() const = 0;
  /// Closes the files; Read fails from here on.
  virtual void Release() = 0;
};

std::unique_ptr<WeightSource> GgufWeights(std::shared_ptr<GgufFile> file,
                                          Architecture architecture);
std::unique_ptr<WeightSource> SafetensorsWeights(std::unique_ptr<SafetensorsModel> model);
/// Made up from `seed`, bf16 matrices generated row by row as they are read; norms are 1. A
/// weight's standard deviation is 1 / sqrt(its columns), that of the two projections back into the
/// residual stream divided by sqrt(2 layers) more, so that activations keep their size whatever the
/// depth.
std::unique_ptr<WeightSource> RandomWeights(const ModelConfig& config, std::uint64_t seed);

/// Every weight that `config` needs is there, readable, and of the right shape: one line naming the
/// tensor otherwise.
Status CheckWeights(const WeightSource& source, const ModelConfig& config);

/// order[r] = row of an interleaved Q or K matrix that holds row r of the natural one: inside a
/// head, the partner of row i is row i + head_dim / 2, and the file keeps the two side by side at
/// 2i and 2i + 1.
std::vector<std::int32_t> InterleavedOrder(int heads, int head_dim);

/// Two 64-bit lanes of FNV-1a over whatever is added, for fingerprints (not for security).
class Fingerprinter {
 public:
  void Add(std::span<const std::byte> bytes);
  void Add(std::string_view text) { Add(std::as_bytes(std::span(text.data(), text.size()))); }
  void Add(std::uint64_t number) { Add(std::as_bytes(std::span(&number, 1))); }
  std::string Hex() const;

 private:
  std::uint64_t a_ = 0xcbf29ce484222325u;
  std::uint64_t b_ = 0x9ae16a3b2f90404fu;
};

}  // namespace pliant
