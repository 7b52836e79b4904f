// Room: backend. Runs products on the threads of a pool, with the scratch memory they need. One
// owner thread.
#pragma once

#include <vector>

#include "backend/cpu/arena.h"
#include "backend/cpu/gemm.h"
#include "base/thread_pool.h"

namespace pliant {

class GemmRunner {
 public:
  /// `pool` must outlive the runner.
  GemmRunner(ThreadPool* pool, CpuLevel level, bool precise)
      : pool_(pool), kernel_(&ChooseGemmKernel(level, precise)) {}
  GemmRunner(ThreadPool* pool, const GemmKernel* kernel) : pool_(pool), kernel_(kernel) {}

  const GemmKernel& kernel() const { return *kernel_; }

  /// Makes room for products with up to `blocks` column blocks. OutOfMemory leaves the runner as it
  /// was.
  Status Reserve(std::int64_t blocks);

  /// The product; x_bf16 must be set where kernel().wants_bf16(call.rows).
  void Run(const GemmCall& call);

 private:
  ThreadPool* pool_;
  const GemmKernel* kernel_;
  Arena arena_;
  std::byte* scratch_ = nullptr;  // threads times bytes_
  std::size_t bytes_ = 0;
  std::int64_t blocks_ = 0;
};

}  // namespace pliant
