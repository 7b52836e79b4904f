// Workload files: what is read, what is refused and where; the token rule; made-up workloads.
#include "replay/workload.h"

#include <gtest/gtest.h>

#include <set>
#include <sstream>

namespace pliant {
namespace {

Result<std::vector<WorkloadRequest>> Parse(const std::string& text,
                                           const WorkloadLimits& limits = {}) {
  std::istringstream in(text);
  return ParseWorkload(in, limits);
}

TEST(Workload, ReadsRequestsInOrderOfArrival) {
  const auto workload = Parse(
      "{\"arrival\":2.5,\"input\":513,\"output\":7,\"blocks\":[3,9]}\r\n"
      "\n"
      "{\"blocks\":[0],\"output\":1,\"input\":512,\"arrival\":1,\"more\":\"is ignored\"}");
  ASSERT_TRUE(workload.ok()) << workload.status().message();
  ASSERT_EQ(workload->size(), 2u);
  EXPECT_EQ((*workload)[0].arrival, 1);
  EXPECT_EQ((*workload)[0].input, 512);
  EXPECT_EQ((*workload)[1].arrival, 2.5);
  EXPECT_EQ((*workload)[1].output, 7);
  EXPECT_EQ((*workload)[1].blocks, (std::vector<std::int64_t>{3, 9}));
}

TEST(Workload, HostileLinesAreRefusedWithTheirNumber) {
  const std::string good = "{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":[0]}\n";
  const struct {
    const char* line;
    const char* says;
  } cases[] = {
      {"not json", "JSON"},
      {"[1,2]", "JSON"},
      {"{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":[0]", "JSON"},
      {"{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":[0]} tail", "JSON"},
      {"{\"input\":5,\"output\":3,\"blocks\":[0]}", "arrival"},
      {"{\"arrival\":-1,\"input\":5,\"output\":3,\"blocks\":[0]}", "arrival"},
      {"{\"arrival\":\"0\",\"input\":5,\"output\":3,\"blocks\":[0]}", "arrival"},
      {"{\"arrival\":1e300,\"input\":5,\"output\":3,\"blocks\":[0]}", "arrival"},
      {"{\"arrival\":1e999,\"input\":5,\"output\":3,\"blocks\":[0]}", "JSON"},
      {"{\"arrival\":0,\"output\":3,\"blocks\":[0]}", "input"},
      {"{\"arrival\":0,\"input\":0,\"output\":3,\"blocks\":[]}", "input"},
      {"{\"arrival\":0,\"input\":5.0,\"output\":3,\"blocks\":[0]}", "input"},
      {"{\"arrival\":0,\"input\":18446744073709551615,\"output\":3,\"blocks\":[0]}", "input"},
      {"{\"arrival\":0,\"input\":-9223372036854775808,\"output\":3,\"blocks\":[0]}", "input"},
      {"{\"arrival\":0,\"input\":5,\"output\":0,\"blocks\":[0]}", "output"},
      {"{\"arrival\":0,\"input\":5,\"output\":99999999999,\"blocks\":[0]}", "output"},
      {"{\"arrival\":0,\"input\":5,\"output\":3}", "blocks"},
      {"{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":7}", "blocks"},
      {"{\"arrival\":0,\"input\":513,\"output\":3,\"blocks\":[0]}", "2 blocks"},
      {"{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":[0,1]}", "blocks"},
      {"{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":[-1]}", "block id"},
      {"{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":[1.5]}", "block id"},
      {"{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":[18446744073709551615]}", "block id"},
      {"{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":[null]}", "block id"},
  };
  for (const auto& one : cases) {
    const auto workload = Parse(good + "\n" + one.line + "\n" + good);
    ASSERT_FALSE(workload.ok()) << one.line;
    const std::string& message = workload.status().message();
    EXPECT_TRUE(message.starts_with("line 3: ")) << one.line << " -> " << message;
    EXPECT_NE(message.find(one.says), std::string::npos) << one.line << " -> " << message;
  }
}

TEST(Workload, SizesAreBounded) {
  WorkloadLimits limits;
  limits.line_bytes = 100;
  limits.requests = 2;
  const std::string good = "{\"arrival\":0,\"input\":5,\"output\":3,\"blocks\":[0]}\n";
  EXPECT_TRUE(Parse(good + good, limits).ok());
  auto refused = Parse(good + good + good, limits);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(refused.status().message(), "line 3: more than 2 requests");
  refused = Parse(good + std::string(5000, '['), limits);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().message(), "line 2: longer than 100 bytes");
  // Nesting within a line of the default limit must not exhaust the stack.
  EXPECT_FALSE(Parse(std::string(500'000, '[')).ok());
}

TEST(Workload, EmptyAndMissingFilesAreRefused) {
  EXPECT_FALSE(Parse("").ok());
  EXPECT_FALSE(Parse("\n \r\n").ok());
  const auto missing = ReadWorkload("/nowhere/at/all.jsonl");
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.status().message().find("/nowhere/at/all.jsonl"), std::string::npos);
}

TEST(Workload, TokenRule) {
  // By hand: 1000 + (2 * 7919 + 3 * 104729 + 17) % 100000 = 1000 + 330042 % 100000.
  EXPECT_EQ(WorkloadToken(2, 3, 128'256), 31'042);
  EXPECT_EQ(WorkloadToken(2, 3, 101'000), 31'042);
  EXPECT_EQ(WorkloadToken(2, 3, 21'000), 1000 + 30'042 % 20'000);
  EXPECT_EQ(WorkloadToken(2, 3, 264), 30'042 % 264);
  for (const std::int64_t vocabulary : {1, 264, 1000, 1001, 2001, 49'152, 200'000}) {
    for (std::int64_t block : {std::int64_t{0}, std::int64_t{1234}, std::int64_t{1} << 40}) {
      for (std::int64_t i = 0; i < kWorkloadBlockTokens; ++i) {
        const TokenId id = WorkloadToken(block, i, vocabulary);
        ASSERT_GE(id, 0);
        ASSERT_LT(id, vocabulary);
      }
    }
  }
}

TEST(Workload, EqualLeadingBlocksAreEqualPrompts) {
  const WorkloadRequest a{.input = 1200, .output = 1, .blocks = {4, 5, 6}};
  const WorkloadRequest b{.input = 1100, .output = 1, .blocks = {4, 5, 7}};
  const std::vector<TokenId> x = WorkloadPrompt(a, 49'152), y = WorkloadPrompt(b, 49'152);
  ASSERT_EQ(x.size(), 1200u);
  ASSERT_EQ(y.size(), 1100u);
  EXPECT_TRUE(std::equal(x.begin(), x.begin() + 1024, y.begin()));
  EXPECT_NE(x[1024], y[1024]);
}

TEST(Workload, Cut) {
  std::vector<WorkloadRequest> workload = {
      {.arrival = 1, .input = 1200, .output = 50, .blocks = {4, 5, 6}},
      {.arrival = 3, .input = 10, .output = 5, .blocks = {1}},
      {.arrival = 4, .input = 10, .output = 5, .blocks = {1}}};
  CutWorkload(workload, {.limit = 2, .max_input = 512, .max_output = 20, .scale_time = 0.5});
  ASSERT_EQ(workload.size(), 2u);
  EXPECT_EQ(workload[0].arrival, 0.5);
  EXPECT_EQ(workload[0].input, 512);
  EXPECT_EQ(workload[0].output, 20);
  EXPECT_EQ(workload[0].blocks, std::vector<std::int64_t>{4});
  EXPECT_EQ(workload[1].input, 10);
  EXPECT_EQ(workload[1].output, 5);
}

TEST(Workload, Synthetic) {
  const auto workload = MakeSyntheticWorkload("200:600:8:4", 7);
  ASSERT_TRUE(workload.ok());
  ASSERT_EQ(workload->size(), 200u);
  std::set<std::int64_t> blocks;
  for (std::size_t i = 0; i < workload->size(); ++i) {
    const WorkloadRequest& one = (*workload)[i];
    EXPECT_EQ(one.input, 600);
    EXPECT_EQ(one.output, 8);
    blocks.insert(one.blocks.begin(), one.blocks.end());
    if (i > 0) {
      EXPECT_GE(one.arrival, (*workload)[i - 1].arrival);
    }
  }
  EXPECT_EQ(blocks.size(), 400u) << "prompts must not be shared";
  EXPECT_NEAR(workload->back().arrival, 50, 15);
  EXPECT_EQ(MakeSyntheticWorkload("200:600:8:4", 7)->back().arrival, workload->back().arrival);
  EXPECT_NE(MakeSyntheticWorkload("200:600:8:4", 8)->back().arrival, workload->back().arrival);
  EXPECT_EQ(MakeSyntheticWorkload("3:1:1:0", 1)->back().arrival, 0);
  for (const char* wrong :
       {"", "1", "1:2:3", "1:2:3:", "1:2:3:4:5", "0:2:3:4", "1:0:3:4", "1:2:0:4", "1:2:3:-1",
        "a:2:3:4", "1:2:3:4x", "1:2:3:nan", "1:2:3:inf", "9999999999:1:1:1", "1::3:4"}) {
    EXPECT_FALSE(MakeSyntheticWorkload(wrong, 1).ok()) << wrong;
  }
}

}  // namespace
}  // namespace pliant
