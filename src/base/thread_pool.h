// Room: base. A fixed set of compute threads that run one job together, for kernels. The owner (the engine thread) is one of
// them. Only the owner calls Run; jobs must not call it again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace pliant {

/// Fork-join over `threads()` workers. Workers spin for a short while between jobs (a decode step has hundreds of them), then sleep.
class ThreadPool {
 public:
  /// threads: total, the caller included; at least 1. 0 means one a core that this process may run on.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  /// Calls fn(worker) once on every worker, worker in [0, threads()), and returns when all have returned.
  template <typename F>
  void Run(F&& fn) {
    if (threads_ == 1) {
      fn(0);
      return;
    }
    using Fn = std::remove_reference_t<F>;
    RunErased([](void* context, int worker) { (*static_cast<Fn*>(context))(worker); },
              const_cast<void*>(static_cast<const void*>(&fn)));
  }

  /// Splits [0, count) into items taken one by one by whichever worker is free: fn(item, worker).
  template <typename F>
  void ForEach(std::int64_t count, F&& fn) {
    if (threads_ == 1 || count <= 1) {
      for (std::int64_t i = 0; i < count; ++i) fn(i, 0);
      return;
    }
    std::atomic<std::int64_t> next{0};
    Run([&](int worker) {
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) fn(i, worker);
    });
  }

 private:
  using JobFn = void (*)(void* context, int worker);
  void RunErased(JobFn fn, void* context);
  void WorkerLoop(int worker);

  int threads_;
  std::vector<std::thread> workers_;
  JobFn job_ = nullptr;
  void* job_context_ = nullptr;
  alignas(64) std::atomic<std::uint32_t> generation_{0};  // even: idle; each Run adds 1
  alignas(64) std::atomic<int> running_{0};               // workers still in the job
  std::atomic<bool> stop_{false};
};

/// Cores this process may run on (its affinity mask), at least 1.
int AvailableCores();

}  // namespace pliant
