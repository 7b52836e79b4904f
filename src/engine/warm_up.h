// Room: engine. A first prompt and a first few tokens for nobody, so that the first request does
// not wait for what a device loads and plans at first use (kernels, algorithms, a graph). Runs on
// the thread that sets the engine up, before the engine thread starts.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "model/model.h"

namespace pliant {

/// Nothing on a backend that does not take tokens itself (SamplesTokens), or with fewer pages or
/// rows than this takes. Writes pages 0 .. 31 at most, which must be nobody's, and leaves them
/// undefined.
Status WarmUp(Backend& backend, Model& model, std::uint32_t pages, int max_rows);

}  // namespace pliant
