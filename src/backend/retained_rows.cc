#include "backend/retained_rows.h"

#include <algorithm>
#include <complex>
#include <cstring>
#include <memory>
#include <vector>

#include "backend/step_check.h"
#include "base/check.h"

namespace pliant {
namespace {

using Move = RetainedHistory::Move;

/// Cosines and sines of a block's tokens: [32][head_dim / 2], the same for all units.
class Angles {
 public:
  /// RoPE turns no pair beyond inv_freq.
  Angles(std::span<const float> inv_freq, int head_dim)
      : inv_freq_(inv_freq),
        half_(static_cast<std::size_t>(head_dim) / 2),
        cosine_(half_ * kBlockTokens, 1.0f),
        sine_(half_ * kBlockTokens, 0.0f) {}

  void Set(std::int32_t first_token) {
    for (std::size_t i = 0; i < inv_freq_.size(); ++i) {
      // Turned on token by token in double, where 31 products cost nothing of an f32's digits.
      std::complex<double> at = std::polar(1.0, double{inv_freq_[i]} * first_token);
      const std::complex<double> next = std::polar(1.0, double{inv_freq_[i]});
      for (std::size_t t = 0; t < kBlockTokens; ++t) {
        cosine_[t * half_ + i] = static_cast<float>(at.real());
        sine_[t * half_ + i] = static_cast<float>(at.imag());
        at = {at.real() * next.real() - at.imag() * next.imag(),
              at.real() * next.imag() + at.imag() * next.real()};
      }
    }
  }
  const float* cosine() const { return cosine_.data(); }
  const float* sine() const { return sine_.data(); }

 private:
  std::span<const float> inv_freq_;
  std::size_t half_;
  std::vector<float> cosine_, sine_;
};

/// Keys of one unit of one block.
CodedKeys KeysOf(const KvGeometry& g, const OriginalBlock& original, const Angles& angles,
                 int layer, int kv_head, const ChannelCode* code) {
  CodedKeys keys;
  keys.head_dim = g.head_dim;
  for (int p = 0; p < kLikenessPlanes; ++p) {
    keys.rows[p] =
        reinterpret_cast<const std::uint8_t*>(original.K(p)) + g.RowOffset(layer, kv_head, 0);
  }
  keys.scales = original.K(0) + g.ScaleOffset(layer, kv_head, 0);
  if (code != nullptr && !code->scale.empty()) {
    const std::size_t first = (static_cast<std::size_t>(layer) * g.kv_heads + kv_head) * g.head_dim;
    keys.channel_scale = code->scale.data() + first;
    keys.channel_center = code->center.data() + first;
  }
  keys.cosine = angles.cosine();
  keys.sine = angles.sine();
  return keys;
}

}  // namespace

bool OriginalBlock::Load(const PageMemory& memory, RowSource& source, std::int32_t block, int unit,
                         int k, int v) {
  // Not set to zero: only a store that keeps its pages elsewhere uses it.
  const std::size_t bytes = memory.page_bytes * (k + v);
  if (bytes > buffer_bytes_) buffer_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  buffer_bytes_ = std::max(buffer_bytes_, bytes);
  std::span<std::byte> room(buffer_.get(), bytes);
  const auto load = [&](bool is_v, int planes, std::array<const std::byte*, kPlanes>& to) {
    for (int p = 0; p < planes; ++p) {
      const PlanePlace place = source.Find(block, is_v, p, unit, room.first(memory.page_bytes));
      room = room.subspan(memory.page_bytes);
      if (!place.found()) return false;
      to[p] = place.page.valid() ? memory.Page(place.page) : place.host;
    }
    return true;
  };
  return load(false, k, k_) && load(true, v, v_);
}

void CopyRows(const PageMemory& memory, const OriginalBlock& original, std::int32_t first_token,
              int layer, int kv_head, std::span<const Move> moves,
              std::span<const BlockView> kept) {
  const KvGeometry& g = memory.geometry;
  for (const Move& move : moves) {
    const int from = move.token - first_token;
    const int to = move.slot % kBlockTokens;
    const BlockView& block = kept[move.slot / kBlockTokens];
    const auto copy = [&](const std::byte* source, PageId page, bool scale) {
      std::byte* target = memory.Page(page);
      std::memcpy(target + g.RowOffset(layer, kv_head, to),
                  source + g.RowOffset(layer, kv_head, from), g.RowBytes());
      if (!scale) return;
      std::memcpy(target + g.ScaleOffset(layer, kv_head, to),
                  source + g.ScaleOffset(layer, kv_head, from), sizeof(std::uint16_t));
    };
    for (int p = 0; p < kPlanes && block.k[p].valid(); ++p) copy(original.K(p), block.k[p], p == 0);
    for (int p = 0; p < kPlanes && block.v[p].valid(); ++p) copy(original.V(p), block.v[p], p == 0);
  }
}

Status NoteRows(const PageMemory& memory, RetainedHistory& history, const KeyDecoding& decoding,
                std::int32_t blocks) {
  const KvGeometry& g = memory.geometry;
  const std::int32_t first = history.noted();
  if (first >= blocks) return {};
  history.Reserve(std::int64_t{blocks} * kBlockTokens);
  OriginalBlock original;
  Angles angles(decoding.inv_freq, g.head_dim);
  std::vector<float> keys(static_cast<std::size_t>(kBlockTokens) * g.head_dim);
  const auto each = [&](auto&& take) -> Status {
    for (std::int32_t block = first; block < blocks; ++block) {
      if (!original.Load(memory, history.source(), block, RowSource::kAllUnits, kLikenessPlanes, 0))
        return OriginalGone(block);
      angles.Set(block * kBlockTokens);
      for (int layer = 0; layer < g.layers; ++layer) {
        for (int head = 0; head < g.kv_heads; ++head) {
          memory.kernel->decode(KeysOf(g, original, angles, layer, head, decoding.code),
                                keys.data());
          take(history.UnitOf(layer, head));
        }
      }
    }
    return {};
  };
  if (first == 0) PLIANT_RETURN_IF_ERROR(each([&](int unit) { history.AddToMean(unit, keys); }));
  return each([&](int unit) {
    history.NoteKeys(unit, keys, *memory.kernel);
    if (unit + 1 == history.units()) history.EndNote();
  });
}

Status DropRows(const PageMemory& memory, RetainedHistory& history,
                std::span<const BlockView> kept) {
  PLIANT_RETURN_IF_ERROR(CheckKeptBlocks(history, kept, /*perhaps_more=*/true, memory.pages));
  const bool more = kept.size() > static_cast<std::size_t>(history.kept_blocks());
  const KvGeometry& g = memory.geometry;
  OriginalBlock original;
  if (!original.Load(memory, history.source(), history.frontier(), RowSource::kAllUnits,
                     ResidentPlanes(kept[0].k), ResidentPlanes(kept[0].v)))
    return OriginalGone(history.frontier());
  const std::int32_t first_token = history.frontier() * kBlockTokens;
  std::vector<Move> moves;
  for (int layer = 0; layer < g.layers; ++layer) {
    for (int head = 0; head < g.kv_heads; ++head) {
      const int unit = history.UnitOf(layer, head);
      if (more) {
        history.DropIntoNewBlock(unit, moves);
      } else {
        history.Drop(unit, moves, *memory.kernel);
      }
      CopyRows(memory, original, first_token, layer, head, moves, kept);
    }
  }
  if (more) {
    history.EndDropIntoNewBlock();
  } else {
    history.EndDrop();
  }
  return {};
}

Status RefillRows(const PageMemory& memory, RetainedHistory& history,
                  std::span<const BlockView> kept) {
  PLIANT_RETURN_IF_ERROR(CheckKeptBlocks(history, kept, /*perhaps_more=*/false, memory.pages));
  const KvGeometry& g = memory.geometry;
  OriginalBlock original;
  std::vector<Move> moves;
  for (std::int32_t block = 0; block < history.frontier() && !kept.empty(); ++block) {
    bool loaded = false;
    for (int unit = 0; unit < history.units(); ++unit) {
      if (history.Kept(unit, block) == 0) continue;
      if (!loaded && !original.Load(memory, history.source(), block, RowSource::kAllUnits,
                                    ResidentPlanes(kept[0].k), ResidentPlanes(kept[0].v)))
        return OriginalGone(block);
      loaded = true;
      moves.clear();
      const std::span<const std::int32_t> tokens = history.KeptTokens(unit);
      for (std::size_t slot = 0; slot < tokens.size(); ++slot) {
        if (tokens[slot] / kBlockTokens == block)
          moves.push_back({tokens[slot], static_cast<std::int32_t>(slot)});
      }
      CopyRows(memory, original, block * kBlockTokens, unit / g.kv_heads, unit % g.kv_heads, moves,
               kept);
    }
  }
  return {};
}

bool ReturnRows(const PageMemory& memory, RetainedHistory& history, int layer, int kv_head,
                std::int32_t page, std::span<const BlockView> kept) {
  const int unit = history.UnitOf(layer, kv_head);
  const std::int32_t block = page * kReturnTokens / kBlockTokens;
  OriginalBlock original;
  if (kept.empty() || !original.Load(memory, history.source(), block, unit,
                                     ResidentPlanes(kept[0].k), ResidentPlanes(kept[0].v))) {
    history.Lose(unit, page);
    return false;
  }
  std::vector<Move> moves;
  history.Return(unit, page, moves, *memory.kernel);
  CopyRows(memory, original, block * kBlockTokens, layer, kv_head, moves, kept);
  return true;
}

}  // namespace pliant
