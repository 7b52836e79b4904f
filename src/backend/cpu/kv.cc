#include "backend/cpu/kv.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "backend/cpu/cpu_level.h"
#include "backend/cpu/kv_arena.h"
#include "backend/cpu/kv_attention.h"
#include "backend/cpu/kv_history.h"
#include "backend/cpu/kv_keys.h"
#include "backend/cpu/kv_plan.h"
#include "backend/cpu/kv_watch.h"
#include "backend/cpu/kv_write.h"
#include "backend/cpu/page_copier.h"
#include "backend/retained_rows.h"
#include "backend/step_check.h"
#include "base/check.h"

namespace pliant {
namespace {

constexpr std::size_t kLine = 64;

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<std::byte, FreeDeleter>;

AlignedBytes AllocateAligned(std::size_t bytes) {
  void* p = std::aligned_alloc(kLine, (bytes + kLine - 1) / kLine * kLine);
  if (p == nullptr) throw std::bad_alloc();
  return AlignedBytes(static_cast<std::byte*>(p));
}

class CpuKvImpl final : public CpuKv {
 public:
  CpuKvImpl(ThreadPool* pool, CpuLevel level)
      : pool_(pool),
        level_(level),
        write_(ChooseKvWriteKernel(level)),
        history_(ChooseHistoryKernel(level)),
        watch_(ChooseWatchKernel(level)),
        keys_(ChooseKeyKernel(level)),
        partial_(ChoosePartialKernel(level)) {}

  std::string_view Level() const override { return CpuLevelName(level_); }
  std::size_t PageBytes(const KvGeometry& geometry) const override {
    // An odd number of cache lines, so that the same place of neighbouring pages falls into
    // different cache sets.
    const std::size_t lines = (geometry.PageBytes() + kLine - 1) / kLine;
    return (lines | 1) * kLine;
  }
  Status AllocatePages(const KvGeometry& geometry, std::uint32_t pages) override;
  Status SetKvCode(const KvCode& code) override;
  void StartChannelStatistics() override {
    statistics_ = {std::vector<float>(Channels(), INFINITY),
                   std::vector<float>(Channels(), -INFINITY), std::vector<double>(Channels()),
                   std::vector<double>(Channels())};
  }
  ChannelStatistics TakeChannelStatistics() override { return std::exchange(statistics_, {}); }
  std::span<std::byte> Page(PageId page) override {
    PLIANT_CHECK(page.value() < pages_, "page id out of range");
    return arena_.bytes().subspan(page.value() * page_bytes_, page_bytes_);
  }

  Status BeginStep(const StepBatch& batch) override;
  void QkvToCache(const KvQkvParams& params, const RopeTable& rope, KvRows qkv) override;
  void Attention(int layer, int heads, float softmax_scale, KvRows query, KvRows out) override;
  bool RetainsHistory(int heads) const override {
    return attention_ != nullptr && heads / geometry_.kv_heads <= attention_->narrow_columns;
  }
  Status NoteHistory(RetainedHistory& history, std::int32_t blocks) override {
    return NoteRows(Memory(), history, {&code_.key, rope_inv_freq_}, blocks);
  }
  Status DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return DropRows(Memory(), history, kept);
  }
  Status RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) override {
    return RefillRows(Memory(), history, kept);
  }

  CopyTicket CopyOut(std::span<const PageCopy> copies) override {
    return Copy(PageCopier::Direction::kOut, copies);
  }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override {
    return Copy(PageCopier::Direction::kIn, copies);
  }
  CopyState Poll(CopyTicket ticket) override { return copier_.Poll(ticket); }
  CopyState Wait(CopyTicket ticket) override { return copier_.Wait(ticket); }

 private:
  std::size_t Channels() const { return geometry_.Units() * geometry_.head_dim; }
  std::size_t ChannelOffset(int layer, int head) const {
    return (static_cast<std::size_t>(layer) * geometry_.kv_heads + head) * geometry_.head_dim;
  }
  /// Nothing while every scale is 1 and every center 0.
  ChannelRow Channels(const ChannelCode& side, int layer, int head) const {
    if (side.scale.empty()) return {};
    const std::size_t first = ChannelOffset(layer, head);
    return {side.scale.data() + first, side.center.data() + first};
  }
  void PrepareRope(const RopeTable& rope);
  void NoteQueries(const KvQkvParams& params, KvRows qkv);
  void WriteRow(const KvQkvParams& params, const KvWriteShape& shape, std::int64_t row, float* x);
  void RecordKeyAndValue(int layer, int head, const float* key, const float* value);
  void RecordQuery(int layer, int head, const float* query);
  KvRowTarget Target(int layer, int head, int token, const std::array<PageId, kPlanes>& pages);
  void PrepareAttention(int heads);
  PageMemory Memory() { return {arena_.bytes().data(), page_bytes_, pages_, geometry_, &keys_}; }
  /// All splits of one unit of a sequence with a history are there: what it misses returns, and
  /// scores are added. Afterwards `total` holds the merged partial results.
  template <typename F>
  void MindHistory(const HistoryTable& table, int layer, int kv_head,
                   const UnitAttention& attention, int worker, F&& attend_again);
  /// A slice of several rows of a sequence with a history: its rows once more, each alone.
  void ScoreRows(const AttentionItem& item, int layer, AttentionHead head, QueryTile tile,
                 int worker);
  void RunItem(const AttentionItem& item, int layer, float softmax_scale, KvRows query, KvRows out,
               int worker);
  CopyTicket Copy(PageCopier::Direction direction, std::span<const PageCopy> copies);

  ThreadPool* pool_;
  CpuLevel level_;
  const KvWriteKernel& write_;
  const HistoryKernel& history_;
  const WatchKernel watch_;
  const KeyKernel& keys_;
  const PartialKernel& partial_;
  const AttentionKernel* attention_ = nullptr;

  KvGeometry geometry_;
  std::uint32_t pages_ = 0;
  std::size_t page_bytes_ = 0;
  KvArena arena_;
  KvCode code_;                   // empty: scale 1, center 0
  ChannelStatistics statistics_;  // empty while off

  StepBatch batch_;
  HistoryTables histories_;
  std::vector<std::vector<float>> history_scratch_;  // of each worker
  std::vector<std::vector<float>> score_scratch_;    // of each worker: ScoreRows
  std::vector<std::int32_t> row_sequence_;           // slice of each row of the step
  std::vector<float> rope_inv_freq_;                 // what cosine_ and sine_ were made from
  bool rope_ready_ = false;
  std::vector<float> cosine_, sine_;  // [rows][head_dim / 2]

  int plan_heads_ = 0;  // what plan_ was made for; 0: nothing yet in this step
  AttentionPlan plan_;
  std::vector<std::atomic<int>> splits_left_;  // of each join
  AlignedBytes partials_;
  std::size_t partials_capacity_ = 0;
  std::vector<AlignedBytes>
      scratch_;  // of each worker: the kernel's, then two tiles of partial results
  std::size_t kernel_scratch_ = 0;

  PageCopier copier_;  // last: its thread ends before the arena goes
};

Status CpuKvImpl::AllocatePages(const KvGeometry& geometry, std::uint32_t pages) {
  if (pages_ != 0) return InvalidArgument("KV pages: allocated once");
  constexpr int kLimit = 1 << 20;
  if (geometry.layers < 1 || geometry.kv_heads < 1 || geometry.head_dim < 32 ||
      geometry.layers > kLimit || geometry.kv_heads > kLimit || geometry.head_dim % 32 != 0 ||
      geometry.head_dim > kMaxKvHeadDim) {
    return InvalidArgument("KV geometry: " + std::to_string(geometry.layers) + " layers, " +
                           std::to_string(geometry.kv_heads) + " KV heads, head dim " +
                           std::to_string(geometry.head_dim) +
                           "; the head dim must be a multiple of 32 up to " +
                           std::to_string(kMaxKvHeadDim));
  }
  if (pages == 0) return InvalidArgument("KV pages: at least one");
  const std::size_t page_bytes = PageBytes(geometry);
  if (page_bytes > std::numeric_limits<std::ptrdiff_t>::max() / pages) {
    return OutOfMemory("KV pages: " + std::to_string(pages) + " of " + std::to_string(page_bytes) +
                       " bytes pass the address space");
  }
  const AttentionKernel& kernel = ChooseAttentionKernel(level_, geometry.head_dim);
  kernel_scratch_ = (kernel.scratch_bytes(geometry.head_dim) + kLine - 1) / kLine * kLine;
  try {
    scratch_.clear();
    for (int i = 0; i < pool_->threads(); ++i) {
      scratch_.push_back(AllocateAligned(kernel_scratch_ + 2 * sizeof(float) * kernel.max_columns *
                                                               PartialFloats(geometry.head_dim)));
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("attention scratch of " + std::to_string(kernel_scratch_) +
                       " bytes a thread");
  }
  PLIANT_RETURN_IF_ERROR(arena_.Reserve(page_bytes * pages));
  attention_ = &kernel;
  geometry_ = geometry;
  page_bytes_ = page_bytes;
  pages_ = pages;
  return {};
}

Status CpuKvImpl::SetKvCode(const KvCode& code) {
  PLIANT_RETURN_IF_ERROR(CheckKvCode(code, geometry_.layers == 0 ? 0 : Channels()));
  code_ = code;
  return {};
}

Status CpuKvImpl::BeginStep(const StepBatch& batch) {
  PLIANT_RETURN_IF_ERROR(CheckStepBatch(batch, pages_));
  batch_ = batch;
  row_sequence_.resize(batch.tokens.size());
  for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceSlice& slice = batch.sequences[s];
    std::fill_n(row_sequence_.begin() + slice.first_row, slice.rows, static_cast<std::int32_t>(s));
  }
  histories_.Start(batch_);
  history_scratch_.resize(static_cast<std::size_t>(pool_->threads()));
  score_scratch_.resize(static_cast<std::size_t>(pool_->threads()));
  rope_ready_ = false;
  plan_heads_ = 0;
  return {};
}

// ---- writing

void CpuKvImpl::PrepareRope(const RopeTable& rope) {
  if (rope_ready_ && rope_inv_freq_ == rope.inv_freq) return;
  const std::size_t half = static_cast<std::size_t>(geometry_.head_dim) / 2;
  PLIANT_CHECK(rope.inv_freq.size() <= half, "RoPE covers at most the head");
  const std::size_t rows = batch_.positions.size();
  cosine_.resize(rows * half);
  sine_.resize(rows * half);
  constexpr std::int64_t kRowsAtOnce = 32;
  const std::int64_t pieces = (static_cast<std::int64_t>(rows) + kRowsAtOnce - 1) / kRowsAtOnce;
  pool_->ForEach(pieces, [&](std::int64_t piece, int) {
    const std::size_t end = std::min<std::size_t>(rows, (piece + 1) * kRowsAtOnce);
    for (std::size_t r = piece * kRowsAtOnce; r < end; ++r) {
      for (std::size_t i = 0; i < half; ++i) {
        // Dims beyond the table are turned by nothing. Double: at position 100,000 an f32 angle is
        // off by 4e-3.
        const double angle =
            i < rope.inv_freq.size() ? double{rope.inv_freq[i]} * batch_.positions[r] : 0.0;
        cosine_[r * half + i] = static_cast<float>(std::cos(angle));
        sine_[r * half + i] = static_cast<float>(std::sin(angle));
      }
    }
  });
  rope_inv_freq_ = rope.inv_freq;
  rope_ready_ = true;
}

KvRowTarget CpuKvImpl::Target(int layer, int head, int token,
                              const std::array<PageId, kPlanes>& pages) {
  KvRowTarget target;
  target.planes = ResidentPlanes(pages);
  std::byte* base = arena_.bytes().data();
  const std::size_t row = geometry_.RowOffset(layer, head, token);
  for (int p = 0; p < target.planes; ++p) {
    target.rows[p] = reinterpret_cast<std::uint8_t*>(base + pages[p].value() * page_bytes_ + row);
  }
  target.scale = reinterpret_cast<std::uint16_t*>(base + pages[0].value() * page_bytes_ +
                                                  geometry_.ScaleOffset(layer, head, token));
  return target;
}

void CpuKvImpl::RecordKeyAndValue(int layer, int head, const float* key, const float* value) {
  float* least = statistics_.key_min.data() + ChannelOffset(layer, head);
  float* most = statistics_.key_max.data() + ChannelOffset(layer, head);
  double* energy = statistics_.value_energy.data() + ChannelOffset(layer, head);
  for (int c = 0; c < geometry_.head_dim; ++c) {
    least[c] = std::min(least[c], key[c]);
    most[c] = std::max(most[c], key[c]);
    energy[c] += double{value[c]} * value[c];
  }
}

void CpuKvImpl::RecordQuery(int layer, int head, const float* query) {
  double* energy = statistics_.query_energy.data() + ChannelOffset(layer, head);
  for (int c = 0; c < geometry_.head_dim; ++c) energy[c] += double{query[c]} * query[c];
}

void CpuKvImpl::WriteRow(const KvQkvParams& params, const KvWriteShape& shape, std::int64_t row,
                         float* x) {
  const int dim = geometry_.head_dim;
  const int kv_heads = geometry_.kv_heads;
  const int group = params.heads / kv_heads;
  const SequenceSlice& slice = batch_.sequences[row_sequence_[row]];
  const int position = slice.context + static_cast<int>(row - slice.first_row);
  const BlockView& block = batch_.blocks[slice.first_block + position / kBlockTokens];
  const int token = position % kBlockTokens;
  const float* cosine = cosine_.data() + row * (dim / 2);
  const float* sine = sine_.data() + row * (dim / 2);
  const bool recording = !statistics_.key_min.empty();
  for (int head = 0; head < params.heads; ++head) {
    float* q = x + std::int64_t{head} * dim;
    write_.query(shape, cosine, sine, q);
    if (recording) RecordQuery(params.layer, head / group, q);
    write_.code_query(dim, Channels(code_.key, params.layer, head / group).scale, q);
  }
  for (int head = 0; head < kv_heads; ++head) {
    float* k = x + std::int64_t{params.heads + head} * dim;
    const float* v = x + std::int64_t{params.heads + kv_heads + head} * dim;
    write_.key(shape, cosine, sine, k);
    if (recording) RecordKeyAndValue(params.layer, head, k, v);
    write_.store_key(dim, Channels(code_.key, params.layer, head), k,
                     Target(params.layer, head, token, block.k));
    write_.store_value(dim, Channels(code_.value, params.layer, head), v,
                       Target(params.layer, head, token, block.v));
  }
}

/// Running means of queries before norm and RoPE, row after row: the queries of a prompt count too.
void CpuKvImpl::NoteQueries(const KvQkvParams& params, KvRows qkv) {
  for (const SequenceSlice& slice : batch_.sequences) {
    if (slice.history == nullptr || !slice.history->options().query_means) continue;
    const auto note = [&](std::int64_t head, int) {
      for (int r = 0; r < slice.rows; ++r) {
        slice.history->NoteQuery(params.layer, static_cast<int>(head),
                                 qkv.Row(slice.first_row + r) + head * geometry_.head_dim);
      }
    };
    if (slice.rows > 1) {
      pool_->ForEach(params.heads, note);
    } else {
      for (int head = 0; head < params.heads; ++head) note(head, 0);
    }
  }
}

void CpuKvImpl::QkvToCache(const KvQkvParams& params, const RopeTable& rope, KvRows qkv) {
  PLIANT_CHECK(params.layer >= 0 && params.layer < geometry_.layers, "layer out of range");
  PLIANT_CHECK(params.heads >= 1 && params.heads % geometry_.kv_heads == 0,
               "heads are a multiple of KV heads");
  PrepareRope(rope);
  NoteQueries(params, qkv);
  const KvWriteShape shape = {geometry_.head_dim, params.q_norm, params.k_norm, params.norm_eps};
  const auto rows = static_cast<std::int64_t>(batch_.tokens.size());
  const std::int64_t columns =
      std::int64_t{params.heads + 2 * geometry_.kv_heads} * geometry_.head_dim;
  // Below some microseconds of work waking the others costs more than it brings. Recording
  // statistics is rare, shares one array and keeps its order.
  constexpr std::int64_t kWorthSharing = 4096;
  if (!statistics_.key_min.empty() || rows * columns < kWorthSharing) {
    for (std::int64_t r = 0; r < rows; ++r) WriteRow(params, shape, r, qkv.Row(r));
    return;
  }
  const std::int64_t rows_at_once = std::clamp<std::int64_t>(rows / (8 * pool_->threads()), 1, 32);
  pool_->ForEach((rows + rows_at_once - 1) / rows_at_once, [&](std::int64_t piece, int) {
    const std::int64_t end = std::min(rows, (piece + 1) * rows_at_once);
    for (std::int64_t r = piece * rows_at_once; r < end; ++r)
      WriteRow(params, shape, r, qkv.Row(r));
  });
}

// ---- reading

void CpuKvImpl::PrepareAttention(int heads) {
  if (plan_heads_ == heads) return;
  plan_ = PlanAttention(batch_, histories_, geometry_, heads, *attention_, pool_->threads());
  if (plan_.partial_floats > partials_capacity_) {
    partials_capacity_ = plan_.partial_floats + plan_.partial_floats / 2;
    partials_ = AllocateAligned(partials_capacity_ * sizeof(float));
  }
  if (splits_left_.size() < plan_.joins.size()) {
    splits_left_ = std::vector<std::atomic<int>>(plan_.joins.size() * 2);
  }
  for (std::size_t j = 0; j < plan_.joins.size(); ++j) {
    splits_left_[j].store(plan_.joins[j].items, std::memory_order_relaxed);
  }
  plan_heads_ = heads;
}

template <typename F>
void CpuKvImpl::MindHistory(const HistoryTable& table, int layer, int kv_head,
                            const UnitAttention& attention, int worker, F&& attend_again) {
  RetainedHistory& history = *table.history;
  const int unit = history.UnitOf(layer, kv_head);
  std::vector<float>& scratch = history_scratch_[worker];
  for (int returned = 0; table.dropped > 0 && returned < history.options().most_returns;) {
    if (!history_.page_masses(table, unit, attention, scratch)) break;
    const std::int32_t page = history.Wanted(unit, scratch);
    if (page < 0) break;
    history.AskFor(unit, page);
    if (!ReturnRows(Memory(), history, layer, kv_head, page, table.kept)) continue;
    attend_again();
    ++returned;
  }
  history_.add_scores(table.tokens, attention, history.Scores(unit));
}

void CpuKvImpl::ScoreRows(const AttentionItem& item, int layer, AttentionHead head, QueryTile tile,
                          int worker) {
  const SequenceSlice& slice = batch_.sequences[item.sequence];
  const int dim = geometry_.head_dim;
  const float* first_query = tile.query;
  tile.rows = 1;
  const std::size_t partial = tile.Columns() * PartialFloats(dim);
  const std::size_t weights = static_cast<std::size_t>(tile.Columns()) * kSplitTokens;
  const std::size_t bases = static_cast<std::size_t>(tile.Columns()) * kSplitBlocks;
  const std::size_t most = SplitsOf(slice.context + slice.rows);
  std::vector<float>& room = score_scratch_[worker];
  room.resize(std::max(room.size(), most * (partial + weights + bases)));
  float* partials = room.data();
  const UnitAttention unit = {.columns = tile.Columns(),
                              .head_dim = dim,
                              .kernel = attention_,
                              .weights = partials + most * partial,
                              .bases = partials + most * (partial + weights),
                              .total = partials,
                              .squared = slice.history->options().squared};
  for (int row = 0; row < item.rows; ++row) {
    const int position = slice.context + row;
    tile.query = first_query + row * tile.query_stride;
    tile.first_position = position;
    for (int split = 0; split < SplitsOf(position + 1); ++split) {
      tile.weights = partials + most * partial + split * weights;
      tile.bases = partials + most * (partial + weights) + split * bases;
      const int first = split * kSplitTokens;
      attention_->attend(head, tile, first, std::min(first + kSplitTokens, position + 1),
                         partials + split * partial, scratch_[worker].get());
      if (split > 0) partial_.merge(dim, tile.Columns(), partials + split * partial, partials);
    }
    history_.add_scores(position + 1, unit,
                        slice.history->Scores(slice.history->UnitOf(layer, item.kv_head)));
  }
}

void CpuKvImpl::RunItem(const AttentionItem& item, int layer, float softmax_scale, KvRows query,
                        KvRows out, int worker) {
  const SequenceSlice& slice = batch_.sequences[item.sequence];
  const int dim = geometry_.head_dim;
  AttentionHead head;
  head.pages = arena_.bytes().data();
  head.page_bytes = page_bytes_;
  head.rows_offset = geometry_.RowOffset(layer, item.kv_head, 0);
  head.scales_offset = geometry_.ScaleOffset(layer, item.kv_head, 0);
  head.head_dim = dim;
  const HistoryTable* table = histories_.TableOf(item.sequence);
  head.blocks = table == nullptr ? batch_.blocks.data() + slice.first_block
                                 : histories_.Views(table->first_taking_part);

  const int plan_group = plan_heads_ / geometry_.kv_heads;
  const std::int64_t column = (std::int64_t{item.kv_head} * plan_group + item.first_head) * dim;
  QueryTile tile;
  tile.query = query.Row(slice.first_row + item.first_row) + column;
  tile.query_stride = query.stride;
  tile.out = out.Row(slice.first_row + item.first_row) + column;
  tile.out_stride = out.stride;
  tile.rows = item.rows;
  tile.group = item.group;
  tile.first_position = table != nullptr ? table->tokens - 1 : slice.context + item.first_row;
  tile.softmax_scale = softmax_scale;
  tile.value_code = Channels(code_.value, layer, item.kv_head);

  if (item.scores) return ScoreRows(item, layer, head, tile, worker);
  std::byte* scratch = scratch_[worker].get();
  const int tokens = tile.LastPosition() + 1;
  const auto attend = [&](int split, float* to) {
    const int first = split * kSplitTokens;
    attention_->attend(head, tile, first, std::min(first + kSplitTokens, tokens), to, scratch);
  };
  if (item.split < 0) {
    float* total = reinterpret_cast<float*>(scratch + kernel_scratch_);
    float* part = total + attention_->max_columns * PartialFloats(dim);
    attend(0, total);
    for (int split = 1; split < SplitsOf(tokens); ++split) {
      attend(split, part);
      partial_.merge(dim, tile.Columns(), part, total);
    }
    partial_.finish(dim, tile, total);
    return;
  }
  const AttentionJoin& join = plan_.joins[item.join];
  const std::size_t room = item.whole ? plan_.first_room + worker * plan_.room_floats : 0;
  float* const all = reinterpret_cast<float*>(partials_.get()) + room;
  float* const partials = all + join.partials;
  const std::size_t stride = tile.Columns() * PartialFloats(dim);
  const auto watch_split = [&](int split) {
    head.blocks = histories_.Views(table->first_dropped);
    if (split == 0) {
      // The unit's scores have not been touched since the step before.
      tile.soon = table->history->Scores(table->history->UnitOf(layer, item.kv_head)).data();
      tile.soon_count = table->tokens;
    } else {
      tile.soon_count = 0;
    }
    const int first = split * kSplitTokens;
    watch_(head, tile, first, std::min(first + kSplitTokens, table->watched()),
           all + join.watched + std::ptrdiff_t{split} * tile.Columns() * kSplitTokens);
  };
  const auto attend_split = [&](int split) {
    if (table != nullptr) {
      head.blocks = histories_.Views(table->first_taking_part);
      tile.weights = all + join.weights + std::ptrdiff_t{split} * tile.Columns() * kSplitTokens;
      tile.bases = all + join.bases + std::ptrdiff_t{split} * tile.Columns() * kSplitBlocks;
      if (table->watched() == 0) {  // else watching asks for them
        const std::span<const float> scores =
            table->history->Scores(table->history->UnitOf(layer, item.kv_head));
        const int end = std::min((split + 1) * kSplitTokens, table->tokens);
        for (int at = split * kSplitTokens; at < end; at += 64 / static_cast<int>(sizeof(float)))
          __builtin_prefetch(&scores[at], 1);
      }
    }
    attend(split, partials + split * stride);
  };
  if (item.whole) {
    for (int split = 0; split < join.items - join.splits; ++split) watch_split(split);
    for (int split = 0; split < join.splits; ++split) attend_split(split);
  } else {
    item.watches ? watch_split(item.split) : attend_split(item.split);
    // Whoever ends last sees what the others wrote, and merges in the order of the context.
    if (splits_left_[item.join].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    splits_left_[item.join].store(join.items, std::memory_order_relaxed);  // for the next layer
  }
  const auto merge = [&] {
    for (int split = 1; split < join.splits; ++split) {
      partial_.merge(dim, tile.Columns(), partials + split * stride, partials);
    }
  };
  merge();
  if (table != nullptr) {
    const UnitAttention unit = {.columns = tile.Columns(),
                                .head_dim = dim,
                                .kernel = attention_,
                                .weights = all + join.weights,
                                .bases = all + join.bases,
                                .watched = all + join.watched,
                                .total = partials,
                                .squared = table->history->options().squared};
    MindHistory(*table, layer, item.kv_head, unit, worker, [&] {
      for (int split = 0; split < join.splits; ++split) attend_split(split);
      merge();
    });
  }
  partial_.finish(dim, tile, partials);
}

void CpuKvImpl::Attention(int layer, int heads, float softmax_scale, KvRows query, KvRows out) {
  PLIANT_CHECK(layer >= 0 && layer < geometry_.layers, "layer out of range");
  PrepareAttention(heads);
  pool_->ForEach(static_cast<std::int64_t>(plan_.items.size()), [&](std::int64_t i, int worker) {
    // What the next item reads first of its unit, so that it need not wait for it.
    if (const std::size_t next = static_cast<std::size_t>(i) + 1; next < plan_.items.size()) {
      const AttentionItem& item = plan_.items[next];
      if (const HistoryTable* table = histories_.TableOf(item.sequence); table != nullptr)
        table->history->AskFor(table->history->UnitOf(layer, item.kv_head));
    }
    RunItem(plan_.items[i], layer, softmax_scale, query, out, worker);
  });
}

// ---- copies

CopyTicket CpuKvImpl::Copy(PageCopier::Direction direction, std::span<const PageCopy> copies) {
  if (!CheckCopies(copies, pages_).ok()) return copier_.Refuse();
  std::vector<PageCopier::Piece> pieces;
  pieces.reserve(copies.size());
  for (const PageCopy& copy : copies) pieces.push_back({Page(copy.page).data(), copy.host});
  return copier_.Start(direction, std::move(pieces), page_bytes_);
}

}  // namespace

Result<std::unique_ptr<CpuKv>> CpuKv::Make(ThreadPool* pool, std::string_view level) {
  PLIANT_ASSIGN_OR_RETURN(const CpuLevel chosen, ChooseCpuLevel(level));
  return std::unique_ptr<CpuKv>(std::make_unique<CpuKvImpl>(pool, chosen));
}

}  // namespace pliant
