// Attention over histories with a capacity: what a layer of one step costs, and what of it watching
// and scoring do; and what scoring adds to a prompt's attention. Bytes are what must be read; no
// page returns (all logits are alike). The share of the ceiling is of a plain read in the same run.
#include <cstdio>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/history_attention/history_attention.h"
#include "backend/cuda/history_scores/history_scores.h"
#include "backend/cuda/page_layout.h"
#include "bench_util.cuh"

namespace pliant::cuda::bench {
namespace {

struct Shape {
  const char* name;
  int sequences, kv_heads, group, dim;
  int kept, planes_k, planes_v, whole, dropped;  // blocks of a sequence
};

template <typename T>
DeviceArray<T> Filled(std::size_t count, int byte) {
  auto array = *DeviceArray<T>::Make(count, "bench");
  PLIANT_CUDA_CHECK(cudaMemset(array.data(), byte, array.bytes()));
  return array;
}

/// One layer's cache, tables and queries.
class World {
 public:
  explicit World(const Shape& shape)
      : s_(shape),
        geometry_{1, shape.kv_heads, shape.dim},
        blocks_(shape.kept + shape.whole + shape.dropped),
        pages_(Filled<std::uint8_t>(
            std::size_t{8} * shape.sequences * blocks_ * geometry_.PageBytes(), 0x3c)),
        q_(Filled<float>(std::size_t(shape.sequences) * Heads() * shape.dim, 0)),
        out_(Filled<float>(q_.size(), 0)),
        scores_(Filled<float>(std::size_t(shape.sequences) * Tables() * 4, 0)),
        kept_(Filled<std::uint32_t>(std::size_t(shape.sequences) * Tables() / 32, 0)),
        lost_(Filled<std::uint8_t>(std::size_t(shape.sequences) * Tables() / 16, 0)),
        tokens_(Filled<std::int32_t>(std::size_t(shape.sequences) * Tables(), 0)),
        counts_(Filled<HistoryCounts>(shape.sequences, 0)) {
    std::vector<BlockView> views;
    std::uint32_t page = 0;
    for (int i = 0; i < s_.sequences; ++i) {
      for (int b = 0; b < blocks_; ++b) {
        BlockView view;
        const bool kept = b < s_.kept, dropped = !kept && b < s_.kept + s_.dropped;
        for (int p = 0; p < (kept ? s_.planes_k : dropped ? 1 : kPlanes); ++p)
          view.k[p] = PageId(page++);
        for (int p = 0; p < (kept ? s_.planes_v : dropped ? 0 : kPlanes); ++p)
          view.v[p] = PageId(page++);
        views.push_back(view);
      }
    }
    views_ = *DeviceArray<BlockView>::Make(views.size(), "bench");
    Upload<BlockView>(views, views_.data());
    rows_ = *DeviceArray<HistoryRow>::Make(s_.sequences, "bench");
  }

  int Heads() const { return s_.kv_heads * s_.group; }
  double Bytes(bool watches) const {
    const double unit = UnitStride(s_.dim);
    return unit * s_.kv_heads * s_.sequences *
           (s_.kept * (s_.planes_k + s_.planes_v) + 2 * kPlanes * s_.whole +
            (watches ? s_.dropped : 0));
  }

  HistoryAttentionArgs Args(bool watches, bool scores) {
    std::vector<HistoryRow> rows;
    const auto room = static_cast<std::int32_t>(Tables() / s_.kv_heads);
    for (int i = 0; i < s_.sequences; ++i) {
      HistoryRow row;
      HistoryTables& t = row.tables;
      float* const own = scores_.data() + std::size_t(i) * Tables() * 4;
      t.token_score = scores ? own : nullptr;
      t.token_weight = own + Tables();
      t.slot_score = own + 2 * Tables();
      t.slot_weight = own + 3 * Tables();
      t.kept = kept_.data() + std::size_t(i) * Tables() / 32;
      t.lost = lost_.data() + std::size_t(i) * Tables() / 16;
      t.slot_token = tokens_.data() + std::size_t(i) * Tables();
      t.token_room = t.slot_room = room;
      t.most_returns = 2;
      t.return_weight = 0.3f;
      t.returns = watches;
      row.row = row.index = i;
      row.rows = 1;
      row.frontier = s_.dropped;
      row.context = (s_.dropped + s_.whole) * kBlockTokens - 1;
      row.first_kept = i * blocks_;
      row.kept_blocks = s_.kept;
      row.first_block = i * blocks_ + s_.kept;
      rows.push_back(row);
    }
    Upload<HistoryRow>(rows, rows_.data());
    HistoryAttentionArgs args;
    args.histories = rows_.data();
    args.counts = counts_.data();
    args.count = s_.sequences;
    args.heads = Heads();
    args.kv_heads = s_.kv_heads;
    args.head_dim = s_.dim;
    args.pages = pages_.data();
    args.page_bytes = geometry_.PageBytes();
    args.blocks = reinterpret_cast<const std::uint32_t*>(views_.data());
    args.q = q_.data();
    args.out = out_.data();
    args.q_stride = args.out_stride = Heads() * s_.dim;
    args.softmax_scale = 0.125f;
    args.most_tokens = (s_.kept + s_.whole) * kBlockTokens;
    args.most_dropped = s_.dropped * kBlockTokens;
    const std::size_t heads = std::size_t(s_.sequences) * Heads();
    logits_ = *DeviceArray<float>::Make(heads * args.most_tokens, "bench");
    masses_ = *DeviceArray<float>::Make(heads * args.most_dropped / kReturnTokens, "bench");
    args.logits = logits_.data();
    args.masses = masses_.data();
    return args;
  }

 private:
  /// Tokens of a sequence, times units.
  std::size_t Tables() const { return std::size_t(s_.kv_heads) * blocks_ * kBlockTokens; }

  Shape s_;
  KvGeometry geometry_;
  int blocks_;
  DeviceArray<std::uint8_t> pages_;
  DeviceArray<float> q_, out_, scores_, logits_, masses_;
  DeviceArray<std::uint32_t> kept_;
  DeviceArray<std::uint8_t> lost_;
  DeviceArray<std::int32_t> tokens_;
  DeviceArray<HistoryCounts> counts_;
  DeviceArray<BlockView> views_;
  DeviceArray<HistoryRow> rows_;
};

void RunRows(Timer& timer, const Shape& shape, float ceiling) {
  World world(shape);
  float whole = 0;
  for (const auto& [what, watches, scores] : {std::tuple{"as it is", true, true},
                                              {"without scores", true, false},
                                              {"without watching", false, true}}) {
    const HistoryAttentionArgs args = world.Args(watches, scores);
    const float us = timer.Microseconds([&] { LaunchHistoryAttention(args, nullptr); }, 15);
    if (whole == 0) whole = us;
    const double bytes = world.Bytes(watches);
    std::printf("%-34s %-17s %8.1f us %5.1f %% of all %8.2f MB %6.0f GB/s %5.1f %%\n", shape.name,
                what, us, 100 * us / whole, bytes / 1e6, bytes / us / 1e3,
                100 * bytes / us / 1e3 / ceiling);
  }
}

/// A whole prompt's scores, one sequence.
void RunPrompt(Timer& timer, const char* name, int tokens, int kv_heads, int group, int dim) {
  const int blocks = tokens / kBlockTokens;
  const KvGeometry geometry{1, kv_heads, dim};
  auto pages = Filled<std::uint8_t>(std::size_t{8} * blocks * geometry.PageBytes(), 0x3c);
  std::vector<BlockView> views(blocks);
  std::uint32_t page = 0;
  for (BlockView& view : views) {
    for (int p = 0; p < kPlanes; ++p) view.k[p] = PageId(page++), view.v[p] = PageId(page++);
  }
  auto table = *DeviceArray<BlockView>::Make(views.size(), "bench");
  Upload<BlockView>(views, table.data());
  const int heads = kv_heads * group;
  auto q = Filled<float>(std::size_t(tokens) * heads * dim, 0);
  auto scores = Filled<float>(std::size_t(kv_heads) * tokens, 0);
  auto softmax = *DeviceArray<float2>::Make(std::size_t(tokens) * heads, "bench");
  HistoryRow row;
  row.tables.token_score = scores.data();
  row.tables.token_room = tokens;
  row.rows = tokens;
  auto rows = *DeviceArray<HistoryRow>::Make(1, "bench");
  Upload<HistoryRow>({&row, 1}, rows.data());
  HistoryScoresArgs args;
  args.histories = rows.data();
  args.count = 1;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.head_dim = dim;
  args.pages = pages.data();
  args.page_bytes = geometry.PageBytes();
  args.blocks = reinterpret_cast<const std::uint32_t*>(table.data());
  args.q = q.data();
  args.q_stride = heads * dim;
  args.softmax_scale = 0.125f;
  args.softmax = softmax.data();
  args.most_rows = tokens;
  args.most_blocks = blocks;
  const float us = timer.Microseconds([&] { LaunchHistoryScores(args, nullptr); }, 7);
  const double operations = 4.0 * tokens * tokens / 2 * heads * dim;  // two products
  std::printf("%-34s %6d tokens %10.1f us %6.1f TFLOP/s\n", name, tokens, us,
              operations / us / 1e6);
}

}  // namespace
}  // namespace pliant::cuda::bench

int main() {
  using namespace pliant::cuda::bench;
  Timer timer;
  const float ceiling = timer.ReadCeiling();
  std::printf("a plain read: %.0f GB/s\n", ceiling);
  RunRows(timer, {"reckoner, 21 sequences", 21, 2, 3, 64, 14, 2, 1, 2, 42}, ceiling);
  RunRows(timer, {"reckoner, 128 sequences", 128, 2, 3, 64, 14, 2, 1, 2, 42}, ceiling);
  RunRows(timer, {"8B, 16 of 2k kept, 6k dropped", 16, 8, 4, 128, 62, 2, 1, 2, 192}, ceiling);
  RunRows(timer, {"8B, 64 of 2k kept, 6k dropped", 64, 8, 4, 128, 62, 2, 1, 2, 192}, ceiling);
  RunPrompt(timer, "a prompt's scores, reckoner", 256, 2, 3, 64);
  RunPrompt(timer, "a prompt's scores, 8B", 2048, 8, 4, 128);
  RunPrompt(timer, "a prompt's scores, 8B", 8192, 8, 4, 128);
  return 0;
}
