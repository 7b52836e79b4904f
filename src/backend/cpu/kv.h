// Room: backend. CpuKv: the KV half of the CPU backend. It owns the plane pages, writes K and V
// into them, attends over them, and copies them in the background.
//
// Threads: the backend's owner thread calls everything here; kernels run on the ThreadPool given to
// Make, page copies on a thread of CpuKv's own. Ops are immediate: they have taken effect when they
// return. Accuracy and what is bitwise reproducible: see kv_attention.h.
//
// A block that has no plane of K or no plane of V (a SENSOR block, DESIGN.md section 5) takes no
// part in attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/status.h"
#include "base/thread_pool.h"

namespace pliant {

/// Rows of f32 with a stride (in elements), as activation tensors are.
struct KvRows {
  float* data = nullptr;
  std::int64_t stride = 0;
  float* Row(std::int64_t row) const { return data + row * stride; }
};

/// QkvParams with the norm weights resolved.
struct KvQkvParams {
  int layer = 0;
  int heads = 0;
  std::span<const float> q_norm;  // [head_dim] or empty
  std::span<const float> k_norm;
  float norm_eps = 0;
};

class CpuKv {
 public:
  virtual ~CpuKv() = default;

  /// `level` as in CpuOptions: the kernels used stay at or below it and at or below what the
  /// machine can do. `pool` must outlive the result. InvalidArgument for an unknown word.
  static Result<std::unique_ptr<CpuKv>> Make(ThreadPool* pool, std::string_view level);

  /// The level of the kernels in use: "amx", "avx512", "avx2" or "plain".
  virtual std::string_view Level() const = 0;

  /// As in Backend. AllocatePages reserves address space only: memory is used when pages are first
  /// written.
  virtual std::size_t PageBytes(const KvGeometry& geometry) const = 0;
  virtual Status AllocatePages(const KvGeometry& geometry, std::uint32_t pages) = 0;
  virtual Status SetKvCode(const KvCode& code) = 0;
  virtual void StartChannelStatistics() = 0;
  virtual ChannelStatistics TakeChannelStatistics() = 0;
  /// A page's bytes, for tests.
  virtual std::span<std::byte> Page(PageId page) = 0;

  /// For BeginStep: checks the batch against the pages and the cache's shape. The batch must
  /// outlive the ops of the step.
  virtual Status BeginStep(const StepBatch& batch) = 0;
  /// qkv rows: [batch rows][(heads + 2 kv_heads) * head_dim], as in Backend::QkvToCache.
  virtual void QkvToCache(const KvQkvParams& params, const RopeTable& rope, KvRows qkv) = 0;
  /// As in Backend::Attention; `query` rows hold the query in their first heads * head_dim columns.
  virtual void Attention(int layer, int heads, float softmax_scale, KvRows query, KvRows out) = 0;

  /// As in Backend.
  virtual bool RetainsHistory(int heads) const = 0;
  virtual Status NoteHistory(RetainedHistory& history, std::int32_t blocks) = 0;
  virtual Status DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) = 0;
  virtual Status RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) = 0;

  /// As in Backend.
  virtual CopyTicket CopyOut(std::span<const PageCopy> copies) = 0;
  virtual CopyTicket CopyIn(std::span<const PageCopy> copies) = 0;
  virtual CopyState Poll(CopyTicket ticket) = 0;
  virtual CopyState Wait(CopyTicket ticket) = 0;
};

}  // namespace pliant
