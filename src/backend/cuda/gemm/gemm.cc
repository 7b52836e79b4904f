#include "backend/cuda/gemm/gemm.h"

#include <cublasLt.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <tuple>

#include "backend/cuda/device_memory.h"
#include "backend/cuda/gemv/gemv.h"

namespace pliant::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = 64u << 20;

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

using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool>;  // rows, n, k, bias

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

  Plan& PlanFor(std::int64_t rows, std::int64_t n, std::int64_t k, bool bias) {
    const auto [it, fresh] = plans.try_emplace(Key{rows, n, k, bias});
    Plan& plan = it->second;
    if (!fresh) return plan;
    // cuBLASLt thinks in columns: out (n x rows) = weight (k x n, transposed) times x (k x rows).
    PLIANT_CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    PLIANT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA,
                                                       &transposed, sizeof transposed));
    if (bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      const std::int32_t type = CUDA_R_32F;
      PLIANT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(
          plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
      PLIANT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(
          plan.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
    }
    PLIANT_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.weight, CUDA_R_16BF, k, n, k));
    PLIANT_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.x, CUDA_R_16BF, k, rows, k));
    PLIANT_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.out, CUDA_R_32F, n, rows, n));
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, plan.product, plan.weight, plan.x, plan.out,
                                       plan.out, preference, 1, &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0)
      CublasFailed("cublasLtMatmulAlgoGetHeuristic", status);
    plan.algorithm = found.algo;
    return plan;
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

void Gemm::Run(const std::uint16_t* x, const std::uint16_t* weight, const float* bias,
               std::int64_t rows, std::int64_t n, std::int64_t k, float* out, bool accumulate,
               cudaStream_t stream) {
  if (rows == 0) return;
  if (rows == 1 && GemvFits(k)) return LaunchGemv(x, weight, bias, n, k, out, accumulate, stream);
  Plan& plan = state_->PlanFor(rows, n, k, bias != nullptr);
  if (bias != nullptr) {
    PLIANT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(
        plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
  }
  const float one = 1.f, keep = accumulate ? 1.f : 0.f;
  PLIANT_CUBLAS_CHECK(cublasLtMatmul(state_->handle, plan.product, &one, weight, plan.weight, x,
                                     plan.x, &keep, out, plan.out, out, plan.out, &plan.algorithm,
                                     state_->workspace.data(), kWorkspaceBytes, stream));
}

}  // namespace pliant::cuda
