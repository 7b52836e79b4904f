#include "kv/file_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

namespace pliant {
namespace {

constexpr std::uint32_t kNoBuffer = ~0u;

class FileStore final : public ExactStore {
 public:
  FileStore(int fd, std::uint32_t slots, std::size_t page_bytes, std::size_t part_bytes,
            std::uint32_t buffers)
      : ExactStore(slots, page_bytes, part_bytes),
        fd_(fd),
        staging_(buffers * page_bytes),
        buffer_of_(slots, kNoBuffer),
        state_(slots, IoState::kDone) {
    for (std::uint32_t i = buffers; i-- > 0;) free_buffers_.push_back(i);
    worker_ = std::thread([this] { Work(); });
  }
  ~FileStore() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    worker_.join();
    close(fd_);
  }

  std::byte* Map(SlotId slot) override {
    std::uint32_t& buffer = buffer_of_[slot.value()];
    if (buffer == kNoBuffer) {
      if (free_buffers_.empty()) return nullptr;
      buffer = free_buffers_.back();
      free_buffers_.pop_back();
    }
    return Buffer(slot);
  }
  void Unmap(SlotId slot) override {
    std::uint32_t& buffer = buffer_of_[slot.value()];
    if (buffer == kNoBuffer) return;
    free_buffers_.push_back(buffer);
    buffer = kNoBuffer;
  }
  void StartSave(SlotId slot) override { Enqueue({slot, Buffer(slot), true}); }
  void StartFetch(SlotId slot) override { Enqueue({slot, Buffer(slot), false}); }
  IoState Poll(SlotId slot) override {
    Drain();
    return state_[slot.value()];
  }
  void CorruptForTest(SlotId slot) override {
    std::byte byte{};
    const off_t at = Offset(slot) + static_cast<off_t>(page_bytes_ / 2);
    PLIANT_CHECK(pread(fd_, &byte, 1, at) == 1, "the slot was never saved");
    byte ^= std::byte{4};
    PLIANT_CHECK(pwrite(fd_, &byte, 1, at) == 1, "write failed");
  }

 private:
  const std::byte* Read(SlotId slot, ByteRange range, std::byte* buffer) const override {
    return ReadFile(slot, range, buffer) ? buffer : nullptr;
  }

  struct Job {
    SlotId slot;
    std::byte* buffer;
    bool save;
  };
  struct Done {
    SlotId slot;
    IoState state;
  };

  std::byte* Buffer(SlotId slot) {
    PLIANT_CHECK(buffer_of_[slot.value()] != kNoBuffer, "slot is not mapped");
    return staging_.data() + buffer_of_[slot.value()] * page_bytes_;
  }
  off_t Offset(SlotId slot) const {
    return static_cast<off_t>(slot.value()) * static_cast<off_t>(page_bytes_);
  }
  void Enqueue(const Job& job) {
    state_[job.slot.value()] = IoState::kPending;
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(job);
    }
    wake_.notify_one();
  }
  void Drain() {
    std::lock_guard lock(mutex_);
    for (const Done& done : done_) state_[done.slot.value()] = done.state;
    done_.clear();
  }

  // The worker: touches only the job's buffer, the slot's checksums and the file.
  void Work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
      if (stop_) return;
      const Job job = jobs_.front();
      jobs_.pop_front();
      lock.unlock();
      const Done done = job.save ? Save(job) : Fetch(job);
      lock.lock();
      done_.push_back(done);
    }
  }
  Done Save(const Job& job) {
    Sum(job.slot, job.buffer);
    std::size_t at = 0;
    while (at < page_bytes_) {
      const ssize_t n =
          pwrite(fd_, job.buffer + at, page_bytes_ - at, Offset(job.slot) + static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return {job.slot, IoState::kFailed};
      at += static_cast<std::size_t>(n);
    }
    return {job.slot, IoState::kDone};
  }
  /// `page`: what is read goes to its place there.
  bool ReadFile(SlotId slot, ByteRange range, std::byte* page) const {
    std::size_t at = range.first;
    while (at < range.end) {
      const ssize_t n =
          pread(fd_, page + at, range.end - at, Offset(slot) + static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += static_cast<std::size_t>(n);
    }
    return true;
  }
  Done Fetch(const Job& job) const {
    if (!ReadFile(job.slot, {0, page_bytes_}, job.buffer)) return {job.slot, IoState::kFailed};
    return {job.slot, IsRight(job.slot, job.buffer) ? IoState::kDone : IoState::kCorrupt};
  }

  const int fd_;
  std::vector<std::byte> staging_;
  std::vector<std::uint32_t> free_buffers_;
  std::vector<std::uint32_t> buffer_of_;  // by slot
  std::vector<IoState> state_;            // by slot; the engine thread's view

  std::mutex mutex_;  // jobs_, done_, stop_
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  std::vector<Done> done_;
  bool stop_ = false;
  std::thread worker_;
};

}  // namespace

Result<std::unique_ptr<ExactStore>> MakeFileStore(const std::string& path, std::uint32_t slots,
                                                  std::size_t page_bytes, std::size_t part_bytes,
                                                  std::uint32_t buffers) {
  PLIANT_CHECK(buffers >= 1, "a file store stages through at least one buffer");
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return IoError("exact store " + path + ": " + std::strerror(errno));
  unlink(path.c_str());
  return std::unique_ptr<ExactStore>(
      std::make_unique<FileStore>(fd, slots, page_bytes, part_bytes, buffers));
}

}  // namespace pliant
