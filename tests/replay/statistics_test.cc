// Percentiles, and the measures of one distribution against another.
#include "replay/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "replay/cache_state.h"
#include "replay/context_quality.h"

namespace pliant {
namespace {

TEST(Statistics, Percentiles) {
  EXPECT_EQ(Percentile({}, 0.5), 0);
  EXPECT_EQ(Percentile({7}, 0.99), 7);
  const std::vector<double> values = {1, 2, 3, 4, 5};
  EXPECT_EQ(Percentile(values, 0), 1);
  EXPECT_EQ(Percentile(values, 0.5), 3);
  EXPECT_EQ(Percentile(values, 1), 5);
  EXPECT_DOUBLE_EQ(Percentile(values, 0.9), 4.6);
  EXPECT_DOUBLE_EQ(Percentile({1, 2}, 0.25), 1.25);
}

TEST(Statistics, Describe) {
  const Distribution none = Describe({});
  EXPECT_EQ(none.count, 0u);
  EXPECT_EQ(none.mean, 0);
  std::vector<double> values;
  for (int i = 100; i >= 0; --i) values.push_back(i);
  const Distribution all = Describe(values);
  EXPECT_EQ(all.count, 101u);
  EXPECT_DOUBLE_EQ(all.mean, 50);
  EXPECT_DOUBLE_EQ(all.p50, 50);
  EXPECT_DOUBLE_EQ(all.p90, 90);
  EXPECT_DOUBLE_EQ(all.p99, 99);
  EXPECT_EQ(all.max, 100);
}

TEST(Divergence, ByHand) {
  // p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = 1/2 ln 2 - 1/4 ln 2. Logits may be shifted
  // freely.
  const float ln2 = std::log(2.0f);
  const std::vector<float> p = {ln2 + 5, 5, 5}, q = {-3, ln2 - 3, -3};
  const Divergence divergence = Compare(p, q);
  EXPECT_NEAR(divergence.kl, 0.25 * std::log(2.0), 1e-6);
  EXPECT_FALSE(divergence.same_top);
  EXPECT_TRUE(Compare(p, p).same_top);
  EXPECT_EQ(Compare(p, p).kl, 0);
  EXPECT_NEAR(NegativeLogLikelihood(p, 0), std::log(2.0), 1e-6);
  EXPECT_NEAR(NegativeLogLikelihood(p, 2), std::log(4.0), 1e-6);
  const std::vector<float> far = {1000, -1000, 0};
  EXPECT_TRUE(std::isfinite(Compare(far, p).kl));
  EXPECT_NEAR(NegativeLogLikelihood(far, 1), 2000, 1e-3);
}

TEST(CacheState, Words) {
  EXPECT_EQ(ParseCacheState("8/4").value(), (CacheState{2, 1}));
  EXPECT_EQ(CacheStateName(CacheState{3, 2}), "12/8");
  const auto states = ParseCacheStates("16/16,4/4");
  ASSERT_TRUE(states.ok());
  EXPECT_EQ(states->size(), 2u);
  EXPECT_TRUE((*states)[0].whole());
  for (const char* wrong :
       {"", "8", "8/", "/8", "8/7", "0/8", "8/4/4", "16/16,", ",16/16", "8 /8", "-8/8"}) {
    EXPECT_FALSE(ParseCacheStates(wrong).ok()) << wrong;
  }
}

TEST(CacheState, ProtectedTokensKeepTheirBlocksWhole) {
  const Protection protection{.sink = 40, .recent_base = 64, .recent_deep = 100};
  const CacheState base{2, 2}, deep{2, 1}, whole;
  EXPECT_FALSE(Degraded(base, protection, 0, 1000));  // the sink ends in block 1
  EXPECT_FALSE(Degraded(base, protection, 1, 1000));
  EXPECT_TRUE(Degraded(base, protection, 2, 1000));
  EXPECT_FALSE(Degraded(whole, protection, 2, 1000));
  // Block 5 holds tokens 160 .. 191.
  EXPECT_FALSE(Degraded(base, protection, 5, 192 + 63));
  EXPECT_TRUE(Degraded(base, protection, 5, 192 + 64));
  EXPECT_FALSE(Degraded(deep, protection, 5, 192 + 99));
  EXPECT_TRUE(Degraded(deep, protection, 5, 192 + 100));
}

TEST(CacheState, ViewsDropTheLowPlanes) {
  const std::vector<BlockView> blocks = OwnBlocks(16, 2);
  EXPECT_EQ(blocks[1].k[0], PageId(24));
  EXPECT_EQ(blocks[1].v[3], PageId(31));
  const BlockView view = ViewAt(blocks[0], {2, 1});
  EXPECT_EQ(view.k[1], blocks[0].k[1]);
  EXPECT_FALSE(view.k[2].valid());
  EXPECT_EQ(view.v[0], blocks[0].v[0]);
  EXPECT_FALSE(view.v[1].valid());
  EXPECT_EQ(ViewAt(blocks[0], {4, 4}), blocks[0]);
}

}  // namespace
}  // namespace pliant
