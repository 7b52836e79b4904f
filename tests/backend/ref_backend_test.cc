#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "backend/backend.h"
#include "backend/support/kv_case.h"

namespace pliant {
namespace {

using testing_support::KvLikeData;
using testing_support::OwnedStep;
using testing_support::PageMaker;

constexpr KvGeometry kGeometry{1, 2, 32};
constexpr int kHeads = 4;
constexpr int kColumns = (kHeads + 2 * 2) * 32;

HostMatrix F32Matrix(const std::vector<float>& data, std::int64_t rows, std::int64_t cols) {
  return {DType::kF32, rows, cols, std::as_bytes(std::span(data)), {}};
}

/// An identity matrix as embedding table puts chosen values into tensors: token t becomes row t of
/// the table.
class RefBackendTest : public testing::Test {
 protected:
  void SetUp() override { backend_ = MakeReferenceBackend(); }

  /// A tensor that holds `rows` after an Embed of tokens 0, 1, 2, ...
  TensorId Load(const std::vector<float>& rows, std::int64_t cols) {
    const std::int64_t count = static_cast<std::int64_t>(rows.size()) / cols;
    const MatrixId table = backend_->AddMatrix(std::vector{F32Matrix(rows, count, cols)}).value();
    const TensorId tensor = backend_->AddTensor(count, cols).value();
    backend_->Embed(table, tensor);
    return tensor;
  }
  /// Reads the first `rows` rows through the only window there is, Logits with an identity matrix
  /// and a norm undone by its weight. With norm weight w and eps 0 a row x gives w * x / rms(x);
  /// tests that need absolute values read sums of MatMul instead.
  std::vector<float> Normed(TensorId x, std::int64_t cols) {
    std::vector<float> identity(cols * cols, 0.f);
    for (int i = 0; i < cols; ++i) identity[i * cols + i] = 1;
    const MatrixId eye = backend_->AddMatrix(std::vector{F32Matrix(identity, cols, cols)}).value();
    const VectorId ones = backend_->AddVector(std::vector<float>(cols, 1.f)).value();
    backend_->Logits(x, ones, 0, eye);
    return {backend_->LogitRows().begin(), backend_->LogitRows().end()};
  }
  /// Appends a column of fixed size so that the norm can be undone: not needed where rows have a
  /// known rms.
  OwnedStep Plain(int rows, bool all_logits = true) {
    OwnedStep step;
    PageMaker pages(64);
    std::vector<BlockView> blocks;
    for (int b = 0; b * kBlockTokens < rows; ++b) blocks.push_back(pages.Block({}));
    step.Add(0, rows, blocks);
    for (int i = 0; i < rows; ++i) {
      step.tokens[i] = i;
      if (all_logits) step.logit_rows.push_back(i);
    }
    return step;
  }
  static std::vector<float> NormRows(std::vector<float> x, std::size_t cols) {
    for (std::size_t r = 0; r < x.size(); r += cols) {
      double squares = 0;
      for (std::size_t c = 0; c < cols; ++c) squares += double{x[r + c]} * x[r + c];
      for (std::size_t c = 0; c < cols; ++c) x[r + c] /= std::sqrt(squares / cols);
    }
    return x;
  }

  std::unique_ptr<Backend> backend_;
};

TEST_F(RefBackendTest, StacksPartsInTheGivenRowOrder) {
  ASSERT_TRUE(backend_->AllocatePages(kGeometry, 64).ok());
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};  // 3 x 2
  const std::vector<float> b = {10, 20};            // 1 x 2
  const std::vector<std::int32_t> order = {2, 0, 1};
  HostMatrix first = F32Matrix(a, 3, 2);
  first.order = order;
  const MatrixId w = backend_->AddMatrix(std::vector{first, F32Matrix(b, 1, 2)}).value();
  const OwnedStep step = Plain(1);
  ASSERT_TRUE(backend_->BeginStep(step.Batch()).ok());
  const TensorId x = Load({1, 1}, 2);
  const TensorId out = backend_->AddTensor(1, 4).value();
  const VectorId bias = backend_->AddVector(std::vector<float>{1, 0, 0, 0}).value();
  backend_->MatMul(x, w, bias, out, false);
  backend_->MatMul(x, w, VectorId(), out, true);
  // Twice the row sums 11, 3, 7, 30 of rows 2, 0, 1 and of b, and the bias once.
  EXPECT_THAT(Normed(out, 4), testing::Pointwise(testing::FloatEq(), NormRows({23, 6, 14, 60}, 4)));
}

TEST_F(RefBackendTest, RefusesMatricesThatLie) {
  const std::vector<float> a(6);
  EXPECT_EQ(backend_->AddMatrix({}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(backend_->AddMatrix(std::vector{F32Matrix(a, 2, 2)}).ok());  // too many bytes
  EXPECT_FALSE(backend_->AddMatrix(std::vector{F32Matrix(a, -3, -2)}).ok());
  EXPECT_FALSE(backend_->AddMatrix(std::vector{F32Matrix(a, 3, 2), F32Matrix(a, 2, 3)}).ok());
  EXPECT_FALSE(backend_
                   ->AddMatrix(std::vector{HostMatrix{
                       DType::kF32, std::int64_t{1} << 62, 4, std::as_bytes(std::span(a)), {}}})
                   .ok());
  const std::vector<std::int32_t> order = {0, 1, 3};
  HostMatrix ordered = F32Matrix(a, 3, 2);
  ordered.order = order;
  EXPECT_FALSE(backend_->AddMatrix(std::vector{ordered}).ok());
  EXPECT_FALSE(backend_->AddTensor(1 << 30, std::int64_t{1} << 40).ok());
}

TEST_F(RefBackendTest, RmsNormAndSiluMul) {
  ASSERT_TRUE(backend_->AllocatePages(kGeometry, 64).ok());
  const OwnedStep step = Plain(2);
  ASSERT_TRUE(backend_->BeginStep(step.Batch()).ok());
  const TensorId x = Load({3, 4, 0, 0, 1, -2, 2, 1000}, 4);
  const VectorId weight = backend_->AddVector(std::vector<float>{1, 2, 1, 1}).value();
  const TensorId out = backend_->AddTensor(2, 4).value();
  backend_->RmsNorm(x, weight, 0, out);
  EXPECT_THAT(Normed(out, 4), testing::Pointwise(testing::FloatNear(1e-6f),
                                                 NormRows({3, 8, 0, 0, 1, -4, 2, 1000}, 4)));
  const TensorId product = backend_->AddTensor(2, 2).value();
  backend_->SiluMul(x, product);
  const float silu1 = 1 / (1 + std::exp(-1.f));
  const float silu_2 = -2 / (1 + std::exp(2.f));
  EXPECT_THAT(Normed(product, 2).back(),
              testing::FloatNear(NormRows({silu1 * 2, silu_2 * 1000}, 2)[1], 1e-6f));
}

TEST_F(RefBackendTest, RefusesBadSteps) {
  ASSERT_TRUE(backend_->AllocatePages(kGeometry, 64).ok());
  EXPECT_FALSE(backend_->AllocatePages(kGeometry, 64).ok());  // once
  OwnedStep step = Plain(40);
  EXPECT_TRUE(backend_->BeginStep(step.Batch()).ok());
  const auto refused = [&](auto&& change) {
    OwnedStep bad = step;
    change(bad);
    return backend_->BeginStep(bad.Batch()).code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](OwnedStep& s) { s.positions.pop_back(); }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.sequences[0].rows = 41; }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.sequences[0].rows = 39; }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.sequences[0].first_row = 1; }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.sequences[0].context = -1; }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.sequences[0].context = 2147483647; }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.sequences[0].blocks = 1; }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.blocks.pop_back(); }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.blocks[1].k[3] = PageId(64); }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.blocks[1].v[1] = PageId(); }));  // a gap
  EXPECT_TRUE(refused([](OwnedStep& s) { s.blocks[1].v = {}; }));           // written, no pages
  EXPECT_TRUE(refused([](OwnedStep& s) { s.logit_rows = {3, 3}; }));
  EXPECT_TRUE(refused([](OwnedStep& s) { s.logit_rows = {40}; }));
}

TEST(RefBackendPages, RefusesImpossibleGeometry) {
  EXPECT_EQ(MakeReferenceBackend()->AllocatePages({1, 1, 48}, 4).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeReferenceBackend()->AllocatePages({0, 1, 64}, 4).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeReferenceBackend()->AllocatePages({1, 1, 64}, 0).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeReferenceBackend()->AllocatePages({10000, 1000, 256}, 4000000000u).code(),
            StatusCode::kOutOfMemory);
}

/// Attention of the last row of `step`, normed.
class RefAttention : public RefBackendTest {
 protected:
  void SetUp() override {
    RefBackendTest::SetUp();
    ASSERT_TRUE(backend_->AllocatePages(kGeometry, 64).ok());
  }
  std::vector<float> Run(const std::vector<float>& qkv, float softmax_scale) {
    const int rows = static_cast<int>(qkv.size()) / kColumns;
    OwnedStep step = Plain(rows);
    EXPECT_TRUE(backend_->BeginStep(step.Batch()).ok());
    const TensorId x = Load(qkv, kColumns);
    const TensorId out = backend_->AddTensor(rows, kHeads * 32).value();
    const RopeTable rope{std::vector<float>(16, 0.1f)};
    backend_->QkvToCache({0, kHeads, {}, {}, 0}, rope, x);
    backend_->Attention(0, kHeads, softmax_scale, x, out);
    return Normed(out, kHeads * 32);
  }
};

TEST_F(RefAttention, OneTokenGivesItsOwnValueToEveryHeadOfTheGroup) {
  std::mt19937 random(5);
  const std::vector<float> qkv = KvLikeData(1, kColumns, random);
  std::vector<float> expected;
  for (int head = 0; head < kHeads; ++head) {
    const float* v = &qkv[(kHeads + 2 + head / 2) * 32];
    expected.insert(expected.end(), v, v + 32);
  }
  EXPECT_THAT(Run(qkv, 0.2f),
              testing::Pointwise(testing::FloatNear(1e-4f), NormRows(expected, kHeads * 32)));
}

TEST_F(RefAttention, EqualKeysAverageTheValuesSeenSoFar) {
  std::mt19937 random(6);
  constexpr int kRows = 40;
  std::vector<float> qkv = KvLikeData(kRows, kColumns, random);
  for (int r = 0; r < kRows; ++r) {  // no keys: every logit is 0
    std::fill_n(&qkv[r * kColumns + kHeads * 32], 2 * 32, 0.f);
  }
  std::vector<float> expected;
  for (int r = 0; r < kRows; ++r) {
    for (int head = 0; head < kHeads; ++head) {
      for (int c = 0; c < 32; ++c) {
        double sum = 0;
        for (int t = 0; t <= r; ++t) sum += qkv[t * kColumns + (kHeads + 2 + head / 2) * 32 + c];
        expected.push_back(static_cast<float>(sum / (r + 1)));
      }
    }
  }
  EXPECT_THAT(Run(qkv, 1.f),
              testing::Pointwise(testing::FloatNear(5e-4f), NormRows(expected, kHeads * 32)));
}

TEST_F(RefAttention, ChannelScalesCancel) {
  std::mt19937 random(7);
  const std::vector<float> qkv = KvLikeData(37, kColumns, random);
  const std::vector<float> plain = Run(qkv, 0.1f);
  std::vector<float> channel(2 * 32);
  for (int h = 0; h < 2; ++h) {
    for (int c = 0; c < 16; ++c) channel[h * 32 + c] = channel[h * 32 + 16 + c] = 0.25f + 0.3f * c;
  }
  const std::vector<float> zeros(64, 0.f);
  const ChannelCode good{channel, zeros};
  ASSERT_TRUE(backend_->SetKvCode({good, good}).ok());
  EXPECT_THAT(Run(qkv, 0.1f), testing::Pointwise(testing::FloatNear(3e-3f), plain));
  for (const std::vector<float>& scale :
       {std::vector<float>(63, 1.f), std::vector<float>(64, 0.f), std::vector<float>(64, NAN)}) {
    EXPECT_FALSE(backend_->SetKvCode({{scale, zeros}, good}).ok());
    EXPECT_FALSE(backend_->SetKvCode({good, {scale, zeros}}).ok());
  }
}

TEST_F(RefAttention, CentersCancel) {
  std::mt19937 random(7);
  const std::vector<float> qkv = KvLikeData(37, kColumns, random);
  const std::vector<float> plain = Run(qkv, 0.1f);
  std::vector<float> center(2 * 32);
  for (int i = 0; i < 64; ++i) center[i] = 0.2f * (i % 9 - 4);
  const std::vector<float> ones(64, 1.f);
  const ChannelCode good{ones, center};
  ASSERT_TRUE(backend_->SetKvCode({good, good}).ok());
  EXPECT_THAT(Run(qkv, 0.1f), testing::Pointwise(testing::FloatNear(3e-3f), plain));
  for (const std::vector<float>& bad : {std::vector<float>(), std::vector<float>(64, INFINITY)}) {
    EXPECT_FALSE(backend_->SetKvCode({{ones, bad}, good}).ok());
    EXPECT_FALSE(backend_->SetKvCode({good, {ones, bad}}).ok());
  }
}

TEST_F(RefAttention, ChannelStatisticsAreTakenAfterRope) {
  std::vector<float> qkv(kColumns, 0.f);
  qkv[kHeads * 32 + 3] = 2;         // K head 0, pair (3, 19)
  qkv[32 + 4] = 3;                  // Q head 1 (of KV head 0), pair (4, 20)
  qkv[(kHeads + 3) * 32 + 7] = -2;  // V head 1
  std::vector<float> two = qkv;     // positions 0, not rotated, and 1
  two.insert(two.end(), qkv.begin(), qkv.end());
  backend_->StartChannelStatistics();
  Run(two, 1.f);
  const ChannelStatistics got = backend_->TakeChannelStatistics();
  std::vector<float> most(64);
  most[3] = 2;
  most[19] = 2 * std::sin(0.1f);
  std::vector<double> energy(64);
  energy[4] = 9 * (1 + std::cos(0.1) * std::cos(0.1));
  energy[20] = 9 * std::sin(0.1) * std::sin(0.1);
  EXPECT_THAT(got.key_max, testing::Pointwise(testing::FloatNear(1e-6f), most));
  std::vector<float> least(64);
  least[3] = 2 * std::cos(0.1f);
  EXPECT_THAT(got.key_min, testing::Pointwise(testing::FloatNear(1e-6f), least));
  EXPECT_THAT(got.query_energy, testing::Pointwise(testing::DoubleNear(1e-4), energy));
  std::vector<double> value_energy(64);
  value_energy[32 + 7] = 8;
  EXPECT_EQ(got.value_energy, value_energy);
  Run(two, 1.f);
  EXPECT_TRUE(backend_->TakeChannelStatistics().key_min.empty());  // reading turned it off
}

TEST_F(RefAttention, CopiesMovePagesThereAndBack) {
  std::mt19937 random(9);
  Run(KvLikeData(32, kColumns, random), 1.f);
  const std::size_t bytes = backend_->PageBytes(kGeometry);
  std::vector<std::byte> host(bytes), again(bytes);
  const PageId page = PageMaker(64).Take();
  EXPECT_EQ(backend_->Wait(backend_->CopyOut(std::vector{PageCopy{page, host.data()}})),
            CopyState::kDone);
  EXPECT_NE(host, again);
  EXPECT_EQ(backend_->Poll(backend_->CopyIn(std::vector{PageCopy{PageId(63), host.data()}})),
            CopyState::kDone);
  backend_->CopyOut(std::vector{PageCopy{PageId(63), again.data()}});
  EXPECT_EQ(host, again);
  EXPECT_EQ(backend_->Poll(backend_->CopyIn(std::vector{PageCopy{PageId(64), host.data()}})),
            CopyState::kFailed);
}

}  // namespace
}  // namespace pliant
