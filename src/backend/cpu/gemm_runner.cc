#include "backend/cpu/gemm_runner.h"

#include "base/check.h"

namespace pliant {

Status GemmRunner::Reserve(std::int64_t blocks) {
  if (blocks <= blocks_) return Status::Ok();
  // Threads do not share a page, and not the cache sets of one either.
  const std::size_t bytes = (kernel_->scratch_bytes(blocks) + 4095) / 4096 * 4096 + 4096 + 64;
  PLIANT_ASSIGN_OR_RETURN(scratch_, arena_.Allocate(bytes * pool_->threads()));
  bytes_ = bytes;
  blocks_ = blocks;
  return Status::Ok();
}

void GemmRunner::Run(const GemmCall& call) {
  PLIANT_CHECK(call.weight->blocks <= blocks_, "scratch is too small for the matrix");
  if (call.rows == 0) return;
  const std::int64_t panels = call.gated != nullptr ? call.weight->panels / 2 : call.weight->panels;
  const int threads = pool_->threads();
  pool_->Run([&](int worker) {
    const std::int64_t begin = panels * worker / threads;
    const std::int64_t end = panels * (worker + 1) / threads;
    if (begin < end) kernel_->run(call, begin, end, scratch_ + worker * bytes_);
  });
}

}  // namespace pliant
