// A replay inside the process, on the shipped reckoner model: what is counted, what is refused, and
// the report.
#include <gtest/gtest.h>

#include "engine/support/test_model.h"
#include "replay/replayer.h"
#include "replay/report.h"

namespace pliant {
namespace {

std::vector<WorkloadRequest> SmallWorkload(const std::string& spec) {
  return MakeSyntheticWorkload(spec, 3).value();
}

TEST(Replay, EveryRequestProducesItsOutput) {
  TestModel test;
  const std::vector<WorkloadRequest> workload = SmallWorkload("6:40:9:50");
  std::int64_t reports = 0, ended = 0;
  const ReplayResult result =
      Replay(*test.engine, workload, {.vocabulary = 256, .sample_seconds = 0.005},
             [&](const ReplayProgress& at) {
               ++reports;
               EXPECT_EQ(at.total, 6);
               EXPECT_GE(at.ended, ended);
               ended = at.ended;
             });
  EXPECT_EQ(result.requests, 6);
  EXPECT_EQ(result.finished, 6) << result.first_error;
  EXPECT_EQ(result.refused + result.failed + result.cancelled, 0);
  EXPECT_EQ(result.output_tokens, 6 * 9);
  EXPECT_EQ(result.prompt_tokens, 6 * 40);
  EXPECT_EQ(result.ttft.count, 6u);
  EXPECT_EQ(result.itl.count, 6u * 8);
  EXPECT_GT(result.ttft.mean, 0);
  EXPECT_GE(result.latency.mean, result.ttft.mean);
  EXPECT_GE(result.seconds, workload.back().arrival) << "arrivals keep to the clock";
  EXPECT_EQ(result.tokens_below_16_bits, 0);
  EXPECT_GT(reports, 0);
  ASSERT_FALSE(result.samples.empty());
}

TEST(Replay, SharedPromptsComeFromTheCache) {
  TestModel test;
  std::vector<WorkloadRequest> workload = SmallWorkload("2:200:2:0");
  workload[1].blocks = workload[0].blocks;
  // Far enough behind the first for its blocks to be there, however slow the machine is: one replay
  // each.
  const ReplayOptions options{.vocabulary = 256};
  EXPECT_EQ(Replay(*test.engine, {workload[0]}, options).cached_tokens, 0);
  EXPECT_EQ(Replay(*test.engine, {workload[1]}, options).cached_tokens, 192);
}

TEST(Replay, RefusalsAreCountedAndTold) {
  TestModel test;
  std::vector<WorkloadRequest> workload = SmallWorkload("2:40:3:0");
  workload[1].output = 1 << 20;  // over the context
  const ReplayResult result = Replay(*test.engine, workload, {.vocabulary = 256});
  EXPECT_EQ(result.finished, 1);
  EXPECT_EQ(result.refused, 1);
  EXPECT_NE(result.first_error.find("1048576"), std::string::npos) << result.first_error;
  const std::string table = ReplayTable({{"full", result}});
  EXPECT_NE(table.find("full: first refusal or failure: " + result.first_error), std::string::npos);
}

TEST(Replay, CutOff) {
  TestModel test;
  const ReplayResult result = Replay(*test.engine, SmallWorkload("2:40:3000:0"),
                                     {.vocabulary = 256, .give_up_seconds = 0.05});
  EXPECT_EQ(result.finished + result.cancelled, 2);
  EXPECT_GT(result.cancelled, 0);
  EXPECT_LT(result.output_tokens, 6000);
  EXPECT_EQ(test.engine->Stats().running, 0);
}

}  // namespace
}  // namespace pliant
