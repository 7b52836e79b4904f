#include "backend/cuda/append/kv_statistics.h"

#include <bit>
#include <utility>
#include <vector>

namespace pliant::cuda {

void KvStatistics::Start(std::size_t channels, const Stream& stream) {
  auto range = DeviceArray<int>::Make(2 * channels, "channel statistics");
  auto sums = DeviceArray<double>::Make(2 * channels, "channel statistics");
  PLIANT_CHECK(range.ok() && sums.ok(), "no device memory for channel statistics");
  range_ = std::move(range).value();
  sums_ = std::move(sums).value();
  // Words of bytes 0x7f and 0x80, as ordered integers: floats of 3.4e38 and -3.4e38.
  PLIANT_CUDA_CHECK(cudaMemsetAsync(range_.data(), 0x7f, channels * sizeof(int), stream.get()));
  PLIANT_CUDA_CHECK(
      cudaMemsetAsync(range_.data() + channels, 0x80, channels * sizeof(int), stream.get()));
  PLIANT_CUDA_CHECK(cudaMemsetAsync(sums_.data(), 0, sums_.bytes(), stream.get()));
}

ChannelStatistics KvStatistics::Take(const Stream& stream) {
  const std::size_t channels = sums_.size() / 2;
  std::vector<int> range(2 * channels);
  ChannelStatistics taken;
  stream.Synchronize();
  Download<int>(range_.data(), range);
  std::size_t first = 0;
  for (std::vector<double>* sum : {&taken.query_energy, &taken.value_energy}) {
    sum->resize(channels);
    Download<double>(sums_.data() + first, *sum);
    first += channels;
  }
  for (const int ordered : range) {
    const float value = std::bit_cast<float>(ordered >= 0 ? ordered : ordered ^ 0x7fffffff);
    (taken.key_min.size() < channels ? taken.key_min : taken.key_max).push_back(value);
  }
  range_ = {};
  sums_ = {};
  return taken;
}

void KvStatistics::Set(AppendArgs& args, std::size_t first) const {
  if (!on()) return;
  args.key_min = range_.data() + first;
  const std::size_t channels = sums_.size() / 2;
  args.key_max = args.key_min + channels;
  args.query_energy = sums_.data() + first;
  args.value_energy = args.query_energy + channels;
}

}  // namespace pliant::cuda
