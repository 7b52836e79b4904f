// Decorators over the backend contract: every call forwarded, and copies that a test can delay or
// spoil. They stand in front of the fake, the reference and the real backends alike.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "base/check.h"
#include "base/clock.h"

namespace pliant::testing {

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
  Status SetKvCode(const KvCode& code) override { return inner_.SetKvCode(code); }
  void StartChannelStatistics() override { inner_.StartChannelStatistics(); }
  ChannelStatistics TakeChannelStatistics() override { return inner_.TakeChannelStatistics(); }
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
  bool RetainsHistory(int heads) const override { return inner_.RetainsHistory(heads); }
  bool ReturnsFromAnyStore() const override { return inner_.ReturnsFromAnyStore(); }
  void StartHistory(RetainedHistory& history) override { inner_.StartHistory(history); }
  Status NoteHistory(RetainedHistory& history, std::int32_t blocks) override {
    return inner_.NoteHistory(history, blocks);
  }
  Status DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return inner_.DropFromHistory(history, kept);
  }
  Status RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return inner_.RefillHistory(history, kept);
  }
  CopyTicket CopyOut(std::span<const PageCopy> copies) override { return inner_.CopyOut(copies); }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override { return inner_.CopyIn(copies); }
  CopyState Poll(CopyTicket ticket) override { return inner_.Poll(ticket); }
  CopyState Wait(CopyTicket ticket) override { return inner_.Wait(ticket); }

 protected:
  Backend& inner_;
};

/// What can go wrong with copies and memory.
struct Faults {
  int delay_polls = 0;  // a copy takes effect, and is done, only after so many polls
  int fail_every_out = 0, fail_every_in = 0;  // every n-th copy fails; 0: none
  bool fail_allocation = false;
  Nanoseconds step_delay = 0;  // a step takes so much longer
};

/// Copies late or not at all. Bytes move at the very end, and the destination is poisoned at the
/// start, so that whoever reuses the source or reads the destination too early is caught.
class FaultyBackend final : public BackendDecorator {
 public:
  FaultyBackend(Backend& inner, Faults faults) : BackendDecorator(inner), faults(faults) {}
  FaultyBackend(std::unique_ptr<Backend> inner, Faults faults)
      : BackendDecorator(*inner), faults(faults), owned_(std::move(inner)) {}

  Status AllocatePages(const KvGeometry& g, std::uint32_t pages) override {
    if (faults.fail_allocation) return OutOfMemory("no memory for pages");
    poison_.assign(inner_.PageBytes(g), std::byte{0xdd});
    return inner_.AllocatePages(g, pages);
  }
  Status EndStep() override {
    if (faults.step_delay > 0) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(faults.step_delay));
    }
    return inner_.EndStep();
  }
  CopyTicket CopyOut(std::span<const PageCopy> copies) override { return Start(copies, true); }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override { return Start(copies, false); }
  CopyState Poll(CopyTicket ticket) override {
    const auto it = copies_.find(ticket.value());
    PLIANT_CHECK(it != copies_.end(), "copy polled after its end");
    Copy& copy = it->second;
    if (copy.polls_left-- > 0) return CopyState::kPending;
    CopyState state = CopyState::kFailed;
    if (!copy.fails) {
      state = inner_.Wait(copy.out ? inner_.CopyOut(copy.pages) : inner_.CopyIn(copy.pages));
    }
    copies_.erase(it);
    return state;
  }
  CopyState Wait(CopyTicket ticket) override {
    CopyState state;
    do {
      state = Poll(ticket);
    } while (state == CopyState::kPending);
    return state;
  }

  Faults faults;  // may be changed on the way

 private:
  struct Copy {
    std::vector<PageCopy> pages;
    bool out = false, fails = false;
    int polls_left = 0;
  };
  CopyTicket Start(std::span<const PageCopy> copies, bool out) {
    Copy copy{{copies.begin(), copies.end()}, out, false, faults.delay_polls};
    const int every = out ? faults.fail_every_out : faults.fail_every_in;
    int& count = out ? outs_ : ins_;
    copy.fails = every > 0 && ++count % every == 0;
    if (!out) {
      std::vector<PageCopy> poisoned(copies.begin(), copies.end());
      for (PageCopy& c : poisoned) c.host = poison_.data();
      PLIANT_CHECK(inner_.Wait(inner_.CopyIn(poisoned)) == CopyState::kDone, "pages are poisoned");
    }
    copies_.emplace(++tickets_, std::move(copy));
    return CopyTicket(tickets_);
  }

  std::unique_ptr<Backend> owned_;
  std::vector<std::byte> poison_;  // a page
  std::map<std::uint64_t, Copy> copies_;
  std::uint64_t tickets_ = 0;
  int outs_ = 0, ins_ = 0;
};

}  // namespace pliant::testing
