#include "kv/device_host_store.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace pliant {
namespace {

class DeviceHostStore final : public ExactStore {
 public:
  DeviceHostStore(HostMemory memory, std::uint32_t slots, std::size_t page_bytes,
                  std::size_t part_bytes)
      : ExactStore(slots, page_bytes, part_bytes),
        memory_(std::move(memory)),
        state_(slots, IoState::kDone) {
    worker_ = std::thread([this] { Work(); });
  }
  ~DeviceHostStore() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    worker_.join();
  }

  std::byte* Map(SlotId slot) override { return memory_.get() + slot.value() * page_bytes_; }
  void Unmap(SlotId) override {}
  void StartSave(SlotId slot) override { Enqueue({slot, true}); }
  void StartFetch(SlotId slot) override { Enqueue({slot, false}); }
  IoState Poll(SlotId slot) override {
    if (any_done_.load(std::memory_order_acquire)) Drain();
    return state_[slot.value()];
  }
  void Flush() override {
    if (gathered_.empty()) return;
    {
      std::lock_guard lock(mutex_);
      jobs_.insert(jobs_.end(), gathered_.begin(), gathered_.end());
    }
    gathered_.clear();
    wake_.notify_one();
  }
  const std::byte* Address(SlotId slot) const override {
    return memory_.get() + slot.value() * page_bytes_;
  }
  void CorruptForTest(SlotId slot) override { Map(slot)[page_bytes_ / 2] ^= std::byte{4}; }

 private:
  const std::byte* Read(SlotId slot, ByteRange, std::byte*) const override {
    return memory_.get() + slot.value() * page_bytes_;
  }

  struct Job {
    SlotId slot;
    bool save = false;
    IoState state = IoState::kPending;
  };

  void Enqueue(const Job& job) {
    state_[job.slot.value()] = IoState::kPending;
    gathered_.push_back(job);
  }
  void Drain() {
    std::lock_guard lock(mutex_);
    for (const Job& job : done_) state_[job.slot.value()] = job.state;
    done_.clear();
    any_done_.store(false, std::memory_order_relaxed);
  }

  // The worker: touches only the jobs' pages and checksums. It takes all jobs at once: the engine
  // thread seldom meets the lock held.
  void Work() {
    std::vector<Job> taken;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
      if (stop_) return;
      taken.swap(jobs_);
      lock.unlock();
      for (Job& job : taken) {
        if (job.save) Sum(job.slot, Map(job.slot));
        const bool right = job.save || IsRight(job.slot, Map(job.slot));
        job.state = right ? IoState::kDone : IoState::kCorrupt;
      }
      lock.lock();
      done_.insert(done_.end(), taken.begin(), taken.end());
      any_done_.store(true, std::memory_order_release);
      taken.clear();
    }
  }

  const HostMemory memory_;
  std::vector<IoState> state_;  // by slot; the engine thread's view
  std::vector<Job> gathered_;   // until Flush

  std::mutex mutex_;  // jobs_, done_, stop_
  std::condition_variable wake_;
  std::vector<Job> jobs_, done_;
  std::atomic<bool> any_done_ = false;  // spares the engine thread the lock; set under it
  bool stop_ = false;
  std::thread worker_;
};

}  // namespace

Result<std::unique_ptr<ExactStore>> MakeDeviceHostStore(HostMemory memory, std::uint32_t slots,
                                                        std::size_t page_bytes,
                                                        std::size_t part_bytes) {
  return std::unique_ptr<ExactStore>(
      std::make_unique<DeviceHostStore>(std::move(memory), slots, page_bytes, part_bytes));
}

}  // namespace pliant
