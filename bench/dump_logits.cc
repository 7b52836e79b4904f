// pliant_dump_logits MODEL: reads token ids from standard input, whitespace between, one prompt a
// line, and runs them through the model.
//   --out FILE     f32 logits of every token of the first line, [tokens][vocabulary], little-endian
//   --greedy N     instead: prints N greedy tokens for each line, ids on one line; with --out, the
//   gap between the two best
//                  logits of each token, f32 [prompts][N]
// Used by parity.py to compare with transformers.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/calibration.h"
#include "model/model.h"
#include "text/tokenizer.h"
#if defined(PLIANT_CUDA)
#include "backend/cuda/cuda_backend.h"
#endif

namespace pliant {
namespace {

struct Options {
  std::string model, backend = "cpu", level = "auto", out;
  int threads = 0, rows = 256, greedy = 0;
  bool precise = false, calibrate = true;
};

/// One sequence with its own blocks, fed in steps.
class Sequence {
 public:
  Sequence(Model& model, Backend& backend) : model_(model), backend_(backend) {}

  Status Feed(std::span<const TokenId> tokens, std::span<const std::int32_t> logit_rows) {
    const auto rows = static_cast<std::int32_t>(tokens.size());
    const auto blocks =
        static_cast<std::size_t>((context_ + rows + kBlockTokens - 1) / kBlockTokens);
    while (blocks_.size() < blocks) {
      BlockView block;
      auto page = static_cast<std::uint32_t>(blocks_.size() * 2 * kPlanes);
      for (PageId& id : block.k) id = PageId(page++);
      for (PageId& id : block.v) id = PageId(page++);
      blocks_.push_back(block);
    }
    std::vector<std::int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), context_);
    const SequenceSlice slice{0, rows, context_, 0, static_cast<std::int32_t>(blocks)};
    PLIANT_RETURN_IF_ERROR(
        model_.Forward(backend_, {tokens, positions, std::span(&slice, 1), blocks_, logit_rows}));
    context_ += rows;
    return Status::Ok();
  }

 private:
  Model& model_;
  Backend& backend_;
  std::int32_t context_ = 0;
  std::vector<BlockView> blocks_;
};

std::vector<std::vector<TokenId>> ReadPrompts() {
  std::vector<std::vector<TokenId>> prompts;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::vector<TokenId> ids;
    for (TokenId id; words >> id;) ids.push_back(id);
    if (!ids.empty()) prompts.push_back(std::move(ids));
  }
  return prompts;
}

Status DumpLogits(const Options& options, Model& model, Backend& backend,
                  const std::vector<TokenId>& tokens) {
  std::ofstream out(options.out, std::ios::binary);
  if (!out) return IoError(options.out + ": cannot be written");
  Sequence sequence(model, backend);
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t rows =
        std::min<std::size_t>(tokens.size() - done, static_cast<std::size_t>(options.rows));
    std::vector<std::int32_t> wanted(rows);
    std::iota(wanted.begin(), wanted.end(), 0);
    PLIANT_RETURN_IF_ERROR(sequence.Feed(std::span(tokens).subspan(done, rows), wanted));
    const std::span<const float> logits = backend.LogitRows();
    out.write(reinterpret_cast<const char*>(logits.data()),
              static_cast<std::streamsize>(logits.size_bytes()));
    done += rows;
  }
  out.close();
  return out ? Status::Ok() : IoError(options.out + ": writing failed");
}

Status Greedy(const Options& options, Model& model, Backend& backend,
              const std::vector<std::vector<TokenId>>& prompts) {
  std::vector<float> gaps;
  for (const std::vector<TokenId>& prompt : prompts) {
    Sequence sequence(model, backend);
    std::vector<TokenId> next = prompt;
    for (int i = 0; i < options.greedy; ++i) {
      for (std::size_t done = 0; done < next.size();) {
        const std::size_t rows =
            std::min<std::size_t>(next.size() - done, static_cast<std::size_t>(options.rows));
        const std::int32_t last = static_cast<std::int32_t>(rows - 1);
        PLIANT_RETURN_IF_ERROR(
            sequence.Feed(std::span(next).subspan(done, rows), std::span(&last, 1)));
        done += rows;
      }
      const std::span<const float> logits = backend.LogitRows();
      const auto best = std::max_element(logits.begin(), logits.end());
      float second = -INFINITY;
      for (auto it = logits.begin(); it != logits.end(); ++it) {
        if (it != best) second = std::max(second, *it);
      }
      gaps.push_back(*best - second);
      next = {static_cast<TokenId>(best - logits.begin())};
      std::printf("%d%c", next[0], i + 1 == options.greedy ? '\n' : ' ');
    }
  }
  if (!options.out.empty()) {
    std::ofstream out(options.out, std::ios::binary);
    out.write(reinterpret_cast<const char*>(gaps.data()),
              static_cast<std::streamsize>(gaps.size() * sizeof(float)));
    if (!out) return IoError(options.out + ": writing failed");
  }
  return Status::Ok();
}

Result<std::unique_ptr<Backend>> OpenBackend(const Options& options) {
  if (options.backend == "ref") return MakeReferenceBackend();
  if (options.backend == "cuda") {
#if defined(PLIANT_CUDA)
    return MakeCudaBackend({});
#else
    return Unimplemented("built without CUDA");
#endif
  }
  return MakeCpuBackend(
      {.threads = options.threads, .level = options.level, .precise = options.precise});
}

Status Run(const Options& options) {
  const std::vector<std::vector<TokenId>> prompts = ReadPrompts();
  if (prompts.empty()) return InvalidArgument("no token ids on standard input");
  PLIANT_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Open(options.model));
  std::size_t longest = 0;
  for (const auto& prompt : prompts) {
    longest = std::max(longest, prompt.size());
    for (const TokenId id : prompt) {
      if (id < 0 || id >= model->config().vocab_size)
        return InvalidArgument("token id " + std::to_string(id));
    }
  }
  PLIANT_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, OpenBackend(options));
  PLIANT_RETURN_IF_ERROR(model->Load(*backend, options.rows, options.rows, {}));
  const std::size_t tokens =
      std::max<std::size_t>(longest + static_cast<std::size_t>(options.greedy), 1024);
  const auto pages = static_cast<std::uint32_t>((tokens / kBlockTokens + 1) * 2 * kPlanes);
  PLIANT_RETURN_IF_ERROR(backend->AllocatePages(model->config().Kv(), pages));
  if (options.calibrate) {
    PLIANT_ASSIGN_OR_RETURN(Vocabulary vocabulary, model->ReadVocabulary());
    PLIANT_ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer,
                            Tokenizer::Create(std::move(vocabulary)));
    PLIANT_RETURN_IF_ERROR(Calibrate(*backend, *model, *tokenizer, pages, options.rows));
  }
  if (options.greedy > 0) return Greedy(options, *model, *backend, prompts);
  return DumpLogits(options, *model, *backend, prompts[0]);
}

}  // namespace
}  // namespace pliant

int main(int argc, char** argv) {
  pliant::Options options;
  CLI::App app("Logits or greedy tokens of a model for given token ids");
  app.add_option("MODEL", options.model, "GGUF file or Hugging Face folder")->required();
  app.add_option("--backend", options.backend, "ref, cpu or cuda")
      ->check(CLI::IsMember({"ref", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--level", options.level, "CPU level: auto, amx, avx512, avx2, plain")
      ->capture_default_str();
  app.add_flag("--precise", options.precise, "CPU backend: f32 products");
  app.add_option("--threads", options.threads, "0: one a core")->capture_default_str();
  app.add_option("--rows", options.rows, "Tokens a step")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--greedy", options.greedy, "Greedy tokens a prompt");
  app.add_option("--out", options.out, "File for logits or gaps");
  app.add_flag("!--no-calibrate", options.calibrate, "Leave the channels' code at scale 1 and center 0");
  CLI11_PARSE(app, argc, argv);
  if (options.greedy == 0 && options.out.empty()) {
    std::fprintf(stderr, "--out FILE or --greedy N is needed\n");
    return 2;
  }
  const pliant::Status status = pliant::Run(options);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  return 0;
}
