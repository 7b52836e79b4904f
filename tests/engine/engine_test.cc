#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "engine/support/test_model.h"
#include "support/rounds.h"

namespace pliant {
namespace {

constexpr std::size_t kProblems = Rounds(8, 4);  // of SmallProblems

std::vector<GenerateRequest> ProblemRequests(const TestModel& model, std::int64_t max_tokens) {
  std::vector<GenerateRequest> requests;
  for (std::size_t i = 0; i < kProblems; ++i) {
    requests.push_back(TestModel::Greedy(model.Problem(SmallProblems()[i].first), max_tokens));
  }
  return requests;
}

TestEngineOptions WithoutPrefixCache() {
  TestEngineOptions options;
  options.prefix_cache = false;
  return options;
}

TestEngineOptions WithBatchTokens(int tokens) {
  TestEngineOptions options;
  options.max_batch_tokens = tokens;
  return options;
}

/// A pool of 45 blocks: about two of the problems at full length.
TestEngineOptions TightPool(const TestModel& ample) {
  const EngineStats stats = ample.engine->Stats();
  TestEngineOptions options;
  options.kv_bytes = static_cast<std::uint64_t>(stats.kv_bytes_total / stats.pages_total) * 2 * kPlanes * 45;
  return options;
}

std::string FinalAnswer(const std::string& text) {
  const std::size_t at = text.find("</think>");
  if (at == std::string::npos) return "";
  std::string answer = text.substr(at + 8);
  while (!answer.empty() && answer.front() == '\n') answer.erase(0, 1);
  return answer;
}

TEST(Engine, SolvesProblemsTogetherAndAlone) {
  TestModel model;
  const auto together = model.AskAll(ProblemRequests(model, 900));
  for (std::size_t i = 0; i < together.size(); ++i) {
    EXPECT_EQ(FinalAnswer(together[i].text), SmallProblems()[i].second);
    EXPECT_EQ(together[i].finish, FinishReason::kStop);
  }
  TestModel fresh(WithoutPrefixCache());
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(fresh.Ask(ProblemRequests(fresh, 900)[i]).tokens, together[i].tokens);
  }
  ExpectIdle(*model.engine);
}

TEST(Engine, ChunkedPrefillAndPrefixCacheGiveTheSameTokens) {  // known faults B2, B3
  TestModel cached(WithBatchTokens(48)), fresh(WithoutPrefixCache());
  const std::vector<TokenId> base = fresh.Problem(SmallProblems()[0].first);
  ASSERT_GT(base.size(), 100u);
  for (const std::size_t cut : {31u, 32u, 33u, 63u, 64u, 65u, 96u, 1u}) {
    std::vector<TokenId> prompt(base.begin(), base.begin() + cut);
    const auto plain = [&](std::vector<TokenId> ids) { return TestModel::Greedy(std::move(ids), Rounds(24, 8)); };
    for (int again = 0; again < 2; ++again) {
      EXPECT_EQ(cached.Ask(plain(prompt)).tokens, fresh.Ask(plain(prompt)).tokens) << cut;
    }
    prompt.push_back('7');  // equal up to `cut`, then different
    prompt.push_back('=');
    EXPECT_EQ(cached.Ask(plain(prompt)).tokens, fresh.Ask(plain(prompt)).tokens) << cut;
  }
  EXPECT_GT(StatsNow(*cached.engine).prefix_hit_tokens, 0);
  EXPECT_EQ(StatsNow(*fresh.engine).prefix_hit_tokens, 0);
}

TEST(Engine, APoolTooSmallForAllPreemptsAndStillAnswersRight) {
  TestModel ample;
  const auto expected = ample.AskAll(ProblemRequests(ample, 400));
  TestModel tight(TightPool(ample));
  const auto answers = tight.AskAll(ProblemRequests(tight, 400));
  for (std::size_t i = 0; i < answers.size(); ++i) {
    EXPECT_TRUE(answers[i].error.ok()) << answers[i].error.ToString();
    EXPECT_EQ(answers[i].tokens, expected[i].tokens) << i;
  }
  EXPECT_GT(StatsNow(*tight.engine).preemptions, 0);
  ExpectIdle(*tight.engine);
}

TEST(Engine, PressureWithAFloorOf16BitsChangesNoToken) {
  TestModel ample;
  const auto expected = ample.AskAll(ProblemRequests(ample, 300));
  TestEngineOptions options = TightPool(ample);
  options.policy = KvPolicy::kPliant;
  options.store.kind = StoreSpec::Kind::kRam;
  options.store.bytes = 64u << 20;
  options.floor_bits = 8;
  TestModel tight(options);
  std::vector<GenerateRequest> requests = ProblemRequests(tight, 300);
  for (GenerateRequest& request : requests) request.kv.min_bits = 16;
  const auto answers = tight.AskAll(std::move(requests));
  for (std::size_t i = 0; i < answers.size(); ++i) {
    EXPECT_TRUE(answers[i].error.ok()) << answers[i].error.ToString();
    EXPECT_EQ(answers[i].tokens, expected[i].tokens) << i;
    EXPECT_EQ(answers[i].usage.tokens_below_16_bits, 0);
  }
  ExpectIdle(*tight.engine);
}

TEST(Engine, CancelFreesEverythingAtAnyTime) {  // known faults B1, H1
  TestModel model(WithBatchTokens(32));
  const std::vector<TokenId> prompt = model.Problem(SmallProblems()[1].first);
  TestModel fresh(WithoutPrefixCache());
  const auto expected = fresh.Ask(TestModel::Greedy(prompt, 40)).tokens;
  std::mt19937 rng(5);
  for (int round = 0; round < 20; ++round) {
    Collector collector;
    const RequestId id = model.engine->Submit(TestModel::Greedy(prompt, 200), collector.Sink()).value();
    std::this_thread::sleep_for(std::chrono::microseconds(rng() % 20000));
    model.engine->Cancel(id);
    const auto answer = collector.Wait(id);
    EXPECT_TRUE(answer.finish == FinishReason::kCancelled);
    if (round % 5 == 0) {
      EXPECT_EQ(model.Ask(TestModel::Greedy(prompt, 40)).tokens, expected);
    }
  }
  ExpectIdle(*model.engine);
  model.engine->Cancel(RequestId(123456));  // unknown: ignored
}

TEST(Engine, RefusesAtTheDoorWithBothNumbers) {
  TestEngineOptions options;
  options.max_running = 1;
  options.max_waiting = 2;
  TestModel model(options);
  const auto none = [](RequestId, TokenEvent) { FAIL() << "a refused request gets no event"; };
  EXPECT_EQ(model.engine->Submit(TestModel::Greedy({}, 5), none).status().code(), StatusCode::kInvalidArgument);
  const Status too_long = model.engine->Submit(TestModel::Greedy(std::vector<TokenId>(4000, 65), 500), none).status();
  EXPECT_EQ(too_long.code(), StatusCode::kTooLarge);
  EXPECT_NE(too_long.message().find("4000"), std::string::npos);
  EXPECT_NE(too_long.message().find("4096"), std::string::npos);

  Collector collector;  // one runs, two wait, the rest is refused
  std::vector<RequestId> taken;
  int refused = 0;
  for (int i = 0; i < 10; ++i) {
    const Result<RequestId> id = model.engine->Submit(TestModel::Greedy({65, 66, 67}, 300), collector.Sink());
    if (id.ok()) {
      taken.push_back(*id);
    } else {
      EXPECT_EQ(id.status().code(), StatusCode::kResourceExhausted);
      ++refused;
    }
  }
  EXPECT_GE(refused, 6);
  for (const RequestId id : taken) model.engine->Cancel(id);
  for (const RequestId id : taken) collector.Wait(id);
  ExpectIdle(*model.engine);
  EXPECT_EQ(StatsNow(*model.engine).requests_rejected, refused);
}

TEST(Engine, LengthStopStringsStopTokensAndMinTokens) {
  TestModel model;
  const std::vector<TokenId> prompt = model.Problem(SmallProblems()[2].first);
  const auto plain = model.Ask(TestModel::Greedy(prompt, 30));
  EXPECT_EQ(plain.finish, FinishReason::kLength);
  EXPECT_EQ(plain.tokens.size(), 30u);
  EXPECT_EQ(plain.usage.completion_tokens, 30);
  EXPECT_EQ(plain.usage.prompt_tokens, static_cast<std::int64_t>(prompt.size()));

  GenerateRequest with_stop = TestModel::Greedy(prompt, 30);
  with_stop.stop.strings = {plain.text.substr(10, 3)};
  const auto stopped = model.Ask(with_stop);
  EXPECT_EQ(stopped.finish, FinishReason::kStop);
  EXPECT_EQ(stopped.text, plain.text.substr(0, plain.text.find(with_stop.stop.strings[0])));
  EXPECT_EQ(stopped.stop_match, with_stop.stop.strings[0]);

  GenerateRequest with_token = TestModel::Greedy(prompt, 30);
  with_token.stop.token_ids = {plain.tokens[5]};
  const auto first = std::find(plain.tokens.begin(), plain.tokens.end(), plain.tokens[5]) - plain.tokens.begin();
  EXPECT_EQ(static_cast<std::ptrdiff_t>(model.Ask(with_token).tokens.size()), first);
  with_token.stop.min_tokens = 12;
  EXPECT_GE(model.Ask(with_token).tokens.size(), 12u);
}

TEST(Engine, SeedsDecideSampledTokensWhateverTheBatch) {
  TestModel model;
  GenerateRequest request = TestModel::Greedy(model.Encode("a1=12;b2=a1+a1;?=b2"), 40);
  request.sampling.temperature = 20;  // the model is very sure of itself
  request.sampling.seed = 99;
  request.stop.ignore_eos = true;
  const auto alone = model.Ask(request);
  std::vector<GenerateRequest> many(6, request);
  many[1].sampling.seed = 100;
  many[4].sampling.temperature = 0;
  const auto together = model.AskAll(many);
  EXPECT_EQ(together[0].tokens, alone.tokens);
  EXPECT_EQ(together[5].tokens, alone.tokens);
  EXPECT_NE(together[1].tokens, alone.tokens);
}

TEST(Engine, TokensTakenByTheBackendAreTheSamplersOwn) {
  TestEngineOptions options;
  options.backend_samples = true;
  TestModel host, device(options);
  const auto requests = [](const TestModel& model) {
    std::vector<GenerateRequest> list;
    for (int i = 0; i < 8; ++i) {
      GenerateRequest request = TestModel::Greedy(model.Problem(SmallProblems()[i].first), 60);
      request.sampling.temperature = i == 0 ? 0.f : 1.3f;
      request.sampling.seed = 100 + i;
      if (i % 3 == 1) request.sampling.top_k = 5;
      if (i % 2 == 1) request.sampling.top_p = 0.8f;
      if (i == 4) request.sampling.min_p = 0.1f;
      if (i == 5) request.sampling.top_logprobs = 3;
      if (i == 7) request.sampling.top_logprobs = 0;
      if (i == 6) request.sampling.frequency_penalty = 0.5f;
      if (i == 2) request.sampling.repetition_penalty = 1.3f;
      if (i == 3) request.sampling.logit_bias = {{70, 4.f}, {1 << 30, 9.f}};
      if (i == 7) request.stop.min_tokens = 20;
      list.push_back(std::move(request));
    }
    return list;
  };
  const auto want = host.AskAll(requests(host)), got = device.AskAll(requests(device));
  std::size_t tokens = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    ASSERT_EQ(got[i].logprobs.size(), want[i].logprobs.size());
    for (std::size_t t = 0; t < want[i].logprobs.size(); ++t) {
      EXPECT_EQ(got[i].logprobs[t].token, want[i].logprobs[t].token);
      EXPECT_EQ(got[i].logprobs[t].logprob, want[i].logprobs[t].logprob);
      EXPECT_EQ(got[i].logprobs[t].top, want[i].logprobs[t].top);
    }
    tokens += got[i].tokens.size();
  }
  ExpectIdle(*device.engine);
  EXPECT_GE(device.sampling->taken, tokens);
}

TEST(Engine, ReportsTheMemoryMapWhileRequestsRun) {
  TestModel model;
  Collector collector;
  GenerateRequest endless = TestModel::Greedy(std::vector<TokenId>(100, 65), 2000);
  endless.stop.ignore_eos = true;
  const RequestId id = model.engine->Submit(endless, collector.Sink()).value();
  collector.WaitTokens(id, 3);
  const auto report = nlohmann::json::parse(model.engine->KvReportJson().value());
  ASSERT_EQ(report["requests"].size(), 1u);
  EXPECT_EQ(report["requests"][0]["prompt_tokens"], 100);
  EXPECT_TRUE(report["requests"][0]["map"].get<std::string>().starts_with("16/16*"));
  EXPECT_LT(report["pages"]["free"].get<int>(), report["pages"]["total"].get<int>());
  EXPECT_EQ(report["reasons"]["admit"], 1) << report["reasons"].dump();
  model.engine->Cancel(id);
  collector.Wait(id);
  ExpectIdle(*model.engine);
  EXPECT_TRUE(nlohmann::json::parse(model.engine->KvReportJson().value())["requests"].empty());
}

TEST(Engine, DrainEndsWhatRunsAndTakesNothingNew) {
  TestModel model;
  Collector collector;
  const RequestId quick = model.engine->Submit(TestModel::Greedy({65, 66}, 5), collector.Sink()).value();
  EXPECT_TRUE(model.engine->Drain(60));
  EXPECT_TRUE(collector.Wait(quick).error.ok());
  EXPECT_EQ(model.engine->Submit(TestModel::Greedy({65}, 5), collector.Sink()).status().code(), StatusCode::kUnavailable);

  TestModel other;
  GenerateRequest endless = TestModel::Greedy({65, 66}, 4000);
  endless.stop.ignore_eos = true;
  Collector late;
  const RequestId slow = other.engine->Submit(endless, late.Sink()).value();
  EXPECT_FALSE(other.engine->Drain(0.05));
  EXPECT_EQ(late.Wait(slow).error.code(), StatusCode::kUnavailable);
  ExpectIdle(*other.engine);
}

}  // namespace
}  // namespace pliant
