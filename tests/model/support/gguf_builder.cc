#include "model/support/gguf_builder.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/check.h"

namespace pliant::testing_support {
namespace {

/// Walks the raw bytes of a sound file.
class Walker {
 public:
  explicit Walker(const std::vector<std::byte>& bytes) : bytes_(bytes) {}
  std::size_t at = 0;

  template <typename T>
  T Take() {
    T value;
    PLIANT_CHECK(at + sizeof value <= bytes_.size(), "a sound file");
    std::memcpy(&value, bytes_.data() + at, sizeof value);
    at += sizeof value;
    return value;
  }
  std::string TakeString() {
    const auto length = static_cast<std::size_t>(Take<std::uint64_t>());
    PLIANT_CHECK(at + length <= bytes_.size(), "a sound file");
    std::string text(reinterpret_cast<const char*>(bytes_.data() + at), length);
    at += length;
    return text;
  }
  void SkipValue(GgufType type) {
    if (type == GgufType::kString) {
      TakeString();
    } else if (type == GgufType::kArray) {
      const auto element = static_cast<GgufType>(Take<std::uint32_t>());
      const auto count = Take<std::uint64_t>();
      for (std::uint64_t i = 0; i < count; ++i) SkipValue(element);
    } else {
      static constexpr std::size_t kBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
      at += kBytes[static_cast<std::size_t>(type)];
    }
  }

 private:
  const std::vector<std::byte>& bytes_;
};

std::size_t Aligned(std::size_t at) { return (at + 31) / 32 * 32; }

}  // namespace

std::vector<std::byte> WithoutKey(const std::vector<std::byte>& file, std::string_view key) {
  Walker walker(file);
  walker.at = 8;
  const auto tensors = walker.Take<std::uint64_t>();
  const auto keys = walker.Take<std::uint64_t>();
  std::size_t cut_begin = 0;
  std::size_t cut_end = 0;
  for (std::uint64_t i = 0; i < keys; ++i) {
    const std::size_t begin = walker.at;
    const bool match = walker.TakeString() == key;
    walker.SkipValue(static_cast<GgufType>(walker.Take<std::uint32_t>()));
    if (match) {
      cut_begin = begin;
      cut_end = walker.at;
    }
  }
  PLIANT_CHECK(cut_end > 0, "the file has the key to drop");
  for (std::uint64_t i = 0; i < tensors; ++i) {
    walker.TakeString();
    const auto dims = walker.Take<std::uint32_t>();
    walker.at += dims * 8 + 12;
  }
  const auto begin = file.begin();
  std::vector<std::byte> out(begin, begin + static_cast<std::ptrdiff_t>(cut_begin));
  out.insert(out.end(), begin + static_cast<std::ptrdiff_t>(cut_end),
             begin + static_cast<std::ptrdiff_t>(walker.at));
  out.resize(Aligned(out.size()));
  out.insert(out.end(), begin + static_cast<std::ptrdiff_t>(Aligned(walker.at)), file.end());
  const std::uint64_t left = keys - 1;
  std::memcpy(out.data() + 16, &left, sizeof left);
  return out;
}

GgufBuilder SmallGguf() {
  GgufBuilder file;
  file.String("general.architecture", "llama");
  file.Scalar<std::uint32_t>("count", GgufType::kUint32, 7);
  file.Scalar<std::int16_t>("negative", GgufType::kInt16, -3);
  file.Scalar<float>("ratio", GgufType::kFloat32, 0.5f);
  file.Scalar<std::uint8_t>("flag", GgufType::kBool, 1);
  file.Strings("words", {"a", "", "ccc"});
  file.keys.emplace_back("numbers", Bytes()
                                        .Put<std::uint32_t>(9)
                                        .Put<std::uint32_t>(5)
                                        .Put<std::uint64_t>(3)
                                        .Put<std::int32_t>(1)
                                        .Put<std::int32_t>(-2)
                                        .Put<std::int32_t>(3));
  file.tensors.push_back({"first", {32, 2}, 8, 0});  // Q8_0: 68 bytes
  file.tensors.push_back({"second", {8}, 0, 96});    // F32: 32 bytes
  file.data_bytes = 128;
  return file;
}

std::vector<std::byte> FileBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  PLIANT_CHECK(file.is_open(), path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

void WriteBytes(const std::string& path, const std::vector<std::byte>& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  file.close();
  PLIANT_CHECK(file.good(), path);
}

TempFolder::TempFolder() {
  std::string path = (std::filesystem::temp_directory_path() / "pliant-test-XXXXXX").string();
  PLIANT_CHECK(mkdtemp(path.data()) != nullptr, path);
  path_ = path;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace pliant::testing_support
