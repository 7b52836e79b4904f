// Any bytes as a GGUF file: refused with one line, or a file whose tensors and keys can all be
// read.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "model/config_reader.h"
#include "model/gguf.h"
#include "model/vocabulary.h"
#include "model/weights.h"

namespace {

using namespace pliant;  // NOLINT

void CheckMessage(const Status& status) {
  PLIANT_CHECK(!status.message().empty() && status.message().find('\n') == std::string::npos,
               "an error is one line");
}

template <typename T>
void CheckResult(const Result<T>& result) {
  if (!result.ok()) CheckMessage(result.status());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  auto parsed = GgufFile::Parse(MemorySource(std::move(bytes)), "fuzz");
  CheckResult(parsed);
  if (!parsed.ok()) return 0;
  std::shared_ptr<GgufFile> file = std::move(parsed).value();
  for (const std::string& key : file->Keys()) {
    CheckResult(file->Uint(key));
    CheckResult(file->Float(key));
    CheckResult(file->Bool(key));
    CheckResult(file->String(key));
    CheckResult(file->Strings(key));
    CheckResult(file->Ints(key));
  }
  for (const TensorInfo& tensor : file->tensors()) {
    PLIANT_CHECK(tensor.offset <= size && tensor.bytes <= size - tensor.offset,
                 "a tensor lies inside its file");
    std::vector<std::byte> out(tensor.bytes);
    PLIANT_CHECK(file->ReadTensor(tensor, out).ok(), "its bytes can be read");
  }
  CheckResult(ReadGgufVocabulary(*file));
  const Status vocabulary = CheckGgufVocabulary(*file, Architecture::kLlama, 0);
  if (!vocabulary.ok()) CheckMessage(vocabulary);
  const Result<ModelConfig> config = ReadGgufConfig(*file);
  CheckResult(config);
  if (!config.ok()) return 0;
  PLIANT_CHECK(
      config->InverseFrequencies().size() == static_cast<std::size_t>(config->head_dim / 2),
      "one a pair");
  const Status weights = CheckWeights(*GgufWeights(file, config->architecture), *config);
  if (!weights.ok()) CheckMessage(weights);
  return 0;
}
