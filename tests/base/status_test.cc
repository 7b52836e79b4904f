#include "base/status.h"

#include <gtest/gtest.h>

#include <memory>

namespace pliant {
namespace {

Result<std::unique_ptr<int>> Half(int value) {
  if (value % 2 != 0) return InvalidArgument("odd");
  return std::make_unique<int>(value / 2);
}

Status Quarter(int value, int* out) {
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<int> half, Half(value));
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<int> quarter, Half(*half));
  *out = *quarter;
  return Status::Ok();
}

TEST(Status, PassesFailuresUp) {
  int out = 0;
  EXPECT_TRUE(Quarter(8, &out).ok());
  EXPECT_EQ(out, 2);
  const Status status = Quarter(6, &out);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.WithContext("quarter").ToString(), "invalid_argument: quarter: odd");
}

TEST(Status, ReadingAFailureStopsTheProcess) {
  EXPECT_DEATH((void)*Half(3), "odd");
}

}  // namespace
}  // namespace pliant
