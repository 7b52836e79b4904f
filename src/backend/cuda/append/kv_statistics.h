// Room: backend/cuda. ChannelStatistics on the device, filled by append.cu while calibration runs.
// Owned by the thread that owns the stream.
#pragma once

#include <cstddef>

#include "backend/backend.h"
#include "backend/cuda/append/append.h"
#include "backend/cuda/device_memory.h"

namespace pliant::cuda {

class KvStatistics {
 public:
  /// Statistics of `channels` channels (of all layers) are taken from now on.
  void Start(std::size_t channels, const Stream& stream);
  /// What was added up; ends it.
  ChannelStatistics Take(const Stream& stream);
  bool on() const { return sums_.data() != nullptr; }
  /// While on: where a layer, whose channels start at `first`, adds up.
  void Set(AppendArgs& args, std::size_t first) const;

 private:
  DeviceArray<int> range_;    // minima, then maxima, as integers that order like them
  DeviceArray<double> sums_;  // the queries' energy, then the values'
};

}  // namespace pliant::cuda
