// Room: model. Parsing of GGUF files and typed access to their keys.
#include "model/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

namespace pliant {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF values are read in place");

constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kMaxKeys = 1 << 16;
constexpr std::uint64_t kMaxTensors = 1 << 17;
constexpr std::uint64_t kMaxKeyBytes = 65535;  // the specification's
constexpr std::uint64_t kMaxTensorNameBytes = 256;
constexpr std::uint32_t kMaxDims = 4;
constexpr int kMaxArrayDepth = 4;
constexpr std::uint64_t kMaxAlignment = 1 << 20;

/// Bytes of a scalar, 0 for strings and arrays.
std::uint64_t ScalarBytes(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kBool:
      return 1;
    case GgufType::kUint16:
    case GgufType::kInt16:
      return 2;
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kFloat32:
      return 4;
    case GgufType::kUint64:
    case GgufType::kInt64:
    case GgufType::kFloat64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      return 0;
  }
  return 0;
}

bool IsInteger(GgufType type) {
  return ScalarBytes(type) > 0 && type != GgufType::kBool && type != GgufType::kFloat32 &&
         type != GgufType::kFloat64;
}

std::string Quoted(std::string_view text) {
  // Names come from the file: keep them short and printable in messages.
  std::string out = "'";
  for (const char c : text.substr(0, 80)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 32 || byte == 127 ? '?' : c;
  }
  return out + (text.size() > 80 ? "...'" : "'");
}

std::optional<DType> WeightType(std::uint32_t id) {
  switch (id) {
    case 0:
      return DType::kF32;
    case 1:
      return DType::kF16;
    case 2:
      return DType::kQ4_0;
    case 3:
      return DType::kQ4_1;
    case 6:
      return DType::kQ5_0;
    case 7:
      return DType::kQ5_1;
    case 8:
      return DType::kQ8_0;
    case 12:
      return DType::kQ4_K;
    case 13:
      return DType::kQ5_K;
    case 14:
      return DType::kQ6_K;
    case 30:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

/// Names of the types that the specification knows and Pliant does not read.
std::string ForeignTypeName(std::uint32_t id) {
  static constexpr std::pair<std::uint32_t, const char*> kNames[] = {
      {9, "Q8_1"},    {10, "Q2_K"},    {11, "Q3_K"},  {15, "Q8_K"},   {16, "IQ2_XXS"},
      {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"},
      {22, "IQ2_S"},  {23, "IQ4_XS"},  {24, "I8"},    {25, "I16"},    {26, "I32"},
      {27, "I64"},    {28, "F64"},     {29, "IQ1_M"}, {34, "TQ1_0"},  {35, "TQ2_0"},
      {39, "MXFP4"}};
  for (const auto& [number, name] : kNames) {
    if (number == id) return name;
  }
  return "number " + std::to_string(id);
}

}  // namespace

std::string_view GgufTypeName(GgufType type) {
  static constexpr std::array<std::string_view, 13> kNames = {
      "u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
      "bool", "string", "array", "u64", "i64", "f64"};
  const auto index = static_cast<std::size_t>(type);
  return index < kNames.size() ? kNames[index] : "?";
}

/// Walks the header. Bytes are fetched in growing pieces, so that opening a large file reads only
/// its start.
class GgufFile::Reader {
 public:
  Reader(const ByteSource& source, std::vector<std::byte>& buffer)
      : source_(source), buffer_(buffer) {}

  std::uint64_t position() const { return position_; }
  std::uint64_t remaining() const { return source_.size() - position_; }

  /// Makes `bytes` bytes at the position readable. `what` and `name` say in whose behalf.
  Status Need(std::uint64_t bytes, std::string_view what, std::string_view name = {}) {
    if (bytes > remaining()) {
      return DataLoss(Subject(what, name) + " needs " + FormatBytes(bytes) + " at byte " +
                      std::to_string(position_) + ", the file has " + FormatBytes(source_.size()));
    }
    const std::uint64_t end = position_ + bytes;
    if (end <= buffer_.size()) return Status::Ok();
    if (end > kMaxHeaderBytes) {
      return TooLarge(Subject(what, name) + " ends at byte " + std::to_string(end) +
                      ", the keys and tensor table may take " + FormatBytes(kMaxHeaderBytes));
    }
    const std::uint64_t had = buffer_.size();
    const std::uint64_t want =
        std::min(source_.size(), std::max<std::uint64_t>({end, 2 * had, std::uint64_t{1} << 16}));
    buffer_.resize(static_cast<std::size_t>(want));
    return source_.Read(had, std::span(buffer_).subspan(static_cast<std::size_t>(had)));
  }

  template <typename T>
  Status Read(T& value, std::string_view what, std::string_view name = {}) {
    PLIANT_RETURN_IF_ERROR(Need(sizeof(T), what, name));
    std::memcpy(&value, buffer_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return Status::Ok();
  }

  Status ReadString(std::string& value, std::uint64_t limit, std::string_view what) {
    std::uint64_t length = 0;
    PLIANT_RETURN_IF_ERROR(Read(length, what));
    if (length > limit) {
      return InvalidArgument(std::string(what) + " at byte " + std::to_string(position_) +
                             " claims " + FormatBytes(length) + ", at most " + FormatBytes(limit) +
                             " are allowed");
    }
    PLIANT_RETURN_IF_ERROR(Need(length, what));
    value.assign(reinterpret_cast<const char*>(buffer_.data() + position_),
                 static_cast<std::size_t>(length));
    position_ += length;
    return Status::Ok();
  }

  Status Skip(std::uint64_t bytes, std::string_view what, std::string_view name) {
    PLIANT_RETURN_IF_ERROR(Need(bytes, what, name));
    position_ += bytes;
    return Status::Ok();
  }

  /// Reads an array's element type and count into `value` and skips its elements.
  Status SkipArray(Value& value, std::string_view key, int depth) {
    if (depth > kMaxArrayDepth) {
      return InvalidArgument("key " + Quoted(key) + " nests arrays deeper than " +
                             std::to_string(kMaxArrayDepth));
    }
    std::uint32_t element = 0;
    PLIANT_RETURN_IF_ERROR(Read(element, "key", key));
    PLIANT_RETURN_IF_ERROR(Read(value.count, "key", key));
    value.element = static_cast<GgufType>(element);
    value.offset = position_;
    if (GgufTypeName(value.element) == "?") {
      return InvalidArgument("key " + Quoted(key) + " has elements of unknown type " +
                             std::to_string(element));
    }
    // The least an element can take: a string's length, or a nested array's type and count.
    const std::uint64_t scalar = ScalarBytes(value.element);
    const std::uint64_t least = scalar > 0 ? scalar : (value.element == GgufType::kString ? 8 : 12);
    if (value.count > remaining() / least) {
      return DataLoss("key " + Quoted(key) + " claims " + std::to_string(value.count) +
                      " elements of type " + std::string(GgufTypeName(value.element)) +
                      " at byte " + std::to_string(position_) + ", the file has " +
                      FormatBytes(source_.size()));
    }
    if (scalar > 0) return Skip(value.count * scalar, "key", key);
    for (std::uint64_t i = 0; i < value.count; ++i) {
      if (value.element == GgufType::kString) {
        std::uint64_t length = 0;
        PLIANT_RETURN_IF_ERROR(Read(length, "key", key));
        PLIANT_RETURN_IF_ERROR(Skip(length, "key", key));
      } else {
        Value nested;
        PLIANT_RETURN_IF_ERROR(SkipArray(nested, key, depth + 1));
      }
    }
    return Status::Ok();
  }

 private:
  static std::string Subject(std::string_view what, std::string_view name) {
    return name.empty() ? std::string(what) : std::string(what) + " " + Quoted(name);
  }

  const ByteSource& source_;
  std::vector<std::byte>& buffer_;
  std::uint64_t position_ = 0;
};

Result<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path) {
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<ByteSource> source, OpenFile(path));
  return Parse(std::move(source), path);
}

Result<std::unique_ptr<GgufFile>> GgufFile::Parse(std::unique_ptr<ByteSource> source,
                                                  std::string_view name) {
  std::unique_ptr<GgufFile> file(new GgufFile());
  file->file_bytes_ = source->size();
  file->source_ = std::move(source);
  const Status parsed = file->ParseHeader();
  if (!parsed.ok()) return parsed.WithContext(name);
  return file;
}

Status GgufFile::ParseHeader() {
  if (file_bytes_ == 0) return DataLoss("the file is empty");
  Reader reader(*source_, header_);
  std::array<unsigned char, 4> magic{};
  PLIANT_RETURN_IF_ERROR(reader.Read(magic, "the GGUF magic"));
  static constexpr std::array<unsigned char, 4> kMagic = {'G', 'G', 'U', 'F'};
  static constexpr std::array<unsigned char, 4> kSwapped = {'F', 'U', 'G', 'G'};
  if (magic == kSwapped) {
    return Unimplemented("the file is byte-swapped (big-endian); only little-endian GGUF is read");
  }
  if (magic != kMagic) {
    char text[96];
    std::snprintf(text, sizeof text,
                  "not a GGUF file: it starts with %02x %02x %02x %02x, not 47 47 55 46 (GGUF)",
                  magic[0], magic[1], magic[2], magic[3]);
    return InvalidArgument(text);
  }
  PLIANT_RETURN_IF_ERROR(reader.Read(version_, "the GGUF version"));
  if (version_ != 2 && version_ != 3) {
    const std::uint32_t swapped = __builtin_bswap32(version_);
    if (swapped >= 1 && swapped <= 3) {
      return Unimplemented(
          "the file is byte-swapped (big-endian); only little-endian GGUF is read");
    }
    return Unimplemented("GGUF version " + std::to_string(version_) +
                         " is not supported (2 and 3 are)");
  }
  std::uint64_t tensor_count = 0;
  std::uint64_t key_count = 0;
  PLIANT_RETURN_IF_ERROR(reader.Read(tensor_count, "the tensor count"));
  PLIANT_RETURN_IF_ERROR(reader.Read(key_count, "the key count"));
  // A key takes at least 13 bytes (length, type, one byte), a tensor at least 32 (length,
  // dimensions, one size, type, offset).
  if (key_count > kMaxKeys || key_count > reader.remaining() / 13) {
    return DataLoss("the header claims " + std::to_string(key_count) + " keys; at most " +
                           std::to_string(std::min(kMaxKeys, reader.remaining() / 13)) +
                           " fit into the file's " + FormatBytes(file_bytes_));
  }
  if (tensor_count > kMaxTensors || tensor_count > reader.remaining() / 32) {
    return DataLoss("the header claims " + std::to_string(tensor_count) +
                           " tensors; at most " +
                           std::to_string(std::min(kMaxTensors, reader.remaining() / 32)) +
                           " fit into the file's " + FormatBytes(file_bytes_));
  }
  PLIANT_RETURN_IF_ERROR(ParseKeys(reader, key_count));
  PLIANT_RETURN_IF_ERROR(ParseTensors(reader, tensor_count));
  PLIANT_RETURN_IF_ERROR(PlaceTensors(reader.position()));
  header_.resize(static_cast<std::size_t>(reader.position()));
  header_.shrink_to_fit();
  return Status::Ok();
}

Status GgufFile::ParseKeys(Reader& reader, std::uint64_t count) {
  std::string key;
  for (std::uint64_t i = 0; i < count; ++i) {
    PLIANT_RETURN_IF_ERROR(reader.ReadString(key, kMaxKeyBytes, "a key's name"));
    std::uint32_t type = 0;
    PLIANT_RETURN_IF_ERROR(reader.Read(type, "key", key));
    Value value;
    value.type = static_cast<GgufType>(type);
    if (GgufTypeName(value.type) == "?") {
      return InvalidArgument("key " + Quoted(key) + " has unknown type " + std::to_string(type));
    }
    if (value.type == GgufType::kArray) {
      PLIANT_RETURN_IF_ERROR(reader.SkipArray(value, key, 1));
    } else if (value.type == GgufType::kString) {
      PLIANT_RETURN_IF_ERROR(reader.Read(value.count, "key", key));
      value.offset = reader.position();
      PLIANT_RETURN_IF_ERROR(reader.Skip(value.count, "key", key));
    } else {
      value.offset = reader.position();
      PLIANT_RETURN_IF_ERROR(reader.Skip(ScalarBytes(value.type), "key", key));
    }
    if (!values_.emplace(key, value).second) {
      return InvalidArgument("key " + Quoted(key) + " appears twice");
    }
  }
  return Status::Ok();
}

Status GgufFile::ParseTensors(Reader& reader, std::uint64_t count) {
  tensors_.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count; ++i) {
    TensorInfo tensor;
    PLIANT_RETURN_IF_ERROR(reader.ReadString(tensor.name, kMaxTensorNameBytes, "a tensor's name"));
    const std::string label = "tensor " + Quoted(tensor.name);
    std::uint32_t dims = 0;
    PLIANT_RETURN_IF_ERROR(reader.Read(dims, "tensor", tensor.name));
    if (dims == 0 || dims > kMaxDims) {
      return InvalidArgument(label + " has " + std::to_string(dims) + " dimensions (1 to " +
                             std::to_string(kMaxDims) + " are allowed)");
    }
    tensor.shape.resize(dims);
    tensor.elements = 1;
    for (std::uint32_t d = 0; d < dims; ++d) {
      std::uint64_t size = 0;
      PLIANT_RETURN_IF_ERROR(reader.Read(size, "tensor", tensor.name));
      if (size == 0 || size > kMaxTensorElements / tensor.elements) {
        return InvalidArgument(label + " has " + std::to_string(size) + " elements in dimension " +
                               std::to_string(d) +
                               "; sizes must be positive and their product at most " +
                               std::to_string(kMaxTensorElements));
      }
      tensor.elements *= size;
      // GGUF lists the contiguous dimension first.
      tensor.shape[dims - 1 - d] = static_cast<std::int64_t>(size);
    }
    std::uint32_t type = 0;
    PLIANT_RETURN_IF_ERROR(reader.Read(type, "tensor", tensor.name));
    const std::optional<DType> known = WeightType(type);
    if (!known) {
      return Unimplemented(
          label + " has type " + ForeignTypeName(type) +
          ", which is not supported (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, "
          "Q4_K, Q5_K and Q6_K are)");
    }
    tensor.type = *known;
    const DTypeTraits traits = Traits(tensor.type);
    tensor.type_name = traits.name;
    if (tensor.shape.back() % traits.block_elements != 0) {
      return InvalidArgument(label + " has rows of " + std::to_string(tensor.shape.back()) +
                             " elements, type " + tensor.type_name + " needs a multiple of " +
                             std::to_string(traits.block_elements));
    }
    tensor.bytes = tensor.elements / traits.block_elements * traits.block_bytes;
    PLIANT_RETURN_IF_ERROR(reader.Read(tensor.offset, "tensor", tensor.name));
    tensors_.push_back(std::move(tensor));
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensor_index_.emplace(tensors_[i].name, i).second) {
      return InvalidArgument("tensor " + Quoted(tensors_[i].name) + " appears twice");
    }
  }
  return Status::Ok();
}

/// Turns offsets into the file's and checks that every tensor lies inside it, aligned and apart
/// from the others.
Status GgufFile::PlaceTensors(std::uint64_t table_end) {
  std::uint64_t alignment = 32;
  if (Has("general.alignment")) {
    PLIANT_ASSIGN_OR_RETURN(alignment, Uint("general.alignment"));
    if (!std::has_single_bit(alignment) || alignment < 8 || alignment > kMaxAlignment) {
      return InvalidArgument("key 'general.alignment' is " + std::to_string(alignment) +
                             "; it must be a power of two from 8 to " +
                             std::to_string(kMaxAlignment));
    }
  }
  const std::uint64_t data_start = (table_end + alignment - 1) / alignment * alignment;
  const std::uint64_t data_bytes = data_start < file_bytes_ ? file_bytes_ - data_start : 0;
  std::vector<const TensorInfo*> by_offset;
  by_offset.reserve(tensors_.size());
  for (TensorInfo& tensor : tensors_) {
    if (tensor.offset % alignment != 0) {
      return InvalidArgument("tensor " + Quoted(tensor.name) + " starts at offset " +
                             std::to_string(tensor.offset) + ", not a multiple of the alignment " +
                             std::to_string(alignment));
    }
    if (tensor.offset > data_bytes || tensor.bytes > data_bytes - tensor.offset) {
      return DataLoss("tensor " + Quoted(tensor.name) + " takes " + FormatBytes(tensor.bytes) +
                      " at offset " + std::to_string(tensor.offset) + " of the data, which has " +
                      FormatBytes(data_bytes) + " (the file has " + FormatBytes(file_bytes_) +
                      "): the file is cut off or damaged");
    }
    tensor.offset += data_start;
    by_offset.push_back(&tensor);
  }
  std::sort(by_offset.begin(), by_offset.end(),
            [](const TensorInfo* a, const TensorInfo* b) { return a->offset < b->offset; });
  for (std::size_t i = 1; i < by_offset.size(); ++i) {
    const TensorInfo& before = *by_offset[i - 1];
    if (before.offset + before.bytes > by_offset[i]->offset) {
      return InvalidArgument("tensors " + Quoted(before.name) + " and " +
                             Quoted(by_offset[i]->name) + " overlap: the first takes " +
                             FormatBytes(before.bytes) + " at byte " +
                             std::to_string(before.offset) + ", the second starts at byte " +
                             std::to_string(by_offset[i]->offset));
    }
  }
  return Status::Ok();
}

const TensorInfo* GgufFile::FindTensor(std::string_view name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

Status GgufFile::ReadTensor(const TensorInfo& tensor, std::span<std::byte> out) const {
  PLIANT_CHECK(out.size() == tensor.bytes, "the buffer must have the tensor's size");
  PLIANT_CHECK(source_ != nullptr, "the file has been released");
  const Status read = source_->Read(tensor.offset, out);
  return read.ok() ? read : read.WithContext("tensor " + Quoted(tensor.name));
}

Status GgufFile::ReadBytes(std::uint64_t offset, std::span<std::byte> out) const {
  PLIANT_CHECK(source_ != nullptr, "the file has been released");
  return source_->Read(offset, out);
}

std::vector<std::string> GgufFile::Keys() const {
  std::vector<std::string> keys;
  keys.reserve(values_.size());
  for (const auto& [key, value] : values_) keys.push_back(key);
  return keys;
}

// ---- typed access
// ---------------------------------------------------------------------------------------------------------

template <typename T>
T GgufFile::At(std::uint64_t offset) const {
  T value;
  std::memcpy(&value, header_.data() + offset, sizeof value);
  return value;
}

Result<const GgufFile::Value*> GgufFile::Find(std::string_view key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return NotFound("key " + Quoted(key) + " is missing");
  return &found->second;
}

namespace {
Status WrongType(std::string_view key, std::string_view is, std::string_view wanted) {
  return InvalidArgument("key " + Quoted(key) + " is of type " + std::string(is) + ", " +
                         std::string(wanted) + " is needed");
}
}  // namespace

Result<const GgufFile::Value*> GgufFile::FindArray(std::string_view key) const {
  PLIANT_ASSIGN_OR_RETURN(const Value* value, Find(key));
  if (value->type != GgufType::kArray) {
    return WrongType(key, GgufTypeName(value->type), "an array");
  }
  return value;
}

std::int64_t GgufFile::IntAt(GgufType type, std::uint64_t offset, bool& fits) const {
  fits = true;
  switch (type) {
    case GgufType::kUint8:
      return At<std::uint8_t>(offset);
    case GgufType::kInt8:
      return At<std::int8_t>(offset);
    case GgufType::kUint16:
      return At<std::uint16_t>(offset);
    case GgufType::kInt16:
      return At<std::int16_t>(offset);
    case GgufType::kUint32:
      return At<std::uint32_t>(offset);
    case GgufType::kInt32:
      return At<std::int32_t>(offset);
    case GgufType::kInt64:
      return At<std::int64_t>(offset);
    case GgufType::kUint64: {
      const auto value = At<std::uint64_t>(offset);
      fits = value <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      return static_cast<std::int64_t>(value);
    }
    default:
      fits = false;
      return 0;
  }
}

Result<std::uint64_t> GgufFile::Uint(std::string_view key) const {
  PLIANT_ASSIGN_OR_RETURN(const Value* value, Find(key));
  if (!IsInteger(value->type)) return WrongType(key, GgufTypeName(value->type), "an integer");
  bool fits = true;
  const std::int64_t number = IntAt(value->type, value->offset, fits);
  if (!fits || number < 0) {
    return InvalidArgument("key " + Quoted(key) + " is " +
                           (fits ? std::to_string(number) : "over 2^63") +
                           "; a non-negative integer is needed");
  }
  return static_cast<std::uint64_t>(number);
}

Result<double> GgufFile::Float(std::string_view key) const {
  PLIANT_ASSIGN_OR_RETURN(const Value* value, Find(key));
  if (value->type == GgufType::kFloat32) return static_cast<double>(At<float>(value->offset));
  if (value->type == GgufType::kFloat64) return At<double>(value->offset);
  if (IsInteger(value->type)) {
    bool fits = true;
    const std::int64_t number = IntAt(value->type, value->offset, fits);
    if (fits) return static_cast<double>(number);
  }
  return WrongType(key, GgufTypeName(value->type), "a number");
}

Result<bool> GgufFile::Bool(std::string_view key) const {
  PLIANT_ASSIGN_OR_RETURN(const Value* value, Find(key));
  if (value->type != GgufType::kBool) return WrongType(key, GgufTypeName(value->type), "bool");
  const auto byte = At<std::uint8_t>(value->offset);
  if (byte > 1) {
    return InvalidArgument("key " + Quoted(key) + " is a bool of value " + std::to_string(byte));
  }
  return byte == 1;
}

Result<std::string> GgufFile::String(std::string_view key) const {
  PLIANT_ASSIGN_OR_RETURN(const Value* value, Find(key));
  if (value->type != GgufType::kString) return WrongType(key, GgufTypeName(value->type), "string");
  return std::string(reinterpret_cast<const char*>(header_.data() + value->offset),
                     static_cast<std::size_t>(value->count));
}

Result<std::vector<std::string>> GgufFile::Strings(std::string_view key) const {
  PLIANT_ASSIGN_OR_RETURN(const Value* value, FindArray(key));
  if (value->element != GgufType::kString) {
    return WrongType(key, "array of " + std::string(GgufTypeName(value->element)),
                     "an array of strings");
  }
  std::vector<std::string> strings;
  strings.reserve(static_cast<std::size_t>(value->count));
  std::uint64_t at = value->offset;
  for (std::uint64_t i = 0; i < value->count; ++i) {
    const auto length = At<std::uint64_t>(at);
    strings.emplace_back(reinterpret_cast<const char*>(header_.data() + at + 8),
                         static_cast<std::size_t>(length));
    at += 8 + length;
  }
  return strings;
}

Result<std::vector<std::int64_t>> GgufFile::Ints(std::string_view key) const {
  PLIANT_ASSIGN_OR_RETURN(const Value* value, FindArray(key));
  if (!IsInteger(value->element)) {
    return WrongType(key, "array of " + std::string(GgufTypeName(value->element)),
                     "an array of integers");
  }
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(value->count));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    bool fits = true;
    numbers[i] = IntAt(value->element, value->offset + i * ScalarBytes(value->element), fits);
    if (!fits) {
      return InvalidArgument("key " + Quoted(key) + " has an element over 2^63");
    }
  }
  return numbers;
}

Result<std::uint64_t> GgufFile::Count(std::string_view key) const {
  PLIANT_ASSIGN_OR_RETURN(const Value* value, FindArray(key));
  return value->count;
}

}  // namespace pliant
