#include "backend/cuda/cuda_backend.h"

#include <algorithm>
#include <set>
#include <utility>

#include "backend/cuda/cuda_backend_impl.h"

namespace pliant {
namespace cuda {
namespace {

/// A largest step of fewer rows than this gains nothing from choosing algorithms by trial.
constexpr std::int64_t kLeastTunedRows = 1024;

}  // namespace

Status CudaBackend::AllocatePages(const KvGeometry& geometry, std::uint32_t pages) {
  if (page_count_ != 0) return InvalidArgument("pages are allocated once");
  if (geometry.layers < 1 || pages == 0) return InvalidArgument("KV pages need a layer and a page");
  PLIANT_RETURN_IF_ERROR(
      DecodeLaunchFor({.kv_heads = geometry.kv_heads, .group = 1, .head_dim = geometry.head_dim})
          .status());
  if (pages > static_cast<std::size_t>(-1) / 2 / geometry.PageBytes()) {
    return OutOfMemory("KV pages: " + std::to_string(pages) + " pages pass the address space");
  }
  const std::size_t channels = geometry.Units() * geometry.head_dim;
  PLIANT_ASSIGN_OR_RETURN(code_, DeviceArray<float>::Make(4 * channels, "channel codes"));
  PLIANT_ASSIGN_OR_RETURN(copier_, PageCopier::Make(geometry.PageBytes()));
  PLIANT_ASSIGN_OR_RETURN(
      pages_, DeviceArray<std::uint8_t>::Make(pages * geometry.PageBytes(), "KV pages"));
  const ChannelCode plain{std::vector<float>(channels, 1.f), std::vector<float>(channels, 0.f)};
  UploadCode({plain, plain});
  geometry_ = geometry;
  page_count_ = pages;
  TuneProducts();
  return {};
}

void CudaBackend::TuneProducts() {
  std::set<std::pair<std::int64_t, std::int64_t>> done;
  for (const DeviceMatrix& matrix : matrices_) {
    // The table of embeddings and the output matrix have no tensor of their size.
    const auto x = std::find_if(tensors_.begin(), tensors_.end(),
                                [&](const Tensor& t) { return t.cols == matrix.cols; });
    const auto out = std::find_if(tensors_.rbegin(), tensors_.rend(),
                                  [&](const Tensor& t) { return t.cols == matrix.rows; });
    if (x == tensors_.end() || out == tensors_.rend() || &*x == &*out ||
        matrix.type != WeightType::kBf16)
      continue;
    const std::int64_t rows = std::min(x->max_rows, out->max_rows);
    if (rows < kLeastTunedRows || !done.emplace(matrix.rows, matrix.cols).second) continue;
    // Real numbers, since a product of zeros takes less power and so less time.
    const std::size_t bytes = static_cast<std::size_t>(rows * matrix.cols) * sizeof(std::uint16_t);
    for (std::size_t at = 0; at < bytes; at += matrix.data.bytes()) {
      PLIANT_CUDA_CHECK(cudaMemcpyAsync(
          reinterpret_cast<std::byte*>(x->data.data()) + at, matrix.data.data(),
          std::min(matrix.data.bytes(), bytes - at), cudaMemcpyDeviceToDevice, stream_.get()));
    }
    for (const bool to_bf16 : {false, true})
      gemm_->Tune(x->Bf16(), matrix.data.data(), rows, matrix.rows, matrix.cols, out->data.data(),
                  to_bf16, stream_);
  }
  stream_.Synchronize();
}

}  // namespace cuda

Result<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options) {
  if (!cuda::DeviceAvailable()) return Unavailable("no usable CUDA device");
  int count = 0;
  PLIANT_CUDA_CHECK(cudaGetDeviceCount(&count));
  if (options.device < 0 || options.device >= count) {
    return InvalidArgument("CUDA device " + std::to_string(options.device) + " of " +
                           std::to_string(count));
  }
  PLIANT_CUDA_CHECK(cudaSetDevice(options.device));
  PLIANT_ASSIGN_OR_RETURN(auto gemm, cuda::Gemm::Make());
  return std::unique_ptr<Backend>(std::make_unique<cuda::CudaBackend>(options, std::move(gemm)));
}

}  // namespace pliant
