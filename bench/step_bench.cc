// Times whole steps of a model on a backend, the way llama-bench times llama_decode: no sampling, no scheduler.
//   pliant_step_bench MODEL [--backend cpu|ref] [--threads N] [--level L] [--chunk 512] [--case prefill:512 ...]
// Cases: prefill:N (a prompt of N tokens in chunks) and decode:S (S sequences of 128 tokens, 64 steps). One line of JSON a case.
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/calibration.h"
#include "model/model.h"

namespace pliant {
namespace {

using Seconds = std::chrono::duration<double>;

struct Bench {
  Model& model;
  Backend& backend;
  int chunk;

  // Sequences own consecutive pages: block b of sequence s holds pages 8 * (s * max_blocks + b) ...
  std::vector<BlockView> Table(int sequence, int blocks, int max_blocks) const {
    std::vector<BlockView> table(blocks);
    std::uint32_t next = static_cast<std::uint32_t>(sequence * max_blocks) * 2 * kPlanes;
    for (BlockView& block : table) {
      for (PageId& page : block.k) page = PageId(next++);
      for (PageId& page : block.v) page = PageId(next++);
    }
    return table;
  }

  // One step: `rows` new tokens for each of `sequences` sequences that hold `context` tokens.
  double Step(int sequences, int rows, int context, int max_blocks, bool logits, int first_sequence = 0) const {
    std::vector<std::int32_t> tokens, positions, logit_rows;
    std::vector<SequenceSlice> slices;
    std::vector<BlockView> blocks;
    for (int s = 0; s < sequences; ++s) {
      const std::vector<BlockView> table = Table(first_sequence + s, (context + rows + kBlockTokens - 1) / kBlockTokens, max_blocks);
      slices.push_back({static_cast<std::int32_t>(tokens.size()), rows, context, static_cast<std::int32_t>(blocks.size()),
                        static_cast<std::int32_t>(table.size())});
      blocks.insert(blocks.end(), table.begin(), table.end());
      for (int i = 0; i < rows; ++i) {
        tokens.push_back(static_cast<std::int32_t>((1000 + (context + i) * 7 + s * 13) % (model.config().vocab_size - 10)));
        positions.push_back(context + i);
      }
      if (logits) logit_rows.push_back(static_cast<std::int32_t>(tokens.size()) - 1);
    }
    const auto start = std::chrono::steady_clock::now();
    const Status status = model.Forward(backend, {tokens, positions, slices, blocks, logit_rows});
    PLIANT_CHECK(status.ok(), status.message());
    return Seconds(std::chrono::steady_clock::now() - start).count();
  }

  double Prefill(int tokens, int max_blocks, int sequence) const {
    double seconds = 0;
    for (int done = 0; done < tokens; done += chunk) {
      const int rows = std::min(chunk, tokens - done);
      seconds += Step(1, rows, done, max_blocks, done + rows == tokens, sequence);
    }
    return seconds;
  }
};

int Main(int argc, char** argv) {
  CLI::App app("Whole-step timings of a model on a backend");
  std::string path, backend_name = "cpu", level = "auto";
  int threads = 0, chunk = 512, repeat = 3;
  std::vector<std::string> cases = {"prefill:512", "prefill:2048", "decode:1", "decode:16"};
  bool random_weights = false;
  app.add_option("MODEL", path)->required();
  app.add_option("--backend", backend_name)->capture_default_str();
  app.add_option("--threads", threads)->capture_default_str();
  app.add_option("--level", level)->capture_default_str();
  app.add_option("--chunk", chunk)->capture_default_str();
  app.add_option("--repeat", repeat, "Best of this many")->capture_default_str();
  app.add_option("--case", cases)->capture_default_str();
  app.add_flag("--random-weights", random_weights);
  CLI11_PARSE(app, argc, argv);

  Result<std::unique_ptr<Model>> model = Model::Open(path, {.random_weights = random_weights});
  if (!model.ok()) return std::fprintf(stderr, "%s\n", model.status().message().c_str()), 1;
  Result<std::unique_ptr<Backend>> backend =
      backend_name == "ref" ? Result<std::unique_ptr<Backend>>(MakeReferenceBackend())
                            : MakeCpuBackend({.threads = threads, .level = level});
  if (!backend.ok()) return std::fprintf(stderr, "%s\n", backend.status().message().c_str()), 1;
  const Status loaded = (*model)->Load(**backend, chunk, 64, [](std::uint64_t, std::uint64_t) {});
  if (!loaded.ok()) return std::fprintf(stderr, "%s\n", loaded.message().c_str()), 1;
  constexpr int kDecodeContext = 128, kDecodeSteps = 64;
  int max_tokens = 2048 + kBlockTokens, sequences = 1;
  for (const std::string& one : cases) {
    const int n = std::atoi(one.substr(one.find(':') + 1).c_str());
    if (one.starts_with("decode:")) sequences = std::max(sequences, n);
    if (one.starts_with("prefill:")) max_tokens = std::max(max_tokens, n);
  }
  const int long_blocks = (max_tokens + kBlockTokens - 1) / kBlockTokens;
  const int decode_blocks = (kDecodeContext + kDecodeSteps) / kBlockTokens + 1;
  const int pages = std::max(long_blocks, sequences * decode_blocks) * 2 * kPlanes;
  const Status allocated = (*backend)->AllocatePages((*model)->config().Kv(), static_cast<std::uint32_t>(pages));
  if (!allocated.ok()) return std::fprintf(stderr, "%s\n", allocated.message().c_str()), 1;
  const Bench bench{**model, **backend, chunk};
  std::fprintf(stderr, "%s\n", (*backend)->Info().name.c_str());
  for (const std::string& one : cases) {
    const int n = std::atoi(one.substr(one.find(':') + 1).c_str());
    double best = 1e30;
    if (one.starts_with("prefill:")) {
      for (int i = 0; i < repeat; ++i) best = std::min(best, bench.Prefill(n, long_blocks, 0));
      std::printf("{\"case\": \"%s\", \"seconds\": %.6f, \"tokens_per_second\": %.1f}\n", one.c_str(), best, n / best);
    } else {
      for (int s = 0; s < n; ++s) bench.Prefill(kDecodeContext, decode_blocks, s);
      double total = 0;
      for (int i = 0; i < kDecodeSteps; ++i) total += bench.Step(n, 1, kDecodeContext + i, decode_blocks, true);
      std::printf("{\"case\": \"%s\", \"seconds\": %.6f, \"tokens_per_second\": %.1f}\n", one.c_str(), total / kDecodeSteps,
                  n * kDecodeSteps / total);
    }
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace pliant

int main(int argc, char** argv) { return pliant::Main(argc, argv); }
