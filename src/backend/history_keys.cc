#include "backend/history_keys.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace pliant {
namespace {

void Decode(const CodedKeys& coded, float* keys) {
  const std::size_t dim = static_cast<std::size_t>(coded.head_dim), half = dim / 2;
  std::vector<std::uint16_t> u(dim);
  for (std::size_t t = 0; t < kBlockTokens; ++t) {
    const std::uint8_t* rows[kPlanes] = {};
    for (int p = 0; p < kLikenessPlanes; ++p) rows[p] = coded.rows[p] + t * half;
    std::uint16_t scale;
    std::memcpy(&scale, coded.scales + t * sizeof(scale), sizeof(scale));
    const std::span<float> row(keys + t * dim, dim);
    JoinPlanes(rows, kLikenessPlanes, u);
    DecodeRow(u, scale, row);
    MixChannels(row, kQueryMix);  // the inverse
    for (std::size_t c = 0; coded.channel_scale != nullptr && c < dim; ++c)
      row[c] = row[c] * coded.channel_scale[c] + coded.channel_center[c];
    for (std::size_t i = 0; i < half; ++i) {
      const float cosine = coded.cosine[t * half + i], sine = coded.sine[t * half + i];
      const float a = row[i], b = row[i + half];
      row[i] = a * cosine + b * sine;
      row[i + half] = b * cosine - a * sine;
    }
  }
}

void Signs(int rows, int dim, const float* keys, const float* mean, std::uint64_t* signs) {
  const int words = (dim + 63) / 64;
  std::fill_n(signs, static_cast<std::ptrdiff_t>(rows) * words, 0);
  for (int t = 0; t < rows; ++t, keys += dim, signs += words) {
    for (int c = 0; c < dim; ++c) signs[c / 64] |= std::uint64_t{keys[c] > mean[c]} << (c % 64);
  }
}

void Fewest(int words, int count, const std::uint64_t* rows, int later_count,
            const std::uint64_t* later, std::int32_t* fewest) {
  for (int i = 0; i < count; ++i, rows += words) {
    fewest[i] = std::numeric_limits<std::int32_t>::max();
    for (int j = 0; j < later_count; ++j) {
      std::int32_t differ = 0;
      for (int w = 0; w < words; ++w)
        differ += std::popcount(rows[w] ^ later[static_cast<std::ptrdiff_t>(j) * words + w]);
      fewest[i] = std::min(fewest[i], differ);
    }
  }
}

void Nearest(int dim, int count, const std::int8_t* rows, int from, const std::int8_t* later,
             const float* norms, float* nearest) {
  const auto size = static_cast<std::size_t>(dim);
  const std::vector<std::int16_t> wide(later, later + kBlockTokens * size);  // as products are
  std::vector<std::int16_t> row(size);
  for (int i = 0; i < count; ++i, rows += dim) {
    std::copy_n(rows, size, row.begin());
    nearest[i] = 0;
    for (std::size_t t = static_cast<std::size_t>(std::max(0, from + i)); t < kBlockTokens; ++t) {
      std::int32_t dot = 0;
      for (std::size_t c = 0; c < size; ++c)
        dot += std::int32_t{row[c]} * std::int32_t{wide[t * size + c]};
      nearest[i] = std::max(nearest[i], static_cast<float>(dot) * norms[t]);
    }
  }
}

void LeastUseful(const UseTable& table, int count, std::int32_t* uses, std::int32_t* places) {
  for (int i = 0; i < table.tokens; ++i) {
    const std::int32_t token = table.token[i];
    const float use = table.score[i] * table.weight[i];
    uses[i] = use > 0 ? std::bit_cast<std::int32_t>(use) : 0;
    if (token < table.never_before || (token >= table.never_from && token < table.never_to))
      uses[i] = kEndlessUse;
    places[i] = i;
  }
  std::nth_element(places, places + count, places + table.tokens, [&](int a, int b) {
    return std::pair(uses[a], table.token[a]) < std::pair(uses[b], table.token[b]);
  });
  std::sort(places, places + count);
}

constexpr KeyKernel kScalar = {Decode, Signs, Fewest, Nearest, LeastUseful};

}  // namespace

const KeyKernel& ScalarKeyKernel() { return kScalar; }

}  // namespace pliant
