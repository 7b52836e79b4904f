// Room: backend. The reference backend: the definition of every op in backend.h, in plain loops.
// f32 storage, sums in double. One thread.
#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "backend/backend.h"
#include "backend/dequant.h"
#include "backend/ref/ref_kv.h"
#include "backend/step_check.h"
#include "base/check.h"

namespace pliant {
namespace {

struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<float> data;
  std::span<const float> Row(std::int64_t r) const {
    return std::span(data).subspan(static_cast<std::size_t>(r * cols),
                                   static_cast<std::size_t>(cols));
  }
};

struct Tensor {
  std::int64_t cols = 0;
  std::vector<float> data;
  std::span<float> Row(std::int64_t r) {
    return std::span(data).subspan(static_cast<std::size_t>(r * cols),
                                   static_cast<std::size_t>(cols));
  }
};

/// Checks one part of a stacked matrix against what it says of itself.
Status CheckPart(const HostMatrix& part, std::int64_t cols) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 40;
  const DTypeTraits traits = Traits(part.type);
  if (part.rows < 1 || part.cols < 1 || part.cols != cols || part.rows > kLimit / part.cols) {
    return InvalidArgument("matrix: " + std::to_string(part.rows) + " x " +
                           std::to_string(part.cols) + " does not stack on " +
                           std::to_string(cols) + " columns");
  }
  if (part.cols % traits.block_elements != 0 ||
      part.data.size() != part.rows * RowBytes(part.type, part.cols)) {
    return InvalidArgument("matrix: " + std::to_string(part.data.size()) + " bytes for " +
                           std::to_string(part.rows) + " x " + std::to_string(part.cols) + " of " +
                           std::string(traits.name));
  }
  if (!part.order.empty() && static_cast<std::int64_t>(part.order.size()) != part.rows) {
    return InvalidArgument("matrix: row order of another length");
  }
  for (const std::int32_t row : part.order) {
    if (row < 0 || row >= part.rows) return InvalidArgument("matrix: row order out of range");
  }
  return {};
}

class ReferenceBackend final : public Backend {
 public:
  std::string Name() const override { return "ref"; }
  DeviceInfo Info() const override { return {"scalar reference, 1 thread", 0, 0}; }

  // ---- weights ----
  Result<MatrixId> AddMatrix(std::span<const HostMatrix> parts) override {
    if (parts.empty()) return InvalidArgument("matrix: no parts");
    Matrix matrix;
    matrix.cols = parts[0].cols;
    for (const HostMatrix& part : parts) {
      PLIANT_RETURN_IF_ERROR(CheckPart(part, matrix.cols));
      matrix.rows += part.rows;
    }
    try {
      matrix.data.resize(static_cast<std::size_t>(matrix.rows * matrix.cols));
      std::size_t at = 0;
      for (const HostMatrix& part : parts) {
        const std::size_t bytes = RowBytes(part.type, part.cols);
        for (std::int64_t r = 0; r < part.rows; ++r) {
          const std::int64_t source = part.order.empty() ? r : part.order[r];
          DequantizeRow(part.type, part.data.data() + source * bytes,
                        std::span(matrix.data).subspan(at, part.cols));
          at += part.cols;
        }
      }
      matrices_.push_back(std::move(matrix));
    } catch (const std::bad_alloc&) {
      return OutOfMemory("matrix: no memory for " + std::to_string(matrix.rows) + " x " +
                         std::to_string(matrix.cols) + " f32");
    }
    return MatrixId(static_cast<std::uint32_t>(matrices_.size() - 1));
  }

  Result<VectorId> AddVector(std::span<const float> values) override {
    vectors_.emplace_back(values.begin(), values.end());
    return VectorId(static_cast<std::uint32_t>(vectors_.size() - 1));
  }

  std::size_t WeightBytes() const override {
    std::size_t elements = 0;
    for (const Matrix& matrix : matrices_) elements += matrix.data.size();
    for (const auto& vector : vectors_) elements += vector.size();
    return elements * sizeof(float);
  }

  Result<TensorId> AddTensor(std::int64_t max_rows, std::int64_t cols) override {
    if (max_rows < 1 || cols < 1 || max_rows > (std::int64_t{1} << 40) / cols) {
      return InvalidArgument("tensor: " + std::to_string(max_rows) + " x " + std::to_string(cols));
    }
    try {
      tensors_.push_back({cols, std::vector<float>(static_cast<std::size_t>(max_rows * cols))});
    } catch (const std::bad_alloc&) {
      return OutOfMemory("tensor: no memory for " + std::to_string(max_rows) + " x " +
                         std::to_string(cols) + " f32");
    }
    return TensorId(static_cast<std::uint32_t>(tensors_.size() - 1));
  }

  // ---- KV pages ----
  std::size_t PageBytes(const KvGeometry& geometry) const override {
    return kv_.PageBytes(geometry);
  }
  Status AllocatePages(const KvGeometry& geometry, std::uint32_t pages) override {
    return kv_.AllocatePages(geometry, pages);
  }
  Status SetKvCode(const KvCode& code) override { return kv_.SetKvCode(code); }
  void StartChannelStatistics() override { kv_.StartChannelStatistics(); }
  ChannelStatistics TakeChannelStatistics() override { return kv_.TakeChannelStatistics(); }

  // ---- one step ----
  Status BeginStep(const StepBatch& batch) override {
    PLIANT_RETURN_IF_ERROR(CheckStepBatch(batch, kv_.pages()));
    batch_ = batch;
    return {};
  }

  void Embed(MatrixId table, TensorId out) override {
    const Matrix& matrix = matrices_.at(table.value());
    for (std::int64_t r = 0; r < Rows(); ++r) {
      PLIANT_CHECK(batch_.tokens[r] >= 0 && batch_.tokens[r] < matrix.rows,
                   "token id out of range");
      std::ranges::copy(matrix.Row(batch_.tokens[r]), TensorRow(out, r).begin());
    }
  }

  void RmsNorm(TensorId x, VectorId weight, float eps, TensorId out) override {
    for (std::int64_t r = 0; r < Rows(); ++r) {
      const std::span<float> row = TensorRow(out, r);
      if (x != out) std::ranges::copy(TensorRow(x, r), row.begin());
      RefRmsNorm(row, vectors_.at(weight.value()), eps);
    }
  }

  void MatMul(TensorId x, MatrixId weight, VectorId bias, TensorId out, bool accumulate) override {
    const Matrix& matrix = matrices_.at(weight.value());
    for (std::int64_t r = 0; r < Rows(); ++r) {
      const std::vector<float> product = Product(matrix, TensorRow(x, r));
      const std::span<float> row = TensorRow(out, r);
      for (std::int64_t n = 0; n < matrix.rows; ++n) {
        const float biased = product[n] + (bias.valid() ? vectors_.at(bias.value())[n] : 0.0f);
        row[n] = accumulate ? row[n] + biased : biased;
      }
    }
  }

  void QkvToCache(const QkvParams& params, const RopeTable& rope, TensorId qkv) override {
    inv_freq_ = rope.inv_freq;
    for (const SequenceSlice& slice : batch_.sequences) {
      const int dim = kv_.geometry().head_dim;
      if (slice.history == nullptr || !slice.history->options().query_means) continue;
      for (int r = 0; r < slice.rows; ++r) {
        const float* row = TensorRow(qkv, slice.first_row + r).data();
        for (int head = 0; head < params.heads; ++head)
          slice.history->NoteQuery(params.layer, head, row + std::size_t(head) * dim);
      }
    }
    ForEachRow([&](std::int64_t r, std::span<const BlockView> blocks, int cache_position) {
      kv_.WriteRow(params, OptionalVector(params.q_norm), OptionalVector(params.k_norm), rope,
                   blocks, cache_position, {batch_.positions[r], TensorRow(qkv, r), {}});
    });
  }

  void Attention(int layer, int heads, float softmax_scale, TensorId qkv, TensorId out) override {
    for (const SequenceSlice& slice : batch_.sequences) {
      const auto blocks = batch_.blocks.subspan(slice.first_block, slice.blocks);
      if (slice.history != nullptr && slice.rows == 1) {
        const std::int64_t r = slice.first_row;
        kv_.AttendHistory(layer, heads, softmax_scale, *slice.history,
                          batch_.blocks.subspan(slice.first_kept, slice.history->kept_blocks()),
                          blocks, slice.context,
                          {batch_.positions[r], TensorRow(qkv, r), TensorRow(out, r)});
        continue;
      }
      for (int i = 0; i < slice.rows; ++i) {
        const std::int64_t r = slice.first_row + i;
        kv_.AttendRow(layer, heads, softmax_scale, blocks, slice.context + i,
                      {batch_.positions[r], TensorRow(qkv, r), TensorRow(out, r)});
        if (slice.history == nullptr) continue;
        kv_.ScoreRow(layer, heads, softmax_scale, *slice.history, blocks, slice.context + i,
                     {batch_.positions[r], TensorRow(qkv, r), {}});
      }
    }
  }

  void SiluMul(TensorId gate_up, TensorId out) override {
    const std::int64_t features = tensors_.at(gate_up.value()).cols / 2;
    for (std::int64_t r = 0; r < Rows(); ++r) {
      const std::span<const float> in = TensorRow(gate_up, r);
      const std::span<float> row = TensorRow(out, r);
      for (std::int64_t i = 0; i < features; ++i) {
        const double gate = in[i];
        row[i] = static_cast<float>(gate / (1 + std::exp(-gate)) * in[features + i]);
      }
    }
  }

  void Logits(TensorId x, VectorId norm, float eps, MatrixId weight) override {
    const Matrix& matrix = matrices_.at(weight.value());
    logits_.clear();
    sampled_.clear();
    logprobs_.assign(batch_.sampling.size(), {});
    RowSampler sampler;
    for (std::size_t i = 0; i < batch_.logit_rows.size(); ++i) {
      const std::span<const float> row = TensorRow(x, batch_.logit_rows[i]);
      std::vector<float> normed(row.begin(), row.end());
      RefRmsNorm(normed, vectors_.at(norm.value()), eps);
      const std::vector<float> product = Product(matrix, normed);
      if (!batch_.sampling.empty()) {
        const RowSampling& how = batch_.sampling[i];
        const auto columns =
            std::min<std::size_t>(product.size(), static_cast<std::size_t>(batch_.sampled_columns));
        sampled_.push_back(how.on_host != 0
                               ? kNoToken
                               : SampleLogits(std::span(product).first(columns), how, sampler,
                                              batch_.changes.subspan(how.first_change, how.changes),
                                              &logprobs_[i]));
        if (how.on_host == 0) continue;
      }
      logits_.insert(logits_.end(), product.begin(), product.end());
    }
  }

  bool RetainsHistory(int) const override { return true; }
  Status NoteHistory(RetainedHistory& history, std::int32_t blocks) override {
    return kv_.NoteHistory(history, inv_freq_, blocks);
  }
  Status DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return kv_.DropFromHistory(history, kept);
  }
  Status RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return kv_.RefillHistory(history, kept);
  }
  Status EndStep() override { return {}; }
  std::span<const float> LogitRows() const override { return logits_; }
  bool SamplesTokens() const override { return true; }
  std::span<const std::int32_t> SampledTokens() const override { return sampled_; }
  std::span<const RowLogprobs> SampledLogprobs() const override { return logprobs_; }

  // ---- page copies: done at once, seen through the same tickets as everywhere ----
  CopyTicket CopyOut(std::span<const PageCopy> copies) override {
    return Copy(copies,
                [](std::span<std::byte> page, std::byte* host) { std::ranges::copy(page, host); });
  }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override {
    return Copy(copies, [](std::span<std::byte> page, std::byte* host) {
      std::copy_n(host, page.size(), page.begin());
    });
  }
  CopyState Poll(CopyTicket ticket) override { return tickets_.at(ticket.value()); }
  CopyState Wait(CopyTicket ticket) override { return tickets_.at(ticket.value()); }

 private:
  std::int64_t Rows() const { return static_cast<std::int64_t>(batch_.tokens.size()); }
  std::span<float> TensorRow(TensorId id, std::int64_t r) { return tensors_.at(id.value()).Row(r); }
  std::span<const float> OptionalVector(VectorId id) const {
    return id.valid() ? std::span<const float>(vectors_.at(id.value())) : std::span<const float>();
  }

  /// Calls fn(row of the batch, blocks of its sequence, position in its sequence's cache).
  template <typename F>
  void ForEachRow(F&& fn) {
    for (const SequenceSlice& slice : batch_.sequences) {
      const auto blocks = batch_.blocks.subspan(slice.first_block, slice.blocks);
      for (int i = 0; i < slice.rows; ++i) fn(slice.first_row + i, blocks, slice.context + i);
    }
  }

  static std::vector<float> Product(const Matrix& matrix, std::span<const float> x) {
    PLIANT_CHECK(static_cast<std::int64_t>(x.size()) == matrix.cols, "x and weight disagree");
    std::vector<float> product(static_cast<std::size_t>(matrix.rows));
    for (std::int64_t n = 0; n < matrix.rows; ++n) {
      const std::span<const float> w = matrix.Row(n);
      double sum = 0;
      for (std::size_t c = 0; c < x.size(); ++c) sum += double{x[c]} * w[c];
      product[n] = static_cast<float>(sum);
    }
    return product;
  }

  template <typename F>
  CopyTicket Copy(std::span<const PageCopy> copies, F&& copy_page) {
    CopyState state = CopyState::kFailed;
    if (CheckCopies(copies, kv_.pages()).ok()) {
      for (const PageCopy& copy : copies) copy_page(kv_.Page(copy.page), copy.host);
      state = CopyState::kDone;
    }
    tickets_.push_back(state);
    return CopyTicket(tickets_.size() - 1);
  }

  std::vector<Matrix> matrices_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Tensor> tensors_;
  RefKv kv_;
  std::vector<float> inv_freq_;  // of the last RoPE
  StepBatch batch_;
  std::vector<float> logits_;
  std::vector<std::int32_t> sampled_;
  std::vector<RowLogprobs> logprobs_;
  std::vector<CopyState> tickets_;
};

}  // namespace

std::unique_ptr<Backend> MakeReferenceBackend() { return std::make_unique<ReferenceBackend>(); }

}  // namespace pliant
