// The long ops of a step.
#include "backend/cuda/cuda_backend_impl.h"

namespace pliant::cuda {
namespace {

/// Rows cut by attention's ranges that a graph's merge is launched for; a step with more is no
/// graph.
constexpr std::int64_t kMostCutRows = 160;
/// Gathered fp16 K and V of one prefill group stay below this, unless a single sequence needs more.
constexpr std::size_t kGatherBytes = 256u << 20;

}  // namespace

Status CudaBackend::BeginStep(const StepBatch& batch) {
  const bool as_graph = MayBeGraph(batch) && TakesAllTokens(batch);
  const std::uint64_t prepared = std::exchange(prepared_, 0);
  if (batch.step == 0 || prepared != batch.step || laid_as_graph_ != as_graph) {
    PLIANT_RETURN_IF_ERROR(CheckPlaces(batch, page_count_));
    PLIANT_RETURN_IF_ERROR(Lay(batch, as_graph));
  }
  PLIANT_RETURN_IF_ERROR(CheckSampling(batch));
  PLIANT_RETURN_IF_ERROR(LayHistories(batch, as_graph));
  idle_ = started_ = false;
  logit_count_ = static_cast<std::int64_t>(batch.logit_rows.size());
  batch_sampling_ = batch.sampling;
  sampled_columns_ = batch.sampled_columns;
  PLIANT_RETURN_IF_ERROR(GrowGathered(static_cast<std::size_t>(inputs_.gathered_blocks())));
  PLIANT_RETURN_IF_ERROR(inputs_.Send(batch, stream_));
  if (planned_heads_ != 0) inputs_.SendPlan(stream_);
  logit_columns_ = 0;
  attended_ = false;
  ropes_.NewStep();
  mode_ = StepGraphs::Mode::kLaunch;
  ops_ = 0;
  in_graph_ = as_graph && plan_fits_;
  // Of steps with histories, those with other sequences beside them launch ordinary attention too,
  // and some take note of queries.
  const int kind =
      histories_.empty() ? 0 : (inputs_.has_decode() ? 2 : 1) + (notes_queries_ ? 2 : 0);
  if (in_graph_) mode_ = graphs_.Begin(inputs_.rows(), kind, Moves(), stream_);
  return {};
}

Status CudaBackend::Lay(const StepBatch& batch, bool as_graph) {
  const std::int64_t rows = StepRows(batch);
  const std::int64_t logits =
      as_graph ? rows : PaddedRows(static_cast<std::int64_t>(batch.logit_rows.size()));
  const std::size_t block_bytes = GatheredBlockElements() * sizeof(std::uint16_t) * 2;
  planned_heads_ = 0;
  laid_as_graph_ = as_graph;
  PLIANT_RETURN_IF_ERROR(inputs_.Lay(batch, static_cast<int>(rows), static_cast<int>(logits),
                                     std::max<std::size_t>(1, kGatherBytes / block_bytes),
                                     PrefillTileRows(geometry_.head_dim)));
  plan_fits_ = !inputs_.has_decode();
  if (last_heads_ == 0 || !inputs_.has_decode()) return {};
  // A graph's plan is data: it is sent before the graph, not in it.
  const std::int64_t cut_rows = std::min<std::int64_t>(rows, kMostCutRows);
  PlanDecode({geometry_.kv_heads, last_heads_ / geometry_.kv_heads, geometry_.head_dim},
             as_graph ? std::optional<int>(static_cast<int>(cut_rows)) : std::nullopt);
  return {};
}

void CudaBackend::PlanDecode(const DecodeShape& shape, std::optional<int> fixed_cut_rows) {
  const int heads = shape.group * shape.kv_heads;
  if (launch_heads_ != heads) {
    auto launch = DecodeLaunchFor(shape);
    PLIANT_CHECK(launch.ok(), launch.status().message());
    launch_ = *launch;
    launch_heads_ = heads;
  }
  const Result<bool> fits = inputs_.PlanAttention(launch_, fixed_cut_rows);
  PLIANT_CHECK(fits.ok(), fits.status().message());
  plan_fits_ = *fits;
  Grow(partials_, static_cast<std::int64_t>(DecodePartialFloats(shape, inputs_.planned_segments())),
       "attention partials");
  planned_heads_ = last_heads_ = heads;
}

void CudaBackend::QkvToCache(const QkvParams& params, const RopeTable& rope, TensorId qkv) {
  if (Replayed({4, static_cast<unsigned>(params.layer), qkv.value()})) return;
  Tensor& data = tensors_.at(qkv.value());
  PLIANT_CHECK(params.heads % geometry_.kv_heads == 0 &&
                   data.cols == static_cast<std::int64_t>(params.heads + 2 * geometry_.kv_heads) *
                                    geometry_.head_dim,
               "a QKV product does not fit the cache's heads");
  PLIANT_CHECK(rope.inv_freq.size() * 2 <= static_cast<std::size_t>(geometry_.head_dim),
               "RoPE over more dims than a head has");
  AppendArgs args;
  args.rows = inputs_.rows();
  args.heads = params.heads;
  args.kv_heads = geometry_.kv_heads;
  args.head_dim = geometry_.head_dim;
  args.qkv = data.F32();
  args.q_norm = OptionalVector(params.q_norm);
  args.k_norm = OptionalVector(params.k_norm);
  args.norm_eps = params.norm_eps;
  args.angles = ropes_.For(rope, inputs_.positions(), inputs_.rows(), stream_);
  args.pairs = static_cast<int>(rope.inv_freq.size());
  args.key = Code(kKey, params.layer);
  args.value = Code(kValue, params.layer);
  statistics_.Set(args, FirstChannel(params.layer));
  args.pages = pages_.data();
  args.page_bytes = geometry_.PageBytes();
  args.layer_offset = UnitOffset(geometry_.kv_heads, geometry_.head_dim, params.layer, 0);
  args.blocks = inputs_.blocks();
  args.slots = inputs_.slots();
  if (notes_queries_ && histories_by_row_) args.histories = history_rows_.data();
  args.layer = params.layer;
  NoteQueries(params, data);
  LaunchAppend(args, stream_.get());
}

void CudaBackend::Attention(int layer, int heads, float softmax_scale, TensorId qkv, TensorId out) {
  if (Replayed({5, static_cast<unsigned>(layer), qkv.value(), out.value()})) return;
  Tensor& q = tensors_.at(qkv.value());
  const float* q_data = q.F32();
  Tensor& to =
      Writable(out, static_cast<std::int64_t>(heads) * geometry_.head_dim, ElementType::kBf16);
  const std::size_t layer_offset = UnitOffset(geometry_.kv_heads, geometry_.head_dim, layer, 0);
  if (inputs_.has_decode()) {
    const DecodeShape shape{geometry_.kv_heads, heads / geometry_.kv_heads, geometry_.head_dim};
    if (planned_heads_ != heads) {
      PLIANT_CHECK(!attended_ && !in_graph_,
                   "all layers of a step have the same number of query heads");
      PlanDecode(shape, std::nullopt);
      inputs_.SendPlan(stream_);
    }
    attended_ = true;
    DecodeArgs args;
    args.pages = pages_.data();
    args.page_bytes = geometry_.PageBytes();
    args.layer_offset = layer_offset;
    args.blocks = inputs_.blocks();
    args.q = q_data;
    args.q_stride = q.cols;
    args.out = to.data.data();
    args.out_stride = to.cols;
    args.out_type = to.type;
    args.softmax_scale = softmax_scale;
    args.value = Code(kValue, layer);
    args.partials = partials_.data();
    inputs_.SetPlan(args);
    LaunchDecodeAttention(shape, launch_, args, stream_.get());
  }
  AttendHistories(layer, heads, softmax_scale, q, to);
  for (const PrefillGroup& group : inputs_.prefill()) {
    GatherArgs gather;
    gather.kv_heads = geometry_.kv_heads;
    gather.head_dim = geometry_.head_dim;
    gather.pages = pages_.data();
    gather.page_bytes = geometry_.PageBytes();
    gather.layer_offset = layer_offset;
    gather.blocks = inputs_.blocks();
    gather.sources = inputs_.sources() + group.first_source;
    gather.count = group.sources;
    gather.k = gathered_k_.data();
    gather.v = gathered_v_.data();
    gather.present = present_.data();
    LaunchGather(gather, stream_.get());
    PrefillArgs prefill;
    prefill.heads = heads;
    prefill.kv_heads = geometry_.kv_heads;
    prefill.head_dim = geometry_.head_dim;
    prefill.tiles = inputs_.tiles() + group.first_tile;
    prefill.tile_count = group.tiles;
    prefill.q = q_data;
    prefill.q_stride = q.cols;
    prefill.k = gathered_k_.data();
    prefill.v = gathered_v_.data();
    prefill.present = present_.data();
    prefill.gathered_blocks = group.sources;
    prefill.out = to.data.data();
    prefill.out_stride = to.cols;
    prefill.out_type = to.type;
    prefill.softmax_scale = softmax_scale;
    prefill.value = Code(kValue, layer);
    LaunchPrefillAttention(prefill, stream_.get());
  }
}

void CudaBackend::Logits(TensorId x, VectorId norm, float eps, MatrixId weight) {
  const DeviceMatrix& matrix = matrices_.at(weight.value());
  Tensor& from = tensors_.at(x.value());
  PLIANT_CHECK(from.cols == matrix.cols, "x and the output matrix disagree");
  host_rows_ = 0;
  logit_columns_ = matrix.rows;
  if (Replayed({7, x.value(), norm.value(), weight.value()}) || logit_count_ == 0) return;
  const std::int64_t count = inputs_.logit_count();
  Grow(scratch_, count * from.cols, "logit rows");
  Grow(logits_, count * matrix.rows, "logits");
  LaunchRmsNorm(from.F32(), inputs_.logit_rows(), vectors_.at(norm.value()).data(), eps,
                static_cast<int>(count), static_cast<int>(from.cols), scratch_.data(),
                ElementType::kBf16, stream_.get());
  Multiply(scratch_.data(), matrix, nullptr, count, logits_.data(), false);
  if (batch_sampling_.empty()) {
    LogitsToHost(0, logit_count_, 0);
    host_rows_ = logit_count_;
  } else {
    Sample(count);
  }
}

void CudaBackend::Sample(std::int64_t count) {
  Grow(tokens_, count, "sampled tokens");
  Grow(host_tokens_, count, "sampled tokens");
  Grow(host_logprobs_, count, "logprobs");
  const auto columns = std::min<std::int64_t>(sampled_columns_, logit_columns_);
  LaunchSample(logits_.data(), logit_columns_, static_cast<int>(columns), static_cast<int>(count),
               inputs_.sampling(), inputs_.changes(), tokens_.data(), host_logprobs_.data(),
               stream_.get());
  PLIANT_CUDA_CHECK(cudaMemcpyAsync(host_tokens_.data(), tokens_.data(),
                                    static_cast<std::size_t>(count) * sizeof(std::int32_t),
                                    cudaMemcpyDeviceToHost, stream_.get()));
  const auto on_host = std::count_if(batch_sampling_.begin(), batch_sampling_.end(),
                                     [](const RowSampling& row) { return row.on_host != 0; });
  Grow(host_logits_, on_host * logit_columns_, "logits");
  for (std::size_t i = 0; i < batch_sampling_.size(); ++i) {
    if (batch_sampling_[i].on_host != 0)
      LogitsToHost(static_cast<std::int64_t>(i), 1, host_rows_++);
  }
}

void CudaBackend::StartWaiting(ElementType type) {
  if (!waiting_.out.valid()) return;
  const DeviceMatrix& matrix = matrices_.at(waiting_.weight.value());
  const std::uint16_t* const x = AsBf16(tensors_.at(waiting_.x.value()));
  Tensor& to = tensors_.at(waiting_.out.value());
  to.type = type;
  if (type == ElementType::kBf16)
    gemm_->RunToBf16(x, matrix.data.data(), inputs_.rows(), matrix.rows, matrix.cols, to.Bf16(),
                     stream_.get());
  else
    Multiply(x, matrix, nullptr, inputs_.rows(), to.data.data(), false);
  waiting_ = {};
}

Status CudaBackend::GrowGathered(std::size_t blocks) {
  if (blocks <= present_.size()) return {};
  blocks = std::max(blocks, present_.size() + present_.size() / 2);
  present_ = {};
  PLIANT_ASSIGN_OR_RETURN(gathered_k_, DeviceArray<std::uint16_t>::Make(
                                           blocks * GatheredBlockElements(), "gathered K"));
  PLIANT_ASSIGN_OR_RETURN(gathered_v_, DeviceArray<std::uint16_t>::Make(
                                           blocks * GatheredBlockElements(), "gathered V"));
  PLIANT_ASSIGN_OR_RETURN(present_, DeviceArray<std::uint8_t>::Make(blocks, "gathered blocks"));
  return {};
}

}  // namespace pliant::cuda
