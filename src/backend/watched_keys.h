// Room: backend. The arithmetic of watching dropped keys (retained_history.h). Of those only plane
// 0 is there, 4 bits an element, and whether a page returns turns on it; so a query is rounded to 8
// bits and products are exact integers, the same in the oracle and at every level.
//
// Plane 0's digit n of an element stands for (2 n - 15) / 16 of its row's scale (the midpoint of
// what the absent planes may add). A query row q is codes[c] = round(q[c] / step), step = max |q| /
// 127, halves to even; both products below are f32. The error is a sixteenth of that of the 4-bit
// keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

namespace pliant {

/// Codes of a row, [head_dim] each; returns step. A row of zeros has step 0. Rows that are not
/// finite have no meaning.
inline float CodeWatchingQuery(std::span<const float> q, std::span<std::int8_t> codes) {
  float most = 0;
  for (const float x : q) most = std::max(most, std::abs(x));
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  for (std::size_t c = 0; c < q.size(); ++c) {
    const float code = std::nearbyint(q[c] * inverse);
    codes[c] = static_cast<std::int8_t>(std::abs(code) <= 127 ? code : 0);
  }
  return most * (1 / 127.0f);
}

/// Sum over elements of codes[c] * (2 digit[c] - 15); `row` is plane 0's: element 2 i in the lower
/// half of byte i. Its logit is this * scale of the row * step / 16 * softmax_scale.
inline std::int32_t WatchProduct(std::span<const std::int8_t> codes, const std::uint8_t* row) {
  std::int32_t sum = 0;
  for (std::size_t c = 0; c < codes.size(); c += 2) {
    sum += codes[c] * (2 * (row[c / 2] & 15) - 15);
    sum += codes[c + 1] * (2 * (row[c / 2] >> 4) - 15);
  }
  return sum;
}

}  // namespace pliant
