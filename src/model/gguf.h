// Room: model. GGUF v2 and v3 files (the GGUF specification of the ggml project): typed keys and a
// table of tensors. Immutable after opening: any thread may read it.
//
// Every count, length, type, offset and product is checked against the file's size before it is
// used, so a GgufFile that exists is sound: each tensor lies inside the file, aligned, and overlaps
// no other. A file that is not is refused with one line that names the key or tensor and the sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "model/byte_source.h"
#include "model/tensor_info.h"

namespace pliant {

enum class GgufType : std::uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};
/// "u32", "array", ...; "?" for a number that is no type.
std::string_view GgufTypeName(GgufType type);

class GgufFile {
 public:
  static Result<std::unique_ptr<GgufFile>> Open(const std::string& path);
  /// `name` stands in front of messages.
  static Result<std::unique_ptr<GgufFile>> Parse(std::unique_ptr<ByteSource> source,
                                                 std::string_view name);

  std::uint32_t version() const { return version_; }
  std::uint64_t file_bytes() const { return file_bytes_; }
  /// The raw bytes in front of the tensor data.
  std::span<const std::byte> header() const { return header_; }
  std::vector<std::string> Keys() const;

  /// In the file's order.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  /// Null when there is none of this name.
  const TensorInfo* FindTensor(std::string_view name) const;
  /// Fills `out` (tensor.bytes long). DataLoss naming the tensor when the file was shortened since.
  Status ReadTensor(const TensorInfo& tensor, std::span<std::byte> out) const;
  /// Any bytes of the file, for fingerprints.
  Status ReadBytes(std::uint64_t offset, std::span<std::byte> out) const;
  /// Closes the file; keys stay, nothing may be read from here on.
  void ReleaseFile() { source_.reset(); }

  // Typed access. NotFound when the key is missing, InvalidArgument when its type or value does not
  // fit; both name the key.
  bool Has(std::string_view key) const { return values_.find(key) != values_.end(); }
  /// Any integer type, not negative.
  Result<std::uint64_t> Uint(std::string_view key) const;
  /// Any float or integer type.
  Result<double> Float(std::string_view key) const;
  Result<bool> Bool(std::string_view key) const;
  Result<std::string> String(std::string_view key) const;
  Result<std::vector<std::string>> Strings(std::string_view key) const;
  /// Any integer element type.
  Result<std::vector<std::int64_t>> Ints(std::string_view key) const;
  /// Elements of an array.
  Result<std::uint64_t> Count(std::string_view key) const;

 private:
  class Reader;
  struct Value {
    GgufType type = GgufType::kUint8;
    GgufType element = GgufType::kUint8;  // of an array
    std::uint64_t count = 0;              // elements of an array, bytes of a string
    std::uint64_t offset = 0;             // of the payload in header_
  };

  GgufFile() = default;
  Status ParseHeader();
  Status ParseKeys(Reader& reader, std::uint64_t count);
  Status ParseTensors(Reader& reader, std::uint64_t count);
  Status PlaceTensors(std::uint64_t table_end);
  Result<const Value*> Find(std::string_view key) const;
  Result<const Value*> FindArray(std::string_view key) const;
  std::int64_t IntAt(GgufType type, std::uint64_t offset, bool& fits) const;
  template <typename T>
  T At(std::uint64_t offset) const;

  std::unique_ptr<ByteSource> source_;
  std::uint64_t file_bytes_ = 0;
  std::uint32_t version_ = 0;
  std::vector<std::byte> header_;  // what was read of the file's start; values point into it
  std::map<std::string, Value, std::less<>> values_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string_view, std::size_t> tensor_index_;  // views of tensors_' names
};

}  // namespace pliant
