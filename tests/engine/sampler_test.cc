#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "support/rounds.h"

namespace pliant {
namespace {

std::vector<float> RandomLogits(int n, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(n);
  for (float& x : logits) x = normal(rng);
  return logits;
}

TokenId Take(Sampler& sampler, const std::vector<float>& logits) {
  return sampler.Sample(logits, static_cast<std::int64_t>(logits.size())).value().token;
}

// Share of draws that gave each token.
std::map<TokenId, double> Shares(SamplingParams params, const std::vector<float>& logits, int draws = 40000) {
  params.seed = 11;
  Sampler sampler(params, {}, 0);
  std::map<TokenId, double> shares;
  for (int i = 0; i < draws; ++i) shares[Take(sampler, logits)] += 1.0 / draws;
  return shares;
}

TEST(Sampler, GreedyTakesTheLargestAndTheLowestIdOfEquals) {
  SamplingParams params;
  params.temperature = 0;
  Sampler sampler(params, {}, 0);
  std::vector<float> logits = RandomLogits(1003, 1);
  logits[700] = logits[400] = 50;
  EXPECT_EQ(Take(sampler, logits), 400);
}

TEST(Sampler, PaddedRowsBeyondTheVocabularyAreNeverChosen) {
  SamplingParams params;
  params.temperature = 0;
  Sampler sampler(params, {}, 0);
  std::vector<float> logits = {1, 2, 99};
  EXPECT_EQ(sampler.Sample(logits, 2).value().token, 1);
}

TEST(Sampler, NonFiniteLogitsAreAnErrorNotATokenAndMasksAreFine) {  // known fault L1
  SamplingParams params;
  params.temperature = 0;
  Sampler sampler(params, {}, 0);
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for (const int at : {0, 17, 1002}) {
      std::vector<float> logits = RandomLogits(1003, 2);
      logits[at] = bad;
      EXPECT_EQ(sampler.Sample(logits, 1003).status().code(), StatusCode::kInternal);
    }
  }
  std::vector<float> masked(40, -std::numeric_limits<float>::infinity());
  EXPECT_FALSE(sampler.Sample(masked, 40).ok());
  masked[31] = -5;
  EXPECT_EQ(sampler.Sample(masked, 40).value().token, 31);
}

TEST(Sampler, FollowsTheSoftmax) {
  const std::vector<float> logits = {0, 1, 2, -1};
  const auto shares = Shares({}, logits);
  double total = 0;
  for (const float x : logits) total += std::exp(x);
  for (int id = 0; id < 4; ++id) EXPECT_NEAR(shares.at(id), std::exp(logits[id]) / total, 0.01);
  SamplingParams hot;
  hot.temperature = 2;
  EXPECT_NEAR(Shares(hot, logits).at(2), std::exp(1.0) / (1 + std::exp(.5) + std::exp(1.0) + std::exp(-.5)), 0.01);
}

TEST(Sampler, CutsByTopKTopPAndMinP) {
  const std::vector<float> logits = {std::log(.5f), std::log(.3f), std::log(.15f), std::log(.05f)};
  SamplingParams k;
  k.top_k = 2;
  EXPECT_EQ(Shares(k, logits).size(), 2u);
  EXPECT_NEAR(Shares(k, logits).at(1), .3 / .8, 0.01);
  SamplingParams p;
  p.top_p = .6f;  // .5 is not enough, .8 is
  EXPECT_EQ(Shares(p, logits).size(), 2u);
  p.top_p = 1e-9f;
  EXPECT_EQ(Shares(p, logits).size(), 1u);
  SamplingParams m;
  m.min_p = .25f;  // below .125 goes
  EXPECT_EQ(Shares(m, logits).size(), 3u);
}

TEST(Sampler, TopPSortsOnlyAsFarAsNeededAndStaysExact) {
  const std::vector<float> logits = RandomLogits(5000, 3);
  SamplingParams params;
  params.top_p = .9f;
  std::vector<std::pair<double, TokenId>> order;
  double total = 0;
  for (int i = 0; i < 5000; ++i) {
    order.push_back({-std::exp(static_cast<double>(logits[i])), i});
    total += std::exp(static_cast<double>(logits[i]));
  }
  std::sort(order.begin(), order.end());
  double kept = 0;
  std::map<TokenId, bool> allowed;
  for (const auto& [weight, id] : order) {
    if (kept >= .9 * total) break;
    kept -= weight;
    allowed[id] = true;
  }
  for (const auto& [id, share] : Shares(params, logits, Rounds(20000, 2000))) EXPECT_TRUE(allowed.count(id)) << id;
}

TEST(Sampler, SameSeedSameTokensWhateverElseHappens) {
  const std::vector<float> logits = RandomLogits(300, 4);
  SamplingParams params;
  params.seed = 42;
  Sampler a(params, {}, 1), b(params, {}, 2), other({}, {}, 3);
  bool differs = false;
  for (int i = 0; i < 50; ++i) {
    const TokenId token = Take(a, logits);
    EXPECT_EQ(token, Take(b, logits));
    differs |= token != Take(other, logits);
  }
  EXPECT_TRUE(differs);
}

TEST(Sampler, PenaltiesAndBias) {
  const std::vector<float> logits = {3, 2.9f, -1};
  SamplingParams params;
  params.temperature = 0;
  params.presence_penalty = .5f;
  Sampler presence(params, {}, 0);
  EXPECT_EQ(Take(presence, logits), 0);
  EXPECT_EQ(Take(presence, logits), 1);
  EXPECT_EQ(Take(presence, logits), 0);  // both were seen; presence does not grow

  params.presence_penalty = 0;
  params.repetition_penalty = 2;
  const std::vector<TokenId> prompt = {0, 0};
  Sampler repetition(params, prompt, 0);
  EXPECT_EQ(Take(repetition, logits), 1);

  params.repetition_penalty = 1;
  params.logit_bias = {{2, 100}, {12345, 100}};
  Sampler biased(params, {}, 0);
  EXPECT_EQ(Take(biased, logits), 2);

  params.logit_bias = {{0, -100}, {1, -100}, {2, -100}};
  Sampler banned(params, {}, 0);
  EXPECT_EQ(Take(banned, logits), 0);  // all equally banned: the order stays
  const std::vector<TokenId> forbidden = {0};
  banned.Forbid(forbidden);
  EXPECT_EQ(Take(banned, logits), 1);
}

TEST(Sampler, ExtremeTemperaturesStayFinite) {  // known fault D2
  const std::vector<float> logits = {1000, -1000, 999.9f};
  for (const float temperature : {1e-20f, 1e-4f, 2.0f, 1e6f}) {
    SamplingParams params;
    params.temperature = temperature;
    for (const auto& [id, share] : Shares(params, logits, 200)) EXPECT_TRUE(id >= 0 && id < 3);
  }
}

TEST(Sampler, LogprobsAreTheModelsOwn) {
  SamplingParams params;
  params.temperature = 0;
  params.top_logprobs = 2;
  params.logit_bias = {{2, 100}};
  Sampler sampler(params, {}, 0);
  const std::vector<float> logits = {1, 3, 0, 2};
  const TokenLogprob out = sampler.Sample(logits, 4).value();
  const double sum = std::exp(1) + std::exp(3) + 1 + std::exp(2);
  EXPECT_EQ(out.token, 2);
  EXPECT_NEAR(out.logprob, -std::log(sum), 1e-5);
  ASSERT_EQ(out.top.size(), 2u);
  EXPECT_EQ(out.top[0].first, 1);
  EXPECT_EQ(out.top[1].first, 3);
  EXPECT_NEAR(out.top[1].second, 2 - std::log(sum), 1e-5);
}

}  // namespace
}  // namespace pliant
