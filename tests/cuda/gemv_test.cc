// The product of a weight matrix and one row, against sums in double.
#include "backend/cuda/gemv/gemv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"
#include "backend/plane_code.h"

namespace pliant {
namespace {

using cuda::DeviceArray;

struct Shape {
  int n, k;
  bool bias, accumulate;
};

class CudaGemv : public testing::TestWithParam<Shape> {};

TEST_P(CudaGemv, MatchesSumsInDouble) {
  if (!cuda::DeviceAvailable()) GTEST_SKIP() << "no CUDA device";
  const Shape s = GetParam();
  ASSERT_TRUE(cuda::GemvFits(s.k));
  std::mt19937 random(s.n + s.k);
  std::normal_distribution<float> normal(0.f, 1.f);
  std::vector<std::uint16_t> x(s.k), weight(static_cast<std::size_t>(s.n) * s.k);
  std::vector<float> bias(s.n), out(s.n);
  for (auto& v : x) v = FloatToBf16(normal(random));
  for (auto& v : weight) v = FloatToBf16(normal(random));
  for (auto& v : bias) v = normal(random);
  for (auto& v : out) v = normal(random);
  std::vector<double> want(s.n);
  for (int r = 0; r < s.n; ++r) {
    double sum = (s.bias ? bias[r] : 0.0) + (s.accumulate ? out[r] : 0.0);
    for (int i = 0; i < s.k; ++i) {
      sum += double{Bf16ToFloat(x[i])} * Bf16ToFloat(weight[static_cast<std::size_t>(r) * s.k + i]);
    }
    want[r] = sum;
  }
  auto device_x = DeviceArray<std::uint16_t>::Make(x.size(), "x").value();
  auto device_weight = DeviceArray<std::uint16_t>::Make(weight.size(), "weight").value();
  auto device_bias = DeviceArray<float>::Make(bias.size(), "bias").value();
  auto device_out = DeviceArray<float>::Make(out.size(), "out").value();
  cuda::Upload<std::uint16_t>(x, device_x.data());
  cuda::Upload<std::uint16_t>(weight, device_weight.data());
  cuda::Upload<float>(bias, device_bias.data());
  if (!s.accumulate) std::fill(out.begin(), out.end(), std::nanf(""));  // must all be written
  cuda::Upload<float>(out, device_out.data());
  cuda::LaunchGemv(device_x.data(), device_weight.data(), s.bias ? device_bias.data() : nullptr,
                   s.n, s.k, device_out.data(), s.accumulate, nullptr);
  PLIANT_CUDA_CHECK(cudaDeviceSynchronize());
  cuda::Download<float>(device_out.data(), out);
  for (int r = 0; r < s.n; ++r) {
    ASSERT_NEAR(out[r], want[r], 1e-5 * std::sqrt(double{1. * s.k}) + 1e-6 * std::abs(want[r]))
        << r;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaGemv,
                         testing::Values(Shape{4096, 4096, false, false},
                                         Shape{1024, 14336, false, true},
                                         Shape{33, 576, true, false}, Shape{1, 8, true, true},
                                         Shape{500, 24576, false, false},
                                         Shape{17, 1032, false, true}));

}  // namespace
}  // namespace pliant
