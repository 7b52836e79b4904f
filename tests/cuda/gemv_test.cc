// Products of a weight matrix with one row and with several, against sums in double.
#include "backend/cuda/gemv/gemv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"
#include "backend/cuda/gemm/gemm.h"
#include "backend/dequant.h"
#include "backend/plane_code.h"

namespace pliant {
namespace {

using cuda::DeviceArray;

struct Shape {
  int n, k;
  bool bias, accumulate;
  cuda::WeightType type = cuda::WeightType::kBf16;
  int rows = 1;  // more: cuBLASLt's product
};

class CudaProduct : public testing::TestWithParam<Shape> {};

TEST_P(CudaProduct, MatchesSumsInDouble) {
  if (!cuda::DeviceAvailable()) GTEST_SKIP() << "no CUDA device";
  const Shape s = GetParam();
  const bool half = s.type == cuda::WeightType::kF16;
  std::mt19937 random(s.n + s.k);
  std::normal_distribution<float> normal(0.f, 1.f);
  std::vector<std::uint16_t> x(static_cast<std::size_t>(s.rows) * s.k),
      weight(static_cast<std::size_t>(s.n) * s.k);
  std::vector<float> bias(s.n), out(static_cast<std::size_t>(s.rows) * s.n);
  for (auto& v : x) v = FloatToBf16(normal(random));
  for (auto& v : weight) v = half ? FloatToF16(normal(random)) : FloatToBf16(normal(random));
  for (auto& v : bias) v = normal(random);
  for (auto& v : out) v = normal(random);
  std::vector<double> want(out.size());
  for (int row = 0; row < s.rows; ++row) {
    for (int r = 0; r < s.n; ++r) {
      const std::size_t at = static_cast<std::size_t>(row) * s.n + r;
      double sum = (s.bias ? bias[r] : 0.0) + (s.accumulate ? out[at] : 0.0);
      for (int i = 0; i < s.k; ++i) {
        const std::uint16_t w = weight[static_cast<std::size_t>(r) * s.k + i];
        sum += double{Bf16ToFloat(x[static_cast<std::size_t>(row) * s.k + i])} *
               (half ? F16ToFloat(w) : Bf16ToFloat(w));
      }
      want[at] = sum;
    }
  }
  auto device_x = DeviceArray<std::uint16_t>::Make(x.size(), "x").value();
  auto half_x = DeviceArray<std::uint16_t>::Make(x.size(), "x").value();
  auto device_weight = DeviceArray<std::uint16_t>::Make(weight.size(), "weight").value();
  auto device_bias = DeviceArray<float>::Make(bias.size(), "bias").value();
  auto device_out = DeviceArray<float>::Make(out.size(), "out").value();
  cuda::Upload<std::uint16_t>(x, device_x.data());
  cuda::Upload<std::uint16_t>(weight, device_weight.data());
  cuda::Upload<float>(bias, device_bias.data());
  if (!s.accumulate) std::fill(out.begin(), out.end(), std::nanf(""));  // must all be written
  cuda::Upload<float>(out, device_out.data());
  if (s.rows == 1) ASSERT_TRUE(cuda::GemvFits(s.k));
  auto gemm = cuda::Gemm::Make().value();
  gemm->Run(device_x.data(), half_x.data(), device_weight.data(), s.type,
            s.bias ? device_bias.data() : nullptr, s.rows, s.n, s.k, device_out.data(),
            s.accumulate, nullptr);
  PLIANT_CUDA_CHECK(cudaDeviceSynchronize());
  cuda::Download<float>(device_out.data(), out);
  for (std::size_t at = 0; at < out.size(); ++at) {
    ASSERT_NEAR(out[at], want[at], 1e-5 * std::sqrt(double{1. * s.k}) + 1e-6 * std::abs(want[at]))
        << at;
  }
}

constexpr auto kF16 = cuda::WeightType::kF16;
INSTANTIATE_TEST_SUITE_P(
    Shapes, CudaProduct,
    testing::Values(Shape{4096, 4096, false, false}, Shape{1024, 14336, false, true},
                    Shape{33, 576, true, false}, Shape{1, 8, true, true},
                    Shape{500, 24576, false, false}, Shape{17, 1032, false, true},
                    Shape{33, 576, true, false, kF16}, Shape{17, 1032, false, true, kF16},
                    Shape{96, 576, true, false, kF16, 5}, Shape{256, 1024, false, true, kF16, 64},
                    Shape{96, 576, true, false, cuda::WeightType::kBf16, 5}));

}  // namespace
}  // namespace pliant
