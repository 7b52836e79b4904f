// Benches of the CUDA room: timing with a cold L2 and events, and the ceiling that a plain read
// reaches on this device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backend/cuda/device_memory.h"

namespace pliant::cuda::bench {

static __global__ void ReadAll(const uint4* p, std::size_t n, std::uint32_t* sink) {
  std::uint32_t s = 0;
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const uint4 a = p[i], b = p[i + step], c = p[i + 2 * step], d = p[i + 3 * step];
    s += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^
         d.w;
  }
  if (s == 0x12345678u) *sink = s;
}

/// Times launches: median of `repeats` after one warm-up, microseconds, the L2 filled with
/// something else before each.
class Timer {
 public:
  Timer()
      : flush_(*DeviceArray<std::uint8_t>::Make(kFlushBytes, "flush")),
        sink_(*DeviceArray<std::uint32_t>::Make(1, "sink")),
        begin_(true),
        end_(true) {
    PLIANT_CUDA_CHECK(cudaMemset(flush_.data(), 1, kFlushBytes));
    PLIANT_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, 0));
  }
  template <typename F>
  float Microseconds(F launch, int repeats, cudaStream_t stream = nullptr) {
    std::vector<float> times;
    for (int i = 0; i <= repeats; ++i) {
      ReadAll<<<multiprocessors_ * 8, 256, 0, stream>>>(
          reinterpret_cast<const uint4*>(flush_.data()), kFlushBytes / 16, sink_.data());
      PLIANT_CUDA_CHECK(cudaEventRecord(begin_.get(), stream));
      launch();
      PLIANT_CUDA_CHECK(cudaEventRecord(end_.get(), stream));
      end_.Synchronize();
      float ms = 0;
      PLIANT_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
      if (i > 0) times.push_back(ms * 1e3f);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  /// GB/s of a plain read of 2 GiB.
  float ReadCeiling() {
    auto big = *DeviceArray<std::uint8_t>::Make(2ull << 30, "read ceiling");
    PLIANT_CUDA_CHECK(cudaMemset(big.data(), 1, big.bytes()));
    const float us = Microseconds(
        [&] {
          ReadAll<<<multiprocessors_ * 8, 256>>>(reinterpret_cast<const uint4*>(big.data()),
                                                 big.bytes() / 16, sink_.data());
        },
        5);
    return static_cast<float>(big.bytes()) / us / 1e3f;
  }

 private:
  static constexpr std::size_t kFlushBytes = 192u << 20;
  DeviceArray<std::uint8_t> flush_;
  DeviceArray<std::uint32_t> sink_;
  Event begin_, end_;
  int multiprocessors_ = 0;
};

}  // namespace pliant::cuda::bench
