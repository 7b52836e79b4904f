// Room: backend. The CPU backend: packed weights and products (gemm), row-wise ops (ops), and the
// plane cache (CpuKv). Ops are immediate. One owner thread, as in backend.h.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/arena.h"
#include "backend/cpu/gemm_runner.h"
#include "backend/cpu/kv.h"
#include "backend/cpu/ops.h"
#include "base/thread_pool.h"

namespace pliant {

class CpuBackend final : public Backend {
 public:
  static Result<std::unique_ptr<CpuBackend>> Make(const CpuOptions& options);

  std::string Name() const override { return "cpu"; }
  DeviceInfo Info() const override;

  Result<MatrixId> AddMatrix(std::span<const HostMatrix> parts) override;
  Result<VectorId> AddVector(std::span<const float> values) override;
  std::size_t WeightBytes() const override;
  Result<TensorId> AddTensor(std::int64_t max_rows, std::int64_t cols) override;

  std::size_t PageBytes(const KvGeometry& geometry) const override;
  Status AllocatePages(const KvGeometry& geometry, std::uint32_t pages) override;
  Status SetKvCode(const KvCode& code) override;
  void StartChannelStatistics() override;
  ChannelStatistics TakeChannelStatistics() override;

  Status BeginStep(const StepBatch& batch) override;
  void Embed(MatrixId table, TensorId out) override;
  void RmsNorm(TensorId x, VectorId weight, float eps, TensorId out) override;
  void MatMul(TensorId x, MatrixId weight, VectorId bias, TensorId out, bool accumulate) override;
  void QkvToCache(const QkvParams& params, const RopeTable& rope, TensorId qkv) override;
  void Attention(int layer, int heads, float softmax_scale, TensorId qkv, TensorId out) override;
  void SiluMul(TensorId gate_up, TensorId out) override;
  void Logits(TensorId x, VectorId norm, float eps, MatrixId weight) override;
  Status EndStep() override;
  std::span<const float> LogitRows() const override;

  bool RetainsHistory(int heads) const override { return kv_->RetainsHistory(heads); }
  Status NoteHistory(RetainedHistory& history, std::int32_t blocks) override {
    return kv_->NoteHistory(history, blocks);
  }
  Status DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return kv_->DropFromHistory(history, kept);
  }
  Status RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return kv_->RefillHistory(history, kept);
  }
  CopyTicket CopyOut(std::span<const PageCopy> copies) override { return kv_->CopyOut(copies); }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override { return kv_->CopyIn(copies); }
  CopyState Poll(CopyTicket ticket) override { return kv_->Poll(ticket); }
  CopyState Wait(CopyTicket ticket) override { return kv_->Wait(ticket); }

 private:
  /// Rows in f32, in bf16, or both. What only products read (norms, the gated features) is written
  /// as bf16 alone when the product at hand reads bf16.
  struct Tensor {
    std::int64_t max_rows = 0;
    std::int64_t cols = 0;
    std::int64_t bf16_stride = 0;
    float* f32 = nullptr;           // [max_rows][cols]
    std::uint16_t* bf16 = nullptr;  // [max_rows up to 32][cols up to 32], or null at f32 levels
    bool f32_current = true;
    bool bf16_current = false;
  };

  CpuBackend(const CpuOptions& options, CpuLevel level);

  std::int64_t Rows() const { return static_cast<std::int64_t>(batch_.tokens.size()); }
  Tensor& At(TensorId id);
  /// `id` with its f32 rows current.
  Tensor& AtF32(TensorId id);
  const PackedMatrix& At(MatrixId id) const;
  const float* At(VectorId id, std::int64_t size) const;
  Status GrowTensor(Tensor& tensor, std::int64_t max_rows, std::int64_t cols);
  /// A product that waits for the next op: when that is SiluMul of it, both become one pass.
  struct PendingProduct {
    TensorId x;
    MatrixId weight;
    TensorId out;
  };
  /// Computes the pending product, if there is one. Every op begins with it.
  void Flush();
  /// x in bf16 for a product of `rows` rows, where the kernel reads that.
  void PrepareInput(Tensor& x, std::int64_t rows, GemmCall& call);
  void Multiply(Tensor& x, std::int64_t rows, const PackedMatrix& weight, const float* bias,
                float* out, std::int64_t out_stride, bool accumulate);
  /// Fills rows [0, rows) of `out` by fn(row, f32 destination), as bf16 alone where products want
  /// it.
  template <typename F>
  void FillRows(Tensor& out, std::int64_t rows, const F& fn);
  /// fn(row) on the pool's threads, or on this one when there is little to do.
  template <typename F>
  void ForRows(std::int64_t rows, std::int64_t cols, const F& fn);

  CpuLevel level_;
  ThreadPool pool_;
  GemmRunner gemm_;
  const CpuOps* ops_;
  std::unique_ptr<CpuKv> kv_;
  Arena weights_;
  Arena activations_;
  std::vector<PackedMatrix> matrices_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Tensor> tensors_;
  std::size_t vector_bytes_ = 0;
  std::int64_t most_rows_ = 0;  // of any matrix: the vocabulary, as the widest
  std::int64_t most_cols_ = 0;
  std::vector<std::vector<float>> row_buffers_;  // one a thread, most_tensor_cols_ long
  StepBatch batch_;
  std::optional<PendingProduct> pending_;
  Tensor logit_x_;  // normed rows that logits are wanted of
  Tensor logits_;   // their logits
  std::int64_t logit_cols_ = 0;
  std::int64_t logit_count_ = 0;
};

}  // namespace pliant
