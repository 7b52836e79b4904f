// A backend without a model: page memory, and copies that a test can delay or spoil. Pages hold,
// for each token, bytes that tell whose token it is, so that a wrong block or a stale page is seen
// at once (see driver.h).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "backend/backend.h"
#include "base/check.h"

namespace pliant::testing {

inline constexpr KvGeometry kTinyGeometry{.layers = 1, .kv_heads = 1, .head_dim = 32};

/// Every call forwarded: what decorators are made from.
class BackendDecorator : public Backend {
 public:
  explicit BackendDecorator(Backend& inner) : inner_(inner) {}
  std::string Name() const override { return inner_.Name(); }
  DeviceInfo Info() const override { return inner_.Info(); }
  Result<MatrixId> AddMatrix(std::span<const HostMatrix> parts) override {
    return inner_.AddMatrix(parts);
  }
  Result<VectorId> AddVector(std::span<const float> values) override {
    return inner_.AddVector(values);
  }
  std::size_t WeightBytes() const override { return inner_.WeightBytes(); }
  Result<TensorId> AddTensor(std::int64_t rows, std::int64_t cols) override {
    return inner_.AddTensor(rows, cols);
  }
  std::size_t PageBytes(const KvGeometry& g) const override { return inner_.PageBytes(g); }
  Status AllocatePages(const KvGeometry& g, std::uint32_t pages) override {
    return inner_.AllocatePages(g, pages);
  }
  Status SetChannelScales(std::span<const float> channel) override {
    return inner_.SetChannelScales(channel);
  }
  void StartKeyMaxima() override { inner_.StartKeyMaxima(); }
  std::vector<float> TakeKeyMaxima() override { return inner_.TakeKeyMaxima(); }
  Status BeginStep(const StepBatch& batch) override { return inner_.BeginStep(batch); }
  void Embed(MatrixId table, TensorId out) override { inner_.Embed(table, out); }
  void RmsNorm(TensorId x, VectorId w, float eps, TensorId out) override {
    inner_.RmsNorm(x, w, eps, out);
  }
  void MatMul(TensorId x, MatrixId w, VectorId b, TensorId out, bool acc) override {
    inner_.MatMul(x, w, b, out, acc);
  }
  void QkvToCache(const QkvParams& p, const RopeTable& r, TensorId qkv) override {
    inner_.QkvToCache(p, r, qkv);
  }
  void Attention(int layer, int heads, float scale, TensorId qkv, TensorId out) override {
    inner_.Attention(layer, heads, scale, qkv, out);
  }
  void SiluMul(TensorId gate_up, TensorId out) override { inner_.SiluMul(gate_up, out); }
  void Logits(TensorId x, VectorId norm, float eps, MatrixId w) override {
    inner_.Logits(x, norm, eps, w);
  }
  Status EndStep() override { return inner_.EndStep(); }
  std::span<const float> LogitRows() const override { return inner_.LogitRows(); }
  CopyTicket CopyOut(std::span<const PageCopy> copies) override { return inner_.CopyOut(copies); }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override { return inner_.CopyIn(copies); }
  CopyState Poll(CopyTicket ticket) override { return inner_.Poll(ticket); }
  CopyState Wait(CopyTicket ticket) override { return inner_.Wait(ticket); }

 protected:
  Backend& inner_;
};

class FakeBackend final : public Backend {
 public:
  std::span<std::byte> Page(PageId id) {
    PLIANT_CHECK(id.valid() && (id.value() + 1) * page_bytes_ <= memory_.size(), "no such page");
    return {memory_.data() + id.value() * page_bytes_, page_bytes_};
  }
  void Poison(PageId id) {
    for (std::byte& b : Page(id)) b = std::byte{0xdd};
  }

  std::string Name() const override { return "fake"; }
  DeviceInfo Info() const override { return {"fake", 1 << 30, 1 << 30}; }
  Result<MatrixId> AddMatrix(std::span<const HostMatrix>) override { return MatrixId(0); }
  Result<VectorId> AddVector(std::span<const float>) override { return VectorId(0); }
  std::size_t WeightBytes() const override { return 0; }
  Result<TensorId> AddTensor(std::int64_t, std::int64_t) override { return TensorId(0); }
  std::size_t PageBytes(const KvGeometry& g) const override { return g.PageBytes(); }
  Status AllocatePages(const KvGeometry& g, std::uint32_t pages) override {
    page_bytes_ = g.PageBytes();
    memory_.assign(pages * page_bytes_, std::byte{0xdd});
    return Status::Ok();
  }
  Status SetChannelScales(std::span<const float>) override { return Status::Ok(); }
  void StartKeyMaxima() override {}
  std::vector<float> TakeKeyMaxima() override { return {}; }
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
  CopyTicket CopyOut(std::span<const PageCopy> copies) override;
  CopyTicket CopyIn(std::span<const PageCopy> copies) override;
  CopyState Poll(CopyTicket) override { return CopyState::kDone; }
  CopyState Wait(CopyTicket) override { return CopyState::kDone; }

 private:
  std::size_t page_bytes_ = 0;
  std::vector<std::byte> memory_;
  std::uint64_t tickets_ = 0;
};

/// What can go wrong with copies and memory.
struct Faults {
  int delay_polls = 0;  // a copy takes effect, and is done, only after so many polls
  int fail_every_out = 0, fail_every_in = 0;  // every n-th copy fails; 0: none
  bool fail_allocation = false;
};

/// Copies late or not at all. Bytes move at the very end, and the destination is poisoned at the
/// start, so that whoever reuses the source or reads the destination too early is caught.
class FaultyBackend final : public BackendDecorator {
 public:
  FaultyBackend(FakeBackend& inner, Faults faults)
      : BackendDecorator(inner), fake_(inner), faults(faults) {}
  Status AllocatePages(const KvGeometry& g, std::uint32_t pages) override {
    if (faults.fail_allocation) return OutOfMemory("no memory for pages");
    return inner_.AllocatePages(g, pages);
  }
  CopyTicket CopyOut(std::span<const PageCopy> copies) override { return Start(copies, true); }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override { return Start(copies, false); }
  CopyState Poll(CopyTicket ticket) override;
  CopyState Wait(CopyTicket ticket) override;

 private:
  struct Copy {
    std::vector<PageCopy> pages;
    bool out = false, fails = false;
    int polls_left = 0;
  };
  CopyTicket Start(std::span<const PageCopy> copies, bool out);

  FakeBackend& fake_;
  std::map<std::uint64_t, Copy> copies_;
  std::uint64_t tickets_ = 0;
  int outs_ = 0, ins_ = 0;

 public:
  Faults faults;  // may be changed on the way
};

}  // namespace pliant::testing
