#include "backend/ref/ref_kv.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <string>

#include "backend/step_check.h"
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
    channel_.assign(channels, 1.0f);
    center_.assign(channels, 0.0f);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("KV pages: cannot allocate " + std::to_string(pages * geometry.PageBytes()) +
                       " bytes");
  }
  geometry_ = geometry;
  pages_ = pages;
  return {};
}

Status RefKv::SetKeyCode(const KeyCode& code) {
  PLIANT_RETURN_IF_ERROR(CheckKeyCode(code, channel_.size()));
  channel_ = code.scale;
  center_ = code.center;
  return {};
}

void RefKv::StartChannelStatistics() {
  statistics_.key_min.assign(channel_.size(), INFINITY);
  statistics_.key_max.assign(channel_.size(), -INFINITY);
  statistics_.query_energy.assign(channel_.size(), 0.0);
}

ChannelStatistics RefKv::TakeChannelStatistics() { return std::exchange(statistics_, {}); }

std::span<std::byte> RefKv::Page(PageId page) {
  PLIANT_CHECK(page.value() < pages_, "page id out of range");
  const std::size_t bytes = geometry_.PageBytes();
  return std::span(arena_).subspan(page.value() * bytes, bytes);
}

std::span<const float> RefKv::Channel(int layer, int head) const {
  const std::size_t unit = static_cast<std::size_t>(layer) * geometry_.kv_heads + head;
  return std::span(channel_).subspan(unit * geometry_.head_dim, geometry_.head_dim);
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
    const std::span<const float> channel = Channel(params.layer, head / group);
    if (!statistics_.query_energy.empty()) {
      double* energy = &statistics_.query_energy[channel.data() - channel_.data()];
      for (int c = 0; c < dim; ++c) energy[c] += double{q[c]} * q[c];
    }
    for (int c = 0; c < dim; ++c) q[c] *= channel[c];
  }
  for (int head = 0; head < kv_heads; ++head) {
    const std::span<float> k = row.qkv.subspan(std::size_t(params.heads + head) * dim, dim);
    const std::span<const float> v =
        row.qkv.subspan(std::size_t(params.heads + kv_heads + head) * dim, dim);
    RefRmsNorm(k, k_norm, params.norm_eps);
    Rotate(k, rope, row.position);
    const std::span<const float> channel = Channel(params.layer, head);
    if (!statistics_.key_min.empty()) {
      float* least = &statistics_.key_min[channel.data() - channel_.data()];
      float* most = &statistics_.key_max[channel.data() - channel_.data()];
      for (int c = 0; c < dim; ++c) {
        least[c] = std::min(least[c], k[c]);
        most[c] = std::max(most[c], k[c]);
      }
    }
    std::vector<float> scaled(dim);
    const float* center = &center_[channel.data() - channel_.data()];
    for (int c = 0; c < dim; ++c) scaled[c] = (k[c] - center[c]) / channel[c];
    Store(params.layer, head, token, block.k, scaled);
    Store(params.layer, head, token, block.v, v);
  }
}

void RefKv::AttendRow(int layer, int heads, float softmax_scale, std::span<const BlockView> blocks,
                      int cache_position, Row row, std::span<float> weights) {
  const int dim = geometry_.head_dim;
  const int group = heads / geometry_.kv_heads;
  std::vector<float> key(dim), value(dim);
  std::vector<double> tops(weights.size());  // largest logit of each block
  for (int head = 0; head < heads; ++head) {
    const std::span<const float> q = row.qkv.subspan(std::size_t(head) * dim, dim);
    std::vector<double> logits;
    std::vector<std::vector<float>> values;
    std::fill(tops.begin(), tops.end(), -std::numeric_limits<double>::infinity());
    for (int t = 0; t <= cache_position; ++t) {
      const BlockView& block = blocks[t / kBlockTokens];
      // The channel factor of K is in q already.
      if (!Load(layer, head / group, t % kBlockTokens, block.k, key)) continue;
      double dot = 0;
      for (int c = 0; c < dim; ++c) dot += double{q[c]} * key[c];
      if (!tops.empty()) {
        double& top = tops[t / kBlockTokens];
        top = std::max(top, dot * softmax_scale);
      }
      if (!Load(layer, head / group, t % kBlockTokens, block.v, value)) continue;
      logits.push_back(dot * softmax_scale);
      values.push_back(value);
    }
    double largest = -std::numeric_limits<double>::infinity();
    for (const double logit : logits) largest = std::max(largest, logit);
    double total = 0;
    std::vector<double> sum(dim, 0.0);
    for (std::size_t t = 0; t < logits.size(); ++t) {
      const double weight = std::exp(logits[t] - largest);
      total += weight;
      for (int c = 0; c < dim; ++c) sum[c] += weight * values[t][c];
    }
    for (int c = 0; c < dim; ++c) {
      row.out[std::size_t(head) * dim + c] = static_cast<float>(sum[c] / total);
    }
    for (std::size_t b = 0; b < weights.size(); ++b) {
      weights[b] = std::max(weights[b], static_cast<float>(std::exp(tops[b] - largest) / total));
    }
  }
}

}  // namespace pliant
