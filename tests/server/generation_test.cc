// A Generation without sockets: how what the engine says becomes an answer.
#include "server/generation.h"

#include <gtest/gtest.h>

#include "server/support/tiny_tokenizer.h"

namespace pliant {
namespace {

using testing::TinyTokenizer;

/// Hands the sinks to the test, which then is the engine.
class ManualEngine final : public Engine {
 public:
  Result<RequestId> Submit(GenerateRequest request, EventSink sink) override {
    if (sinks.size() >= room) return ResourceExhausted("full");
    requests.push_back(std::move(request));
    sinks.push_back(std::move(sink));
    return RequestId(sinks.size());
  }
  void Cancel(RequestId id) override { cancelled.push_back(id.value()); }
  EngineStats Stats() const override { return {}; }
  Result<std::string> KvReportJson() override { return Unimplemented("no cache"); }
  bool Drain(double) override { return true; }
  std::int64_t MaxContext() const override { return 100; }

  void Say(std::size_t which, const std::string& text,
           std::optional<FinishReason> finish = std::nullopt) {
    TokenEvent event;
    event.text = text;
    event.tokens.assign(text.size(), 1);
    for (char c : text) event.logprobs.push_back({static_cast<TokenId>(c), -1.0f, {}});
    event.finish = finish;
    event.usage.prompt_tokens = 3;
    event.usage.completion_tokens = 5;
    event.usage.cached_tokens = 2;
    event.usage.lowest_k_bits = which == 0 ? 16 : 8;
    event.usage.lowest_v_bits = which == 0 ? 16 : 4;
    event.usage.tokens_below_16_bits = static_cast<std::int64_t>(which);
    event.usage.dropped = 1;
    event.usage.held_pages = 2;
    event.usage.whole_pages = 8;
    sinks[which](RequestId(which + 1), std::move(event));
  }

  std::size_t room = 1000;
  std::vector<GenerateRequest> requests;
  std::vector<EventSink> sinks;
  std::vector<std::uint64_t> cancelled;
};

class GenerationTest : public ::testing::Test {
 protected:
  std::unique_ptr<Generation> Start(bool stream, int n, int prompts = 1, int top_logprobs = -1) {
    GenerationPlan plan;
    plan.header.id = "cmpl-1";
    plan.header.model = "m";
    plan.header.include_usage = stream;
    plan.stream = stream;
    plan.n = n;
    plan.base.sampling.top_logprobs = top_logprobs;
    for (int i = 0; i < prompts; ++i) plan.prompts.push_back({{1, 2, 3}, "", 10});
    auto started = Generation::Start(std::move(plan), &engine_, &tokenizer_, &metrics_,
                                     [this] { ++notified_; });
    if (!started.ok()) {
      refusal_ = started.status();
      return nullptr;
    }
    return std::move(started).value();
  }

  TinyTokenizer tokenizer_;
  ManualEngine engine_;
  ServerMetrics metrics_{"m"};
  int notified_ = 0;
  Status refusal_;
};

std::vector<Json> Events(const std::string& stream) {
  std::vector<Json> out;
  for (std::size_t at = 0; at < stream.size();) {
    const std::size_t end = stream.find("\n\n", at);
    const std::string data = stream.substr(at + 6, end - at - 6);
    if (data != "[DONE]") out.push_back(Json::parse(data));
    at = end + 2;
  }
  return out;
}

TEST_F(GenerationTest, WakesItsReaderOncePerFilling) {
  const auto generation = Start(true, 1);
  engine_.Say(0, "a");
  engine_.Say(0, "b");
  EXPECT_EQ(notified_, 1);
  generation->Advance();
  engine_.Say(0, "c");
  EXPECT_EQ(notified_, 2);
}

TEST_F(GenerationTest, EventsThatWaitedShareAChunk) {
  const auto generation = Start(true, 2, 1, 0);
  engine_.Say(0, "a");
  engine_.Say(1, "x");
  engine_.Say(0, "b");
  engine_.Say(1, "y");
  engine_.Say(0, "c", FinishReason::kStop);
  Generation::Progress progress = generation->Advance();
  EXPECT_FALSE(progress.done);
  std::vector<Json> events = Events(progress.stream);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["choices"][0]["text"], "abc");
  EXPECT_EQ(events[0]["choices"][0]["logprobs"]["text_offset"], Json::parse("[0,1,2]"));
  EXPECT_EQ(events[1]["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(events[2]["choices"][0]["text"], "xy");
  EXPECT_TRUE(generation->Advance().stream.empty());
  engine_.Say(1, "z", FinishReason::kLength);
  progress = generation->Advance();
  EXPECT_TRUE(progress.done);
  events = Events(progress.stream);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["choices"][0]["text"], "z");
  EXPECT_EQ(events[1]["choices"][0]["finish_reason"], "length");
  EXPECT_TRUE(events[2]["choices"].empty());
  EXPECT_TRUE(progress.stream.ends_with("data: [DONE]\n\n"));
}

TEST_F(GenerationTest, UsageAddsUp) {
  const auto generation = Start(false, 2, 2);
  for (std::size_t i = 0; i < 4; ++i) engine_.Say(i, "t", FinishReason::kStop);
  const Generation::Progress progress = generation->Advance();
  ASSERT_TRUE(progress.response);
  const Json usage = Json::parse(progress.response->body)["usage"];
  EXPECT_EQ(usage, Json::parse(R"({"prompt_tokens":6,"completion_tokens":20,"total_tokens":26,
    "prompt_tokens_details":{"cached_tokens":4},"kv":{"tokens_below_16_bits":6,"lowest_k_bits":8,
    "lowest_v_bits":4,"preemptions":0,"demotions":0,"restores":0,"dropped":4,"returned":0,
    "held_share":0.25}})"));
}

TEST_F(GenerationTest, LeavingCancelsWhatIsOpenAndNothingElse) {
  auto generation = Start(true, 3);
  engine_.Say(1, "t", FinishReason::kStop);
  generation->Advance();
  generation.reset();
  EXPECT_EQ(engine_.cancelled, (std::vector<std::uint64_t>{1, 3}));
  const int before = notified_;
  engine_.Say(0, "late");  // the engine has not seen the cancel yet
  EXPECT_EQ(notified_, before);
}

TEST_F(GenerationTest, ARefusedChoiceTakesTheOthersBack) {
  engine_.room = 2;
  EXPECT_EQ(Start(false, 3), nullptr);
  EXPECT_EQ(refusal_.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_.cancelled, (std::vector<std::uint64_t>{1, 2}));
}

TEST_F(GenerationTest, BrokenBytesNeverLeaveTheStreamInvalid) {
  const auto generation = Start(true, 1);
  engine_.Say(0, "\xF0\x9F", FinishReason::kStop);  // an engine that breaks its contract
  const Generation::Progress progress = generation->Advance();
  EXPECT_TRUE(IsValidUtf8(progress.stream));
  EXPECT_EQ(Events(progress.stream)[0]["choices"][0]["text"], "\xEF\xBF\xBD");
}

TEST(StatusTable, EveryFailureHasItsAnswer) {
  const std::pair<StatusCode, int> rows[] = {
      {StatusCode::kInvalidArgument, 400},   {StatusCode::kNotFound, 404},
      {StatusCode::kTooLarge, 400},          {StatusCode::kOutOfMemory, 503},
      {StatusCode::kResourceExhausted, 429}, {StatusCode::kUnavailable, 503},
      {StatusCode::kCancelled, 499},         {StatusCode::kDataLoss, 500},
      {StatusCode::kUnimplemented, 501},     {StatusCode::kIo, 500},
      {StatusCode::kInternal, 500}};
  for (const auto& [code, http] : rows) {
    EXPECT_EQ(MapStatus(code).http_status, http) << StatusCodeName(code);
    EXPECT_EQ(MapStatus(code).retry_after_seconds > 0, http == 429 || http == 503);
    EXPECT_NE(ReasonPhrase(http == 499 ? 400 : http), "Unknown");
  }
}

}  // namespace
}  // namespace pliant
