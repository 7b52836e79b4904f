// Histories with a capacity: what is done with them between steps, and what a step needs of them.
#include <bit>
#include <vector>

#include "backend/cuda/cuda_backend_impl.h"
#include "backend/cuda/history/history_tables.h"
#include "backend/cuda/history_changes/history_changes.h"
#include "backend/cuda/history_changes/history_queries.h"

namespace pliant::cuda {
namespace {

DeviceHistory& On(RetainedHistory& history) {
  PLIANT_CHECK(history.remote() != nullptr, "a history on a device starts with StartHistory");
  return static_cast<DeviceHistory&>(*history.remote());
}

/// Are the first `k` planes of K and `v` of V there?
bool Readable(const BlockPlaces& places, int k, int v) {
  return std::all_of(places.plane, places.plane + k, [](auto at) { return at != 0; }) &&
         std::all_of(places.plane + kPlanes, places.plane + kPlanes + v,
                     [](auto at) { return at != 0; });
}

}  // namespace

bool CudaBackend::RetainsHistory(int heads) const {
  return page_count_ != 0 && heads % geometry_.kv_heads == 0 &&
         heads / geometry_.kv_heads <= kMostHistoryGroup;
}

void CudaBackend::StartHistory(RetainedHistory& history) {
  if (history_memory_ == nullptr) history_memory_ = std::make_shared<HistoryMemory>(stream_);
  history.KeepRemotely(std::make_shared<DeviceHistory>(geometry_, history, history_memory_));
}

Status CudaBackend::NoteHistory(RetainedHistory& history, std::int32_t blocks) {
  const std::int32_t first = history.noted();
  if (first >= blocks) return {};
  DeviceHistory& device = On(history);
  PLIANT_RETURN_IF_ERROR(device.Reserve(history, blocks, history.kept_blocks()));
  std::vector<NotedKeys> keys(static_cast<std::size_t>(blocks - first));
  for (std::int32_t block = first; block < blocks; ++block) {
    const BlockPlaces places = device.Find(history.source(), block, pages_.data());
    if (!Readable(places, kNotedPlanes, 0)) return OriginalGone(block);
    std::copy_n(places.plane, kNotedPlanes, keys[block - first].plane);
  }
  const auto [inv_freq, pairs] = ropes_.Last();
  if (inv_freq == nullptr) return InvalidArgument("no step has rotated keys yet");
  if (first == 0) device.SetKeysSummed(blocks * kBlockTokens);
  Grow(history_scratch_, static_cast<std::int64_t>(std::span(keys).size_bytes()), "noted keys");
  PLIANT_CUDA_CHECK(cudaMemcpyAsync(history_scratch_.data(), keys.data(),
                                    std::span(keys).size_bytes(), cudaMemcpyHostToDevice,
                                    stream_.get()));
  HistoryNoteArgs args;
  args.tables = device.tables();
  args.units = history.units();
  args.head_dim = geometry_.head_dim;
  args.keys = reinterpret_cast<const NotedKeys*>(history_scratch_.data());
  args.first_block = first;
  args.blocks = blocks;
  args.frontier = history.frontier();
  args.kept_blocks = history.kept_blocks();
  args.key = Code(kKey, 0);
  args.inv_freq = inv_freq;
  args.pairs = pairs;
  LaunchHistoryNote(args, stream_.get());
  idle_ = false;  // the caller may give the pages away: copies wait, and steps come later
  while (history.noted() < blocks) history.EndNote();
  return {};
}

HistoryMoveArgs CudaBackend::MoveArgs(const RetainedHistory& history, const DeviceHistory& device,
                                      std::span<const BlockView> kept) {
  Grow(history_scratch_, static_cast<std::int64_t>(kept.size_bytes()), "kept blocks");
  PLIANT_CUDA_CHECK(cudaMemcpyAsync(history_scratch_.data(), kept.data(), kept.size_bytes(),
                                    cudaMemcpyHostToDevice, stream_.get()));
  HistoryMoveArgs args;
  args.tables = device.tables();
  args.units = history.units();
  args.head_dim = geometry_.head_dim;
  args.frontier = history.frontier();
  args.kept_blocks = history.kept_blocks();
  args.kept = reinterpret_cast<const std::uint32_t*>(history_scratch_.data());
  args.pages = pages_.data();
  args.page_bytes = geometry_.PageBytes();
  return args;
}

Status CudaBackend::DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) {
  PLIANT_RETURN_IF_ERROR(CheckKeptBlocks(history, kept, /*perhaps_more=*/true, page_count_));
  const bool more = kept.size() > static_cast<std::size_t>(history.kept_blocks());
  DeviceHistory& device = On(history);
  const std::int32_t block = history.frontier();
  PLIANT_RETURN_IF_ERROR(
      device.Reserve(history, block + 1, static_cast<std::int32_t>(kept.size())));
  const BlockPlaces places = device.Find(history.source(), block, pages_.data());
  if (!Readable(places, ResidentPlanes(kept[0].k), ResidentPlanes(kept[0].v)))
    return OriginalGone(block);
  device.SetPlaces(block, places);
  HistoryMoveArgs args = MoveArgs(history, device, kept);
  args.into_new = more;
  LaunchHistoryDrop(args, stream_.get());
  idle_ = false;  // as above
  if (more) {
    history.EndDropIntoNewBlock();
  } else {
    history.EndDrop();
  }
  device.SetDropped(history.frontier(), history.kept_blocks());
  return {};
}

Status CudaBackend::RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) {
  PLIANT_RETURN_IF_ERROR(CheckKeptBlocks(history, kept, /*perhaps_more=*/false, page_count_));
  if (kept.empty()) return {};
  if (!history.options().returns)
    return OriginalGone(0);  // nobody knows where its tokens' originals are
  DeviceHistory& device = On(history);
  for (std::int32_t block = 0; block < history.frontier(); ++block) {
    const BlockPlaces places = device.Find(history.source(), block, pages_.data());
    // Which blocks the kept tokens are of only the device knows; hardly one has none.
    if (!Readable(places, ResidentPlanes(kept[0].k), ResidentPlanes(kept[0].v)))
      return OriginalGone(block);
    device.SetPlaces(block, places);
  }
  LaunchHistoryRefill(MoveArgs(history, device, kept), stream_.get());
  idle_ = false;
  return {};
}

Status CudaBackend::LayHistories(const StepBatch& batch, bool as_graph) {
  histories_.clear();
  std::vector<HistoryRow> rows;
  histories_by_row_ = as_graph;
  most_scored_rows_ = most_scored_blocks_ = 0;
  decodes_histories_ = notes_queries_ = false;
  const auto raise = [this](std::int32_t& room, std::int32_t tokens) {
    if (tokens <= room) return;
    room = static_cast<std::int32_t>(std::bit_ceil(static_cast<std::uint32_t>(tokens)));
    ++moves_;
  };
  for (const SequenceSlice& slice : batch.sequences) {
    if (slice.history == nullptr) continue;
    RetainedHistory& history = *slice.history;
    DeviceHistory& device = On(history);
    const std::int32_t kept = history.kept_blocks(), frontier = history.frontier();
    PLIANT_RETURN_IF_ERROR(device.Reserve(history, slice.blocks, kept));
    if (history.options().returns) device.UpdatePlaces(history.source(), frontier, pages_.data());
    HistoryRow row;
    row.tables = device.tables();
    row.row = slice.first_row;
    row.rows = slice.rows;
    row.context = slice.context;
    row.first_block = slice.first_block;
    row.first_kept = slice.first_kept;
    row.kept_blocks = kept;
    row.frontier = frontier;
    row.index = static_cast<std::int32_t>(histories_.size());
    if (history.options().query_means) {
      row.queries_seen = device.TakeQueriesSeen();
      notes_queries_ = true;
    }
    if (as_graph) {  // one row each; those of other sequences and of padding have none
      rows.resize(static_cast<std::size_t>(inputs_.rows()));
      rows[static_cast<std::size_t>(slice.first_row)] = row;
    } else {
      rows.push_back(row);
    }
    histories_.push_back({&history, slice.context + slice.rows});
    if (slice.rows == 1) {
      decodes_histories_ = true;
      raise(most_history_tokens_, (kept + slice.blocks - frontier) * kBlockTokens);
      if (history.options().returns) raise(most_dropped_tokens_, frontier * kBlockTokens);
    } else {
      most_scored_rows_ = std::max(most_scored_rows_, slice.rows);
      most_scored_blocks_ = std::max(most_scored_blocks_, slice.blocks);
    }
  }
  if (rows.empty()) return {};
  launched_histories_ = static_cast<int>(rows.size());
  const auto count = static_cast<std::int64_t>(rows.size());
  Grow(history_rows_, count, "histories of a step");
  Grow(history_counts_, count, "counts of histories");
  Grow(host_history_counts_, count, "counts of histories");
  PLIANT_CUDA_CHECK(cudaMemcpyAsync(history_rows_.data(), rows.data(), std::span(rows).size_bytes(),
                                    cudaMemcpyHostToDevice, stream_.get()));
  PLIANT_CUDA_CHECK(
      cudaMemsetAsync(history_counts_.data(), 0, count * sizeof(HistoryCounts), stream_.get()));
  return {};
}

void CudaBackend::AttendHistories(int layer, int heads, float softmax_scale, const Tensor& q,
                                  Tensor& out) {
  if (histories_.empty()) return;
  const int count = launched_histories_;
  PLIANT_CHECK(heads / geometry_.kv_heads <= kMostHistoryGroup,
               "more query heads a KV head than histories can have");
  if (decodes_histories_) {
    Grow(history_logits_, std::int64_t{count} * heads * most_history_tokens_, "history logits");
    Grow(dropped_masses_, std::int64_t{count} * heads * (most_dropped_tokens_ / kReturnTokens),
         "masses of dropped pages");
    HistoryAttentionArgs args;
    args.histories = history_rows_.data();
    args.counts = history_counts_.data();
    args.count = count;
    args.heads = heads;
    args.kv_heads = geometry_.kv_heads;
    args.head_dim = geometry_.head_dim;
    args.layer = layer;
    args.pages = pages_.data();
    args.page_bytes = geometry_.PageBytes();
    args.blocks = inputs_.blocks();
    args.q = q.data.data();
    args.q_stride = q.cols;
    args.out = out.data.data();
    args.out_stride = out.cols;
    args.out_type = out.type;
    args.softmax_scale = softmax_scale;
    args.value = Code(kValue, layer);
    args.logits = history_logits_.data();
    args.masses = dropped_masses_.data();
    args.most_tokens = most_history_tokens_;
    args.most_dropped = most_dropped_tokens_;
    LaunchHistoryAttention(args, stream_.get());
  }
  if (most_scored_rows_ == 0) return;
  Grow(history_softmax_, inputs_.rows() * std::int64_t{heads}, "softmax of a prompt's rows");
  HistoryScoresArgs args;
  args.histories = history_rows_.data();
  args.count = count;
  args.heads = heads;
  args.kv_heads = geometry_.kv_heads;
  args.head_dim = geometry_.head_dim;
  args.layer = layer;
  args.pages = pages_.data();
  args.page_bytes = geometry_.PageBytes();
  args.layer_offset = UnitOffset(geometry_.kv_heads, geometry_.head_dim, layer, 0);
  args.blocks = inputs_.blocks();
  args.q = q.data.data();
  args.q_stride = q.cols;
  args.softmax_scale = softmax_scale;
  args.softmax = history_softmax_.data();
  args.most_rows = most_scored_rows_;
  args.most_blocks = most_scored_blocks_;
  LaunchHistoryScores(args, stream_.get());
}

void CudaBackend::NoteQueries(const QkvParams& params, const Tensor& qkv) {
  if (!notes_queries_ || histories_by_row_) return;  // else while they go to the cache
  HistoryQueriesArgs args;
  args.histories = history_rows_.data();
  args.count = launched_histories_;
  args.heads = params.heads;
  args.head_dim = geometry_.head_dim;
  args.layer = params.layer;
  args.q = qkv.data.data();
  args.q_stride = qkv.cols;
  LaunchHistoryQueries(args, stream_.get());
}

void CudaBackend::SendHistoryCounts() {
  if (histories_.empty()) return;
  const bool asked = std::any_of(histories_.begin(), histories_.end(), [](const auto& one) {
    return one.tokens % kQuerySignalTokens == 0 && one.history->options().query_means;
  });
  if (asked) {
    LaunchHistoryQuerySignal(history_rows_.data(), launched_histories_,
                             geometry_.layers * histories_[0].history->heads(), geometry_.head_dim,
                             history_counts_.data(), stream_.get());
  }
  PLIANT_CUDA_CHECK(cudaMemcpyAsync(host_history_counts_.data(), history_counts_.data(),
                                    histories_.size() * sizeof(HistoryCounts),
                                    cudaMemcpyDeviceToHost, stream_.get()));
}

void CudaBackend::CountHistories() {
  for (std::size_t i = 0; i < histories_.size(); ++i) {
    const HistoryCounts& counts = host_history_counts_[i];
    const auto& [history, tokens] = histories_[i];
    history->CountRemotely(counts.returned_pages, counts.returned_tokens, counts.lost_pages);
    if (history->options().query_means && tokens % kQuerySignalTokens == 0)
      history->SetRemoteQuerySignal(counts.query_signal);
  }
  histories_.clear();
}

}  // namespace pliant::cuda
