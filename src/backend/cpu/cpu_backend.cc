#include "backend/cpu/cpu_backend.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/host_memory.h"

namespace pliant {
namespace {

// Below so many elements an op is done before another thread would have noticed.
constexpr std::int64_t kThreadedElements = 6144;
constexpr int kMostThreads = 1024;

std::int64_t RoundUp(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

}  // namespace

Result<std::unique_ptr<CpuBackend>> CpuBackend::Make(const CpuOptions& options) {
  PLIANT_ASSIGN_OR_RETURN(const CpuLevel level, ChooseCpuLevel(options.level));
  if (options.threads < 0 || options.threads > kMostThreads) {
    return InvalidArgument("threads must be 0 to " + std::to_string(kMostThreads) + ", not " +
                           std::to_string(options.threads));
  }
  std::unique_ptr<CpuBackend> backend(new CpuBackend(options, level));
  PLIANT_ASSIGN_OR_RETURN(backend->kv_, CpuKv::Make(&backend->pool_, options.level));
  return backend;
}

CpuBackend::CpuBackend(const CpuOptions& options, CpuLevel level)
    : level_(level),
      pool_(options.threads),
      gemm_(&pool_, level, options.precise),
      ops_(&ChooseCpuOps(level)),
      row_buffers_(pool_.threads()) {}

DeviceInfo CpuBackend::Info() const {
  DeviceInfo info;
  info.name = std::string(gemm_.kernel().name) + " products, " + std::string(kv_->Level()) +
              " attention, " + std::to_string(pool_.threads()) +
              (pool_.threads() == 1 ? " thread" : " threads");
  const auto page = static_cast<std::size_t>(std::max(0L, sysconf(_SC_PAGESIZE)));
  info.memory_total = page * static_cast<std::size_t>(std::max(0L, sysconf(_SC_PHYS_PAGES)));
  info.memory_free = static_cast<std::size_t>(AvailableHostMemory().value_or(0));
  return info;
}

// ---- weights ----

Result<MatrixId> CpuBackend::AddMatrix(std::span<const HostMatrix> parts) {
  // f32 kernels can use f32 weights to the full; the others round to bf16 in any case.
  const bool keep_f32 = !gemm_.kernel().wants_bf16(INT64_MAX);
  PLIANT_ASSIGN_OR_RETURN(PackedMatrix matrix, PackMatrix(parts, keep_f32, weights_, pool_));
  PLIANT_RETURN_IF_ERROR(gemm_.Reserve(matrix.blocks));
  most_rows_ = std::max(most_rows_, matrix.rows);
  most_cols_ = std::max(most_cols_, matrix.cols);
  matrices_.push_back(std::move(matrix));
  return MatrixId(static_cast<std::uint32_t>(matrices_.size() - 1));
}

Result<VectorId> CpuBackend::AddVector(std::span<const float> values) {
  vectors_.emplace_back(values.begin(), values.end());
  vector_bytes_ += values.size_bytes();
  return VectorId(static_cast<std::uint32_t>(vectors_.size() - 1));
}

std::size_t CpuBackend::WeightBytes() const { return weights_.used() + vector_bytes_; }

// ---- activations ----

Status CpuBackend::GrowTensor(Tensor& tensor, std::int64_t max_rows, std::int64_t cols) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  if (max_rows < 1 || cols < 1 || max_rows > kMost / cols) {
    return InvalidArgument("a tensor of " + std::to_string(max_rows) + " x " +
                           std::to_string(cols));
  }
  Tensor grown;
  grown.max_rows = max_rows;
  grown.cols = cols;
  PLIANT_ASSIGN_OR_RETURN(std::byte* const f32, activations_.Allocate(max_rows * cols * 4));
  grown.f32 = reinterpret_cast<float*>(f32);
  if (gemm_.kernel().wants_bf16(INT64_MAX)) {
    grown.bf16_stride = RoundUp(cols, kPanelCols);
    PLIANT_ASSIGN_OR_RETURN(std::byte* const bf16,
                            activations_.Allocate(RoundUp(max_rows, 32) * grown.bf16_stride * 2));
    grown.bf16 = reinterpret_cast<std::uint16_t*>(bf16);
  }
  for (std::vector<float>& buffer : row_buffers_) {
    if (static_cast<std::int64_t>(buffer.size()) < cols) buffer.resize(cols);
  }
  tensor = grown;
  return Status::Ok();
}

Result<TensorId> CpuBackend::AddTensor(std::int64_t max_rows, std::int64_t cols) {
  Tensor tensor;
  PLIANT_RETURN_IF_ERROR(GrowTensor(tensor, max_rows, cols));
  tensors_.push_back(tensor);
  return TensorId(static_cast<std::uint32_t>(tensors_.size() - 1));
}

CpuBackend::Tensor& CpuBackend::At(TensorId id) {
  PLIANT_CHECK(id.value() < tensors_.size(), "no such tensor");
  Tensor& tensor = tensors_[id.value()];
  PLIANT_CHECK(Rows() <= tensor.max_rows, "the step has more rows than the tensor");
  return tensor;
}

CpuBackend::Tensor& CpuBackend::AtF32(TensorId id) {
  Tensor& tensor = At(id);
  if (!tensor.f32_current) {
    PLIANT_CHECK(tensor.bf16_current, "the tensor was used up by SiluMul");
    for (std::int64_t r = 0; r < Rows(); ++r) {
      for (std::int64_t c = 0; c < tensor.cols; ++c) {
        tensor.f32[r * tensor.cols + c] = Bf16ToFloat(tensor.bf16[r * tensor.bf16_stride + c]);
      }
    }
    tensor.f32_current = true;
  }
  return tensor;
}

const PackedMatrix& CpuBackend::At(MatrixId id) const {
  PLIANT_CHECK(id.value() < matrices_.size(), "no such matrix");
  return matrices_[id.value()];
}

const float* CpuBackend::At(VectorId id, std::int64_t size) const {
  if (!id.valid()) return nullptr;
  PLIANT_CHECK(id.value() < vectors_.size(), "no such vector");
  const std::vector<float>& vector = vectors_[id.value()];
  PLIANT_CHECK(static_cast<std::int64_t>(vector.size()) == size, "vector of another size");
  return vector.data();
}

template <typename F>
void CpuBackend::ForRows(std::int64_t rows, std::int64_t cols, const F& fn) {
  const int threads = pool_.threads();
  if (threads == 1 || rows < 2 || rows * cols < kThreadedElements) {
    for (std::int64_t r = 0; r < rows; ++r) fn(r, 0);
    return;
  }
  pool_.Run([&](int worker) {
    const std::int64_t end = rows * (worker + 1) / threads;
    for (std::int64_t r = rows * worker / threads; r < end; ++r) fn(r, worker);
  });
}

template <typename F>
void CpuBackend::FillRows(Tensor& out, std::int64_t rows, const F& fn) {
  const bool as_bf16 = gemm_.kernel().wants_bf16(rows);
  ForRows(rows, out.cols, [&](std::int64_t r, int worker) {
    if (!as_bf16) {
      fn(r, out.f32 + r * out.cols);
      return;
    }
#if defined(__x86_64__)
    float* buffer = row_buffers_[worker].data();
    fn(r, buffer);
    ConvertRowsToBf16(buffer, out.cols, out.cols, 0, 1, out.bf16 + r * out.bf16_stride,
                      out.bf16_stride);
#else
    (void)worker;
#endif
  });
  out.f32_current = !as_bf16;
  out.bf16_current = as_bf16;
}

// ---- KV ----

std::size_t CpuBackend::PageBytes(const KvGeometry& geometry) const {
  return kv_->PageBytes(geometry);
}
Status CpuBackend::AllocatePages(const KvGeometry& geometry, std::uint32_t pages) {
  return kv_->AllocatePages(geometry, pages);
}
Status CpuBackend::SetKvCode(const KvCode& code) { return kv_->SetKvCode(code); }
void CpuBackend::StartChannelStatistics() { kv_->StartChannelStatistics(); }
ChannelStatistics CpuBackend::TakeChannelStatistics() { return kv_->TakeChannelStatistics(); }

// ---- one step ----

Status CpuBackend::BeginStep(const StepBatch& batch) {
  const auto wanted = static_cast<std::int64_t>(batch.logit_rows.size());
  for (const std::int32_t row : batch.logit_rows) {
    if (row < 0 || static_cast<std::size_t>(row) >= batch.tokens.size()) {
      return InvalidArgument("logits are wanted of row " + std::to_string(row) + " of " +
                             std::to_string(batch.tokens.size()));
    }
  }
  // Room for the logits is found here, where its absence can be told.
  if (wanted > 0 && (logits_.max_rows < wanted || logits_.cols < most_rows_)) {
    const std::int64_t rows = std::max(wanted, std::min<std::int64_t>(2 * logits_.max_rows, 256));
    PLIANT_RETURN_IF_ERROR(GrowTensor(logits_, rows, std::max<std::int64_t>(1, most_rows_)));
    PLIANT_RETURN_IF_ERROR(GrowTensor(logit_x_, rows, std::max<std::int64_t>(1, most_cols_)));
  }
  PLIANT_RETURN_IF_ERROR(kv_->BeginStep(batch));
  batch_ = batch;
  pending_.reset();
  logit_count_ = 0;
  return Status::Ok();
}

void CpuBackend::Embed(MatrixId table, TensorId out) {
  Flush();
  const PackedMatrix& matrix = At(table);
  Tensor& to = At(out);
  PLIANT_CHECK(to.cols == matrix.cols, "embedding and tensor differ in width");
  for (const std::int32_t token : batch_.tokens) {
    PLIANT_CHECK(token >= 0 && token < matrix.rows, "token id out of range");
  }
  ForRows(Rows(), to.cols,
          [&](std::int64_t r, int) { UnpackRow(matrix, batch_.tokens[r], to.f32 + r * to.cols); });
  to.f32_current = true;
  to.bf16_current = false;
}

void CpuBackend::RmsNorm(TensorId x, VectorId weight, float eps, TensorId out) {
  Flush();
  const Tensor& from = AtF32(x);
  Tensor& to = At(out);
  PLIANT_CHECK(from.cols == to.cols, "norm of another width");
  const float* scale = At(weight, from.cols);
  PLIANT_CHECK(scale != nullptr, "a norm needs its weight");
  FillRows(to, Rows(), [&](std::int64_t r, float* row) {
    ops_->rms_norm(from.f32 + r * from.cols, scale, eps, from.cols, row);
  });
}

void CpuBackend::PrepareInput(Tensor& x, std::int64_t rows, GemmCall& call) {
  call.rows = rows;
  call.x = x.f32;
  call.x_stride = x.cols;
  if (!gemm_.kernel().wants_bf16(rows)) return;
#if defined(__x86_64__)
  if (!x.bf16_current) {
    PLIANT_CHECK(x.f32_current, "the tensor was used up by SiluMul");
    ForRows(rows, x.cols, [&](std::int64_t r, int) {
      ConvertRowsToBf16(x.f32, x.cols, x.cols, r, r + 1, x.bf16, x.bf16_stride);
    });
    x.bf16_current = true;
  }
#endif
  call.x_bf16 = x.bf16;
  call.x_bf16_stride = x.bf16_stride;
}

void CpuBackend::Multiply(Tensor& x, std::int64_t rows, const PackedMatrix& weight,
                          const float* bias, float* out, std::int64_t out_stride, bool accumulate) {
  GemmCall call;
  PrepareInput(x, rows, call);
  call.weight = &weight;
  call.bias = bias;
  call.out = out;
  call.out_stride = out_stride;
  call.accumulate = accumulate;
  gemm_.Run(call);
}

void CpuBackend::MatMul(TensorId x, MatrixId weight, VectorId bias, TensorId out, bool accumulate) {
  Flush();
  const PackedMatrix& matrix = At(weight);
  Tensor& from = gemm_.kernel().wants_bf16(Rows()) ? At(x) : AtF32(x);
  Tensor& to = accumulate ? AtF32(out) : At(out);
  PLIANT_CHECK(x != out, "a product cannot overwrite its input");
  PLIANT_CHECK(from.cols == matrix.cols && to.cols == matrix.rows, "sizes of a product disagree");
  if (!accumulate && !bias.valid() && gemm_.kernel().gates(Rows(), matrix)) {
    pending_ = PendingProduct{x, weight, out};
    return;
  }
  Multiply(from, Rows(), matrix, At(bias, matrix.rows), to.f32, to.cols, accumulate);
  to.f32_current = true;
  to.bf16_current = false;
}

void CpuBackend::Flush() {
  if (!pending_.has_value()) return;
  const PendingProduct product = *pending_;
  pending_.reset();
  Tensor& to = At(product.out);
  Multiply(At(product.x), Rows(), At(product.weight), nullptr, to.f32, to.cols, false);
  to.f32_current = true;
  to.bf16_current = false;
}

void CpuBackend::QkvToCache(const QkvParams& params, const RopeTable& rope, TensorId qkv) {
  Flush();
  Tensor& tensor = AtF32(qkv);
  const auto norm = [this](VectorId id) {
    return id.valid() ? std::span<const float>(vectors_.at(id.value())) : std::span<const float>();
  };
  KvQkvParams resolved;
  resolved.layer = params.layer;
  resolved.heads = params.heads;
  resolved.q_norm = norm(params.q_norm);
  resolved.k_norm = norm(params.k_norm);
  resolved.norm_eps = params.norm_eps;
  kv_->QkvToCache(resolved, rope, {tensor.f32, tensor.cols});
  tensor.bf16_current = false;
}

void CpuBackend::Attention(int layer, int heads, float softmax_scale, TensorId qkv, TensorId out) {
  Flush();
  const Tensor& query = AtF32(qkv);
  Tensor& to = At(out);
  kv_->Attention(layer, heads, softmax_scale, {query.f32, query.cols}, {to.f32, to.cols});
  to.f32_current = true;
  to.bf16_current = false;
}

void CpuBackend::SiluMul(TensorId gate_up, TensorId out) {
  Tensor& to = At(out);
  PLIANT_CHECK(At(gate_up).cols == 2 * to.cols, "gate and up are not twice the output");
  if (pending_.has_value() && pending_->out == gate_up && pending_->x != out) {
    const PendingProduct product = *pending_;
    pending_.reset();
    GemmCall call;
    PrepareInput(At(product.x), Rows(), call);
    call.weight = &At(product.weight);
    call.gated = to.bf16;
    call.gated_stride = to.bf16_stride;
    call.silu_mul = ops_->silu_mul;
    gemm_.Run(call);
    Tensor& used_up = At(gate_up);
    used_up.f32_current = used_up.bf16_current = false;
    to.f32_current = false;
    to.bf16_current = true;
    return;
  }
  Flush();
  const Tensor& from = AtF32(gate_up);
  FillRows(to, Rows(), [&](std::int64_t r, float* row) {
    const float* gate = from.f32 + r * from.cols;
    ops_->silu_mul(gate, gate + to.cols, to.cols, row);
  });
}

void CpuBackend::Logits(TensorId x, VectorId norm, float eps, MatrixId weight) {
  Flush();
  const Tensor& from = AtF32(x);
  const PackedMatrix& matrix = At(weight);
  PLIANT_CHECK(from.cols == matrix.cols, "sizes of the logits' product disagree");
  const float* scale = At(norm, from.cols);
  PLIANT_CHECK(scale != nullptr, "the last norm needs its weight");
  logit_count_ = static_cast<std::int64_t>(batch_.logit_rows.size());
  logit_cols_ = matrix.rows;
  if (logit_count_ == 0) return;
  Tensor rows = logit_x_;  // the same memory, as wide as this model
  rows.cols = from.cols;
  rows.bf16_stride = RoundUp(from.cols, kPanelCols);
  FillRows(rows, logit_count_, [&](std::int64_t r, float* row) {
    ops_->rms_norm(from.f32 + batch_.logit_rows[r] * from.cols, scale, eps, from.cols, row);
  });
  Multiply(rows, logit_count_, matrix, nullptr, logits_.f32, matrix.rows, false);
}

Status CpuBackend::EndStep() {
  Flush();
  return Status::Ok();
}

std::span<const float> CpuBackend::LogitRows() const {
  return {logits_.f32, static_cast<std::size_t>(logit_count_ * logit_cols_)};
}

Result<std::unique_ptr<Backend>> MakeCpuBackend(const CpuOptions& options) {
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CpuBackend::Make(options));
  return backend;
}

}  // namespace pliant
