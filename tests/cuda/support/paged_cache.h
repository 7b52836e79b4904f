// Tests of the CUDA room: a random paged KV cache in host memory, in the GPU's page layout, and
// attention over it in double. The oracle reads the codes themselves, not the pages, so a fault of
// the layout shows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/page_layout.h"

namespace pliant::cuda::test {

/// How many planes a block keeps.
struct State {
  int k = 4, v = 4;
};

class PagedCache {
 public:
  PagedCache(KvGeometry geometry, int blocks, std::uint32_t seed)
      : geometry_(geometry), blocks_(blocks), random_(seed) {
    const std::size_t codes = Row(blocks, 0, 0, 0, 0) * geometry.head_dim;
    code_.resize(codes);
    for (auto& c : code_) c = static_cast<std::uint16_t>(1 + random_() % 65535);
    scale_.resize(Row(blocks, 0, 0, 0, 0));
    std::uniform_real_distribution<float> exponent(-2.f, 2.f);
    for (auto& s : scale_) s = FloatToBf16(std::exp2(exponent(random_)));
  }

  /// Gives every block pages in its state, at random places of a pool, and writes them. Unused
  /// bytes are garbage.
  void Place(std::span<const State> states) {
    states_.assign(states.begin(), states.end());
    std::vector<std::uint32_t> order(static_cast<std::size_t>(blocks_) * 8);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
    std::shuffle(order.begin(), order.end(), random_);
    pages_.resize(order.size() * geometry_.PageBytes());
    for (auto& b : pages_) b = static_cast<std::uint8_t>(random_());
    views_.assign(blocks_, {});
    for (int b = 0; b < blocks_; ++b) {
      for (int p = 0; p < kPlanes; ++p) {
        if (p < states_[b].k) views_[b].k[p] = PageId(order[b * 8 + p]);
        if (p < states_[b].v) views_[b].v[p] = PageId(order[b * 8 + 4 + p]);
      }
      for (int is_v = 0; is_v < 2; ++is_v)
        for (int p = 0; p < (is_v ? states_[b].v : states_[b].k); ++p) WritePage(b, is_v, p);
    }
  }

  const std::vector<std::uint8_t>& pages() const { return pages_; }
  const std::vector<BlockView>& views() const { return views_; }
  const KvGeometry& geometry() const { return geometry_; }
  void SetScale(int block, int is_v, int layer, int head, int token, float s) {
    scale_[Row(block, is_v, layer, head, token)] = FloatToBf16(s);
  }

  /// The value that the block's state shows.
  double Value(int block, int is_v, int layer, int head, int token, int dim) const {
    const std::size_t row = Row(block, is_v, layer, head, token);
    const int planes = is_v ? states_[block].v : states_[block].k;
    const int u = MidpointCode(code_[row * geometry_.head_dim + dim], planes);
    return static_cast<double>(Bf16ToFloat(scale_[row])) * (u - 32768) / 32768.0;
  }

  /// softmax(q k * scale) v of one query head over the first `tokens` tokens from `first_block` on.
  std::vector<double> Attend(std::span<const float> q, int first_block, int tokens, int layer,
                             int kv_head, double scale) const {
    const int d = geometry_.head_dim;
    std::vector<double> score(tokens);
    double top = -INFINITY;
    for (int i = 0; i < tokens; ++i) {
      const int block = first_block + i / kBlockTokens;
      score[i] = -INFINITY;
      if (states_[block].k == 0 || states_[block].v == 0) continue;
      double sum = 0;
      for (int c = 0; c < d; ++c)
        sum += q[c] * Value(block, 0, layer, kv_head, i % kBlockTokens, c);
      score[i] = sum * scale;
      top = std::max(top, score[i]);
    }
    std::vector<double> out(d, 0.0);
    double mass = 0;
    for (int i = 0; i < tokens; ++i) {
      if (score[i] == -INFINITY) continue;
      const double p = std::exp(score[i] - top);
      mass += p;
      for (int c = 0; c < d; ++c)
        out[c] += p * Value(first_block + i / kBlockTokens, 1, layer, kv_head, i % kBlockTokens, c);
    }
    for (double& x : out) x = mass > 0 ? x / mass : 0.0;
    return out;
  }

 private:
  std::size_t Row(int block, int is_v, int layer, int head, int token) const {
    return (((static_cast<std::size_t>(block) * 2 + is_v) * geometry_.layers + layer) *
                geometry_.kv_heads +
            head) *
               kBlockTokens +
           token;
  }
  void WritePage(int block, int is_v, int plane) {
    const int d = geometry_.head_dim;
    const PageId id = is_v ? views_[block].v[plane] : views_[block].k[plane];
    std::uint8_t* const page = pages_.data() + id.value() * geometry_.PageBytes();
    for (int layer = 0; layer < geometry_.layers; ++layer)
      for (int head = 0; head < geometry_.kv_heads; ++head) {
        std::uint8_t* const unit = page + UnitOffset(geometry_.kv_heads, d, layer, head);
        for (int token = 0; token < kBlockTokens; ++token) {
          const std::size_t row = Row(block, is_v, layer, head, token);
          for (int dim = 0; dim < d; ++dim) {
            const int nibble = (code_[row * d + dim] >> (12 - 4 * plane)) & 15;
            std::uint8_t& byte = unit[is_v ? VByte(d, token, dim) : KByte(d, token, dim)];
            byte = dim & 1 ? (byte & 0x0f) | nibble << 4 : (byte & 0xf0) | nibble;
          }
          if (plane == 0) {
            std::uint16_t* const s = reinterpret_cast<std::uint16_t*>(unit + ScaleByte(d, token));
            *s = scale_[row];
          }
        }
      }
  }

  KvGeometry geometry_;
  int blocks_;
  std::mt19937 random_;
  std::vector<std::uint16_t> code_, scale_;
  std::vector<State> states_;
  std::vector<std::uint8_t> pages_;
  std::vector<BlockView> views_;
};

}  // namespace pliant::cuda::test
