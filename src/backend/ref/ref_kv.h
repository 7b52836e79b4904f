// Room: backend. The KV half of the reference backend: pages as plane_code.h lays them out, written
// and read with its functions. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/retained_rows.h"

namespace pliant {

/// Norm weight (or nothing), in place: x = x / rms(x) * weight. Sums in double. Empty weight: left
/// alone.
void RefRmsNorm(std::span<float> x, std::span<const float> weight, float eps);

class RefKv {
 public:
  std::size_t PageBytes(const KvGeometry& geometry) const { return geometry.PageBytes(); }
  Status AllocatePages(const KvGeometry& geometry, std::uint32_t pages);
  Status SetKvCode(const KvCode& code);
  void StartChannelStatistics();
  ChannelStatistics TakeChannelStatistics();

  const KvGeometry& geometry() const { return geometry_; }
  std::uint32_t pages() const { return pages_; }
  std::span<std::byte> Page(PageId page);

  /// One sequence's part of Backend::QkvToCache. row(i) is row i of the slice: [(heads + 2
  /// kv_heads) * head_dim].
  struct Row {
    std::int32_t position = 0;
    std::span<float> qkv;
    std::span<float> out;  // attention only: [heads * head_dim]
  };
  void WriteRow(const QkvParams& params, std::span<const float> q_norm,
                std::span<const float> k_norm, const RopeTable& rope,
                std::span<const BlockView> blocks, int cache_position, Row row);
  /// Attention of one row over positions 0 .. cache_position of its sequence.
  void AttendRow(int layer, int heads, float softmax_scale, std::span<const BlockView> blocks,
                 int cache_position, Row row);
  /// The same for a sequence with a history: SequenceSlice::history.
  void AttendHistory(int layer, int heads, float softmax_scale, RetainedHistory& history,
                     std::span<const BlockView> kept, std::span<const BlockView> blocks,
                     int cache_position, Row row);

  /// How near to its threshold the closest page was, of the last AttendHistory: an implementation
  /// with other roundings may have decided otherwise when this is small.
  double closest_decision() const { return closest_decision_; }
  /// What a row of a slice of several adds to a history's scores.
  void ScoreRow(int layer, int heads, float softmax_scale, RetainedHistory& history,
                std::span<const BlockView> blocks, int cache_position, Row row);

  Status NoteHistory(RetainedHistory& history, std::span<const float> inv_freq,
                     std::int32_t blocks);
  Status DropFromHistory(RetainedHistory& history, std::span<const BlockView> kept) {
    return DropRows(Memory(), history, kept);
  }
  Status RefillHistory(RetainedHistory& history, std::span<const BlockView> kept) {
    return RefillRows(Memory(), history, kept);
  }

 private:
  std::size_t FirstChannel(int layer, int head) const;
  PageMemory Memory() { return {arena_.data(), geometry_.PageBytes(), pages_, geometry_}; }
  /// One query head over a list of tokens, (block, slot): logits of those that have K, and with
  /// `out` the weighted sum of V. Returns the largest logit and the sum of exp(logit - largest).
  struct Place {
    const BlockView* block;
    int slot;
  };
  std::vector<double> Logits(int layer, int kv_head, std::span<const float> q, float softmax_scale,
                             std::span<const Place> places);
  /// The same of dropped tokens by their plane 0 alone: watched_keys.h.
  std::vector<double> WatchedLogits(int layer, int kv_head, std::span<const float> q,
                                    float softmax_scale, std::span<const Place> places);
  struct Softmax {
    double largest = 0, total = 0;
  };
  Softmax WeightedSum(int layer, int kv_head, std::span<const double> logits,
                      std::span<const Place> places, std::span<float> out);
  /// Encodes `row` into slot `token` of every plane in `pages`.
  void Store(int layer, int head, int token, const std::array<PageId, kPlanes>& pages,
             std::span<const float> row);
  /// Decodes slot `token`; false when no plane is resident.
  bool Load(int layer, int head, int token, const std::array<PageId, kPlanes>& pages,
            std::span<float> row);

  KvGeometry geometry_;
  double closest_decision_ = 0;
  std::uint32_t pages_ = 0;
  std::vector<std::byte> arena_;
  KvCode code_;
  ChannelStatistics statistics_;  // same shape; empty while off
};

}  // namespace pliant
