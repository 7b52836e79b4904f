// Packed weights and the products over them, against DequantizeRow and plain loops.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "backend/cpu/gemm_runner.h"
#include "backend/plane_code.h"
#include "backend/support/random_weights.h"

namespace pliant {
namespace {

using testing::kAllTypes;
using testing::OwnedMatrix;
using testing::RandomMatrix;

constexpr CpuLevel kLevels[] = {CpuLevel::kPlain, CpuLevel::kAvx2, CpuLevel::kAvx512,
                                CpuLevel::kAmx};

// A kernel that this machine can run.
struct KernelCase {
  CpuLevel level;
  bool precise;
};

std::vector<KernelCase> MachineKernels() {
  std::vector<KernelCase> cases;
  for (const CpuLevel level : kLevels) {
    if (level > MachineLevel()) continue;
    cases.push_back({level, false});
    if (level >= CpuLevel::kAvx512) cases.push_back({level, true});
  }
  return cases;
}

std::string Describe(const KernelCase& c) {
  return std::string(CpuLevelName(c.level)) + (c.precise ? " precise" : "");
}

bool RoundsToBf16(const KernelCase& c) { return !c.precise && c.level >= CpuLevel::kAvx512; }

std::vector<float> RandomRows(std::int64_t rows, std::int64_t cols, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(rows * cols);
  for (float& value : x) value = normal(random);
  return x;
}

// A packed matrix with what it was made of.
struct Packed {
  explicit Packed(std::vector<OwnedMatrix> matrices, bool keep_f32 = false, int threads = 2)
      : parts(std::move(matrices)), pool(threads) {
    std::vector<HostMatrix> views;
    for (const OwnedMatrix& part : parts) views.push_back(part.View());
    auto result = PackMatrix(views, keep_f32, arena, pool);
    EXPECT_TRUE(result.ok()) << result.status().ToString();
    matrix = std::move(result).value();
    for (const OwnedMatrix& part : parts) {
      for (std::int64_t r = 0; r < part.host.rows; ++r) {
        rows.push_back(part.Row(r));
        types.push_back(part.host.type);
      }
    }
  }
  std::vector<OwnedMatrix> parts;
  ThreadPool pool;
  Arena arena;
  PackedMatrix matrix;
  std::vector<std::vector<float>> rows;  // the oracle's weights
  std::vector<DType> types;              // of each row
};

// Products of the first `rows` rows of x, out preset to `before`.
std::vector<float> Product(const Packed& packed, ThreadPool& pool, const KernelCase& kernel,
                           const std::vector<float>& x, std::int64_t rows,
                           const std::vector<float>* bias, const std::vector<float>* before) {
  GemmRunner runner(&pool, kernel.level, kernel.precise);
  EXPECT_TRUE(runner.Reserve(packed.matrix.blocks).ok());
  const std::int64_t cols = packed.matrix.cols;
  const std::int64_t padded = packed.matrix.blocks * kPanelCols;
  std::vector<std::uint16_t> x_bf16((rows + 31) / 32 * 32 * padded, 0x7fc0);  // NaN where unset
  std::vector<float> out(rows * packed.matrix.rows, std::numeric_limits<float>::quiet_NaN());
  if (before != nullptr) std::copy_n(before->data(), out.size(), out.data());
  GemmCall call;
  call.weight = &packed.matrix;
  call.rows = rows;
  call.x = x.data();
  call.x_stride = cols;
  if (runner.kernel().wants_bf16(rows)) {
    ConvertRowsToBf16(x.data(), cols, cols, 0, rows, x_bf16.data(), padded);
    call.x_bf16 = x_bf16.data();
    call.x_bf16_stride = padded;
  }
  call.bias = bias != nullptr ? bias->data() : nullptr;
  call.accumulate = before != nullptr;
  call.out = out.data();
  call.out_stride = packed.matrix.rows;
  runner.Run(call);
  return out;
}

// What a kernel makes of a factor before it multiplies.
float Rounded(float value, bool to_bf16) {
  return to_bf16 ? Bf16ToFloat(FloatToBf16(value)) : value;
}

// 4-bit weights round halves away from zero.
float RoundedHalfAway(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value) + 0x8000u;
  return std::bit_cast<float>(bits & 0xffff0000u);
}

bool HasFourBits(DType type) {
  return type == DType::kQ4_0 || type == DType::kQ4_1 || type == DType::kQ4_K;
}

// Largest |got - want| over sqrt(sum (w x)^2), the scale of rounding errors, over all elements. The
// oracle rounds its factors as the kernel does and sums in double.
double WorstError(const Packed& packed, const KernelCase& kernel, const std::vector<float>& x,
                  std::int64_t rows, const std::vector<float>& got, const std::vector<float>* bias,
                  const std::vector<float>* before) {
  const std::int64_t cols = packed.matrix.cols;
  const bool to_bf16 = RoundsToBf16(kernel);
  std::vector<float> factors(x.begin(), x.begin() + rows * cols);
  for (float& factor : factors) factor = Rounded(factor, to_bf16);
  double worst = 0;
  for (std::int64_t n = 0; n < packed.matrix.rows; ++n) {
    std::vector<float> weights = packed.rows[n];
    for (float& weight : weights) {
      weight = to_bf16 && HasFourBits(packed.types[n]) ? RoundedHalfAway(weight)
                                                       : Rounded(weight, to_bf16);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      double sum = 0;
      double squares = 1e-30;
      for (std::int64_t k = 0; k < cols; ++k) {
        const double term = double{weights[k]} * factors[r * cols + k];
        sum += term;
        squares += term * term;
      }
      if (bias != nullptr) sum += (*bias)[n];
      if (before != nullptr) sum += (*before)[r * packed.matrix.rows + n];
      const double error = std::abs(sum - got[r * packed.matrix.rows + n]) / std::sqrt(squares);
      if (!(error <= worst)) worst = error;  // a NaN sticks
    }
  }
  return worst;
}

// Of the f32 sums. A weight computed by fused multiply-add may fall on the other side of a bf16
// rounding border than the oracle's: one term is then off by 2^-8 of itself.
double Tolerance(const KernelCase& kernel) { return RoundsToBf16(kernel) ? 7e-4 : 1e-5; }

TEST(CpuPack, EveryTypeUnpacksToItself) {
  for (const DType type : kAllTypes) {
    const Packed packed({RandomMatrix(type, 41, 512, 7)}, /*keep_f32=*/true);
    std::vector<float> row(512);
    for (int r = 0; r < 41; ++r) {
      UnpackRow(packed.matrix, r, row.data());
      for (int k = 0; k < 512; ++k) {
        // K types multiply scale and code in another order here than DequantizeRow may.
        ASSERT_NEAR(row[k], packed.rows[r][k], 1e-6 * (0.5 + std::abs(row[k])))
            << Traits(type).name << " row " << r << " column " << k;
      }
    }
  }
}

TEST(CpuPack, QuantisedWeightsKeepTheirFileSize) {
  for (const DType type : kAllTypes) {
    const Packed packed({RandomMatrix(type, 64, 512, 7)});
    const double file = 64.0 * static_cast<double>(RowBytes(type, 512));
    const double held = static_cast<double>(packed.arena.used());
    const double limit = type == DType::kQ6_K   ? 1.31
                         : type == DType::kQ4_K ? 1.03
                         : type == DType::kQ5_K ? 1.03
                                                : 1.0;
    EXPECT_LE(held, file * limit) << Traits(type).name;
  }
}

TEST(CpuPack, RowOrderIsFollowed) {
  OwnedMatrix matrix = RandomMatrix(DType::kQ4_1, 40, 64, 3);
  for (int r = 0; r < 40; ++r) matrix.order.push_back((r * 7 + 3) % 40);
  const Packed packed({matrix});
  std::vector<float> row(64);
  for (int r = 0; r < 40; ++r) {
    UnpackRow(packed.matrix, r, row.data());
    for (int k = 0; k < 64; ++k) ASSERT_NEAR(row[k], packed.rows[r][k], 1e-6);
  }
}

TEST(CpuPack, RefusesWhatDoesNotFit) {
  ThreadPool pool(1);
  Arena arena;
  const OwnedMatrix good = RandomMatrix(DType::kQ4_1, 8, 64, 1);
  const auto pack = [&](const std::vector<HostMatrix>& parts) {
    const auto result = PackMatrix(parts, false, arena, pool);
    return result.ok() ? std::string() : result.status().ToString();
  };
  EXPECT_NE(pack({}), "");
  HostMatrix part = good.View();
  part.rows = 9;
  EXPECT_NE(pack({part}).find("bytes where 9 rows"), std::string::npos);
  part.rows = 0;
  EXPECT_NE(pack({part}), "");
  part.rows = std::int64_t{1} << 62;
  EXPECT_NE(pack({part}), "");
  part = good.View();
  part.cols = 63;
  EXPECT_NE(pack({part}).find("not a multiple of the 32"), std::string::npos);
  part = good.View();
  part.data = part.data.first(part.data.size() - 1);
  EXPECT_NE(pack({part}), "");
  part = good.View();
  const std::vector<std::int32_t> low = {0, 1, 2, 3, 4, 5, 6, -1};
  part.order = low;
  EXPECT_NE(pack({part}).find("row -1"), std::string::npos);
  const std::vector<std::int32_t> short_order = {0};
  part.order = short_order;
  EXPECT_NE(pack({part}), "");
  const OwnedMatrix wider = RandomMatrix(DType::kQ4_1, 8, 96, 1);
  EXPECT_NE(pack({good.View(), wider.View()}).find("part 1: 96 columns"), std::string::npos);
  EXPECT_EQ(arena.used(), 0u);
}

TEST(CpuArena, RefusesTheImpossible) {
  Arena arena;
  const auto result = arena.Allocate(std::numeric_limits<std::size_t>::max() / 2);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(arena.used(), 0u);
}

class CpuGemm : public ::testing::TestWithParam<DType> {};

TEST_P(CpuGemm, MatchesTheOracleAtEveryLevel) {
  const DType type = GetParam();
  const Packed packed({RandomMatrix(type, 77, 512, 5)});
  const Packed exact({RandomMatrix(type, 77, 512, 5)}, /*keep_f32=*/true);
  const std::vector<float> x = RandomRows(130, 512, 6);
  for (const KernelCase& kernel : MachineKernels()) {
    const Packed& weights = RoundsToBf16(kernel) ? packed : exact;
    ThreadPool pool(2);
    for (const std::int64_t rows : {1, 2, 3, 15, 16, 17, 33, 64, 100, 130}) {
      const auto out = Product(weights, pool, kernel, x, rows, nullptr, nullptr);
      EXPECT_LT(WorstError(weights, kernel, x, rows, out, nullptr, nullptr), Tolerance(kernel))
          << Describe(kernel) << ", " << rows << " rows";
    }
  }
}

TEST_P(CpuGemm, ARowDoesNotDependOnItsBatchOrThreads) {
  const DType type = GetParam();
  const Packed packed({RandomMatrix(type, 77, 768, 5)});
  const std::vector<float> x = RandomRows(300, 768, 6);
  for (const KernelCase& kernel : MachineKernels()) {
    ThreadPool two(2);
    ThreadPool three(3);
    const auto whole = Product(packed, two, kernel, x, 300, nullptr, nullptr);
    for (const std::int64_t rows : {1, 2, 7, 16, 17, 32, 33, 64, 65, 100}) {
      for (const std::int64_t first : {0, 131}) {
        const std::vector<float> part(x.begin() + first * 768, x.end());
        const auto some = Product(packed, three, kernel, part, rows, nullptr, nullptr);
        for (std::int64_t i = 0; i < rows * 77; ++i) {
          ASSERT_EQ(some[i], whole[first * 77 + i])
              << Describe(kernel) << ", " << rows << " rows from " << first;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CpuGemm, ::testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return std::string(Traits(info.param).name); });

TEST(CpuGemmShapes, BiasResidualAndStackedTypes) {
  std::vector<OwnedMatrix> parts = {
      RandomMatrix(DType::kQ4_1, 50, 256, 1), RandomMatrix(DType::kQ8_0, 3, 256, 2),
      RandomMatrix(DType::kQ5_K, 32, 256, 3), RandomMatrix(DType::kBF16, 17, 256, 4)};
  const Packed packed(std::move(parts));
  ASSERT_EQ(packed.matrix.rows, 102);
  const std::vector<float> x = RandomRows(70, 256, 6);
  const std::vector<float> bias = RandomRows(1, 102, 7);
  const std::vector<float> before = RandomRows(70, 102, 8);
  ThreadPool pool(2);
  for (const KernelCase& kernel : MachineKernels()) {
    for (const std::int64_t rows : {1, 5, 40, 70}) {
      const auto biased = Product(packed, pool, kernel, x, rows, &bias, nullptr);
      EXPECT_LT(WorstError(packed, kernel, x, rows, biased, &bias, nullptr), Tolerance(kernel))
          << Describe(kernel);
      const auto both = Product(packed, pool, kernel, x, rows, &bias, &before);
      EXPECT_LT(WorstError(packed, kernel, x, rows, both, &bias, &before), Tolerance(kernel))
          << Describe(kernel);
    }
  }
}

TEST(CpuGemmShapes, ColumnsThatAreNoMultipleOf32) {
  for (const std::int64_t cols : {1, 31, 33, 100}) {
    const Packed packed({RandomMatrix(DType::kBF16, 19, cols, 1)});
    const std::vector<float> x = RandomRows(70, cols, 2);
    ThreadPool pool(2);
    for (const KernelCase& kernel : MachineKernels()) {
      for (const std::int64_t rows : {1, 20, 70}) {
        const auto out = Product(packed, pool, kernel, x, rows, nullptr, nullptr);
        EXPECT_LT(WorstError(packed, kernel, x, rows, out, nullptr, nullptr), Tolerance(kernel))
            << Describe(kernel) << ", " << cols << " columns, " << rows << " rows";
      }
    }
  }
}

TEST(CpuGemmShapes, ANonFiniteRowLeavesItsNeighboursAlone) {
  const Packed packed({RandomMatrix(DType::kQ4_1, 64, 128, 1)});
  const std::vector<float> clean = RandomRows(70, 128, 2);
  std::vector<float> broken = clean;
  broken[3 * 128 + 5] = std::numeric_limits<float>::quiet_NaN();
  broken[4 * 128 + 9] = std::numeric_limits<float>::infinity();
  ThreadPool pool(2);
  for (const KernelCase& kernel : MachineKernels()) {
    for (const std::int64_t rows : {8, 30, 64, 70}) {
      const auto want = Product(packed, pool, kernel, clean, rows, nullptr, nullptr);
      const auto got = Product(packed, pool, kernel, broken, rows, nullptr, nullptr);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t n = 0; n < 64; ++n) {
          if (r == 3 || r == 4) {
            EXPECT_FALSE(std::isfinite(got[r * 64 + n])) << Describe(kernel);
          } else {
            EXPECT_EQ(got[r * 64 + n], want[r * 64 + n]) << Describe(kernel);
          }
        }
      }
    }
  }
}

TEST(CpuLevelTest, WordsAreCappedAndChecked) {
  for (const CpuLevel level : kLevels) {
    const auto chosen = ChooseCpuLevel(CpuLevelName(level));
    ASSERT_TRUE(chosen.ok());
    EXPECT_LE(*chosen, level);
    EXPECT_LE(*chosen, MachineLevel());
  }
  EXPECT_EQ(*ChooseCpuLevel("auto"), MachineLevel());
  EXPECT_FALSE(ChooseCpuLevel("sse9").ok());
}

}  // namespace
}  // namespace pliant
