// Room: model. Parsing of safetensors headers and of the shard index.
#include "model/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "model/json.h"

namespace pliant {
namespace {

static_assert(std::endian::native == std::endian::little, "weights are read in place");

constexpr std::uint64_t kMaxJsonHeaderBytes = 100'000'000;  // as the reference implementation
constexpr std::uint64_t kMaxIndexBytes = 64 << 20;
constexpr std::size_t kMaxEntries = 1 << 17;
constexpr std::size_t kMaxListLength = 8;
constexpr std::size_t kMaxShards = 4096;

struct StoredType {
  std::string_view name;
  std::uint64_t bytes;
  std::optional<DType> weight;  // the type a weight of this kind is read as
};

constexpr StoredType kStoredTypes[] = {
    {"F32", 4, DType::kF32}, {"F16", 2, DType::kF16}, {"BF16", 2, DType::kBF16},
    {"F64", 8, {}},          {"I64", 8, {}},          {"U64", 8, {}},
    {"I32", 4, {}},          {"U32", 4, {}},          {"I16", 2, {}},
    {"U16", 2, {}},          {"I8", 1, {}},           {"U8", 1, {}},
    {"BOOL", 1, {}},         {"F8_E4M3", 1, {}},      {"F8_E5M2", 1, {}},
    {"F8_E8M0", 1, {}},
};

std::string Label(std::string_view name) {
  std::string out = "tensor '";
  for (const char c : name.substr(0, 100)) {
    out += static_cast<unsigned char>(c) < 32 || c == 127 ? '?' : c;
  }
  return out + (name.size() > 100 ? "...'" : "'");
}

/// One tensor's entry as the header spells it; offsets are from the start of the data.
struct Entry {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::vector<std::uint64_t> offsets;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

/// Streams the header's JSON, so that a hostile one costs no more than its tensors. Shape: {name:
/// {member: string | [uint]}}, and "__metadata__": {string: string}.
class HeaderSax final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<Entry> entries;
  std::string error;

  bool null() override { return Fail("null where a value is needed"); }
  bool boolean(bool) override { return Fail("true or false where a value is needed"); }
  bool number_integer(number_integer_t) override { return Fail("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { return Fail("a fraction"); }
  bool binary(binary_t&) override { return Fail("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (depth_ != 2 || list_ == nullptr) return Fail("a number where none may stand");
    if (list_->size() >= kMaxListLength) return Fail("more than 8 numbers in a list");
    list_->push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (depth_ == 2 && metadata_) return true;
    if (depth_ != 2 || list_ != nullptr || member_ != "dtype") {
      return Fail("a string where none may stand");
    }
    entries.back().dtype = value;
    entries.back().has_dtype = true;
    return true;
  }

  bool start_object(std::size_t) override {
    if (depth_ >= 2 || list_ != nullptr) return Fail("an object nested too deep");
    ++depth_;
    return true;
  }

  bool end_object() override {
    if (depth_ == 2) metadata_ = false;
    --depth_;
    return true;
  }

  bool key(string_t& value) override {
    if (depth_ == 1) {
      if (!names_.insert(value).second) return Fail("appears twice", value);
      metadata_ = value == "__metadata__";
      if (metadata_) return true;
      if (entries.size() >= kMaxEntries) return Fail("too many tensors");
      entries.emplace_back();
      entries.back().name = value;
      return true;
    }
    member_ = value;
    return true;
  }

  bool start_array(std::size_t) override {
    if (depth_ != 2 || metadata_ || list_ != nullptr) return Fail("a list where none may stand");
    Entry& entry = entries.back();
    if (member_ == "shape" && !entry.has_shape) {
      entry.has_shape = true;
      list_ = &entry.shape;
    } else if (member_ == "data_offsets" && !entry.has_offsets) {
      entry.has_offsets = true;
      list_ = &entry.offsets;
    } else {
      return Fail("a list where none may stand");
    }
    return true;
  }

  bool end_array() override {
    list_ = nullptr;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    if (error.empty()) error = "invalid JSON near byte " + std::to_string(position);
    return false;
  }

 private:
  bool Fail(std::string_view what) {
    error =
        entries.empty() ? std::string(what) : Label(entries.back().name) + ": " + std::string(what);
    return false;
  }
  bool Fail(std::string_view what, std::string_view name) {
    error = Label(name) + " " + std::string(what);
    return false;
  }

  int depth_ = 0;
  bool metadata_ = false;
  std::string member_;
  std::vector<std::uint64_t>* list_ = nullptr;
  std::set<std::string> names_;
};

Status CheckEntry(const Entry& entry, std::uint64_t data_start, std::uint64_t data_bytes, int file,
                  TensorInfo& tensor) {
  const std::string label = Label(entry.name);
  if (!entry.has_dtype) return InvalidArgument(label + " has no dtype");
  if (!entry.has_shape) return InvalidArgument(label + " has no shape");
  if (entry.offsets.size() != 2) {
    return InvalidArgument(label + " needs two data_offsets, it has " +
                           std::to_string(entry.offsets.size()));
  }
  const auto* stored = std::find_if(std::begin(kStoredTypes), std::end(kStoredTypes),
                                    [&](const StoredType& t) { return t.name == entry.dtype; });
  if (stored == std::end(kStoredTypes)) {
    return Unimplemented(label + " has dtype " + entry.dtype.substr(0, 40) +
                         ", which is not supported (F32, F16 and BF16 weights are)");
  }
  tensor.name = entry.name;
  tensor.file = file;
  tensor.type_name = entry.dtype;
  tensor.readable = stored->weight.has_value();
  tensor.type = stored->weight.value_or(DType::kF32);
  tensor.elements = 1;
  for (const std::uint64_t size : entry.shape) {
    if (size > kMaxTensorElements ||
        (tensor.elements != 0 && size > kMaxTensorElements / tensor.elements)) {
      return InvalidArgument(label + " has a shape whose product passes " +
                             std::to_string(kMaxTensorElements) + " elements");
    }
    tensor.elements *= size;
    tensor.shape.push_back(static_cast<std::int64_t>(size));
  }
  tensor.bytes = tensor.elements * stored->bytes;
  const auto [begin, end] = std::pair(entry.offsets[0], entry.offsets[1]);
  if (begin > end) {
    return InvalidArgument(label + " has reversed data_offsets " + std::to_string(begin) + " and " +
                           std::to_string(end));
  }
  if (end > data_bytes) {
    return DataLoss(label + " ends at byte " + std::to_string(end) + " of the data, which has " +
                    FormatBytes(data_bytes) + ": the file is cut off or damaged");
  }
  if (end - begin != tensor.bytes) {
    return InvalidArgument(label + " of dtype " + entry.dtype + " and shape " + tensor.ShapeText() +
                           " takes " + FormatBytes(tensor.bytes) + ", its data_offsets span " +
                           FormatBytes(end - begin));
  }
  tensor.offset = data_start + begin;
  return Status::Ok();
}

/// The data must be covered without overlap or hole, as the format demands.
Status CheckCoverage(const std::vector<TensorInfo>& tensors, std::uint64_t data_start,
                     std::uint64_t file_bytes) {
  std::vector<const TensorInfo*> by_offset;
  by_offset.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) by_offset.push_back(&tensor);
  std::sort(by_offset.begin(), by_offset.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::pair(a->offset, a->bytes) < std::pair(b->offset, b->bytes);
  });
  std::uint64_t covered = data_start;
  for (const TensorInfo* tensor : by_offset) {
    if (tensor->offset != covered) {
      return InvalidArgument(Label(tensor->name) + " starts at byte " +
                             std::to_string(tensor->offset) + " where byte " +
                             std::to_string(covered) + " is due: tensors overlap or leave a hole");
    }
    covered += tensor->bytes;
  }
  if (covered != file_bytes) {
    return InvalidArgument("the tensors end at byte " + std::to_string(covered) +
                           ", the file has " + FormatBytes(file_bytes));
  }
  return Status::Ok();
}

}  // namespace

Result<std::vector<TensorInfo>> ReadSafetensorsHeader(const ByteSource& source, int file) {
  if (source.size() == 0) return DataLoss("the file is empty");
  if (source.size() < 8) {
    return DataLoss("the header length needs 8 bytes, the file has " + FormatBytes(source.size()));
  }
  std::uint64_t length = 0;
  PLIANT_RETURN_IF_ERROR(source.Read(0, std::as_writable_bytes(std::span(&length, 1))));
  if (length > source.size() - 8) {
    return DataLoss("the header claims " + FormatBytes(length) + ", the file has " +
                    FormatBytes(source.size()));
  }
  if (length > kMaxJsonHeaderBytes) {
    return TooLarge("the header claims " + FormatBytes(length) + ", at most " +
                    FormatBytes(kMaxJsonHeaderBytes) + " are allowed");
  }
  std::string header(static_cast<std::size_t>(length), '\0');
  PLIANT_RETURN_IF_ERROR(
      source.Read(8, std::as_writable_bytes(std::span(header.data(), header.size()))));
  if (header.empty() || header[0] != '{') {
    return InvalidArgument("not a safetensors file: its header does not start with '{'");
  }
  HeaderSax sax;
  if (!nlohmann::json::sax_parse(header, &sax)) {
    return InvalidArgument("the safetensors header is not valid: " + sax.error);
  }
  const std::uint64_t data_start = 8 + length;
  std::vector<TensorInfo> tensors;
  tensors.reserve(sax.entries.size());
  for (const Entry& entry : sax.entries) {
    TensorInfo tensor;
    PLIANT_RETURN_IF_ERROR(CheckEntry(entry, data_start, source.size() - data_start, file, tensor));
    tensors.push_back(std::move(tensor));
  }
  PLIANT_RETURN_IF_ERROR(CheckCoverage(tensors, data_start, source.size()));
  return tensors;
}

Status SafetensorsModel::AddFile(const std::string& folder, const std::string& name) {
  const std::string path = folder + "/" + name;
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<ByteSource> source, OpenFile(path));
  Result<std::vector<TensorInfo>> tensors =
      ReadSafetensorsHeader(*source, static_cast<int>(names_.size()));
  if (!tensors.ok()) return tensors.status().WithContext(path);
  for (TensorInfo& tensor : *tensors) {
    if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) {
      return InvalidArgument(path + ": " + Label(tensor.name) + " is also in " +
                             names_[static_cast<std::size_t>(FindTensor(tensor.name)->file)]);
    }
    tensors_.push_back(std::move(tensor));
  }
  file_bytes_ += source->size();
  names_.push_back(name);
  sources_.push_back(std::move(source));
  return Status::Ok();
}

Status SafetensorsModel::CheckIndex(
    const std::unordered_map<std::string, std::string>& index) const {
  for (const auto& [tensor, shard] : index) {
    const TensorInfo* found = FindTensor(tensor);
    if (found == nullptr) {
      return DataLoss(Label(tensor) + " should be in " + shard + " and is in no shard");
    }
    if (names_[static_cast<std::size_t>(found->file)] != shard) {
      return InvalidArgument(Label(tensor) + " should be in " + shard + " and is in " +
                             names_[static_cast<std::size_t>(found->file)]);
    }
  }
  return Status::Ok();
}

Result<std::unique_ptr<SafetensorsModel>> SafetensorsModel::Open(const std::string& folder) {
  std::unique_ptr<SafetensorsModel> model(new SafetensorsModel());
  const std::string index_path = folder + "/model.safetensors.index.json";
  Result<std::string> index_text = ReadTextFile(index_path, kMaxIndexBytes);
  if (!index_text.ok()) {
    if (index_text.status().code() != StatusCode::kNotFound) return index_text.status();
    PLIANT_RETURN_IF_ERROR(model->AddFile(folder, "model.safetensors"));
    return model;
  }
  Result<nlohmann::json> index = ParseJsonObject(*index_text, 4);
  if (!index.ok()) return index.status().WithContext(index_path);
  const auto map = index->find("weight_map");
  if (map == index->end() || !map->is_object()) {
    return InvalidArgument(index_path + ": 'weight_map' is missing or not an object");
  }
  std::unordered_map<std::string, std::string> where;
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) {
      return InvalidArgument(index_path + ": the shard of " + Label(tensor) + " is not a string");
    }
    const auto& name = shard.get_ref<const std::string&>();
    // A shard is a file of this folder; a path out of it is an attack.
    if (name.empty() || name[0] == '.' || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos) {
      return InvalidArgument(index_path + ": the shard of " + Label(tensor) +
                             " is not a plain file name");
    }
    where.emplace(tensor, name);
    shards.insert(name);
  }
  if (shards.empty() || shards.size() > kMaxShards) {
    return InvalidArgument(index_path + ": " + std::to_string(shards.size()) + " shards (1 to " +
                           std::to_string(kMaxShards) + " are allowed)");
  }
  for (const std::string& shard : shards) PLIANT_RETURN_IF_ERROR(model->AddFile(folder, shard));
  const Status matches = model->CheckIndex(where);
  if (!matches.ok()) return matches.WithContext(index_path);
  return model;
}

const TensorInfo* SafetensorsModel::FindTensor(std::string_view name) const {
  const auto found = tensor_index_.find(std::string(name));
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

Status SafetensorsModel::ReadTensor(const TensorInfo& tensor, std::span<std::byte> out) const {
  PLIANT_CHECK(out.size() == tensor.bytes, "the buffer must have the tensor's size");
  PLIANT_CHECK(!sources_.empty(), "the files have been released");
  const auto file = static_cast<std::size_t>(tensor.file);
  const Status read = sources_[file]->Read(tensor.offset, out);
  return read.ok() ? read : read.WithContext(names_[file] + ": " + Label(tensor.name));
}

}  // namespace pliant
