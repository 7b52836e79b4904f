#include "backend/cuda/gemm/gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

#include "backend/cuda/device_memory.h"
#include "backend/cuda/gemv/gemv.h"
#include "backend/cuda/rowwise/rowwise.h"

namespace pliant::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = 64u << 20;
constexpr int kCandidates = 8;
/// Of the first proposal's time: what a better one must stay below, so that noise changes nothing.
constexpr float kClearlyFaster = 0.97f;

[[noreturn]] void CublasFailed(const char* call, cublasStatus_t status) {
  std::fprintf(stderr, "cuBLASLt call failed: %s: %s\n", call, cublasLtGetStatusString(status));
  std::fflush(stderr);
  std::abort();
}

#define PLIANT_CUBLAS_CHECK(call)                                                     \
  do {                                                                                \
    const cublasStatus_t pliant_status_ = (call);                                     \
    if (pliant_status_ != CUBLAS_STATUS_SUCCESS) CublasFailed(#call, pliant_status_); \
  } while (false)

struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, out = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
};

enum class Mode { kF32, kF32Bias, kBf16 };
using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, WeightType, Mode>;  // rows, n, k

}  // namespace

struct Gemm::State {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  DeviceArray<std::uint8_t> workspace;
  std::map<Key, Plan> plans;

  ~State() {
    for (auto& [key, plan] : plans) {
      cublasLtMatrixLayoutDestroy(plan.weight);
      cublasLtMatrixLayoutDestroy(plan.x);
      cublasLtMatrixLayoutDestroy(plan.out);
      cublasLtMatmulDescDestroy(plan.product);
    }
    if (preference != nullptr) cublasLtMatmulPreferenceDestroy(preference);
    if (handle != nullptr) cublasLtDestroy(handle);
  }

  Plan& PlanFor(std::int64_t rows, std::int64_t n, std::int64_t k, WeightType type, Mode mode) {
    const auto [it, fresh] = plans.try_emplace(Key{rows, n, k, type, mode});
    Plan& plan = it->second;
    if (!fresh) return plan;
    // cuBLASLt thinks in columns: out (n x rows) = weight (k x n, transposed) times x (k x rows).
    PLIANT_CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    PLIANT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA,
                                                       &transposed, sizeof transposed));
    if (mode == Mode::kF32Bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      const std::int32_t type = CUDA_R_32F;
      PLIANT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(
          plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
      PLIANT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(
          plan.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
    }
    const cudaDataType operand = type == WeightType::kF16 ? CUDA_R_16F : CUDA_R_16BF;
    PLIANT_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.weight, operand, k, n, k));
    PLIANT_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.x, operand, k, rows, k));
    PLIANT_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(
        &plan.out, mode == Mode::kBf16 ? CUDA_R_16BF : CUDA_R_32F, n, rows, n));
    plan.algorithm = Proposals(plan, 1).front().algo;
    return plan;
  }

  /// What the library proposes for a plan's shapes, its favourite first; at least one.
  std::vector<cublasLtMatmulHeuristicResult_t> Proposals(const Plan& plan, int most) {
    std::vector<cublasLtMatmulHeuristicResult_t> found(most);
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, plan.product, plan.weight, plan.x, plan.out,
                                       plan.out, preference, most, found.data(), &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0)
      CublasFailed("cublasLtMatmulAlgoGetHeuristic", status);
    found.resize(count);
    return found;
  }

  /// out = times * x weightᵀ + keep * out
  void Multiply(Plan& plan, const std::uint16_t* x, const std::uint16_t* weight, float keep,
                void* out, cudaStream_t stream, float times = 1.f) {
    PLIANT_CUBLAS_CHECK(cublasLtMatmul(handle, plan.product, &times, weight, plan.weight, x, plan.x,
                                       &keep, out, plan.out, out, plan.out, &plan.algorithm,
                                       workspace.data(), kWorkspaceBytes, stream));
  }
};

Gemm::Gemm(std::unique_ptr<State> state) : state_(std::move(state)) {}
Gemm::~Gemm() = default;

Result<std::unique_ptr<Gemm>> Gemm::Make() {
  auto state = std::make_unique<State>();
  PLIANT_ASSIGN_OR_RETURN(state->workspace,
                          DeviceArray<std::uint8_t>::Make(kWorkspaceBytes, "cuBLASLt workspace"));
  PLIANT_CUBLAS_CHECK(cublasLtCreate(&state->handle));
  PLIANT_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&state->preference));
  PLIANT_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(
      state->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceBytes,
      sizeof kWorkspaceBytes));
  return std::unique_ptr<Gemm>(new Gemm(std::move(state)));
}

void Gemm::Run(const std::uint16_t* x, std::uint16_t* half_x, const std::uint16_t* weight,
               WeightType type, const float* bias, std::int64_t rows, std::int64_t n,
               std::int64_t k, float* out, bool accumulate, cudaStream_t stream) {
  if (rows == 0) return;
  if (rows == 1 && GemvFits(k))
    return LaunchGemv(x, weight, type, bias, n, k, out, accumulate, stream);
  Plan& plan = state_->PlanFor(rows, n, k, type, bias != nullptr ? Mode::kF32Bias : Mode::kF32);
  if (bias != nullptr) {
    PLIANT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(
        plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
  }
  const float keep = accumulate ? 1.f : 0.f;
  if (type == WeightType::kF16) {
    LaunchToHalf(x, rows * k, half_x, stream);
    state_->Multiply(plan, half_x, weight, keep, out, stream, kHalfRange);
  } else {
    state_->Multiply(plan, x, weight, keep, out, stream);
  }
}

void Gemm::RunToBf16(const std::uint16_t* x, const std::uint16_t* weight, std::int64_t rows,
                     std::int64_t n, std::int64_t k, std::uint16_t* out, cudaStream_t stream) {
  if (rows == 0) return;
  state_->Multiply(state_->PlanFor(rows, n, k, WeightType::kBf16, Mode::kBf16), x, weight, 0.f, out,
                   stream);
}

void Gemm::Tune(const std::uint16_t* x, const std::uint16_t* weight, std::int64_t rows,
                std::int64_t n, std::int64_t k, void* out, bool to_bf16, const Stream& stream) {
  Plan& plan = state_->PlanFor(rows, n, k, WeightType::kBf16, to_bf16 ? Mode::kBf16 : Mode::kF32);
  const auto proposals = state_->Proposals(plan, kCandidates);
  const Event begin(true), end(true);
  const auto time = [&](const cublasLtMatmulAlgo_t& algorithm) {
    plan.algorithm = algorithm;
    float fastest = std::numeric_limits<float>::infinity();
    for (int i = 0; i < 3; ++i) {
      begin.Record(stream);
      state_->Multiply(plan, x, weight, 0.f, out, stream.get());
      end.Record(stream);
      end.Synchronize();
      float milliseconds = 0;
      PLIANT_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
      if (i > 0) fastest = std::min(fastest, milliseconds);  // the first loads the kernel
    }
    return fastest;
  };
  float best = time(proposals[0].algo) * kClearlyFaster;
  std::size_t chosen = 0;
  for (std::size_t i = 1; i < proposals.size(); ++i) {
    const float took = time(proposals[i].algo);
    if (took < best) best = took, chosen = i;
  }
  plan.algorithm = proposals[chosen].algo;
}

}  // namespace pliant::cuda
