// Room: backend. The contract between Pliant and a device: weights, activations, the plane pages of
// the KV cache, the ops of one step, and asynchronous page copies. ref/ is the scalar oracle, cpu/
// the fast CPU one, cuda/ the GPU one; tests wrap a backend in decorators that fail or delay.
//
// Threads: one owner (the engine thread) calls everything here. A backend may use threads of its
// own inside a call. Order: ops between BeginStep and EndStep take effect in the order given. A
// device backend may only enqueue them; results are on the host once EndStep has returned (Logits)
// or a copy's ticket reports done. Errors: Status for what can be expected (out of memory,
// unsupported type). A device fault stops the process with the call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/plane_code.h"
#include "backend/retained_history.h"
#include "backend/sampling.h"
#include "base/dtype.h"
#include "base/ids.h"
#include "base/status.h"

namespace pliant {

/// A weight matrix as it lies in a model file: `rows` outputs by `cols` inputs, row-major, borrowed
/// during the call only.
struct HostMatrix {
  DType type = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::span<const std::byte> data;  // rows * RowBytes(type, cols)
  /// Row r of the matrix is row order[r] of data; empty: natural order. (GGUF llama files
  /// interleave Q and K rows for RoPE.)
  std::span<const std::int32_t> order;
};

using MatrixId = StrongId<struct MatrixIdTag>;
using VectorId = StrongId<struct VectorIdTag>;
/// An activation buffer [max_rows, cols] owned by the backend; f32 unless the backend computes in
/// something narrower.
using TensorId = StrongId<struct TensorIdTag>;

/// The pages of one logical block as an op reads or writes it. Resident planes come first; absent
/// ones are invalid ids.
struct BlockView {
  std::array<PageId, kPlanes> k;
  std::array<PageId, kPlanes> v;
  friend bool operator==(const BlockView&, const BlockView&) = default;
};

/// One sequence's part in a step: `rows` new tokens at positions context .. context + rows - 1.
/// Token at position p lies in block p / 32, slot p % 32. Before attention the step writes K and V
/// of the new rows into their blocks (every plane the block has); attention of row i then reads
/// positions 0 .. context + i.
struct SequenceSlice {
  std::int32_t first_row = 0;    // into StepBatch.tokens
  std::int32_t rows = 0;         // at least 1
  std::int32_t context = 0;      // tokens cached before this step
  std::int32_t first_block = 0;  // into StepBatch.blocks
  std::int32_t blocks = 0;       // ceil((context + rows) / 32)
  /// Only for a backend that RetainsHistory(): the sequence has a capacity. Attention of a single
  /// row reads the kept blocks, blocks first_kept .. first_kept + history->kept_blocks() - 1 of the
  /// batch, and the blocks from history->frontier() on. With returns, the blocks before have plane
  /// 0 of K, and what a head misses comes back before it attends; else they have no pages. A row's
  /// attention is added to the scores. Slices of several rows: only while nothing was dropped;
  RetainedHistory* history = nullptr;
  std::int32_t first_kept = 0;
};

/// All a step needs to know, borrowed until EndStep returns. Sequences lie one behind the other in
/// `tokens`.
struct StepBatch {
  std::span<const std::int32_t> tokens;     // [rows]
  std::span<const std::int32_t> positions;  // [rows]
  std::span<const SequenceSlice> sequences;
  std::span<const BlockView> blocks;
  std::span<const std::int32_t> logit_rows;  // rows of `tokens` whose logits are wanted, ascending
  /// One a logit row, or none: then all logits go to the host. Only for a backend that
  /// SamplesTokens().
  std::span<const RowSampling> sampling;
  std::int32_t sampled_columns = 0;      // with `sampling`: token ids 0 .. this - 1 may be taken
  std::span<const LogitChange> changes;  // what rows' first_change and changes point into
  /// Tells steps apart for PrepareStep; 0: it was not called.
  std::uint64_t step = 0;
};

/// RoPE angles: position * inv_freq[i] for the pair (i, i + head_dim / 2); scaling (Llama 3) is
/// folded into inv_freq.
struct RopeTable {
  std::vector<float> inv_freq;  // [rotary dims / 2]; dims beyond are passed through
};

/// What QkvToCache does to one layer's fused projection, besides RoPE.
struct QkvParams {
  int layer = 0;
  int heads = 0;    // query heads; KV heads and head dim are the cache's
  VectorId q_norm;  // [head_dim] RMSNorm of each query head (Qwen 3), or invalid
  VectorId k_norm;
  float norm_eps = 0;
};

/// Bytes between a host buffer and one page; `bytes` is the backend's page size.
struct PageCopy {
  PageId page;
  std::byte* host = nullptr;
};

/// Host memory that the device's copies reach fastest (pinned); null: the backend has no better
/// memory than any other.
using HostMemory = std::unique_ptr<std::byte[], void (*)(std::byte*)>;

using CopyTicket = StrongId<struct CopyTicketTag, std::uint64_t>;
enum class CopyState { kPending, kDone, kFailed };

struct DeviceInfo {
  std::string name;          // "AVX-512 + AMX, 2 threads", "NVIDIA H200"
  std::size_t memory_total;  // bytes
  std::size_t memory_free;
};

/// The static code of K or of V, [layers][kv_heads][head_dim] each: x is stored as
/// (x - center) / scale; of K the mix of that (MixChannels of plane_code.h).
struct ChannelCode {
  std::vector<float> scale;   // finite, above 0
  std::vector<float> center;  // finite

  bool operator==(const ChannelCode&) const = default;
};

/// Undone outside the sum over tokens. K: the query is multiplied by `scale` and mixed, once (the
/// two channels of a RoPE pair have one scale); `center` adds one and the same number to all logits
/// of a query, which softmax ignores. V: as weights sum to 1, attention's result is the sum over
/// what is stored, times `scale`, plus `center`.
struct KvCode {
  ChannelCode key, value;

  bool operator==(const KvCode&) const = default;
};

/// What calibration needs to know of a text's keys, queries (both after RoPE) and values, by
/// channel. [layers][kv_heads][head_dim], empty while off. Sums are over rows.
struct ChannelStatistics {
  std::vector<float> key_min, key_max;
  std::vector<double> query_energy;  // sum of Q^2, also over the query heads that share the KV head
  std::vector<double> value_energy;  // sum of V^2
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// "ref", "cpu", "cuda".
  virtual std::string Name() const = 0;
  virtual DeviceInfo Info() const = 0;

  // ---- weights
  // ------------------------------------------------------------------------------------------------------------
  /// Stacks matrices of equal `cols` (Q, K and V; gate and up) into one [sum of rows, cols] and
  /// packs it the backend's way.
  virtual Result<MatrixId> AddMatrix(std::span<const HostMatrix> parts) = 0;
  /// A norm weight or a bias.
  virtual Result<VectorId> AddVector(std::span<const float> values) = 0;
  /// Bytes held for weights so far.
  virtual std::size_t WeightBytes() const = 0;

  // ---- activations
  // --------------------------------------------------------------------------------------------------------
  virtual Result<TensorId> AddTensor(std::int64_t max_rows, std::int64_t cols) = 0;

  // ---- KV pages
  // -----------------------------------------------------------------------------------------------------------
  /// Bytes of a page as this backend stores it; at least geometry.PageBytes().
  virtual std::size_t PageBytes(const KvGeometry& geometry) const = 0;
  /// Reserves `pages` pages, ids 0 .. pages - 1, contents undefined. Once.
  virtual Status AllocatePages(const KvGeometry& geometry, std::uint32_t pages) = 0;
  /// How K and V are coded from now on (see KvCode). Default: scale 1, center 0.
  virtual Status SetKvCode(const KvCode& code) = 0;
  /// While on, QkvToCache adds up ChannelStatistics; reading turns it off. For calibration at load.
  virtual void StartChannelStatistics() = 0;
  virtual ChannelStatistics TakeChannelStatistics() = 0;

  // ---- one step
  // -----------------------------------------------------------------------------------------------------------
  virtual Status BeginStep(const StepBatch& batch) = 0;
  /// Between StartStep and EndStep of a step: the one that comes next, so that less is left for its
  /// BeginStep, which gets the same arrays with the same content and `step`. Tokens and what is
  /// said about sampling may not be known yet. Another step may come in its place.
  virtual void PrepareStep(const StepBatch& /*batch*/) {}
  /// out[r] = row tokens[r] of `table`. out: [rows, cols of table].
  virtual void Embed(MatrixId table, TensorId out) = 0;
  /// out = x / rms(x) * weight, row by row.
  virtual void RmsNorm(TensorId x, VectorId weight, float eps, TensorId out) = 0;
  /// out = x Wᵀ + bias (bias may be invalid); with `accumulate`, out += that (the residual stream).
  virtual void MatMul(TensorId x, MatrixId weight, VectorId bias, TensorId out,
                      bool accumulate) = 0;
  /// qkv: [rows, (heads + 2 kv_heads) * head_dim]. Norms and rotates Q and K in place, writes K and
  /// V of every row to its block. Leaves the query in qkv's first heads * head_dim columns,
  /// multiplied by K's channel scale.
  virtual void QkvToCache(const QkvParams& params, const RopeTable& rope, TensorId qkv) = 0;
  /// out[rows, heads * head_dim] = softmax(q kᵀ * softmax_scale, causal) v, read from the planes of
  /// `layer`.
  virtual void Attention(int layer, int heads, float softmax_scale, TensorId qkv, TensorId out) = 0;
  /// gate_up: [rows, 2F], gate first. out[rows, F] = silu(gate) * up. Uses gate_up up: its contents
  /// are undefined after.
  virtual void SiluMul(TensorId gate_up, TensorId out) = 0;
  /// logits = norm(x[logit_rows]) Wᵀ, kept for Logits().
  virtual void Logits(TensorId x, VectorId norm, float eps, MatrixId weight) = 0;
  /// All ops of the step have been given. True: a device works on them now, and what the caller
  /// does before EndStep does not hold it up.
  virtual bool StartStep() { return false; }
  /// Runs what is still queued. After it returns, pages that the step read may be reused.
  virtual Status EndStep() = 0;
  /// [logit_rows, vocabulary] f32 on the host; valid until the next BeginStep. With
  /// StepBatch.sampling: only the rows whose RowSampling says on_host, one behind the other.
  virtual std::span<const float> LogitRows() const = 0;
  /// Does this backend take tokens itself, by StepBatch.sampling?
  virtual bool SamplesTokens() const { return false; }
  /// [logit_rows] token ids taken in the step, or kNoToken; undefined for rows on_host. Valid until
  /// the next BeginStep.
  virtual std::span<const std::int32_t> SampledTokens() const { return {}; }
  /// [logit_rows]; defined for rows that ask for logprobs and whose token is not kNoToken. Valid
  /// until the next BeginStep.
  virtual std::span<const RowLogprobs> SampledLogprobs() const { return {}; }

  // ---- histories with a capacity (retained_history.h), between steps
  /// Can a model with so many query heads have such sequences? Pages must have been allocated.
  virtual bool RetainsHistory(int /*heads*/) const { return false; }
  /// Can what left such a sequence return from any exact store? Else only from memory that
  /// AllocateHost gave.
  virtual bool ReturnsFromAnyStore() const { return true; }
  /// A history begins; for backends that keep tables of their own (RetainedHistory::KeepRemotely).
  virtual void StartHistory(RetainedHistory& /*history*/) {}
  /// Takes note of the keys of the full blocks history.noted() .. blocks - 1; a step must have
  /// rotated keys before. NotFound: an original cannot be read.
  virtual Status NoteHistory(RetainedHistory& /*history*/, std::int32_t /*blocks*/) {
    return InvalidArgument("this backend keeps no histories");
  }
  /// Block history.frontier(), full and noted, is dropped. `kept`: the kept blocks, perhaps one
  /// more than so far: then it takes all of the block, else the tokens of least use leave. All kept
  /// blocks have the same planes. NotFound: the original cannot be read; nothing has changed.
  virtual Status DropFromHistory(RetainedHistory& /*history*/,
                                 std::span<const BlockView> /*kept*/) {
    return InvalidArgument("this backend keeps no histories");
  }
  /// Writes all kept tokens anew, into blocks of undefined content. NotFound as above.
  virtual Status RefillHistory(RetainedHistory& /*history*/, std::span<const BlockView> /*kept*/) {
    return InvalidArgument("this backend keeps no histories");
  }

  // ---- page copies (exact store, restore, offload)
  // --------------------------------------------------------------------------
  /// `bytes` of host memory for the exact store; null when ordinary memory is as good. OutOfMemory
  /// when it cannot be had.
  virtual Result<HostMemory> AllocateHost(std::size_t /*bytes*/) {
    return HostMemory(nullptr, nullptr);
  }
  /// Device to host, after every op given so far. The host buffers stay the caller's and must live
  /// until the ticket is done.
  virtual CopyTicket CopyOut(std::span<const PageCopy> copies) = 0;
  /// Host to device. The caller guarantees that no step in flight reads these pages; a step begun
  /// later may.
  virtual CopyTicket CopyIn(std::span<const PageCopy> copies) = 0;
  virtual CopyState Poll(CopyTicket ticket) = 0;
  /// Blocks until the ticket is done or failed.
  virtual CopyState Wait(CopyTicket ticket) = 0;
};

/// The scalar oracle. Slow, single-threaded, f32 with plain loops (sums in double).
std::unique_ptr<Backend> MakeReferenceBackend();

struct CpuOptions {
  int threads = 0;  // 0: one a core this process may run on
  /// "auto", or a level to stay at or below: "amx", "avx512", "avx2", "plain". For tests and
  /// comparisons.
  std::string level = "auto";
  /// f32 products instead of bf16 ones: slower, for measuring quality.
  bool precise = false;
};
Result<std::unique_ptr<Backend>> MakeCpuBackend(const CpuOptions& options);

}  // namespace pliant
