#include "backend/cuda/append/rope_tables.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/append/append.h"

namespace pliant::cuda {

void RopeTables::NewStep() {
  for (Entry& entry : entries_) entry.current = false;
}

const float2* RopeTables::For(const RopeTable& table, const std::int32_t* positions, int rows,
                              const Stream& stream) {
  auto it = std::find_if(entries_.begin(), entries_.end(),
                         [&](const Entry& e) { return e.inv_freq == table.inv_freq; });
  const auto pairs = static_cast<int>(table.inv_freq.size());
  if (it == entries_.end()) {
    Entry entry;
    entry.inv_freq = table.inv_freq;
    Grow(entry.device_freq, pairs, "RoPE frequencies", stream);
    Upload<float>(table.inv_freq, entry.device_freq.data());
    entries_.push_back(std::move(entry));
    it = entries_.end() - 1;
    ++moves_;
  }
  if (!it->current) {
    if (Grow(it->angles, std::int64_t{rows} * pairs, "RoPE angles", stream)) ++moves_;
    LaunchRopeAngles(positions, rows, it->device_freq.data(), pairs, it->angles.data(),
                     stream.get());
    it->current = true;
  }
  last_ = static_cast<std::size_t>(it - entries_.begin());
  return it->angles.data();
}

}  // namespace pliant::cuda
