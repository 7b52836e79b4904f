// Encodes texts for bench/tokenizer_parity.py: ids for comparison with the reference, or the time
// it takes. Usage: tokenizer_ids MODEL.gguf ids|special|time < texts > out Input: frames of a
// 32-bit little-endian length and that many bytes. Output, per frame: a 32-bit count and that many
// 32-bit ids; with `time`, one line: bytes, tokens and the CPU seconds of the fastest of five
// passes over all frames.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <iostream>
#include <iterator>
#include <string>

#include "model/gguf.h"
#include "model/vocabulary.h"
#include "text/tokenizer.h"

namespace pliant {
namespace {

Result<std::unique_ptr<Tokenizer>> Load(const std::string& path) {
  PLIANT_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Open(path));
  PLIANT_ASSIGN_OR_RETURN(Vocabulary vocabulary, ReadGgufVocabulary(*file));
  return Tokenizer::Create(std::move(vocabulary));
}

Result<std::vector<std::string_view>> Frames(std::string_view input) {
  std::vector<std::string_view> frames;
  while (!input.empty()) {
    std::uint32_t size = 0;
    if (input.size() < 4) return DataLoss("a frame's length is cut off");
    std::memcpy(&size, input.data(), 4);
    input.remove_prefix(4);
    if (input.size() < size) return DataLoss("a frame is cut off");
    frames.push_back(input.substr(0, size));
    input.remove_prefix(size);
  }
  return frames;
}

Status WriteIds(const Tokenizer& tokenizer, const std::vector<std::string_view>& frames,
                bool special) {
  for (const std::string_view text : frames) {
    PLIANT_ASSIGN_OR_RETURN(const std::vector<TokenId> ids,
                            tokenizer.Encode(text, {.parse_special = special}));
    const auto count = static_cast<std::uint32_t>(ids.size());
    if (std::fwrite(&count, 4, 1, stdout) != 1 ||
        std::fwrite(ids.data(), 4, count, stdout) != count) {
      return IoError("standard output");
    }
  }
  return {};
}

Status Time(const Tokenizer& tokenizer, const std::vector<std::string_view>& frames) {
  double best = 1e30;
  std::size_t bytes = 0, tokens = 0;
  for (int pass = 0; pass < 5; ++pass) {
    bytes = tokens = 0;
    const std::clock_t start = std::clock();
    for (const std::string_view text : frames) {
      PLIANT_ASSIGN_OR_RETURN(const std::vector<TokenId> ids, tokenizer.Encode(text, {}));
      bytes += text.size();
      tokens += ids.size();
    }
    best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  std::printf("%zu %zu %.9f\n", bytes, tokens, best);
  return {};
}

Status Main(int argc, char** argv) {
  if (argc != 3) return InvalidArgument("usage: tokenizer_ids MODEL.gguf ids|special|time");
  const std::string mode = argv[2];
  const auto start = std::chrono::steady_clock::now();
  PLIANT_ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer, Load(argv[1]));
  std::cerr << "loaded in "
            << std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()
            << " s\n";
  const std::string input{std::istreambuf_iterator<char>(std::cin), {}};
  PLIANT_ASSIGN_OR_RETURN(const std::vector<std::string_view> frames, Frames(input));
  return mode == "time" ? Time(*tokenizer, frames)
                        : WriteIds(*tokenizer, frames, mode == "special");
}

}  // namespace
}  // namespace pliant

int main(int argc, char** argv) {
  std::ios::sync_with_stdio(false);
  const pliant::Status status = pliant::Main(argc, argv);
  if (!status.ok()) std::cerr << status.ToString() << '\n';
  return status.ok() ? 0 : 1;
}
