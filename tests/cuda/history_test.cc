// Histories with a capacity on the GPU against the oracle.
#include <gtest/gtest.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_check.h"
#include "support/history_cases.h"

namespace pliant::testing {
namespace {

std::unique_ptr<Backend> Gpu(bool graphs = true) {
  return std::move(MakeCudaBackend({.graphs = graphs})).value();
}

class CudaHistory : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::DeviceAvailable()) GTEST_SKIP() << "no CUDA device";
  }
};

class CudaHistoryShapes : public CudaHistory, public ::testing::WithParamInterface<LabShape> {};

TEST_P(CudaHistoryShapes, TokensLeaveAndReturnAsInTheOracle) { LeaveAndReturn(Gpu(), GetParam()); }
TEST_P(CudaHistoryShapes, APromptIsScoredInWhateverChunksItComes) {
  PromptInChunks(Gpu(), GetParam(), 420);
}
TEST_P(CudaHistoryShapes, BlocksOfMixedPrecisionAreDroppedExactly) {
  MixedPrecision(Gpu(), GetParam());
}
TEST_P(CudaHistoryShapes, WhatIsDroppedForGoodIsChosenByExactLikeness) {
  DroppedForGood(Gpu(), GetParam());
  if (GetParam().heads == 4) DroppedForGood(Gpu(), GetParam(), 16, /*squared=*/false);
}
TEST_P(CudaHistoryShapes, FittedWeightsSayTheSameOfTheQueriesMeans) {
  DroppedForGood(Gpu(), GetParam(), 16, /*squared=*/true, /*learned=*/true);
}
INSTANTIATE_TEST_SUITE_P(Shapes, CudaHistoryShapes, ::testing::ValuesIn(kLabShapes),
                         [](const ::testing::TestParamInfo<LabShape>& info) {
                           return "h" + std::to_string(info.param.heads) + "_" +
                                  std::to_string(info.param.kv_heads) + "_d" +
                                  std::to_string(info.param.dim);
                         });

TEST_F(CudaHistory, ManyBlocksOfBothKinds) {
  ManyBlocks(Gpu());
  ManyBlocks(Gpu(), 70);  // more kept ones than have their page ids at hand
}
TEST_F(CudaHistory, WhatCannotBeReadIsLostAndTheRowGoesOn) { LostPages(Gpu()); }
TEST_F(CudaHistory, KeptBlocksAreMadeAnew) {
  Refilled(Gpu(), {2, 2});
  Refilled(Gpu(), {4, 4});
}
TEST_F(CudaHistory, StepsThatAreGraphs) { SampledSteps(Gpu()); }
TEST_F(CudaHistory, StepsThatAreGraphsWhereNothingReturns) { SampledSteps(Gpu(), false); }
TEST_F(CudaHistory, StepsThatAreNot) { SampledSteps(Gpu(false)); }

TEST_F(CudaHistory, AHistoryEndsAndAnotherTakesItsTables) {
  auto backend = Gpu();
  const KvGeometry geometry{1, 1, 64};
  ASSERT_TRUE(backend->AllocatePages(geometry, 8).ok());
  for (int i = 0; i < 3; ++i) {
    RetainedHistory history(geometry, 1, {}, std::make_shared<LabOriginals>());
    backend->StartHistory(history);
    EXPECT_EQ(backend->NoteHistory(history, 1).code(), StatusCode::kNotFound);
    EXPECT_EQ(history.noted(), 0);
    EXPECT_FALSE(backend->DropFromHistory(history, {}).ok());
  }
  // One that outlives the backend is harmless.
  RetainedHistory last(geometry, 1, {}, std::make_shared<LabOriginals>());
  backend->StartHistory(last);
  backend.reset();
}

}  // namespace
}  // namespace pliant::testing
