// A list of who leaves next against asking everybody each time.
#include "backend/leaving_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

namespace pliant {
namespace {

using Token = LeavingOrder::Token;

/// Kept tokens by slot, and those that could come.
struct Kept {
  std::vector<float> score, weight;
  std::vector<std::int32_t> token;
  std::vector<Token> away;

  UseTable Table() const {
    return {.tokens = static_cast<int>(token.size()),
            .score = score.data(),
            .weight = weight.data(),
            .token = token.data(),
            .never_before = 4};
  }
  /// (use, token), slot of everybody who may leave, in order.
  std::vector<std::pair<std::uint64_t, std::int32_t>> InOrder(std::int32_t from,
                                                              std::int32_t to) const {
    std::vector<std::pair<std::uint64_t, std::int32_t>> all;
    for (std::size_t s = 0; s < token.size(); ++s) {
      const std::uint64_t key = LeavingOrder::KeyOf(score[s], weight[s], token[s]);
      if (token[s] < 4 || (token[s] >= from && token[s] < to)) continue;
      if (key >> 32 >= std::uint64_t{kEndlessUse}) continue;
      all.emplace_back(key, static_cast<std::int32_t>(s));
    }
    std::sort(all.begin(), all.end());
    return all;
  }
};

/// Numbers of which many are equal and some nothing.
float Coarse(std::mt19937& random) {
  return std::ldexp(static_cast<float>(random() % 4), -static_cast<int>(random() % 12));
}

Kept MakeKept(int slots, int away, std::mt19937& random) {
  Kept kept;
  std::vector<std::int32_t> tokens(slots + away);
  for (int t = 0; t < slots + away; ++t) tokens[t] = t;
  std::shuffle(tokens.begin() + 4, tokens.end(), random);
  for (int s = 0; s < slots; ++s) {
    kept.token.push_back(tokens[s]);
    kept.score.push_back(Coarse(random));
    kept.weight.push_back(Coarse(random));
  }
  for (int t = slots; t < slots + away; ++t)
    kept.away.push_back({.token = tokens[t], .score = Coarse(random), .weight = Coarse(random)});
  return kept;
}

/// One exchange both ways; how many times the list had to be made.
int Exchange(Kept& kept, LeavingOrder& order, std::mt19937& random) {
  std::shuffle(kept.away.begin(), kept.away.end(), random);
  const std::size_t wanted =
      std::min<std::size_t>(random() % (LeavingOrder::kMostComing + 1), kept.away.size());
  const std::int32_t from = static_cast<std::int32_t>(random() % 40) * 16;
  const auto expected = kept.InOrder(from, from + 16);
  std::vector<Token> coming(kept.away.begin(), kept.away.begin() + wanted);
  Token leaving[LeavingOrder::kMostComing];
  int listed = 0;
  int count =
      order.known() ? order.Exchange(coming, from, from + 16, kept.score.data(), leaving) : -1;
  if (count < 0) {
    ++listed;
    order.List(kept.Table(), ScalarKeyKernel());
    count = order.Exchange(coming, from, from + 16, kept.score.data(), leaving);
  }
  EXPECT_EQ(static_cast<std::size_t>(count), std::min(wanted, expected.size()));
  for (int i = 0; i < count; ++i) {
    const auto slot = static_cast<std::size_t>(expected[i].second);
    EXPECT_EQ(leaving[i].slot, expected[i].second) << i;
    EXPECT_EQ(leaving[i].token, kept.token[slot]);
    EXPECT_EQ(leaving[i].score, kept.score[slot]);
    EXPECT_EQ(leaving[i].weight, kept.weight[slot]);
    EXPECT_EQ(coming[i].slot, leaving[i].slot);
    kept.away[i] = leaving[i];
    kept.token[slot] = coming[i].token;
    kept.score[slot] = coming[i].score;
    kept.weight[slot] = coming[i].weight;
  }
  return listed;
}

TEST(LeavingOrder, ChoosesAsIfEverybodyWereAsked) {
  for (const int slots : {5, 20, 96, 97, 352}) {
    std::mt19937 random(slots);
    Kept kept = MakeKept(slots, 400, random);
    LeavingOrder order;
    int listed = 0;
    constexpr int kExchanges = 400;
    for (int i = 0; i < kExchanges && !testing::Test::HasFailure(); ++i) {
      SCOPED_TRACE(testing::Message() << slots << " slots, exchange " << i);
      listed += Exchange(kept, order, random);
      // Everybody gets something now and then, some much.
      for (float& score : kept.score) {
        if (random() % 3 == 0) score += Coarse(random) * (random() % 20 == 0 ? 8.0f : 0.01f);
      }
      if (i % 50 == 49) {
        for (float& weight : kept.weight) weight = std::min(weight, Coarse(random) + 0.01f);
        order.Forget();
      }
      if (i == 300) kept.score[kept.score.size() / 2] = INFINITY;  // stays from now on
    }
    EXPECT_LT(listed, kExchanges / 2) << slots;
  }
}

TEST(LeavingOrder, GoesOnBehindABlockThatWasDropped) {
  std::mt19937 random(8);
  for (int round = 0; round < 50 && !testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE(round);
    Kept kept = MakeKept(160 + kBlockTokens, 300, random);
    LeavingOrder order;
    order.List(kept.Table(), ScalarKeyKernel());
    const auto expected = kept.InOrder(0, 0);
    Token least[kBlockTokens];
    order.TakeLeast(kept.score.data(), least);
    const int whole = 160;  // the first place of the block
    std::uint32_t gone = 0;
    for (int i = 0; i < kBlockTokens; ++i) {
      ASSERT_EQ(least[i].slot, expected[i].second) << i;
      EXPECT_EQ(least[i].token, kept.token[least[i].slot]);
      if (least[i].slot >= whole) gone |= 1u << (least[i].slot - whole);
      kept.away.push_back(least[i]);
    }
    std::vector<std::int32_t> slots(kBlockTokens, -1);
    int next = 0;
    for (int t = 0; t < kBlockTokens; ++t) {
      if ((gone >> t & 1) != 0) continue;
      while (least[next].slot >= whole) ++next;
      const std::int32_t slot = least[next++].slot;
      slots[t] = slot;
      kept.token[slot] = kept.token[whole + t];
      kept.score[slot] = kept.score[whole + t];
      kept.weight[slot] = kept.weight[whole + t];
    }
    kept.token.resize(whole);
    kept.score.resize(whole);
    kept.weight.resize(whole);
    order.Place(whole, slots);
    EXPECT_TRUE(order.known());
    for (int i = 0; i < 3; ++i) Exchange(kept, order, random);
  }
}

}  // namespace
}  // namespace pliant
