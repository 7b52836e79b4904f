// Room: model. Weights made up from a seed, for speed work on a configuration without its weights.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "backend/plane_code.h"
#include "base/thread_pool.h"
#include "model/weights.h"

namespace pliant {
namespace {

/// SplitMix64 (Steele, Lea, Flood 2014): a 64-bit hash of a counter, so that any row can be made
/// without the ones before it.
std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class RandomSource final : public WeightSource {
 public:
  RandomSource(const ModelConfig& config, std::uint64_t seed) : config_(config), seed_(seed) {
    Add(Weight::kEmbedding, 0);
    Add(Weight::kOutputNorm, 0);
    if (!config.tie_embeddings) Add(Weight::kOutput, 0);
    for (int layer = 0; layer < config.layers; ++layer) {
      for (const Weight weight :
           {Weight::kAttnNorm, Weight::kQ, Weight::kK, Weight::kV, Weight::kAttnOut,
            Weight::kFfnNorm, Weight::kGate, Weight::kUp, Weight::kDown}) {
        Add(weight, layer);
      }
      if (config.qkv_bias) {
        for (const Weight w : {Weight::kQBias, Weight::kKBias, Weight::kVBias}) Add(w, layer);
      }
      if (config.qk_norm) {
        for (const Weight w : {Weight::kQNorm, Weight::kKNorm}) Add(w, layer);
      }
    }
  }

  const TensorInfo* Find(Weight weight, int layer) const override {
    const auto found = index_.find({weight, layer});
    return found == index_.end() ? nullptr : &tensors_[found->second];
  }
  std::string NameOf(Weight weight, int layer) const override {
    return HfWeightName(weight, layer);
  }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  std::uint64_t FileBytes() const override { return 0; }
  std::string FormatName() const override { return "random weights"; }
  bool InterleavedQk() const override { return false; }
  void Release() override { pool_.reset(); }

  Result<std::string> Fingerprint() const override {
    Fingerprinter hash;
    hash.Add("random");
    hash.Add(seed_);
    for (const TensorInfo& tensor : tensors_) {
      hash.Add(tensor.name);
      hash.Add(tensor.ShapeText());
    }
    return hash.Hex();
  }

  Status Read(const TensorInfo& tensor, std::span<std::byte> out) const override {
    PLIANT_CHECK(out.size() == tensor.bytes, "the buffer must have the tensor's size");
    const auto index = static_cast<std::size_t>(&tensor - tensors_.data());
    PLIANT_CHECK(index < tensors_.size(), "a tensor of this source");
    PLIANT_CHECK(pool_ != nullptr, "the source has been released");
    if (tensor.type == DType::kF32) {
      const float one = 1.0f;
      for (std::size_t i = 0; i < out.size(); i += 4) std::memcpy(out.data() + i, &one, 4);
      return Status::Ok();
    }
    const std::int64_t cols = tensor.shape.back();
    const std::int64_t rows = static_cast<std::int64_t>(tensor.elements) / cols;
    constexpr std::int64_t kRowsPerItem = 64;
    // 16 random bits become a uniform value in [-limit, limit), whose standard deviation is limit /
    // sqrt(3).
    const float step = static_cast<float>(deviations_[index] * std::sqrt(3.0) / 32768);
    pool_->ForEach((rows + kRowsPerItem - 1) / kRowsPerItem, [&](std::int64_t item, int) {
      const std::int64_t end = std::min(rows, (item + 1) * kRowsPerItem);
      for (std::int64_t row = item * kRowsPerItem; row < end; ++row) {
        FillRow(Mix(Mix(seed_ + index) + static_cast<std::uint64_t>(row)), step,
                out.subspan(static_cast<std::size_t>(row * cols * 2),
                            static_cast<std::size_t>(cols * 2)));
      }
    });
    return Status::Ok();
  }

 private:
  static void FillRow(std::uint64_t row_seed, float step, std::span<std::byte> out) {
    for (std::size_t i = 0; i < out.size(); i += 8) {
      std::uint64_t bits = Mix(row_seed + i);
      std::uint16_t values[4];
      for (std::uint16_t& value : values) {
        value = FloatToBf16(step * static_cast<float>(static_cast<std::int16_t>(bits)));
        bits >>= 16;
      }
      std::memcpy(out.data() + i, values, std::min<std::size_t>(8, out.size() - i));
    }
  }

  void Add(Weight weight, int layer) {
    const WeightShape shape = ShapeOf(weight, config_);
    TensorInfo tensor;
    tensor.name = NameOf(weight, layer);
    const bool bias =
        weight == Weight::kQBias || weight == Weight::kKBias || weight == Weight::kVBias;
    tensor.type = shape.cols == 0 && !bias ? DType::kF32 : DType::kBF16;
    tensor.type_name = Traits(tensor.type).name;
    tensor.shape = shape.cols == 0 ? std::vector{shape.rows} : std::vector{shape.rows, shape.cols};
    tensor.elements = static_cast<std::uint64_t>(shape.rows) *
                      static_cast<std::uint64_t>(std::max<std::int64_t>(shape.cols, 1));
    tensor.bytes = RowBytes(tensor.type, tensor.elements);
    double deviation =
        bias ? 0.02 : 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(shape.cols, 1)));
    if (weight == Weight::kAttnOut || weight == Weight::kDown)
      deviation /= std::sqrt(2.0 * config_.layers);
    index_.emplace(std::pair(weight, layer), tensors_.size());
    tensors_.push_back(std::move(tensor));
    deviations_.push_back(deviation);
  }

  ModelConfig config_;
  std::uint64_t seed_;
  std::vector<TensorInfo> tensors_;
  std::vector<double> deviations_;
  std::map<std::pair<Weight, int>, std::size_t> index_;
  std::unique_ptr<ThreadPool> pool_ = std::make_unique<ThreadPool>(0);  // until Release
};

}  // namespace

std::unique_ptr<WeightSource> RandomWeights(const ModelConfig& config, std::uint64_t seed) {
  return std::make_unique<RandomSource>(config, seed);
}

}  // namespace pliant
