// Any bytes as a safetensors file and as a config.json: refused with one line, or sound.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "model/config_reader.h"
#include "model/json.h"
#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pliant;  // NOLINT
  const auto check = [](const Status& status) {
    PLIANT_CHECK(!status.message().empty() && status.message().find('\n') == std::string::npos,
                 "an error is one line");
  };
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto config = ReadHfConfig(text); config.ok()) {
    PLIANT_CHECK(config->Validate().ok(), "a configuration that is read is valid");
    PLIANT_CHECK(
        config->InverseFrequencies().size() == static_cast<std::size_t>(config->head_dim / 2),
        "one a pair");
  } else {
    check(config.status());
  }
  // Without a length in front, most inputs would be lost on it: the input is the header, followed
  // by 64 bytes of data.
  for (const bool whole_file : {true, false}) {
    std::vector<std::byte> bytes;
    if (!whole_file) {
      const std::uint64_t length = size;
      bytes.resize(8 + size + 64);
      std::memcpy(bytes.data(), &length, 8);
      if (size > 0) std::memcpy(bytes.data() + 8, data, size);
    } else {
      bytes.resize(size);
      if (size > 0) std::memcpy(bytes.data(), data, size);
    }
    const std::size_t file_bytes = bytes.size();
    const auto read = ReadSafetensorsHeader(*MemorySource(std::move(bytes)), 0);
    if (!read.ok()) {
      check(read.status());
      continue;
    }
    for (const TensorInfo& tensor : *read) {
      PLIANT_CHECK(tensor.offset <= file_bytes && tensor.bytes <= file_bytes - tensor.offset,
                   "inside the file");
    }
  }
  return 0;
}
