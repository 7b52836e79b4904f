// A backend without a model: page memory and nothing else. Pages hold, for each token, bytes that
// tell whose token it is, so that a wrong block or a stale page is seen at once (see machine.h).
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/retained_rows.h"
#include "base/check.h"

namespace pliant::testing {

inline constexpr KvGeometry kTinyGeometry{.layers = 1, .kv_heads = 1, .head_dim = 32};

class FakeBackend final : public Backend {
 public:
  std::span<std::byte> Page(PageId id) {
    PLIANT_CHECK(id.valid() && (id.value() + 1) * page_bytes_ <= memory_.size(), "no such page");
    return {memory_.data() + id.value() * page_bytes_, page_bytes_};
  }

  std::string Name() const override { return "fake"; }
  DeviceInfo Info() const override { return {"fake", 1 << 30, 1 << 30}; }
  Result<MatrixId> AddMatrix(std::span<const HostMatrix>) override { return MatrixId(0); }
  Result<VectorId> AddVector(std::span<const float>) override { return VectorId(0); }
  std::size_t WeightBytes() const override { return 0; }
  Result<TensorId> AddTensor(std::int64_t, std::int64_t) override { return TensorId(0); }
  std::size_t PageBytes(const KvGeometry& g) const override { return g.PageBytes(); }
  Status AllocatePages(const KvGeometry& g, std::uint32_t pages) override {
    geometry_ = g;
    page_bytes_ = g.PageBytes();
    memory_.assign(pages * page_bytes_, std::byte{0xdd});
    return Status::Ok();
  }
  Status SetKvCode(const KvCode&) override { return Status::Ok(); }
  void StartChannelStatistics() override {}
  ChannelStatistics TakeChannelStatistics() override { return {}; }
  Status BeginStep(const StepBatch&) override { return Status::Ok(); }
  void Embed(MatrixId, TensorId) override {}
  void RmsNorm(TensorId, VectorId, float, TensorId) override {}
  void MatMul(TensorId, MatrixId, VectorId, TensorId, bool) override {}
  void QkvToCache(const QkvParams&, const RopeTable&, TensorId) override {}
  void Attention(int, int, float, TensorId, TensorId) override {}
  void SiluMul(TensorId, TensorId) override {}
  void Logits(TensorId, VectorId, float, MatrixId) override {}
  Status EndStep() override { return Status::Ok(); }
  std::span<const float> LogitRows() const override { return {}; }
  PageMemory Memory() {
    return {memory_.data(), page_bytes_, static_cast<std::uint32_t>(memory_.size() / page_bytes_),
            geometry_};
  }
  bool RetainsHistory(int) const override { return true; }
  Status NoteHistory(RetainedHistory& history, std::int32_t blocks) override {
    return NoteRows(Memory(), history, {}, blocks);
  }
  Status DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return DropRows(Memory(), history, kept);
  }
  Status RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return RefillRows(Memory(), history, kept);
  }
  CopyTicket CopyOut(std::span<const PageCopy> copies) override;
  CopyTicket CopyIn(std::span<const PageCopy> copies) override;
  CopyState Poll(CopyTicket) override { return CopyState::kDone; }
  CopyState Wait(CopyTicket) override { return CopyState::kDone; }

 private:
  KvGeometry geometry_;
  std::size_t page_bytes_ = 0;
  std::vector<std::byte> memory_;
  std::uint64_t tickets_ = 0;
};

}  // namespace pliant::testing
