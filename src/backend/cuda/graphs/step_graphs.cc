#include "backend/cuda/graphs/step_graphs.h"

#include "backend/cuda/cuda_check.h"
#include "base/check.h"

namespace pliant::cuda {

StepGraphs::~StepGraphs() {
  for (auto& [rows, entry] : entries_) {
    if (entry.graph != nullptr) cudaGraphExecDestroy(entry.graph);
  }
}

StepGraphs::Mode StepGraphs::Begin(int rows, int kind, std::uint64_t moves,
                                   const Stream& stream) {
  PLIANT_CHECK(current_ == nullptr, "a step within a step");
  current_ = &entries_[{rows, kind}];
  if (!current_->ran || current_->moves != moves) {
    if (current_->graph != nullptr) PLIANT_CUDA_CHECK(cudaGraphExecDestroy(current_->graph));
    *current_ = Entry();
    return mode_ = Mode::kLaunch;
  }
  if (current_->graph != nullptr) return mode_ = Mode::kReplay;
  // Other threads (the page copier) may go on calling CUDA meanwhile.
  PLIANT_CUDA_CHECK(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  return mode_ = Mode::kCapture;
}

void StepGraphs::End(std::uint64_t moves, std::uint64_t ops, const Stream& stream) {
  PLIANT_CHECK(current_ != nullptr, "a step ends that never began");
  Entry& entry = *current_;
  current_ = nullptr;
  if (mode_ == Mode::kLaunch) {
    entry.ran = true;
    entry.moves = moves;
    entry.ops = ops;
    return;
  }
  PLIANT_CHECK(entry.ops == ops, "decode steps of one size with different ops");
  if (mode_ == Mode::kCapture) {
    PLIANT_CHECK(entry.moves == moves, "a buffer moved while a step was captured");
    cudaGraph_t graph = nullptr;
    PLIANT_CUDA_CHECK(cudaStreamEndCapture(stream.get(), &graph));
    PLIANT_CUDA_CHECK(cudaGraphInstantiate(&entry.graph, graph, 0));
    PLIANT_CUDA_CHECK(cudaGraphDestroy(graph));
  }
  PLIANT_CUDA_CHECK(cudaGraphLaunch(entry.graph, stream.get()));
}

}  // namespace pliant::cuda
