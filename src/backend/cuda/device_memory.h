// Room: backend/cuda. Owners of device memory, pinned host memory, streams and events. Each object
// belongs to one thread at a time. Running out of memory is a Status that says what was asked and
// what is free; every other error ends the process (cuda_check.h).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "backend/cuda/cuda_check.h"
#include "base/check.h"
#include "base/status.h"

namespace pliant::cuda {

namespace internal {
enum class MemoryKind { kDevice, kPinned };
Result<void*> Allocate(MemoryKind kind, std::size_t bytes, std::string_view what);
void Release(MemoryKind kind, void* pointer) noexcept;
}  // namespace internal

/// A typed array in device or pinned host memory, uninitialised. Move-only; empty when
/// default-constructed.
template <typename T, internal::MemoryKind kKind>
class Array {
 public:
  Array() = default;
  Array(Array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Array() { internal::Release(kKind, data_); }

  /// `what` names the allocation in the message of a failure ("KV pages").
  static Result<Array> Make(std::size_t count, std::string_view what) {
    if (count > static_cast<std::size_t>(-1) / sizeof(T))
      return OutOfMemory("an allocation of more than 2^64 bytes");
    auto memory = internal::Allocate(kKind, count * sizeof(T), what);
    if (!memory.ok()) return memory.status();
    Array array;
    array.data_ = static_cast<T*>(*memory);
    array.size_ = count;
    return Result<Array>(std::move(array));
  }

  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * sizeof(T); }
  T& operator[](std::size_t i) const requires(kKind == internal::MemoryKind::kPinned) {
    return data_[i];
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

template <typename T>
using DeviceArray = Array<T, internal::MemoryKind::kDevice>;
template <typename T>
using PinnedArray = Array<T, internal::MemoryKind::kPinned>;

/// A non-blocking stream.
class Stream {
 public:
  Stream() { PLIANT_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  void Synchronize() const { PLIANT_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// An event; with `timing` it can measure.
class Event {
 public:
  explicit Event(bool timing = false) {
    PLIANT_CUDA_CHECK(
        cudaEventCreateWithFlags(&event_, timing ? cudaEventDefault : cudaEventDisableTiming));
  }
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }

  cudaEvent_t get() const { return event_; }
  void Record(const Stream& stream) const {
    PLIANT_CUDA_CHECK(cudaEventRecord(event_, stream.get()));
  }
  /// Makes later work of `stream` wait for what was recorded.
  void Block(const Stream& stream) const {
    PLIANT_CUDA_CHECK(cudaStreamWaitEvent(stream.get(), event_, 0));
  }
  void Synchronize() const { PLIANT_CUDA_CHECK(cudaEventSynchronize(event_)); }
  /// False while the recorded work is still running.
  bool Done() const;

 private:
  cudaEvent_t event_ = nullptr;
};

/// Makes room for `count` elements and for half as many again as there were, if that can be had;
/// the contents are lost. True: the array moved. Waits for the stream, whose work may use the old
/// one.
template <typename T, internal::MemoryKind kKind>
bool Grow(Array<T, kKind>& array, std::int64_t count, std::string_view what, const Stream& stream) {
  const auto wanted = static_cast<std::size_t>(count);
  if (array.size() >= wanted) return false;
  stream.Synchronize();
  using Memory = Array<T, kKind>;
  auto memory = Memory::Make(std::max(wanted, array.size() + array.size() / 2), what);
  if (!memory.ok()) memory = Memory::Make(wanted, what);
  PLIANT_CHECK(memory.ok(), memory.status().message());
  array = std::move(memory).value();
  return true;
}

/// Copies a host array to the device, synchronously; for set-up and tests.
template <typename T>
void Upload(std::span<const T> from, T* to) {
  if (from.empty()) return;
  PLIANT_CUDA_CHECK(cudaMemcpy(to, from.data(), from.size_bytes(), cudaMemcpyHostToDevice));
  // From pageable memory cudaMemcpy returns once the bytes are staged, and the streams used here do
  // not wait for the default one.
  PLIANT_CUDA_CHECK(cudaStreamSynchronize(nullptr));
}
/// Copies a device array to the host, synchronously.
template <typename T>
void Download(const T* from, std::span<T> to) {
  if (!to.empty())
    PLIANT_CUDA_CHECK(cudaMemcpy(to.data(), from, to.size_bytes(), cudaMemcpyDeviceToHost));
}

}  // namespace pliant::cuda
