// Histories through the Backend contract, several sequences at once and originals that have left
// the device: the CPU backend, and the lab itself, which measures devices that this machine lacks.
#include <gtest/gtest.h>

#include "support/history_cases.h"

namespace pliant::testing {
namespace {

std::unique_ptr<Backend> Cpu() { return MakeCpuBackend({.threads = 2, .precise = true}).value(); }

TEST(HistoryLab, TokensLeaveAndReturnAsInTheOracle) {
  LeaveAndReturn(Cpu(), {9, 3, 64, 1});
  LeaveAndReturn(Cpu(), {2, 1, 32, 2});
}
TEST(HistoryLab, APromptIsScoredInWhateverChunksItComes) {
  PromptInChunks(Cpu(), {4, 1, 128, 1}, 260);
}
TEST(HistoryLab, BlocksOfMixedPrecisionAreDroppedExactly) { MixedPrecision(Cpu(), {4, 2, 64, 1}); }
TEST(HistoryLab, ManyBlocksOfBothKinds) { ManyBlocks(Cpu(), 70); }
TEST(HistoryLab, WhatCannotBeReadIsLostAndTheRowGoesOn) { LostPages(Cpu()); }
TEST(HistoryLab, KeptBlocksAreMadeAnew) { Refilled(Cpu(), {2, 2}); }
TEST(HistoryLab, WhatIsDroppedForGoodIsChosenByExactLikeness) {
  DroppedForGood(Cpu(), {4, 2, 64, 1});
  DroppedForGood(Cpu(), {4, 2, 64, 1}, 16, /*squared=*/false);
}
TEST(HistoryLab, FittedWeightsSayTheSameOfTheQueriesMeans) {
  DroppedForGood(Cpu(), {4, 2, 64, 2}, 16, /*squared=*/true, /*learned=*/true);
  DroppedForGood(Cpu(), {9, 3, 64, 1}, 2, /*squared=*/true, /*learned=*/true);
}
TEST(HistoryLab, StepsThatTakeTokens) { SampledSteps(MakeReferenceBackend()); }
TEST(HistoryLab, StepsWhereNothingReturns) { SampledSteps(MakeReferenceBackend(), false); }

}  // namespace
}  // namespace pliant::testing
