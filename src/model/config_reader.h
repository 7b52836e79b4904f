// Room: model. Reads ModelConfig from a model file. Pure functions, any thread.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "model/config.h"
#include "model/gguf.h"

namespace pliant {

/// From GGUF keys and the shapes of the embedding. Required keys are checked first, one by one;
/// each missing one is NotFound naming the key. Features the graph does not have (experts, YaRN,
/// partial rotation) are Unimplemented, naming key and value.
Result<ModelConfig> ReadGgufConfig(const GgufFile& file);

/// From the text of a Hugging Face config.json. `max_position_embeddings` becomes context_length.
Result<ModelConfig> ReadHfConfig(std::string_view json);

/// "llama", "qwen2", "qwen3".
std::string_view ArchitectureName(Architecture architecture);
/// Unimplemented, listing what there is, for another word.
Result<Architecture> ParseArchitecture(std::string_view name);

}  // namespace pliant
