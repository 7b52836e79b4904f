// Times whole steps of a model on the CUDA backend: no sampling, no scheduler.
//   pliant_cuda_step_bench MODEL [--random-weights] CASE...
// MODEL: a GGUF file or a folder; with --random-weights a folder with a config.json is enough.
// Cases: prefill:N (one prompt of N tokens in one step) and decode:S:C (S sequences that hold C
// tokens, one new token each). One line of JSON a case.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "model/model.h"

namespace pliant {
namespace {

struct Bench {
  Model& model;
  Backend& backend;

  /// One step of `rows` new tokens for each of `sequences` that hold `context`; sequence s owns
  /// pages 8 blocks s and on.
  double Step(int sequences, int rows, int context, int max_blocks) {
    std::vector<std::int32_t> tokens, positions, logit_rows;
    std::vector<SequenceSlice> slices;
    std::vector<BlockView> blocks;
    for (int s = 0; s < sequences; ++s) {
      const int count = (context + rows + kBlockTokens - 1) / kBlockTokens;
      slices.push_back({static_cast<std::int32_t>(tokens.size()), rows, context,
                        static_cast<std::int32_t>(blocks.size()), count});
      for (int b = 0; b < count; ++b) {
        BlockView view;
        for (int p = 0; p < kPlanes; ++p) {
          const auto base = static_cast<std::uint32_t>((s * max_blocks + b) * 2 * kPlanes + p);
          view.k[p] = PageId(base);
          view.v[p] = PageId(base + kPlanes);
        }
        blocks.push_back(view);
      }
      for (int i = 0; i < rows; ++i) {
        tokens.push_back((1000 + (context + i) * 7 + s * 13) % (model.config().vocab_size - 10));
        positions.push_back(context + i);
      }
      logit_rows.push_back(static_cast<std::int32_t>(tokens.size()) - 1);
    }
    const auto start = std::chrono::steady_clock::now();
    const Status status = model.Forward(backend, {tokens, positions, slices, blocks, logit_rows});
    PLIANT_CHECK(status.ok(), status.message());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
};

int Main(int argc, char** argv) {
  if (argc < 3)
    return std::fprintf(stderr, "usage: pliant_cuda_step_bench MODEL [--random-weights] CASE...\n"),
           2;
  std::vector<std::string> cases;
  bool random_weights = false;
  for (int i = 2; i < argc; ++i) {
    if (std::strcmp(argv[i], "--random-weights") == 0) {
      random_weights = true;
    } else {
      cases.emplace_back(argv[i]);
    }
  }
  auto model = Model::Open(argv[1], {.random_weights = random_weights});
  if (!model.ok()) return std::fprintf(stderr, "%s\n", model.status().message().c_str()), 1;
  auto backend = MakeCudaBackend({});
  if (!backend.ok()) return std::fprintf(stderr, "%s\n", backend.status().message().c_str()), 1;
  int rows = 1, blocks = 1, sequences = 1;
  for (const std::string& one : cases) {
    int n = 0, context = 0;
    if (std::sscanf(one.c_str(), "prefill:%d", &n) == 1) {
      rows = std::max(rows, n);
      blocks = std::max(blocks, (n + kBlockTokens - 1) / kBlockTokens);
    } else if (std::sscanf(one.c_str(), "decode:%d:%d", &n, &context) == 2) {
      rows = std::max(rows, n);
      sequences = std::max(sequences, n);
      blocks = std::max(blocks, n * (context / kBlockTokens + 2));
    } else {
      return std::fprintf(stderr, "no case: %s\n", one.c_str()), 2;
    }
  }
  const auto load_start = std::chrono::steady_clock::now();
  const Status loaded =
      (*model)->Load(**backend, rows, sequences, [](std::uint64_t, std::uint64_t) {});
  if (!loaded.ok()) return std::fprintf(stderr, "%s\n", loaded.message().c_str()), 1;
  std::fprintf(
      stderr, "%s; weights %.1f GB loaded in %.1f s\n", (*backend)->Info().name.c_str(),
      static_cast<double>((*backend)->WeightBytes()) / 1e9,
      std::chrono::duration<double>(std::chrono::steady_clock::now() - load_start).count());
  const Status allocated = (*backend)->AllocatePages(
      (*model)->config().Kv(), static_cast<std::uint32_t>(blocks * 2 * kPlanes));
  if (!allocated.ok()) return std::fprintf(stderr, "%s\n", allocated.message().c_str()), 1;
  Bench bench{**model, **backend};
  for (const std::string& one : cases) {
    int n = 0, context = 0;
    std::vector<double> times;
    const bool prefill = std::sscanf(one.c_str(), "prefill:%d", &n) == 1;
    if (!prefill) std::sscanf(one.c_str(), "decode:%d:%d", &n, &context);
    for (int i = 0; i < (prefill ? 5 : 24); ++i)
      times.push_back(prefill ? bench.Step(1, n, 0, blocks)
                              : bench.Step(n, 1, context, context / kBlockTokens + 2));
    times.erase(times.begin(), times.begin() + 2);  // plans and buffers are made in the first
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    std::printf(
        "{\"case\": \"%s\", \"seconds\": %.6f, \"fastest\": %.6f, \"tokens_per_second\": %.1f}\n",
        one.c_str(), median, times[0], n / median);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace pliant

int main(int argc, char** argv) { return pliant::Main(argc, argv); }
