#include "base/size.h"

#include <gtest/gtest.h>

namespace pliant {
namespace {

TEST(Size, ReadsWhatPeopleWrite) {
  EXPECT_EQ(ParseSize("1GiB").value(), 1ull << 30);
  EXPECT_EQ(ParseSize("1.5 GiB").value(), 3ull << 29);
  EXPECT_EQ(ParseSize("64KiB").value(), 65536u);
  EXPECT_EQ(ParseSize("2GB").value(), 2000000000u);
  EXPECT_EQ(ParseSize("0").value(), 0u);
  for (const char* bad : {"", "GiB", "-1GiB", "1XiB", "1GiBx", "nan", "inf", "1e300", "99999999TiB", "0x10",
                          "18446744073709551616"}) {
    EXPECT_EQ(ParseSize(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

TEST(Size, WritesThreeDigitsAtMost) {
  EXPECT_EQ(FormatSize(17), "17 B");
  EXPECT_EQ(FormatSize(1ull << 30), "1.00 GiB");
  EXPECT_EQ(FormatSize(92160), "90.0 KiB");
  EXPECT_EQ(FormatSize(500ull << 20), "500 MiB");
}

}  // namespace
}  // namespace pliant
