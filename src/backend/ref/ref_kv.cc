#include "backend/ref/ref_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "backend/step_check.h"
#include "backend/watched_keys.h"
#include "base/check.h"

namespace pliant {

void RefRmsNorm(std::span<float> x, std::span<const float> weight, float eps) {
  if (weight.empty()) return;
  double squares = 0;
  for (const float value : x) squares += double{value} * value;
  const double inverse = 1 / std::sqrt(squares / static_cast<double>(x.size()) + eps);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(x[i] * inverse) * weight[i];
  }
}

namespace {

/// Rotates the pairs (i, i + half) of one head by position * inv_freq[i].
void Rotate(std::span<float> x, const RopeTable& rope, std::int32_t position) {
  const std::size_t half = x.size() / 2;
  for (std::size_t i = 0; i < rope.inv_freq.size(); ++i) {
    const double angle = double{rope.inv_freq[i]} * position;
    const float cosine = static_cast<float>(std::cos(angle));
    const float sine = static_cast<float>(std::sin(angle));
    const float a = x[i];
    const float b = x[i + half];
    x[i] = a * cosine - b * sine;
    x[i + half] = b * cosine + a * sine;
  }
}

}  // namespace

Status RefKv::AllocatePages(const KvGeometry& geometry, std::uint32_t pages) {
  if (pages_ != 0) return InvalidArgument("pages are allocated once");
  if (geometry.layers < 1 || geometry.kv_heads < 1 || geometry.head_dim < 32 ||
      geometry.head_dim % 32 != 0) {
    return InvalidArgument(
        "KV geometry: needs layers, heads, and a head dim that is a multiple of 32");
  }
  if (pages == 0) return InvalidArgument("KV pages: at least one");
  if (pages > std::numeric_limits<std::ptrdiff_t>::max() / geometry.PageBytes()) {
    return OutOfMemory("KV pages: " + std::to_string(pages) + " pages pass the address space");
  }
  const std::size_t channels = geometry.Units() * geometry.head_dim;
  try {
    arena_.resize(pages * geometry.PageBytes());
    for (ChannelCode* side : {&code_.key, &code_.value}) {
      side->scale.assign(channels, 1.0f);
      side->center.assign(channels, 0.0f);
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("KV pages: cannot allocate " + std::to_string(pages * geometry.PageBytes()) +
                       " bytes");
  }
  geometry_ = geometry;
  pages_ = pages;
  return {};
}

Status RefKv::SetKvCode(const KvCode& code) {
  PLIANT_RETURN_IF_ERROR(CheckKvCode(code, code_.key.scale.size()));
  code_ = code;
  return {};
}

void RefKv::StartChannelStatistics() {
  const std::size_t channels = code_.key.scale.size();
  statistics_.key_min.assign(channels, INFINITY);
  statistics_.key_max.assign(channels, -INFINITY);
  statistics_.query_energy.assign(channels, 0.0);
  statistics_.value_energy.assign(channels, 0.0);
}

ChannelStatistics RefKv::TakeChannelStatistics() { return std::exchange(statistics_, {}); }

std::span<std::byte> RefKv::Page(PageId page) {
  PLIANT_CHECK(page.value() < pages_, "page id out of range");
  const std::size_t bytes = geometry_.PageBytes();
  return std::span(arena_).subspan(page.value() * bytes, bytes);
}

std::size_t RefKv::FirstChannel(int layer, int head) const {
  return (static_cast<std::size_t>(layer) * geometry_.kv_heads + head) * geometry_.head_dim;
}

void RefKv::Store(int layer, int head, int token, const std::array<PageId, kPlanes>& pages,
                  std::span<const float> row) {
  const std::uint16_t scale = RowScale(row);
  std::vector<std::uint16_t> u(row.size());
  EncodeRow(row, scale, u);
  std::uint8_t* rows[kPlanes] = {};
  const int planes = ResidentPlanes(pages);
  for (int p = 0; p < planes; ++p) {
    rows[p] = reinterpret_cast<std::uint8_t*>(Page(pages[p]).data()) +
              geometry_.RowOffset(layer, head, token);
  }
  SplitPlanes(u, planes, rows);
  std::byte* at = Page(pages[0]).data() + geometry_.ScaleOffset(layer, head, token);
  at[0] = static_cast<std::byte>(scale & 0xff);
  at[1] = static_cast<std::byte>(scale >> 8);
}

bool RefKv::Load(int layer, int head, int token, const std::array<PageId, kPlanes>& pages,
                 std::span<float> row) {
  const int planes = ResidentPlanes(pages);
  if (planes == 0) return false;
  const std::uint8_t* rows[kPlanes] = {};
  for (int p = 0; p < planes; ++p) {
    rows[p] = reinterpret_cast<const std::uint8_t*>(Page(pages[p]).data()) +
              geometry_.RowOffset(layer, head, token);
  }
  std::vector<std::uint16_t> u(row.size());
  JoinPlanes(rows, planes, u);
  const std::byte* at = Page(pages[0]).data() + geometry_.ScaleOffset(layer, head, token);
  DecodeRow(
      u,
      static_cast<std::uint16_t>(static_cast<unsigned>(at[0]) | static_cast<unsigned>(at[1]) << 8),
      row);
  return true;
}

void RefKv::WriteRow(const QkvParams& params, std::span<const float> q_norm,
                     std::span<const float> k_norm, const RopeTable& rope,
                     std::span<const BlockView> blocks, int cache_position, Row row) {
  const int dim = geometry_.head_dim;
  const int kv_heads = geometry_.kv_heads;
  const int group = params.heads / kv_heads;
  const BlockView& block = blocks[cache_position / kBlockTokens];
  const int token = cache_position % kBlockTokens;
  for (int head = 0; head < params.heads; ++head) {
    const std::span<float> q = row.qkv.subspan(std::size_t(head) * dim, dim);
    RefRmsNorm(q, q_norm, params.norm_eps);
    Rotate(q, rope, row.position);
    const std::size_t first = FirstChannel(params.layer, head / group);
    if (!statistics_.query_energy.empty()) {
      double* energy = &statistics_.query_energy[first];
      for (int c = 0; c < dim; ++c) energy[c] += double{q[c]} * q[c];
    }
    for (int c = 0; c < dim; ++c) q[c] *= code_.key.scale[first + c];
    MixChannels(q, kQueryMix);
  }
  for (int head = 0; head < kv_heads; ++head) {
    const std::span<float> k = row.qkv.subspan(std::size_t(params.heads + head) * dim, dim);
    const std::span<const float> v =
        row.qkv.subspan(std::size_t(params.heads + kv_heads + head) * dim, dim);
    RefRmsNorm(k, k_norm, params.norm_eps);
    Rotate(k, rope, row.position);
    const std::size_t first = FirstChannel(params.layer, head);
    if (!statistics_.key_min.empty()) {
      for (int c = 0; c < dim; ++c) {
        float& least = statistics_.key_min[first + c];
        float& most = statistics_.key_max[first + c];
        least = std::min(least, k[c]);
        most = std::max(most, k[c]);
        statistics_.value_energy[first + c] += double{v[c]} * v[c];
      }
    }
    const auto scaled = [&](const ChannelCode& code, std::span<const float> x) {
      std::vector<float> row(dim);
      for (int c = 0; c < dim; ++c)
        row[c] = (x[c] - code.center[first + c]) / code.scale[first + c];
      return row;
    };
    std::vector<float> key = scaled(code_.key, k);
    MixChannels(key, kKeyMix);
    Store(params.layer, head, token, block.k, key);
    Store(params.layer, head, token, block.v, scaled(code_.value, v));
  }
}

std::vector<double> RefKv::Logits(int layer, int kv_head, std::span<const float> q,
                                  float softmax_scale, std::span<const Place> places) {
  std::vector<float> key(q.size());
  std::vector<double> logits;
  for (const Place& place : places) {
    // The channel factor of K is in q already, and q is mixed as K is.
    Load(layer, kv_head, place.slot, place.block->k, key);
    double dot = 0;
    for (std::size_t c = 0; c < q.size(); ++c) dot += double{q[c]} * key[c];
    logits.push_back(dot * softmax_scale);
  }
  return logits;
}

std::vector<double> RefKv::WatchedLogits(int layer, int kv_head, std::span<const float> q,
                                         float softmax_scale, std::span<const Place> places) {
  std::vector<std::int8_t> codes(q.size());
  const float step = CodeWatchingQuery(q, codes);
  std::vector<double> logits;
  for (const Place& place : places) {
    const std::byte* page = Page(place.block->k[0]).data();
    std::uint16_t scale;
    std::memcpy(&scale, page + geometry_.ScaleOffset(layer, kv_head, place.slot), sizeof(scale));
    const auto* row = reinterpret_cast<const std::uint8_t*>(page) +
                      geometry_.RowOffset(layer, kv_head, place.slot);
    logits.push_back(double{Bf16ToFloat(scale)} * WatchProduct(codes, row) * step / 16 *
                     softmax_scale);
  }
  return logits;
}

RefKv::Softmax RefKv::WeightedSum(int layer, int kv_head, std::span<const double> logits,
                                  std::span<const Place> places, std::span<float> out) {
  Softmax softmax{-std::numeric_limits<double>::infinity(), 0};
  for (const double logit : logits) softmax.largest = std::max(softmax.largest, logit);
  std::vector<float> value(out.size());
  std::vector<double> sum(out.size(), 0.0);
  for (std::size_t t = 0; t < logits.size(); ++t) {
    Load(layer, kv_head, places[t].slot, places[t].block->v, value);
    const double weight = std::exp(logits[t] - softmax.largest);
    softmax.total += weight;
    for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += weight * value[c];
  }
  const std::size_t first = FirstChannel(layer, kv_head);
  for (std::size_t c = 0; c < sum.size(); ++c) {
    out[c] = static_cast<float>(sum[c] / softmax.total * code_.value.scale[first + c] +
                                code_.value.center[first + c]);
  }
  return softmax;
}

void RefKv::AttendRow(int layer, int heads, float softmax_scale, std::span<const BlockView> blocks,
                      int cache_position, Row row) {
  const int dim = geometry_.head_dim;
  const int group = heads / geometry_.kv_heads;
  std::vector<Place> places;
  for (int t = 0; t <= cache_position; ++t) {
    const BlockView& block = blocks[t / kBlockTokens];
    if (block.k[0].valid() && block.v[0].valid()) places.push_back({&block, t % kBlockTokens});
  }
  for (int head = 0; head < heads; ++head) {
    const std::span<const float> q = row.qkv.subspan(std::size_t(head) * dim, dim);
    const auto logits = Logits(layer, head / group, q, softmax_scale, places);
    WeightedSum(layer, head / group, logits, places, row.out.subspan(std::size_t(head) * dim, dim));
  }
}

Status RefKv::NoteHistory(RetainedHistory& history, std::span<const float> inv_freq,
                          std::int32_t blocks) {
  return NoteRows(Memory(), history, {&code_.key, inv_freq}, blocks);
}

namespace {

/// What one of `group` heads adds to the score of a token that gets `share` of its attention.
float ScoreOf(double share, bool squared, int group) {
  return static_cast<float>((squared ? share * share : share) / group);
}

}  // namespace

void RefKv::AttendHistory(int layer, int heads, float softmax_scale, RetainedHistory& history,
                          std::span<const BlockView> kept, std::span<const BlockView> blocks,
                          int cache_position, Row row) {
  const int dim = geometry_.head_dim;
  const int group = heads / geometry_.kv_heads;
  closest_decision_ = std::numeric_limits<double>::infinity();
  std::vector<Place> places, dropped;
  for (const BlockView& block : kept) {
    for (int t = 0; t < kBlockTokens; ++t) places.push_back({&block, t});
  }
  const int first_whole = history.frontier() * kBlockTokens;
  for (int t = first_whole; t <= cache_position; ++t)
    places.push_back({&blocks[t / kBlockTokens], t % kBlockTokens});
  for (int t = 0; history.options().returns && t < first_whole; ++t)
    dropped.push_back({&blocks[t / kBlockTokens], t % kBlockTokens});
  for (int kv_head = 0; kv_head < geometry_.kv_heads; ++kv_head) {
    const int unit = history.UnitOf(layer, kv_head);
    std::vector<std::vector<double>> seen(group), watched(group);
    std::vector<Softmax> softmax(group);
    const auto attend = [&] {
      for (int g = 0; g < group; ++g) {
        const std::size_t at = (std::size_t(kv_head) * group + g) * dim;
        const std::span<const float> q = row.qkv.subspan(at, dim);
        seen[g] = Logits(layer, kv_head, q, softmax_scale, places);
        softmax[g] = WeightedSum(layer, kv_head, seen[g], places, row.out.subspan(at, dim));
      }
    };
    for (int g = 0; g < group; ++g) {
      const std::size_t at = (std::size_t(kv_head) * group + g) * dim;
      watched[g] = WatchedLogits(layer, kv_head, row.qkv.subspan(at, dim), softmax_scale, dropped);
    }
    attend();
    for (int returned = 0; returned < history.options().most_returns;) {
      std::vector<float> masses(dropped.size() / kReturnTokens, 0.0f);
      for (int g = 0; g < group; ++g) {
        std::vector<double> mass(masses.size(), 0.0);
        for (std::size_t t = 0; t < dropped.size(); ++t) {
          const auto block = static_cast<std::int32_t>(t / kBlockTokens);
          if ((history.Kept(unit, block) >> (t % kBlockTokens) & 1) != 0) continue;
          mass[t / kReturnTokens] +=
              std::exp(watched[g][t] - softmax[g].largest) / softmax[g].total;
        }
        for (std::size_t p = 0; p < mass.size(); ++p)
          masses[p] = std::max(masses[p], static_cast<float>(mass[p]));
      }
      for (const float mass : masses)
        closest_decision_ = std::min(
            closest_decision_, std::abs(mass / (1.0 + mass) - history.options().return_weight));
      const std::int32_t page = history.Wanted(unit, masses);
      if (page < 0) break;
      if (!ReturnRows(Memory(), history, layer, kv_head, page, kept)) continue;
      attend();
      ++returned;
    }
    std::vector<float> shares(places.size(), 0.0f);
    for (int g = 0; g < group; ++g) {
      for (std::size_t t = 0; t < places.size(); ++t)
        shares[t] += ScoreOf(std::exp(seen[g][t] - softmax[g].largest) / softmax[g].total,
                             history.options().squared, group);
    }
    history.AddScores(unit, shares);
  }
}

void RefKv::ScoreRow(int layer, int heads, float softmax_scale, RetainedHistory& history,
                     std::span<const BlockView> blocks, int cache_position, Row row) {
  const int dim = geometry_.head_dim;
  const int group = heads / geometry_.kv_heads;
  std::vector<Place> places;
  for (int t = 0; t <= cache_position; ++t)
    places.push_back({&blocks[t / kBlockTokens], t % kBlockTokens});
  std::vector<float> unused(dim);
  for (int kv_head = 0; kv_head < geometry_.kv_heads; ++kv_head) {
    std::vector<float> shares(places.size(), 0.0f);
    for (int g = 0; g < group; ++g) {
      const std::size_t at = (std::size_t(kv_head) * group + g) * dim;
      const auto logits = Logits(layer, kv_head, row.qkv.subspan(at, dim), softmax_scale, places);
      const Softmax softmax = WeightedSum(layer, kv_head, logits, places, unused);
      for (std::size_t t = 0; t < places.size(); ++t)
        shares[t] += ScoreOf(std::exp(logits[t] - softmax.largest) / softmax.total,
                             history.options().squared, group);
    }
    history.AddScores(history.UnitOf(layer, kv_head), shares);
  }
}

}  // namespace pliant
