// What a history keeps, drops and brings back, without pages: tables and arithmetic.
#include "backend/retained_history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

namespace pliant {
namespace {

constexpr KvGeometry kGeometry{.layers = 2, .kv_heads = 2, .head_dim = 64};
constexpr int kHeads = 4;

class NoSource final : public RowSource {
 public:
  PlanePlace Find(std::int32_t, bool, int, int, std::span<std::byte>) override { return {}; }
};
RetainedHistory Make(RetentionOptions options = {}) {
  return RetainedHistory(kGeometry, kHeads, options, std::make_shared<NoSource>());
}

/// Keys of `blocks` random blocks, except that each token in `twins` has the key of its partner.
void Note(RetainedHistory& history, int blocks,
          const std::vector<std::pair<int, int>>& twins = {}) {
  history.Reserve(std::int64_t{blocks} * kBlockTokens);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const std::size_t block = static_cast<std::size_t>(kBlockTokens) * kGeometry.head_dim;
  std::vector<std::vector<float>> keys(history.units());
  for (auto& unit : keys) {
    unit.resize(block * blocks);
    for (float& x : unit) x = normal(random);
    for (const auto& [older, later] : twins) {
      std::copy_n(unit.begin() + std::ptrdiff_t{later} * kGeometry.head_dim, kGeometry.head_dim,
                  unit.begin() + std::ptrdiff_t{older} * kGeometry.head_dim);
    }
  }
  for (int unit = 0; unit < history.units(); ++unit) history.AddToMean(unit, keys[unit]);
  for (int b = 0; b < blocks; ++b) {
    for (int unit = 0; unit < history.units(); ++unit)
      history.NoteKeys(unit, std::span(keys[unit]).subspan(block * b, block));
    history.EndNote();
  }
}

/// Every unit looks at the tokens, all of which are whole, with these shares.
void Look(RetainedHistory& history, const std::vector<float>& shares) {
  for (int unit = 0; unit < history.units(); ++unit) history.AddScores(unit, shares);
}

std::vector<RetainedHistory::Move> DropAll(RetainedHistory& history, bool into_new) {
  std::vector<RetainedHistory::Move> moves;
  for (int unit = 0; unit < history.units(); ++unit) {
    if (into_new) {
      history.DropIntoNewBlock(unit, moves);
    } else {
      history.Drop(unit, moves);
    }
  }
  if (into_new) {
    history.EndDropIntoNewBlock();
  } else {
    history.EndDrop();
  }
  return moves;  // of the last unit
}

/// Slots, bits and counters tell the same.
void ExpectSound(const RetainedHistory& history) {
  std::int64_t kept = 0;
  for (int unit = 0; unit < history.units(); ++unit) {
    const auto tokens = history.KeptTokens(unit);
    EXPECT_EQ(tokens.size(), static_cast<std::size_t>(history.kept_blocks()) * kBlockTokens);
    const std::set<std::int32_t> once(tokens.begin(), tokens.end());
    EXPECT_EQ(once.size(), tokens.size()) << "a token is kept twice";
    for (std::int32_t t = 0; t < history.frontier() * kBlockTokens; ++t) {
      const bool bit = (history.Kept(unit, t / kBlockTokens) >> (t % kBlockTokens) & 1) != 0;
      EXPECT_EQ(bit, once.contains(t)) << t;
    }
    kept += static_cast<std::int64_t>(tokens.size());
  }
  EXPECT_EQ(history.dropped_tokens(),
            std::int64_t{history.frontier()} * kBlockTokens * history.units() - kept);
}

TEST(RetainedHistory, KeepsWhatWasLookedAtAndTheFirstTokens) {
  RetainedHistory history = Make({.redundancy = 0});
  Note(history, 3);
  std::vector<float> shares(96);
  for (int t = 0; t < 96; ++t) shares[t] = t % 2 == 0 ? 1.0f + static_cast<float>(t) : 0.001f;
  Look(history, shares);
  EXPECT_EQ(DropAll(history, true).size(), 32u);
  ExpectSound(history);
  EXPECT_EQ(history.dropped_tokens(), 0);
  const auto moves = DropAll(history, false);
  ExpectSound(history);
  for (int unit = 0; unit < history.units(); ++unit) {
    for (const std::int32_t token : history.KeptTokens(unit))
      EXPECT_TRUE(token < 4 || token % 2 == 0) << token;
    const auto kept = history.KeptTokens(unit);
    for (const std::int32_t sink : {0, 1, 2, 3}) EXPECT_TRUE(std::ranges::count(kept, sink) == 1);
  }
  // A move names where the token now is.
  const auto kept = history.KeptTokens(history.units() - 1);
  for (const auto& move : moves) EXPECT_EQ(kept[move.slot], move.token);
  // 64 tokens for 32 places: the 4 first, and of the even ones the 28 that were looked at most.
  EXPECT_EQ(*std::ranges::min_element(kept.begin(), kept.end(), {},
                                      [](std::int32_t t) { return t < 4 ? 1000 : t; }),
            64 - 2 * 28);
}

TEST(RetainedHistory, OfEquallyUsefulTokensTheOlderLeave) {
  RetainedHistory history = Make({.sink_tokens = 2, .redundancy = 0});
  Note(history, 4);
  std::vector<float> shares(128, 0.25f);
  shares[40] = shares[45] = 1;
  shares[70] = 0;
  Look(history, shares);
  DropAll(history, true);
  DropAll(history, false);  // of 0 .. 63 two may not leave and two are looked at more
  for (int unit = 0; unit < history.units(); ++unit) {
    for (int t = 0; t < 64; ++t) {
      const bool stays = t < 2 || t >= 34;
      EXPECT_EQ(std::ranges::count(history.KeptTokens(unit), t), stays ? 1 : 0) << t;
    }
  }
  DropAll(history, false);  // of what is left of them and 64 .. 95
  for (int unit = 0; unit < history.units(); ++unit) {
    for (int t = 0; t < 96; ++t) {
      const bool stays = t < 2 || t == 40 || t == 45 || (t >= 67 && t != 70);
      EXPECT_EQ(std::ranges::count(history.KeptTokens(unit), t), stays ? 1 : 0) << t;
    }
  }
}

TEST(RetainedHistory, ARepeatedKeyIsDroppedBeforeALonelyOne) {
  RetainedHistory history = Make();
  // Tokens 8 .. 23 are repeated by tokens of the third block.
  std::vector<std::pair<int, int>> twins;
  for (int i = 0; i < 16; ++i) twins.emplace_back(8 + i, 70 + i);
  Note(history, 3, twins);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(history.weight(0, 8 + i), 0);
  EXPECT_GT(history.weight(0, 30), 0.006f) << "more than 8 of 64 signs differ";
  Look(history, std::vector<float>(96, 1.0f));
  DropAll(history, true);
  DropAll(history, false);
  for (int unit = 0; unit < history.units(); ++unit) {
    for (const std::int32_t token : history.KeptTokens(unit))
      EXPECT_TRUE(token < 8 || token > 23) << token;
  }
}

TEST(RetainedHistory, LikenessIsExactOnlyWithoutReturns) {
  for (const bool returns : {true, false}) {
    RetainedHistory history = Make({.returns = returns, .redundancy = 1});
    history.Reserve(2 * kBlockTokens);
    // All keys have the same signs around their mean, 0, but for the first half of each block.
    std::vector<float> keys(std::size_t{2} * kBlockTokens * kGeometry.head_dim);
    for (int t = 0; t < 2 * kBlockTokens; ++t) {
      for (int c = 0; c < kGeometry.head_dim; ++c) {
        float& x = keys[static_cast<std::size_t>(t) * kGeometry.head_dim + c];
        x = t % kBlockTokens < 16 ? -1.0f : 1.0f;
        if (t == 20 && c % 2 == 0) x = 0.125f;  // cosine to those behind: 0.79
      }
    }
    for (int b = 0; b < 2; ++b) {
      for (int unit = 0; unit < history.units(); ++unit)
        history.NoteKeys(unit, std::span(keys).subspan(b * keys.size() / 2, keys.size() / 2));
      history.EndNote();
    }
    const float cosine = (1 + 0.125f) / std::sqrt(2 * (1 + 0.125f * 0.125f));
    EXPECT_NEAR(history.weight(1, 20), returns ? 0 : 1 - cosine, returns ? 0 : 2e-3);
    EXPECT_NEAR(history.weight(1, 21), 0, 1e-6);
    EXPECT_EQ(history.weight(1, 63), 1) << "nothing is later";
  }
}

/// Against plain cosines, while tokens move into slots and out of them.
TEST(RetainedHistory, WeightsFollowKeptTokensThroughTheirSlots) {
  constexpr int kBlocks = 24;
  const std::size_t dim = kGeometry.head_dim, block = kBlockTokens * dim;
  RetainedHistory history = Make({.returns = false, .redundancy = 2});
  history.Reserve(kBlocks * kBlockTokens);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> keys(history.units(), std::vector<float>(kBlocks * block));
  std::vector<std::vector<float>> likeness(history.units(),
                                           std::vector<float>(kBlocks * kBlockTokens));
  for (auto& unit : keys) {
    for (float& x : unit) x = normal(random);
    for (int t = 40; t < kBlocks * kBlockTokens; t += 3) {  // like an older one, more or less
      const std::size_t older = random() % t;
      const float part = static_cast<float>(random() % 100) / 100;
      for (std::size_t c = 0; c < dim; ++c)
        unit[t * dim + c] = (1 - part) * unit[t * dim + c] + part * unit[older * dim + c];
    }
  }
  std::vector<std::vector<double>> mean(history.units(), std::vector<double>(dim));
  for (int unit = 0; unit < history.units(); ++unit) {
    history.AddToMean(unit, std::span(keys[unit]).first(4 * block));
    for (std::size_t i = 0; i < 4 * block; ++i)
      mean[unit][i % dim] += keys[unit][i] / (4.0 * kBlockTokens);
  }
  const auto cosine = [&](int unit, int a, int b) {
    double ab = 0, aa = 0, bb = 0;
    for (std::size_t c = 0; c < dim; ++c) {
      const double x = keys[unit][a * dim + c] - mean[unit][c];
      const double y = keys[unit][b * dim + c] - mean[unit][c];
      ab += x * y;
      aa += x * x;
      bb += y * y;
    }
    return static_cast<float>(ab / std::sqrt(aa * bb));
  };
  for (int b = 0; b < kBlocks; ++b) {
    for (int unit = 0; unit < history.units(); ++unit) {
      history.NoteKeys(unit, std::span(keys[unit]).subspan(b * block, block));
      const auto older = [&](int token) {
        for (int t = std::max(b * kBlockTokens, token + 1); t < (b + 1) * kBlockTokens; ++t)
          likeness[unit][token] = std::max(likeness[unit][token], cosine(unit, token, t));
        const float expected = (1 - likeness[unit][token]) * (1 - likeness[unit][token]);
        EXPECT_NEAR(history.weight(unit, token), expected, 0.02) << token << " after block " << b;
      };
      for (const std::int32_t token : history.KeptTokens(unit)) older(token);
      for (int t = history.frontier() * kBlockTokens; t < (b + 1) * kBlockTokens; ++t) older(t);
    }
    history.EndNote();
    std::vector<float> shares(static_cast<std::size_t>(history.TakingPart(b + 1)) * kBlockTokens);
    for (float& share : shares) share = static_cast<float>(random() % 1000) * 1e-3f;
    Look(history, shares);
    if (b >= 4) DropAll(history, history.kept_blocks() < 6);
  }
  ExpectSound(history);
  EXPECT_GT(history.dropped_tokens(), 0);
}

TEST(RetainedHistory, TheMostWantedPageReturnsInPlaceOfTheLeastUsed) {
  RetainedHistory history = Make({.return_weight = 0.3f, .redundancy = 0});
  Note(history, 4);
  std::vector<float> shares(128, 0.5f);
  for (int t = 32; t < 64; ++t) shares[t] = 1.0f + static_cast<float>(t);
  Look(history, shares);
  DropAll(history, true);   // block 0 is kept ...
  DropAll(history, false);  // ... and leaves for block 1, but for the first tokens
  EXPECT_EQ(history.Wanted(1, std::vector<float>{0.4f, 0.4f, 0, 0}), -1) << "0.4 / 1.4 is below";
  const std::vector<float> masses = {0.5f, 3.0f, 0, 0};
  ASSERT_EQ(history.Wanted(1, masses), 1);
  std::vector<RetainedHistory::Move> moves;
  history.Return(1, 1, moves);
  EXPECT_EQ(moves.size(), 16u);
  ExpectSound(history);
  const auto kept = history.KeptTokens(1);
  for (int t = 16; t < 32; ++t) EXPECT_EQ(std::ranges::count(kept, t), 1);
  for (int t = 0; t < 4; ++t) EXPECT_EQ(std::ranges::count(kept, t), 1) << "a first token left";
  for (int t = 48; t < 64; ++t) EXPECT_EQ(std::ranges::count(kept, t), t >= 52 ? 1 : 0) << t;
  EXPECT_EQ(history.returned_pages(), 1);
  EXPECT_EQ(history.returned_tokens(), 16);
  // Other units go their own way, and a page that cannot be read is not asked for again.
  EXPECT_EQ(history.Wanted(2, masses), 1);
  history.Lose(2, 1);
  EXPECT_EQ(history.Wanted(2, masses), 0);
  EXPECT_EQ(history.lost_pages(), 1);
}

TEST(RetainedHistory, DivergenceRisesWhenQueriesTurn) {
  RetainedHistory history = Make({.query_means = true});
  EXPECT_EQ(history.QuerySignal(), 0);
  std::vector<float> east(64), north(64);
  east[0] = north[1] = 1;
  const auto ask = [&](const std::vector<float>& query) {
    for (int layer = 0; layer < kGeometry.layers; ++layer) {
      for (int head = 0; head < kHeads; ++head) history.NoteQuery(layer, head, query.data());
    }
  };
  for (int i = 0; i < 200; ++i) ask(east);
  EXPECT_NEAR(history.QuerySignal(), 0, 1e-6);
  // After n turned queries a mean over w steps has turned by 1 - (1 - 1/w)^n.
  for (int i = 0; i < 8; ++i) ask(north);
  const double quick = std::pow(1 - 1 / 16.0, 8), slow = std::pow(1 - 1 / 64.0, 8);
  const double angle = std::atan2(1 - quick, quick) - std::atan2(1 - slow, slow);
  EXPECT_NEAR(history.QuerySignal(), 1 - std::cos(angle), 1e-4);
}

TEST(RetainedHistory, FittedWeightsTellWhereQueriesPoint) {
  // Of one head the short mean counts along x, of another the long one against y.
  const std::size_t size = std::size_t{kHeads} * kGeometry.layers * kGeometry.head_dim;
  GrowthWeights weights{
      .layers = kGeometry.layers, .heads = kHeads, .head_dim = kGeometry.head_dim};
  weights.short_mean.resize(size);
  weights.long_mean.resize(size);
  weights.bias = -1;
  const std::size_t one = std::size_t{kGeometry.head_dim} * (kHeads + 1), other = 0;
  weights.short_mean[one] = 3;
  weights.long_mean[other + 1] = -5;
  RetainedHistory history =
      Make({.query_means = true, .growth_weights = std::make_shared<const GrowthWeights>(weights)});
  EXPECT_EQ(history.QuerySignal(), 0) << "no query has been seen";
  const auto chance = [](double z) { return 1 / (1 + std::exp(-z)); };
  std::vector<float> east(64), north(64);
  east[0] = 8;  // lengths do not count
  north[1] = 0.125f;
  const auto ask = [&](const std::vector<float>& query) {
    for (int layer = 0; layer < kGeometry.layers; ++layer) {
      for (int head = 0; head < kHeads; ++head) history.NoteQuery(layer, head, query.data());
    }
  };
  ask(east);
  EXPECT_NEAR(history.QuerySignal(), chance(-1 + 3), 1e-6);
  for (int i = 0; i < 64; ++i) ask(north);
  const double quick = 8 * std::pow(1 - 1 / 16.0, 64), slow = 8 * std::pow(1 - 1 / 64.0, 64);
  const double quick_north = 0.125 * (1 - quick / 8), slow_north = 0.125 * (1 - slow / 8);
  EXPECT_NEAR(history.QuerySignal(),
              chance(-1 + 3 * quick / std::hypot(quick, quick_north) -
                     5 * slow_north / std::hypot(slow, slow_north)),
              1e-4);
}

TEST(RetainedHistory, StaysSoundOverRandomDropsAndReturns) {
  RetainedHistory history = Make();
  Note(history, 40);
  std::mt19937 random(11);
  for (int step = 0; step < 400; ++step) {
    const int whole = 40 - history.frontier();
    std::vector<float> shares(static_cast<std::size_t>(history.kept_blocks() + whole) *
                              kBlockTokens);
    for (float& share : shares) share = static_cast<float>(random() % 1000) * 1e-6f;
    Look(history, shares);
    if (step % 12 == 0 && whole > 1) {
      DropAll(history, history.kept_blocks() < 5);
    } else if (history.drops()) {
      const int unit = static_cast<int>(random() % history.units());
      std::vector<RetainedHistory::Move> moves;
      history.Return(unit, static_cast<std::int32_t>(random() % (history.frontier() * 2)), moves);
      for (const auto& move : moves) EXPECT_EQ(history.KeptTokens(unit)[move.slot], move.token);
    }
  }
  EXPECT_EQ(history.kept_blocks(), 5);
  EXPECT_GT(history.returned_tokens(), 1000);
  ExpectSound(history);
}

}  // namespace
}  // namespace pliant
