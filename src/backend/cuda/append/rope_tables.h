// Room: backend/cuda. RoPE's angles for the rows of a step, worked out once a step for each table
// that a model uses. Owned by the thread that owns the stream.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device_memory.h"

namespace pliant::cuda {

class RopeTables {
 public:
  void NewStep();
  /// Cosine and sine, [rows][pairs], for this step's positions (on the device); enqueued at the
  /// first use in a step.
  const float2* For(const RopeTable& table, const std::int32_t* positions, int rows,
                    const Stream& stream);
  /// Frequencies of the table used last, on the device, and their number; null before the first.
  std::pair<const float*, int> Last() const {
    if (entries_.empty()) return {nullptr, 0};
    const Entry& entry = entries_[last_];
    return {entry.device_freq.data(), static_cast<int>(entry.inv_freq.size())};
  }
  /// Counts the times that an address changed.
  std::uint64_t moves() const { return moves_; }

 private:
  struct Entry {
    std::vector<float> inv_freq;
    DeviceArray<float> device_freq;
    DeviceArray<float2> angles;
    bool current = false;  // computed for this step
  };
  std::vector<Entry> entries_;
  std::size_t last_ = 0;
  std::uint64_t moves_ = 0;
};

}  // namespace pliant::cuda
