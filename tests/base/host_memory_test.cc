#include "base/host_memory.h"

#include <gtest/gtest.h>

namespace pliant {
namespace {

TEST(HostMemoryTest, ReadsMeminfo) {
  EXPECT_EQ(ParseMemAvailable("MemTotal:  8000 kB\nMemAvailable:    1234 kB\n"), 1234u * 1024);
  EXPECT_EQ(ParseMemAvailable("MemTotal: 8000 kB\n"), std::nullopt);
  EXPECT_EQ(ParseMemAvailable("MemAvailable: x"), std::nullopt);
  ASSERT_TRUE(AvailableHostMemory().has_value());
  EXPECT_GT(*AvailableHostMemory(), 1u << 20);
}

}  // namespace
}  // namespace pliant
