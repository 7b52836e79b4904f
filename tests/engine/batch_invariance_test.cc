// Logits of a sequence must not depend on what else is in the step: the bits of whole forward passes on the shipped model.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "model/model.h"
#include "support/rounds.h"

namespace pliant {
namespace {

constexpr int kMaxRows = 512;
constexpr int kBlocksPerSequence = 8;

struct Harness {
  explicit Harness(const std::string& level) {
    model = Model::Open(std::string(PLIANT_TEST_DATA) + "/models/reckoner-q8_0.gguf").value();
    backend = MakeCpuBackend({.threads = 2, .level = level}).value();
    PLIANT_CHECK(model->Load(*backend, kMaxRows, 64, {}).ok(), "load");
    PLIANT_CHECK(backend->AllocatePages(model->config().Kv(), 64 * kBlocksPerSequence * 2 * kPlanes).ok(), "pages");
  }

  // One step; entry = sequence slot, tokens, context. Returns a row of logits for each entry.
  struct Entry {
    int slot;
    std::vector<std::int32_t> tokens;
    int context;
  };
  std::vector<std::vector<float>> Step(const std::vector<Entry>& entries) {
    std::vector<std::int32_t> tokens, positions, logit_rows;
    std::vector<SequenceSlice> slices;
    std::vector<BlockView> blocks;
    for (const Entry& e : entries) {
      const int rows = static_cast<int>(e.tokens.size());
      const int count = (e.context + rows + kBlockTokens - 1) / kBlockTokens;
      slices.push_back({static_cast<std::int32_t>(tokens.size()), rows, e.context, static_cast<std::int32_t>(blocks.size()), count});
      std::uint32_t page = static_cast<std::uint32_t>(e.slot * kBlocksPerSequence * 2 * kPlanes);
      for (int b = 0; b < count; ++b) {
        BlockView view;
        for (PageId& p : view.k) p = PageId(page++);
        for (PageId& p : view.v) p = PageId(page++);
        blocks.push_back(view);
      }
      for (int i = 0; i < rows; ++i) {
        tokens.push_back(e.tokens[i]);
        positions.push_back(e.context + i);
      }
      logit_rows.push_back(static_cast<std::int32_t>(tokens.size()) - 1);
    }
    const Status status = model->Forward(*backend, {tokens, positions, slices, blocks, logit_rows});
    PLIANT_CHECK(status.ok(), status.message());
    const std::span<const float> all = backend->LogitRows();
    const std::size_t width = all.size() / logit_rows.size();
    std::vector<std::vector<float>> rows;
    for (std::size_t i = 0; i < logit_rows.size(); ++i) rows.emplace_back(all.begin() + i * width, all.begin() + (i + 1) * width);
    return rows;
  }

  std::unique_ptr<Model> model;
  std::unique_ptr<Backend> backend;
};

std::vector<std::int32_t> Prompt(int length, int seed) {
  std::vector<std::int32_t> tokens(length);
  for (int i = 0; i < length; ++i) tokens[i] = (seed * 31 + i * 7 + i * i % 11) % 128;
  return tokens;
}

class BatchInvariance : public testing::TestWithParam<const char*> {
  void SetUp() override {
    const std::string level = GetParam();
    if (kThreadSanitized && (level == "plain" || level == "avx2")) {
      GTEST_SKIP() << "takes minutes under ThreadSanitizer, on the same threads as the levels above";
    }
  }
};

TEST_P(BatchInvariance, PromptsTogetherEqualPromptsAlone) {
  Harness harness(GetParam());
  for (const int length : {1, 5, 19, 33, 70}) {
    const auto alone = harness.Step({{0, Prompt(length, 1), 0}})[0];
    EXPECT_EQ(harness.Step({{0, Prompt(length, 1), 0}})[0], alone) << "the same step twice, length " << length;
    std::vector<Harness::Entry> entries;
    for (int s = 0; s < 6; ++s) entries.push_back({s, Prompt(length, s == 2 ? 9 : 1), 0});
    const auto together = harness.Step(entries);
    for (int s = 0; s < 6; ++s) {
      if (s != 2) {
        EXPECT_EQ(together[s], alone) << "sequence " << s << ", length " << length;
      }
    }
  }
}

TEST_P(BatchInvariance, DecodeTogetherEqualsDecodeAlone) {
  Harness harness(GetParam());
  std::vector<Harness::Entry> prompts, next;
  constexpr int kSequences = Rounds(40, 12);
  for (int s = 0; s < kSequences; ++s) {
    const int length = 3 + s * 5;
    harness.Step({{s, Prompt(length, s), 0}});
    next.push_back({s, {65 + s}, length});
  }
  const auto together = harness.Step(next);
  for (int s = 0; s < kSequences; ++s) EXPECT_EQ(harness.Step({next[s]})[0], together[s]) << s;
}

TEST_P(BatchInvariance, ChunkedPromptsEqualWholeOnes) {
  Harness harness(GetParam());
  constexpr int kTokens = Rounds(200, 100);
  const std::vector<std::int32_t> prompt = Prompt(kTokens, 3);
  const auto whole = harness.Step({{0, prompt, 0}})[0];
  for (const int chunk : {1, 7, 32, 48, 128}) {
    std::vector<std::vector<float>> rows;
    for (int done = 0; done < kTokens; done += chunk) {
      const int end = std::min(kTokens, done + chunk);
      rows = harness.Step({{1, {prompt.begin() + done, prompt.begin() + end}, done}});
    }
    EXPECT_EQ(rows[0], whole) << "chunks of " << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, BatchInvariance, testing::Values("amx", "avx512", "avx2", "plain"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace pliant
