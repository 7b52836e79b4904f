#include "backend/cuda/append/key_statistics.h"

#include <bit>
#include <utility>
#include <vector>

namespace pliant::cuda {

void KeyStatistics::Start(std::size_t channels, const Stream& stream) {
  auto range = DeviceArray<int>::Make(2 * channels, "channel statistics");
  auto energy = DeviceArray<double>::Make(channels, "channel statistics");
  PLIANT_CHECK(range.ok() && energy.ok(), "no device memory for channel statistics");
  range_ = std::move(range).value();
  energy_ = std::move(energy).value();
  // Words of bytes 0x7f and 0x80, as ordered integers: floats of 3.4e38 and -3.4e38.
  PLIANT_CUDA_CHECK(cudaMemsetAsync(range_.data(), 0x7f, channels * sizeof(int), stream.get()));
  PLIANT_CUDA_CHECK(
      cudaMemsetAsync(range_.data() + channels, 0x80, channels * sizeof(int), stream.get()));
  PLIANT_CUDA_CHECK(cudaMemsetAsync(energy_.data(), 0, energy_.bytes(), stream.get()));
}

ChannelStatistics KeyStatistics::Take(const Stream& stream) {
  const std::size_t channels = energy_.size();
  std::vector<int> range(2 * channels);
  ChannelStatistics taken;
  taken.query_energy.resize(channels);
  stream.Synchronize();
  Download<int>(range_.data(), range);
  Download<double>(energy_.data(), taken.query_energy);
  for (const int ordered : range) {
    const float value = std::bit_cast<float>(ordered >= 0 ? ordered : ordered ^ 0x7fffffff);
    (taken.key_min.size() < channels ? taken.key_min : taken.key_max).push_back(value);
  }
  range_ = {};
  energy_ = {};
  return taken;
}

void KeyStatistics::Set(AppendArgs& args, std::size_t first) const {
  if (!on()) return;
  args.key_min = range_.data() + first;
  args.key_max = args.key_min + energy_.size();
  args.query_energy = energy_.data() + first;
}

}  // namespace pliant::cuda
