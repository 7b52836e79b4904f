// Faults seen in other servers, on real models patched to provoke them: L1 (numbers beyond the half
// range, non-finite logits) and K1 (the hit rate of the prefix cache).
#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "engine/support/test_model.h"
#include "model/gguf.h"

namespace pliant {
namespace {

const std::string kTinyLlama = std::string(PLIANT_TEST_DATA) + "/models/tiny-llama.gguf";
constexpr std::size_t kHidden = 64;

/// A copy of the tiny llama (BF16 weights, embedding and output apart) with some weights changed;
/// the file goes with it.
class PatchedModel {
 public:
  PatchedModel()
      : path_(::testing::TempDir() + "pliant_faults_" + std::to_string(getpid()) + ".gguf") {
    file_ = GgufFile::Open(kTinyLlama).value();
    std::ifstream in(kTinyLlama, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
  }
  ~PatchedModel() { std::remove(path_.c_str()); }
  PatchedModel(const PatchedModel&) = delete;
  PatchedModel& operator=(const PatchedModel&) = delete;

  /// Applies `change` to `count` weights of a BF16 tensor from `first` on.
  void Change(const std::string& tensor, std::size_t first, std::size_t count,
              const std::function<float(float)>& change) {
    const TensorInfo* info = file_->FindTensor(tensor);
    ASSERT_NE(info, nullptr) << tensor;
    ASSERT_EQ(info->type, DType::kBF16) << tensor;
    ASSERT_LE((first + count) * 2, info->bytes);
    for (std::size_t i = first; i < first + count; ++i) {
      char* at = bytes_.data() + info->offset + i * 2;
      std::uint16_t half;
      std::memcpy(&half, at, 2);
      const float value = change(std::bit_cast<float>(std::uint32_t{half} << 16));
      half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
      std::memcpy(at, &half, 2);
    }
  }
  void ChangeAll(const std::string& tensor, const std::function<float(float)>& change) {
    Change(tensor, 0, static_cast<std::size_t>(file_->FindTensor(tensor)->elements), change);
  }
  std::string Write() const {
    std::ofstream(path_, std::ios::binary)
        .write(bytes_.data(), static_cast<std::streamsize>(bytes_.size()));
    return path_;
  }

 private:
  std::string path_;
  std::unique_ptr<GgufFile> file_;
  std::vector<char> bytes_;
};

TestEngineOptions Options(const std::string& model, const std::string& level) {
  TestEngineOptions options;
  options.model_path = model;
  options.level = level;
  return options;
}

GenerateRequest Ask(std::vector<TokenId> prompt, std::int64_t max_tokens = 24) {
  GenerateRequest request = TestModel::Greedy(std::move(prompt), max_tokens);
  request.stop.ignore_eos = true;
  return request;
}

/// Prompts that do not hold the chosen token, one of them long enough for several blocks.
std::vector<GenerateRequest> Neighbours(const TestModel& model) {
  std::string several_blocks;
  for (int i = 0; i < 20; ++i) several_blocks += "some " + std::to_string(i) + " ";
  std::vector<GenerateRequest> requests;
  for (const std::string& text : {std::string("the cat"), std::string("0"), several_blocks}) {
    requests.push_back(Ask(model.Encode(text)));
  }
  return requests;
}

constexpr char kChosen = '~';

class HalfRange : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Levels, HalfRange, ::testing::Values("auto", "plain"),
                         [](const auto& info) { return std::string(info.param); });

// L1: the activations of one token pass 65504 in every layer. f32 holds that: all answers are
// finite, the neighbours' unchanged.
TEST_P(HalfRange, ActivationsBeyondItAreNoFault) {
  TestModel sound(Options(kTinyLlama, GetParam()));
  const auto expected = sound.AskAll(Neighbours(sound));
  const TokenId chosen = sound.Encode(std::string(1, kChosen)).at(0);
  PatchedModel patched;
  patched.Change("token_embd.weight", static_cast<std::size_t>(chosen) * kHidden, kHidden,
                 [](float w) { return w * 0x1p20f; });
  TestModel model(Options(patched.Write(), GetParam()));
  std::vector<GenerateRequest> requests = Neighbours(model);
  requests.push_back(Ask(model.Encode("ab~cd~e")));
  requests.push_back(Ask(model.Encode("~")));
  const auto answers = model.AskAll(std::move(requests));
  for (std::size_t i = 0; i < answers.size(); ++i) {
    EXPECT_TRUE(answers[i].error.ok()) << answers[i].error.ToString();
    EXPECT_EQ(answers[i].finish, FinishReason::kLength);
    if (i < expected.size()) {
      EXPECT_EQ(answers[i].tokens, expected[i].tokens) << i;
    }
  }
  EXPECT_EQ(StatsNow(*model.engine).nonfinite_requests, 0);
}

// L1: K a million times larger, Q as many times smaller: the scores are the same, and so is every
// token, although no K fits a half.
TEST_P(HalfRange, KeysBeyondItAreCachedAsTheyAre) {
  TestModel sound(Options(kTinyLlama, GetParam()));
  const auto expected = sound.AskAll(Neighbours(sound));
  PatchedModel patched;
  for (const char* layer : {"blk.0.", "blk.1."}) {
    patched.ChangeAll(std::string(layer) + "attn_k.weight", [](float w) { return w * 0x1p20f; });
    patched.ChangeAll(std::string(layer) + "attn_q.weight", [](float w) { return w * 0x1p-20f; });
  }
  TestModel model(Options(patched.Write(), GetParam()));
  const auto answers = model.AskAll(Neighbours(model));
  for (std::size_t i = 0; i < answers.size(); ++i) {
    EXPECT_TRUE(answers[i].error.ok()) << answers[i].error.ToString();
    EXPECT_EQ(answers[i].tokens, expected[i].tokens) << i;
  }
}

// L1: one token's activations are infinite. Its request ends with an error that is counted; whoever
// shares the step, or takes the pages it leaves behind, notices nothing.
TEST_P(HalfRange, InfiniteActivationsEndTheirOwnRequestOnly) {
  TestModel sound(Options(kTinyLlama, GetParam()));
  const auto expected = sound.AskAll(Neighbours(sound));
  const EngineStats stats = sound.engine->Stats();
  const TokenId chosen = sound.Encode(std::string(1, kChosen)).at(0);
  PatchedModel patched;
  patched.Change("token_embd.weight", static_cast<std::size_t>(chosen) * kHidden, kHidden,
                 [](float) { return INFINITY; });
  TestEngineOptions options = Options(patched.Write(), GetParam());
  options.prefix_cache = false;  // so that pages go from hand to hand
  options.kv_bytes =
      static_cast<std::uint64_t>(stats.kv_bytes_total / stats.pages_total) * 8 * 16;  // 16 blocks
  TestModel model(options);
  for (int round = 0; round < 3; ++round) {
    std::vector<GenerateRequest> requests = Neighbours(model);
    requests.push_back(Ask(model.Encode("ab~cd")));
    requests.push_back(
        Ask(model.Encode(std::string(100, kChosen))));  // its pages are full of what has no value
    const auto answers = model.AskAll(std::move(requests));
    for (std::size_t i = 0; i < answers.size(); ++i) {
      if (i < expected.size()) {
        EXPECT_TRUE(answers[i].error.ok()) << answers[i].error.ToString();
        EXPECT_EQ(answers[i].tokens, expected[i].tokens) << "round " << round << ", request " << i;
      } else {
        EXPECT_EQ(answers[i].finish, FinishReason::kError) << i;
        EXPECT_EQ(answers[i].error.code(), StatusCode::kInternal);
        EXPECT_TRUE(answers[i].tokens.empty())
            << "token " << answers[i].tokens.front() << " of what is no number";
      }
    }
  }
  EXPECT_EQ(StatsNow(*model.engine).nonfinite_requests, 6);
}

// K1: what the counters say over a run is what the prompts share. (Their types: tests/server.)
TEST(PrefixCounters, TheQuotientOverARunIsTheArithmetic) {
  TestModel model;
  constexpr int kRequests = 50;
  constexpr std::size_t kShared = 3 * 32;
  std::int64_t looked_up = 0;
  for (int i = 0; i < kRequests; ++i) {
    std::vector<TokenId> prompt(kShared, 'a');
    for (int rest = 0; rest < 5 + i % 7; ++rest) prompt.push_back('0' + i % 10);
    prompt.push_back(static_cast<TokenId>('A' + i % 26));
    looked_up += static_cast<std::int64_t>(prompt.size());
    const auto answer = model.Ask(Ask(std::move(prompt), 2));
    EXPECT_EQ(answer.usage.cached_tokens, i == 0 ? 0 : static_cast<std::int64_t>(kShared)) << i;
    (void)model.engine->Stats();  // looking changes nothing
  }
  const EngineStats stats = StatsNow(*model.engine);
  EXPECT_EQ(stats.prefix_lookup_tokens, looked_up);
  EXPECT_EQ(stats.prefix_hit_tokens, (kRequests - 1) * static_cast<std::int64_t>(kShared));
}

}  // namespace
}  // namespace pliant
