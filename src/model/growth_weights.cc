#include "model/growth_weights.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "model/safetensors.h"

namespace pliant {
namespace {

/// A tensor that must be there, of this shape.
Result<std::vector<float>> ReadFloats(const ByteSource& source,
                                      const std::vector<TensorInfo>& tensors, const char* name,
                                      const std::vector<std::int64_t>& shape) {
  const auto tensor = std::ranges::find(tensors, name, &TensorInfo::name);
  if (tensor == tensors.end())
    return InvalidArgument(std::string("growth weights without the tensor ") + name);
  if (!tensor->readable || tensor->type != DType::kF32 || tensor->shape != shape) {
    TensorInfo wanted;
    wanted.shape = shape;
    return InvalidArgument(std::string("tensor ") + name + " is " + tensor->type_name + " " +
                           tensor->ShapeText() + ", this model needs F32 " + wanted.ShapeText());
  }
  std::vector<float> values(static_cast<std::size_t>(tensor->elements));
  PLIANT_RETURN_IF_ERROR(source.Read(tensor->offset, std::as_writable_bytes(std::span(values))));
  if (!std::ranges::all_of(values, [](float value) { return std::isfinite(value); }))
    return InvalidArgument(std::string("tensor ") + name + " holds a number that is not finite");
  return values;
}

}  // namespace

Result<std::shared_ptr<const GrowthWeights>> ReadGrowthWeights(const ByteSource& source,
                                                               const ModelConfig& config) {
  PLIANT_ASSIGN_OR_RETURN(const std::vector<TensorInfo> tensors, ReadSafetensorsHeader(source, 0));
  const std::vector<std::int64_t> shape = {config.layers, config.heads, config.head_dim};
  GrowthWeights weights{
      .layers = config.layers, .heads = config.heads, .head_dim = config.head_dim};
  PLIANT_ASSIGN_OR_RETURN(weights.short_mean, ReadFloats(source, tensors, "short_mean", shape));
  PLIANT_ASSIGN_OR_RETURN(weights.long_mean, ReadFloats(source, tensors, "long_mean", shape));
  PLIANT_ASSIGN_OR_RETURN(const std::vector<float> bias, ReadFloats(source, tensors, "bias", {1}));
  PLIANT_ASSIGN_OR_RETURN(const std::vector<float> above,
                          ReadFloats(source, tensors, "above", {1}));
  if (tensors.size() != 4) {
    return InvalidArgument("growth weights with " + std::to_string(tensors.size()) +
                           " tensors, 4 are known");
  }
  weights.bias = bias[0];
  weights.above = above[0];
  if (!(weights.above > 0 && weights.above < 1))
    return InvalidArgument("tensor above is " + std::to_string(weights.above) +
                           ", a number between 0 and 1 is needed");
  return std::shared_ptr<const GrowthWeights>(
      std::make_shared<const GrowthWeights>(std::move(weights)));
}

Result<std::shared_ptr<const GrowthWeights>> OpenGrowthWeights(const std::string& path,
                                                               const ModelConfig& config) {
  PLIANT_ASSIGN_OR_RETURN(const std::unique_ptr<ByteSource> source, OpenFile(path));
  Result<std::shared_ptr<const GrowthWeights>> weights = ReadGrowthWeights(*source, config);
  if (!weights.ok()) return weights.status().WithContext(path);
  return weights;
}

}  // namespace pliant
