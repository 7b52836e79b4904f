#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

namespace pliant {
namespace {

TEST(ThreadPool, RunsEveryWorkerOnceEachTime) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    std::vector<std::atomic<int>> calls(threads);
    for (int round = 0; round < 300; ++round) {
      pool.Run([&](int worker) { calls[worker].fetch_add(1); });
      for (auto& c : calls) ASSERT_EQ(c.load(), round + 1);
    }
  }
}

TEST(ThreadPool, WakesAfterSleeping) {
  ThreadPool pool(3);
  std::atomic<int> calls{0};
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    pool.Run([&](int) { calls.fetch_add(1); });
  }
  EXPECT_EQ(calls.load(), 9);
}

TEST(ThreadPool, ForEachTakesEveryItemOnce) {
  ThreadPool pool(3);
  std::vector<std::atomic<int>> taken(1001);
  pool.ForEach(taken.size(), [&](std::int64_t item, int) { taken[item].fetch_add(1); });
  for (auto& t : taken) EXPECT_EQ(t.load(), 1);
}

}  // namespace
}  // namespace pliant
