// Test support: writes GGUF files in memory, right or wrong on purpose, and edits existing ones.
// One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/gguf.h"

namespace pliant::testing_support {

/// Little-endian bytes, appended.
class Bytes {
 public:
  template <typename T>
  Bytes& Put(T value) {
    const auto at = bytes_.size();
    bytes_.resize(at + sizeof value);
    std::memcpy(bytes_.data() + at, &value, sizeof value);
    return *this;
  }
  Bytes& Raw(std::string_view text) {
    for (const char c : text) bytes_.push_back(static_cast<std::byte>(c));
    return *this;
  }
  Bytes& String(std::string_view text) { return Put<std::uint64_t>(text.size()).Raw(text); }
  Bytes& Append(const Bytes& other) {
    bytes_.insert(bytes_.end(), other.bytes_.begin(), other.bytes_.end());
    return *this;
  }
  Bytes& PadTo(std::size_t alignment) {
    while (bytes_.size() % alignment != 0) bytes_.push_back(std::byte{0});
    return *this;
  }
  std::size_t size() const { return bytes_.size(); }
  std::vector<std::byte>& data() { return bytes_; }
  const std::vector<std::byte>& data() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

struct GgufTensor {
  std::string name;
  std::vector<std::uint64_t> dims;  // contiguous dimension first, as in the file
  std::uint32_t type = 0;
  std::uint64_t offset = 0;
};

/// A file whose every part can be set wrong. Counts follow the parts unless set.
struct GgufBuilder {
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::int64_t key_count = -1, tensor_count = -1;
  std::vector<std::pair<std::string, Bytes>> keys;  // type and payload
  std::vector<GgufTensor> tensors;
  std::size_t data_bytes = 0;
  std::size_t alignment = 32;

  template <typename T>
  void Scalar(std::string_view key, GgufType type, T value) {
    keys.emplace_back(key, Bytes().Put(static_cast<std::uint32_t>(type)).Put(value));
  }
  void String(std::string_view key, std::string_view value) {
    keys.emplace_back(key,
                      Bytes().Put(static_cast<std::uint32_t>(GgufType::kString)).String(value));
  }
  void Strings(std::string_view key, const std::vector<std::string>& values) {
    Bytes bytes;
    bytes.Put(static_cast<std::uint32_t>(GgufType::kArray));
    bytes.Put(static_cast<std::uint32_t>(GgufType::kString)).Put<std::uint64_t>(values.size());
    for (const std::string& value : values) bytes.String(value);
    keys.emplace_back(key, bytes);
  }

  std::vector<std::byte> Build() const {
    Bytes out;
    out.Raw(magic).Put(version);
    out.Put<std::uint64_t>(tensor_count < 0 ? tensors.size()
                                            : static_cast<std::uint64_t>(tensor_count));
    out.Put<std::uint64_t>(key_count < 0 ? keys.size() : static_cast<std::uint64_t>(key_count));
    for (const auto& [key, value] : keys) out.String(key).Append(value);
    for (const GgufTensor& tensor : tensors) {
      out.String(tensor.name).Put(static_cast<std::uint32_t>(tensor.dims.size()));
      for (const std::uint64_t dim : tensor.dims) out.Put(dim);
      out.Put(tensor.type).Put(tensor.offset);
    }
    out.PadTo(alignment);
    for (std::size_t i = 0; i < data_bytes; ++i) out.Put(static_cast<std::uint8_t>(i * 7));
    return out.data();
  }
  Result<std::unique_ptr<GgufFile>> Parse() const {
    return GgufFile::Parse(MemorySource(Build()), "test");
  }
};

/// The bytes of a GGUF file without one of its keys; stops the test program when it has none of
/// this name.
std::vector<std::byte> WithoutKey(const std::vector<std::byte>& file, std::string_view key);

/// A small sound file: five kinds of keys, two tensors, data to the last byte.
GgufBuilder SmallGguf();

std::vector<std::byte> FileBytes(const std::string& path);
void WriteBytes(const std::string& path, const std::vector<std::byte>& bytes);

/// A fresh folder below the system's temporary one, removed with everything in it at the end.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string File(std::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  std::string path_;
};

}  // namespace pliant::testing_support
