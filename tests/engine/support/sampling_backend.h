// A backend that takes tokens itself and says that it works behind the engine, as a GPU does: the CPU backend, with backend/sampling.h behind its logits.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "backend/backend.h"

namespace pliant {

class SamplingBackend final : public Backend {
 public:
  explicit SamplingBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  std::string Name() const override { return inner_->Name(); }
  DeviceInfo Info() const override { return inner_->Info(); }
  Result<MatrixId> AddMatrix(std::span<const HostMatrix> parts) override { return inner_->AddMatrix(parts); }
  Result<VectorId> AddVector(std::span<const float> values) override { return inner_->AddVector(values); }
  std::size_t WeightBytes() const override { return inner_->WeightBytes(); }
  Result<TensorId> AddTensor(std::int64_t rows, std::int64_t cols) override { return inner_->AddTensor(rows, cols); }
  std::size_t PageBytes(const KvGeometry& g) const override { return inner_->PageBytes(g); }
  Status AllocatePages(const KvGeometry& g, std::uint32_t pages) override { return inner_->AllocatePages(g, pages); }
  Status SetKvCode(const KvCode& code) override { return inner_->SetKvCode(code); }
  void StartChannelStatistics() override { inner_->StartChannelStatistics(); }
  ChannelStatistics TakeChannelStatistics() override { return inner_->TakeChannelStatistics(); }
  Status BeginStep(const StepBatch& batch) override {
    if (fail_step > 0 && --fail_step == 0) return OutOfMemory("this step fails");
    sampling_.assign(batch.sampling.begin(), batch.sampling.end());
    changes_.assign(batch.changes.begin(), batch.changes.end());
    columns_ = static_cast<std::size_t>(batch.sampled_columns);
    logit_rows_ = batch.logit_rows.size();
    StepBatch plain = batch;
    plain.sampling = {};
    plain.changes = {};
    return inner_->BeginStep(plain);
  }
  void Embed(MatrixId table, TensorId out) override { inner_->Embed(table, out); }
  void RmsNorm(TensorId x, VectorId w, float eps, TensorId out) override { inner_->RmsNorm(x, w, eps, out); }
  void MatMul(TensorId x, MatrixId w, VectorId bias, TensorId out, bool add) override { inner_->MatMul(x, w, bias, out, add); }
  void QkvToCache(const QkvParams& params, const RopeTable& rope, TensorId qkv) override { inner_->QkvToCache(params, rope, qkv); }
  void Attention(int layer, int heads, float scale, TensorId qkv, TensorId out) override {
    inner_->Attention(layer, heads, scale, qkv, out);
  }
  void SiluMul(TensorId gate_up, TensorId out) override { inner_->SiluMul(gate_up, out); }
  void Logits(TensorId x, VectorId norm, float eps, MatrixId weight) override { inner_->Logits(x, norm, eps, weight); }
  bool StartStep() override { return true; }  // the engine does its other work then
  Status EndStep() override {
    const Status status = inner_->EndStep();
    const std::span<const float> all = inner_->LogitRows();
    host_.clear();
    tokens_.assign(sampling_.size(), kNoToken);
    logprobs_.assign(sampling_.size(), {});
    const std::size_t width = logit_rows_ == 0 ? 0 : all.size() / logit_rows_;
    for (std::size_t i = 0; i < logit_rows_; ++i) {
      const std::span<const float> row = all.subspan(i * width, width);
      if (sampling_.empty() || sampling_[i].on_host != 0) {
        host_.insert(host_.end(), row.begin(), row.end());
      } else {
        const RowSampling& how = sampling_[i];
        tokens_[i] = SampleLogits(row.first(std::min(columns_, row.size())), how, sampler_,
                                  std::span(changes_).subspan(how.first_change, how.changes), &logprobs_[i]);
        ++taken;
      }
    }
    return status;
  }
  std::span<const float> LogitRows() const override { return host_; }
  bool SamplesTokens() const override { return true; }
  std::span<const std::int32_t> SampledTokens() const override { return tokens_; }
  std::span<const RowLogprobs> SampledLogprobs() const override { return logprobs_; }
  bool RetainsHistory(int heads) const override { return inner_->RetainsHistory(heads); }
  void StartHistory(RetainedHistory& history) override { inner_->StartHistory(history); }
  Status NoteHistory(RetainedHistory& history, std::int32_t blocks) override { return inner_->NoteHistory(history, blocks); }
  Status DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return inner_->DropFromHistory(history, kept);
  }
  Status RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return inner_->RefillHistory(history, kept);
  }
  CopyTicket CopyOut(std::span<const PageCopy> copies) override { return inner_->CopyOut(copies); }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override { return inner_->CopyIn(copies); }
  CopyState Poll(CopyTicket ticket) override { return inner_->Poll(ticket); }
  CopyState Wait(CopyTicket ticket) override { return inner_->Wait(ticket); }

  std::atomic<int> fail_step = 0;  // the so-manieth step from now fails; 0: none
  std::size_t taken = 0;  // tokens taken here; read it when the engine is idle

 private:
  std::unique_ptr<Backend> inner_;
  std::vector<RowSampling> sampling_;
  std::vector<LogitChange> changes_;
  std::size_t columns_ = 0, logit_rows_ = 0;
  std::vector<float> host_;
  std::vector<std::int32_t> tokens_;
  std::vector<RowLogprobs> logprobs_;
  RowSampler sampler_;
};

}  // namespace pliant
