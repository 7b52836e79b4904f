// Room: backend/cuda. From rows of logits to token ids, one thread block a row: what
// backend/sampling.h says, without sorting. The cuts of top_k and top_p are found by descending
// through histograms of the weights' bits (three levels of 10 bits), sums are integers (weights
// times 2^44), so that a result does not depend on the order of the additions. Called by the
// thread that owns the stream; enqueues only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/sampling.h"

namespace pliant::cuda {

/// logits [rows][stride], changed as `changes` (StepBatch.changes) say; ids 0 .. columns - 1 may be
/// taken. tokens[r]: the token, or kNoToken; rows that say on_host are not touched. logprobs[r],
/// for rows that ask for them and get a token: on the device or pinned on the host. Logits are
/// changed in place, and `changes` of rows with logprobs are used up.
void LaunchSample(float* logits, std::int64_t stride, int columns, int rows, const RowSampling* how,
                  LogitChange* changes, std::int32_t* tokens, RowLogprobs* logprobs,
                  cudaStream_t stream);

}  // namespace pliant::cuda
