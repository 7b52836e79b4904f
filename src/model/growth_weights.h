// Room: model. A file of growth weights (backend/growth_weights.h), as bench/fit_signal.py writes
// it: safetensors with the F32 tensors short_mean and long_mean [layers, heads, head dim], bias [1]
// and above [1]. Untrusted: what does not fit is refused with one line that names file and tensor.
// Pure functions, any thread.
#pragma once

#include <memory>
#include <string>

#include "backend/growth_weights.h"
#include "base/status.h"
#include "model/byte_source.h"
#include "model/config.h"

namespace pliant {

/// InvalidArgument: tensors that lack, are too many, of another type, or of a shape that is not the
/// model's; numbers that are not finite; `above` outside 0 .. 1.
Result<std::shared_ptr<const GrowthWeights>> ReadGrowthWeights(const ByteSource& source,
                                                               const ModelConfig& config);
/// The same of a file; messages name it.
Result<std::shared_ptr<const GrowthWeights>> OpenGrowthWeights(const std::string& path,
                                                               const ModelConfig& config);

}  // namespace pliant
