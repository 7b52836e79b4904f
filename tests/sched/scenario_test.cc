// Runs every tests/scenarios/*.kvtest, as written and again under each hostile setting.
#include "sched/support/scenario.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "support/rounds.h"

namespace pliant::testing {
namespace {

std::vector<std::string> Files() {
  std::vector<std::string> files;
  for (const auto& entry :
       std::filesystem::directory_iterator(PLIANT_SOURCE_DIR "/tests/scenarios")) {
    if (entry.path().extension() == ".kvtest") files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

/// Of the runs with a real model, which take seconds each, every so many.
constexpr std::size_t kEvery = Rounds<std::size_t>(1, 6);

/// Every file as written and under each hostile setting.
std::vector<std::tuple<std::string, Hostile>> Runs() {
  std::vector<std::tuple<std::string, Hostile>> runs;
  std::size_t with_model = 0;
  for (const std::string& file : Files()) {
    for (const Hostile& hostile : HostileSettings()) {
      if (!hostile.reference || with_model++ % kEvery == 0) runs.emplace_back(file, hostile);
    }
  }
  return runs;
}

class ScenarioTest : public ::testing::TestWithParam<std::tuple<std::string, Hostile>> {};

TEST_P(ScenarioTest, Holds) {
  const auto& [path, hostile] = GetParam();
  Scenario(path, hostile).Run();
}

INSTANTIATE_TEST_SUITE_P(All, ScenarioTest, ::testing::ValuesIn(Runs()), [](const auto& info) {
  std::string name = std::filesystem::path(std::get<0>(info.param)).stem().string() + "__" +
                     std::get<1>(info.param).name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(Scenarios, ThereAreAtLeastForty) { EXPECT_GE(Files().size(), 40u); }

}  // namespace
}  // namespace pliant::testing
