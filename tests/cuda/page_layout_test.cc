#include "backend/cuda/page_layout.h"

#include <gtest/gtest.h>

#include <vector>

namespace pliant::cuda {
namespace {

// Every (token, dim) has a nibble of its own, rows and scales fill a unit exactly, and units fill
// the page.
TEST(PageLayout, IsABijection) {
  for (const int d : {32, 64, 128, 256}) {
    for (const bool is_v : {false, true}) {
      std::vector<int> used(UnitStride(d), 0);
      for (int token = 0; token < kBlockTokens; ++token) {
        for (int dim = 0; dim < d; ++dim) {
          const int byte = is_v ? VByte(d, token, dim) : KByte(d, token, dim);
          ASSERT_GE(byte, 0);
          ASSERT_LT(byte, kBlockTokens * d / 2);
          const int bit = dim & 1 ? 2 : 1;
          ASSERT_EQ(used[byte] & bit, 0) << d << " " << token << " " << dim;
          used[byte] |= bit;
        }
        const int scale = ScaleByte(d, token);
        ASSERT_LE(scale + 2, UnitStride(d));
        ASSERT_EQ(used[scale], 0);
        used[scale] = used[scale + 1] = 3;
      }
      for (const int u : used) EXPECT_EQ(u, 3);
    }
    const KvGeometry geometry{.layers = 3, .kv_heads = 5, .head_dim = d};
    EXPECT_EQ(UnitOffset(5, d, 2, 4) + UnitStride(d), geometry.PageBytes());
    EXPECT_EQ(UnitStride(d) % 16, 0) << "bulk copies move multiples of 16 bytes";
  }
}

}  // namespace
}  // namespace pliant::cuda
