#include "base/thread_pool.h"

#include <sched.h>

#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pliant {
namespace {

// About 50 microseconds of spinning: longer than the gap between two ops of a decode step, shorter than anything a person or a
// neighbour on the machine would notice.
constexpr int kSpinLimit = 4000;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

int AvailableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    const int count = CPU_COUNT(&set);
    if (count > 0) return count;
  }
  const unsigned cores = std::thread::hardware_concurrency();
  return cores == 0 ? 1 : static_cast<int>(cores);
}

ThreadPool::ThreadPool(int threads) : threads_(threads == 0 ? AvailableCores() : threads) {
  PLIANT_CHECK(threads_ >= 1, "a thread pool needs at least one thread");
  workers_.reserve(threads_ - 1);
  for (int i = 1; i < threads_; ++i) workers_.emplace_back([this, i] { WorkerLoop(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::RunErased(JobFn fn, void* context) {
  job_ = fn;
  job_context_ = context;
  running_.store(threads_ - 1, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  fn(context, 0);
  int spins = 0;
  for (int left; (left = running_.load(std::memory_order_acquire)) != 0;) {
    if (++spins < kSpinLimit) {
      Pause();
    } else {
      running_.wait(left, std::memory_order_acquire);
    }
  }
}

void ThreadPool::WorkerLoop(int worker) {
  std::uint32_t seen = 0;
  while (true) {
    int spins = 0;
    std::uint32_t now;
    while ((now = generation_.load(std::memory_order_acquire)) == seen) {
      if (++spins < kSpinLimit) {
        Pause();
      } else {
        generation_.wait(seen, std::memory_order_acquire);
      }
    }
    seen = now;
    if (stop_.load(std::memory_order_relaxed)) return;
    job_(job_context_, worker);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
  }
}

}  // namespace pliant
