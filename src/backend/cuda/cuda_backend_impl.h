// Room: backend/cuda. The inside of the CUDA backend: what it owns, its short ops, and the steps'
// long ones, which are in cuda_step.cc. Owned by the engine thread.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/append/append.h"
#include "backend/cuda/append/kv_statistics.h"
#include "backend/cuda/append/rope_tables.h"
#include "backend/cuda/attention_decode/attention_decode.h"
#include "backend/cuda/attention_prefill/attention_prefill.h"
#include "backend/cuda/copies/page_copier.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_types.h"
#include "backend/cuda/device_memory.h"
#include "backend/cuda/gather/gather.h"
#include "backend/cuda/gemm/gemm.h"
#include "backend/cuda/graphs/step_graphs.h"
#include "backend/cuda/history/device_history.h"
#include "backend/cuda/history_attention/history_attention.h"
#include "backend/cuda/history_changes/history_changes.h"
#include "backend/cuda/history_scores/history_scores.h"
#include "backend/cuda/page_layout.h"
#include "backend/cuda/rowwise/rowwise.h"
#include "backend/cuda/sampling/sampling.h"
#include "backend/cuda/step_inputs.h"
#include "backend/cuda/weights.h"
#include "backend/step_check.h"

namespace pliant::cuda {

/// Decode steps of more rows than this are not kept as graphs: their launches hide behind the work.
inline constexpr std::int64_t kMostGraphRows = 512;
/// From so many rows on what SiLU takes is bf16: its f32 form no longer fits the cache.
inline constexpr std::int64_t kLeastNarrowRows = 512;

/// [max_rows, cols]; holds f32 or bf16, whatever the op that wrote it last gives.
struct Tensor {
  std::int64_t max_rows = 0, cols = 0;
  DeviceArray<float> data;
  ElementType type = ElementType::kF32;

  float* F32() {
    PLIANT_CHECK(type == ElementType::kF32,
                 "this op takes f32, and its input is what a product takes (bf16)");
    return data.data();
  }
  std::uint16_t* Bf16() const { return reinterpret_cast<std::uint16_t*>(data.data()); }
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CudaOptions& options, std::unique_ptr<Gemm> gemm)
      : device_(options.device), use_graphs_(options.graphs), gemm_(std::move(gemm)) {}
  ~CudaBackend() override {
    copier_.reset();
    cudaStreamSynchronize(stream_.get());
    if (history_memory_ != nullptr) history_memory_->Close();
  }

  std::string Name() const override { return "cuda"; }
  DeviceInfo Info() const override {
    cudaDeviceProp properties{};
    PLIANT_CUDA_CHECK(cudaGetDeviceProperties(&properties, device_));
    DeviceInfo info;
    info.name = properties.name;
    PLIANT_CUDA_CHECK(cudaMemGetInfo(&info.memory_free, &info.memory_total));
    return info;
  }

  // ---- weights ----
  Result<MatrixId> AddMatrix(std::span<const HostMatrix> parts) override {
    PLIANT_ASSIGN_OR_RETURN(DeviceMatrix matrix, UploadMatrix(parts));
    weight_bytes_ += matrix.data.bytes();
    matrices_.push_back(std::move(matrix));
    return MatrixId(static_cast<std::uint32_t>(matrices_.size() - 1));
  }
  Result<VectorId> AddVector(std::span<const float> values) override {
    PLIANT_ASSIGN_OR_RETURN(auto vector,
                            DeviceArray<float>::Make(values.size(), "a weight vector"));
    Upload<float>(values, vector.data());
    weight_bytes_ += vector.bytes();
    vectors_.push_back(std::move(vector));
    return VectorId(static_cast<std::uint32_t>(vectors_.size() - 1));
  }
  std::size_t WeightBytes() const override { return weight_bytes_; }

  // ---- activations ----
  Result<TensorId> AddTensor(std::int64_t max_rows, std::int64_t cols) override {
    if (max_rows < 1 || cols < 1 || max_rows > (std::int64_t{1} << 40) / cols) {
      return InvalidArgument("a tensor of " + std::to_string(max_rows) + " x " +
                             std::to_string(cols));
    }
    if (cols % 8 != 0)
      return Unimplemented("the CUDA kernels want a multiple of 8 columns, not " +
                           std::to_string(cols));
    // Steps are padded; rows of padding hold anything and are never looked at.
    Tensor tensor{PaddedRows(max_rows), cols, {}, ElementType::kF32};
    PLIANT_ASSIGN_OR_RETURN(
        tensor.data,
        DeviceArray<float>::Make(static_cast<std::size_t>(tensor.max_rows * cols), "activations"));
    tensors_.push_back(std::move(tensor));
    return TensorId(static_cast<std::uint32_t>(tensors_.size() - 1));
  }

  // ---- KV pages ----
  std::size_t PageBytes(const KvGeometry& geometry) const override { return geometry.PageBytes(); }
  Status AllocatePages(const KvGeometry& geometry, std::uint32_t pages) override;
  Status SetKvCode(const KvCode& code) override {
    PLIANT_RETURN_IF_ERROR(CheckKvCode(code, Channels()));
    stream_.Synchronize();
    UploadCode(code);
    return {};
  }
  void StartChannelStatistics() override { statistics_.Start(Channels(), stream_); }
  ChannelStatistics TakeChannelStatistics() override { return statistics_.Take(stream_); }

  // ---- one step ----
  Status BeginStep(const StepBatch& batch) override;

  void PrepareStep(const StepBatch& batch) override {
    prepared_ = 0;
    // What is wrong with it is for BeginStep to say.
    if (CheckPlaces(batch, page_count_).ok() && Lay(batch, MayBeGraph(batch)).ok())
      prepared_ = batch.step;
  }

  void Embed(MatrixId table, TensorId out) override {
    if (Replayed({1, table.value(), out.value()})) return;
    const DeviceMatrix& matrix = matrices_.at(table.value());
    Tensor& to = Writable(out, matrix.cols, ElementType::kF32);
    LaunchEmbed(matrix.data.data(), matrix.type, inputs_.tokens(), inputs_.rows(),
                static_cast<int>(matrix.cols), to.data.data(), stream_.get());
  }

  void RmsNorm(TensorId x, VectorId weight, float eps, TensorId out) override {
    if (Replayed({2, x.value(), weight.value(), out.value()})) return;
    Tensor& from = tensors_.at(x.value());
    const float* data = from.F32();
    Tensor& to = Writable(out, from.cols, x == out ? ElementType::kF32 : ElementType::kBf16);
    LaunchRmsNorm(data, nullptr, vectors_.at(weight.value()).data(), eps, inputs_.rows(),
                  static_cast<int>(from.cols), to.data.data(), to.type, stream_.get());
  }

  void MatMul(TensorId x, MatrixId weight, VectorId bias, TensorId out, bool accumulate) override {
    if (Replayed({3, x.value(), weight.value(), out.value()})) return;
    const DeviceMatrix& matrix = matrices_.at(weight.value());
    const Tensor& from = tensors_.at(x.value());
    PLIANT_CHECK(from.cols == matrix.cols, "x and weight disagree");
    Tensor& to = tensors_.at(out.value());
    PLIANT_CHECK(to.cols == matrix.rows && (!accumulate || to.type == ElementType::kF32),
                 "a product and what it is added to disagree");
    to.type = ElementType::kF32;
    if (inputs_.rows() >= kLeastNarrowRows && !bias.valid() && !accumulate &&
        matrix.rows % 16 == 0 && matrix.type == WeightType::kBf16)
      waiting_ = {x, weight, out};
    else
      Multiply(AsBf16(from), matrix, OptionalVector(bias), inputs_.rows(), to.data.data(),
               accumulate);
  }

  void QkvToCache(const QkvParams& params, const RopeTable& rope, TensorId qkv) override;

  void Attention(int layer, int heads, float softmax_scale, TensorId qkv, TensorId out) override;

  void SiluMul(TensorId gate_up, TensorId out) override {
    if (waiting_.out == gate_up) StartWaiting(ElementType::kBf16);
    if (Replayed({6, gate_up.value(), out.value()})) return;
    Tensor& from = tensors_.at(gate_up.value());
    const int features = static_cast<int>(from.cols / 2);
    Tensor& to = Writable(out, features, ElementType::kBf16);
    if (from.type == ElementType::kBf16)
      LaunchSiluMul(from.Bf16(), inputs_.rows(), features, to.Bf16(), stream_.get());
    else
      LaunchSiluMul(from.F32(), inputs_.rows(), features, to.Bf16(), stream_.get());
  }

  void Logits(TensorId x, VectorId norm, float eps, MatrixId weight) override;

  bool StartStep() override {
    StartWaiting(ElementType::kF32);
    if (in_graph_) graphs_.End(Moves(), ops_, stream_);
    in_graph_ = false;
    mode_ = StepGraphs::Mode::kLaunch;
    if (!std::exchange(started_, true)) SendHistoryCounts();
    return true;
  }
  Status EndStep() override {
    StartStep();
    stream_.Synchronize();
    CountHistories();
    idle_ = true;
    return {};
  }
  std::span<const float> LogitRows() const override {
    return {host_logits_.data(), static_cast<std::size_t>(logit_columns_ * host_rows_)};
  }
  bool SamplesTokens() const override { return true; }
  std::span<const std::int32_t> SampledTokens() const override {
    return {host_tokens_.data(),
            batch_sampling_.empty() ? 0 : static_cast<std::size_t>(logit_count_)};
  }

  std::span<const RowLogprobs> SampledLogprobs() const override {
    return {host_logprobs_.data(),
            batch_sampling_.empty() ? 0 : static_cast<std::size_t>(logit_count_)};
  }

  // ---- histories with a capacity ----
  bool RetainsHistory(int heads) const override;
  bool ReturnsFromAnyStore() const override { return false; }
  void StartHistory(RetainedHistory& history) override;
  Status NoteHistory(RetainedHistory& history, std::int32_t blocks) override;
  Status DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) override;
  Status RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) override;

  // ---- page copies ----
  Result<HostMemory> AllocateHost(std::size_t bytes) override {
    PLIANT_ASSIGN_OR_RETURN(void* const memory, internal::Allocate(internal::MemoryKind::kPinned,
                                                                   bytes, "exact store"));
    return HostMemory(static_cast<std::byte*>(memory), [](std::byte* pointer) {
      internal::Release(internal::MemoryKind::kPinned, pointer);
    });
  }
  CopyTicket CopyOut(std::span<const PageCopy> copies) override {
    return Copy(PageCopier::Direction::kOut, copies);
  }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override {
    return Copy(PageCopier::Direction::kIn, copies);
  }
  CopyState Poll(CopyTicket ticket) override { return copier_->Poll(ticket); }
  CopyState Wait(CopyTicket ticket) override { return copier_->Wait(ticket); }

 private:
  enum Side { kKey, kValue };
  std::size_t Channels() const { return code_.size() / 4; }
  std::size_t FirstChannel(int layer) const {
    return static_cast<std::size_t>(layer) * geometry_.kv_heads * geometry_.head_dim;
  }
  ChannelPointers Code(Side side, int layer) const {
    const float* const scales = code_.data() + side * 2 * Channels() + FirstChannel(layer);
    return {scales, scales + Channels()};
  }
  void UploadCode(const KvCode& code) {
    float* to = code_.data();
    for (const std::vector<float>* part :
         {&code.key.scale, &code.key.center, &code.value.scale, &code.value.center}) {
      Upload<float>(*part, to);
      to += Channels();
    }
  }
  std::size_t GatheredBlockElements() const {
    return static_cast<std::size_t>(kBlockTokens) *
           std::max(1, geometry_.kv_heads * geometry_.head_dim);
  }
  const float* OptionalVector(VectorId id) const {
    return id.valid() ? vectors_.at(id.value()).data() : nullptr;
  }

  /// Chooses algorithms for the largest step's products: prompts that fill steps wait for these.
  void TuneProducts();

  Tensor& Writable(TensorId id, std::int64_t cols, ElementType type) {
    Tensor& tensor = tensors_.at(id.value());
    PLIANT_CHECK(tensor.cols == cols && tensor.max_rows >= inputs_.rows(),
                 "an op's result does not fit its tensor");
    tensor.type = type;
    return tensor;
  }

  static std::int64_t StepRows(const StepBatch& batch) {
    return PaddedRows(static_cast<std::int64_t>(batch.tokens.size()));
  }
  /// Only sequences of one new row each; and their tokens must all be taken on the device.
  bool MayBeGraph(const StepBatch& batch) const {
    return use_graphs_ && last_heads_ != 0 && StepRows(batch) <= kMostGraphRows &&
           !statistics_.on() && batch.sequences.size() == batch.tokens.size() &&
           batch.logit_rows.size() == batch.tokens.size();
  }
  static bool TakesAllTokens(const StepBatch& batch) {
    return !batch.sampling.empty() &&
           std::all_of(batch.sampling.begin(), batch.sampling.end(),
                       [](const RowSampling& row) { return row.on_host == 0; });
  }

  /// Lays a checked step out on the host; the step before may be under way.
  Status Lay(const StepBatch& batch, bool as_graph);

  /// Starts the product that waits to know what its result is for, if one does.
  void StartWaiting(ElementType type);

  /// Notes an op of the step. True: it is part of the graph that this step replays.
  bool Replayed(std::initializer_list<std::uint32_t> op) {
    StartWaiting(ElementType::kF32);
    for (const std::uint32_t word : op) ops_ = (ops_ ^ word) * 0x100000001b3u;
    return mode_ == StepGraphs::Mode::kReplay;
  }

  std::uint64_t Moves() const { return moves_ + inputs_.moves() + ropes_.moves(); }

  /// Scratch grows to what the largest step so far needs.
  template <typename Array>
  void Grow(Array& array, std::int64_t count, std::string_view what) {
    if (array.size() >= static_cast<std::size_t>(count)) return;
    PLIANT_CHECK(mode_ != StepGraphs::Mode::kCapture, "scratch grows while a step is captured");
    cuda::Grow(array, count, what, stream_);
    ++moves_;
  }

  Status GrowGathered(std::size_t blocks);

  /// Rows first .. first + count - 1 of the logits go to the host, from row `to` on.
  void LogitsToHost(std::int64_t first, std::int64_t count, std::int64_t to) {
    Grow(host_logits_, (to + count) * logit_columns_, "logits");
    PLIANT_CUDA_CHECK(cudaMemcpyAsync(
        host_logits_.data() + to * logit_columns_, logits_.data() + first * logit_columns_,
        count * logit_columns_ * sizeof(float), cudaMemcpyDeviceToHost, stream_.get()));
  }

  /// Takes a token for each of `count` (padded) rows; rows that say on_host are copied instead.
  void Sample(std::int64_t count);

  void Multiply(const std::uint16_t* x, const DeviceMatrix& matrix, const float* bias,
                std::int64_t rows, float* out, bool accumulate) {
    if (matrix.type == WeightType::kF16) Grow(half_, rows * matrix.cols, "fp16 activations");
    gemm_->Run(x, half_.data(), matrix.data.data(), matrix.type, bias, rows, matrix.rows,
               matrix.cols, out, accumulate, stream_.get());
  }

  const std::uint16_t* AsBf16(const Tensor& tensor) {
    if (tensor.type == ElementType::kBf16) return tensor.Bf16();
    const std::int64_t count = inputs_.rows() * tensor.cols;
    Grow(scratch_, count, "bf16 activations");
    LaunchToBf16(tensor.data.data(), count, scratch_.data(), stream_.get());
    return scratch_.data();
  }

  // ---- histories: what a step needs of them, and does with them
  Status LayHistories(const StepBatch& batch, bool as_graph);
  void AttendHistories(int layer, int heads, float softmax_scale, const Tensor& q, Tensor& out);
  /// Before norm and RoPE.
  void NoteQueries(const QkvParams& params, const Tensor& qkv);
  void SendHistoryCounts();
  void CountHistories();
  HistoryMoveArgs MoveArgs(const RetainedHistory& history, const DeviceHistory& device,
                           std::span<const BlockView> kept);

  /// Plans decode attention of the step that is laid out.
  void PlanDecode(const DecodeShape& shape, std::optional<int> fixed_cut_rows);

  CopyTicket Copy(PageCopier::Direction direction, std::span<const PageCopy> copies) {
    PLIANT_CHECK(copier_ != nullptr, "pages are allocated before they are copied");
    if (!CheckCopies(copies, page_count_).ok()) return copier_->Refuse();
    std::vector<PageCopier::Piece> pieces;
    pieces.reserve(copies.size());
    for (const PageCopy& copy : copies)
      pieces.push_back({pages_.data() + copy.page.value() * geometry_.PageBytes(), copy.host});
    return copier_->Start(direction, std::move(pieces), idle_ ? nullptr : &stream_);
  }

  int device_ = 0;
  bool use_graphs_ = true;
  Stream stream_;
  std::unique_ptr<Gemm> gemm_;
  std::vector<DeviceMatrix> matrices_;
  std::vector<DeviceArray<float>> vectors_;
  std::vector<Tensor> tensors_;
  std::size_t weight_bytes_ = 0;

  KvGeometry geometry_;
  std::uint32_t page_count_ = 0;
  DeviceArray<std::uint8_t> pages_;
  DeviceArray<float> code_;  // KvCode: K's scales and centers, then V's, Channels() each
  KvStatistics statistics_;
  std::unique_ptr<PageCopier> copier_;

  StepInputs inputs_;
  RopeTables ropes_;
  DecodeLaunch launch_;
  int planned_heads_ = 0, last_heads_ = 0, launch_heads_ = 0;
  StepGraphs graphs_;
  StepGraphs::Mode mode_ = StepGraphs::Mode::kLaunch;
  bool in_graph_ = false;    // between Begin and End of graphs_
  bool idle_ = false;        // nothing was given since a step ended
  std::uint64_t moves_ = 0;  // of scratch
  std::uint64_t ops_ = 0;    // a hash of this step's ops so far
  // The step that is laid out: prepared ahead (its number, or 0), for a graph, with a plan that a
  // graph can take.
  std::uint64_t prepared_ = 0;
  bool laid_as_graph_ = false, plan_fits_ = false;
  bool started_ = false;   // StartStep has been
  bool attended_ = false;  // a layer of this step has had its decode attention
  struct Product {
    TensorId x;
    MatrixId weight;
    TensorId out;
  };
  Product waiting_;  // the op before, if it is a product that is not started yet
  // Of the step's slices with a history.
  struct StepHistory {
    RetainedHistory* history;
    std::int32_t tokens;  // after the step
  };
  std::vector<StepHistory> histories_;
  int launched_histories_ = 0;  // with those of a graph's padding
  bool decodes_histories_ = false, notes_queries_ = false;
  bool histories_by_row_ = false;  // history_rows_ has one of each row of the step
  // What scratch has room for a row; it never shrinks, so that graphs find it where it was.
  std::int32_t most_history_tokens_ = 0, most_dropped_tokens_ = 0;
  std::int32_t most_scored_rows_ = 0, most_scored_blocks_ = 0;  // of slices of several rows
  std::shared_ptr<HistoryMemory> history_memory_;
  DeviceArray<HistoryRow> history_rows_;
  DeviceArray<HistoryCounts> history_counts_;
  PinnedArray<HistoryCounts> host_history_counts_;
  DeviceArray<std::byte> history_scratch_;
  DeviceArray<float> history_logits_, dropped_masses_;
  DeviceArray<float2> history_softmax_;
  DeviceArray<float> partials_;
  DeviceArray<std::uint16_t> gathered_k_, gathered_v_;
  DeviceArray<std::uint8_t> present_;
  DeviceArray<std::uint16_t> scratch_, half_;
  DeviceArray<float> logits_;
  PinnedArray<float> host_logits_;
  std::int64_t logit_columns_ = 0, logit_count_ = 0, host_rows_ = 0;
  std::span<const RowSampling> batch_sampling_;  // the batch's, borrowed until EndStep
  std::int32_t sampled_columns_ = 0;
  DeviceArray<std::int32_t> tokens_;
  PinnedArray<std::int32_t> host_tokens_;
  PinnedArray<RowLogprobs> host_logprobs_;  // written by the kernel itself: few rows ask for them
};

}  // namespace pliant::cuda
