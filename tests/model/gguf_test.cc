// GGUF: what it reads, and that every kind of damaged or lying file is refused with one clear line.
#include "model/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "model/support/gguf_builder.h"

namespace pliant {
namespace {

using testing::HasSubstr;
using testing_support::Bytes;
using testing_support::GgufBuilder;
using testing_support::SmallGguf;

/// The file is refused, in one line that holds `words`.
void ExpectRefused(const GgufBuilder& file, std::initializer_list<std::string> words) {
  const auto parsed = file.Parse();
  ASSERT_FALSE(parsed.ok());
  const std::string& message = parsed.status().message();
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  EXPECT_THAT(message, HasSubstr("test: "));
  for (const std::string& word : words) EXPECT_THAT(message, HasSubstr(word));
}

/// Asks for everything a file says, in every type; only crashes and out-of-range tensors are
/// failures.
void Exercise(const GgufFile& file) {
  for (const std::string& key : file.Keys()) {
    (void)file.Uint(key);
    (void)file.Float(key);
    (void)file.Bool(key);
    (void)file.String(key);
    (void)file.Strings(key);
    (void)file.Ints(key);
    (void)file.Count(key);
  }
  for (const TensorInfo& tensor : file.tensors()) {
    ASSERT_LE(tensor.offset, file.file_bytes());
    ASSERT_LE(tensor.bytes, file.file_bytes() - tensor.offset);
    std::vector<std::byte> data(tensor.bytes);
    EXPECT_TRUE(file.ReadTensor(tensor, data).ok());
  }
}

TEST(GgufTest, ReadsKeysAndTensorsOfBothVersions) {
  for (const std::uint32_t version : {2u, 3u}) {
    GgufBuilder builder = SmallGguf();
    builder.version = version;
    const auto parsed = builder.Parse();
    ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
    const GgufFile& file = **parsed;
    EXPECT_EQ(file.version(), version);
    EXPECT_EQ(file.String("general.architecture").value(), "llama");
    EXPECT_EQ(file.Uint("count").value(), 7u);
    EXPECT_EQ(file.Float("count").value(), 7.0);
    EXPECT_EQ(file.Float("negative").value(), -3.0);
    EXPECT_EQ(file.Float("ratio").value(), 0.5);
    EXPECT_TRUE(file.Bool("flag").value());
    EXPECT_THAT(file.Strings("words").value(), testing::ElementsAre("a", "", "ccc"));
    EXPECT_THAT(file.Ints("numbers").value(), testing::ElementsAre(1, -2, 3));
    EXPECT_EQ(file.Count("words").value(), 3u);
    ASSERT_EQ(file.tensors().size(), 2u);
    const TensorInfo* first = file.FindTensor("first");
    ASSERT_NE(first, nullptr);
    EXPECT_EQ(first->type, DType::kQ8_0);
    EXPECT_THAT(first->shape, testing::ElementsAre(2, 32));
    EXPECT_EQ(first->bytes, 68u);
    std::vector<std::byte> data(68);
    ASSERT_TRUE(file.ReadTensor(*first, data).ok());
    EXPECT_EQ(data[1], std::byte{7});
    EXPECT_EQ(file.FindTensor("second")->offset, first->offset + 96);
    EXPECT_EQ(file.FindTensor("third"), nullptr);
  }
}

TEST(GgufTest, TypedAccessNamesKeyAndType) {
  const auto file = SmallGguf().Parse().value();
  EXPECT_EQ(file->Uint("none").status().code(), StatusCode::kNotFound);
  EXPECT_THAT(file->Uint("none").status().message(), HasSubstr("'none' is missing"));
  EXPECT_THAT(file->Uint("negative").status().message(), HasSubstr("'negative' is -3"));
  EXPECT_THAT(file->Uint("ratio").status().message(), HasSubstr("'ratio' is of type f32"));
  EXPECT_THAT(file->String("count").status().message(), HasSubstr("string is needed"));
  EXPECT_THAT(file->Bool("count").status().message(), HasSubstr("bool is needed"));
  EXPECT_THAT(file->Strings("numbers").status().message(), HasSubstr("array of i32"));
  EXPECT_THAT(file->Ints("words").status().message(), HasSubstr("array of string"));
  EXPECT_THAT(file->Ints("count").status().message(), HasSubstr("an array is needed"));
}

TEST(GgufTest, EveryTruncationIsRefused) {
  const std::vector<std::byte> whole = SmallGguf().Build();
  ASSERT_TRUE(GgufFile::Parse(MemorySource(whole), "test").ok());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const std::vector<std::byte> cut(whole.begin(),
                                     whole.begin() + static_cast<std::ptrdiff_t>(size));
    const auto parsed = GgufFile::Parse(MemorySource(cut), "test");
    ASSERT_FALSE(parsed.ok()) << size;
    ASSERT_EQ(parsed.status().message().find('\n'), std::string::npos) << size;
  }
}

TEST(GgufTest, TruncatedDataNamesTensorAndSizes) {
  GgufBuilder file = SmallGguf();
  file.data_bytes = 127;
  ExpectRefused(file, {"'second'", "32 bytes", "offset 96", "127 bytes", "cut off"});
}

TEST(GgufTest, EveryFlippedBitIsSurvived) {
  const std::vector<std::byte> whole = SmallGguf().Build();
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<std::byte> bytes = whole;
      bytes[at] ^= std::byte{1} << bit;
      const auto parsed = GgufFile::Parse(MemorySource(bytes), "test");
      if (at < 4) {
        ASSERT_FALSE(parsed.ok()) << "magic off by bit " << bit << " of byte " << at;
      }
      if (parsed.ok()) Exercise(**parsed);
    }
  }
}

TEST(GgufTest, HugeNumbersAnywhereAreSurvived) {
  const std::vector<std::byte> whole = SmallGguf().Build();
  for (std::size_t at = 0; at + 8 <= whole.size(); ++at) {
    for (const std::uint64_t value :
         {~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{1} << 32,
          std::uint64_t{0x7fffffffffffffff}, std::uint64_t{0}}) {
      std::vector<std::byte> bytes = whole;
      std::memcpy(bytes.data() + at, &value, 8);
      const auto parsed = GgufFile::Parse(MemorySource(bytes), "test");
      if (parsed.ok()) Exercise(**parsed);
    }
  }
}

TEST(GgufTest, ForeignFilesAreNamed) {
  GgufBuilder file = SmallGguf();
  file.magic = "GGUG";
  ExpectRefused(file, {"not a GGUF file", "47 47 55 47"});
  file.magic = "FUGG";
  ExpectRefused(file, {"byte-swapped"});
  file.magic = "GGUF";
  file.version = 1;
  ExpectRefused(file, {"version 1 "});
  file.version = 99;
  ExpectRefused(file, {"version 99 "});
  file.version = __builtin_bswap32(3);
  ExpectRefused(file, {"byte-swapped"});
  EXPECT_THAT(GgufFile::Parse(MemorySource({}), "test").status().message(), HasSubstr("empty"));
}

TEST(GgufTest, LyingCountsAreRefused) {
  for (const std::int64_t count : {std::int64_t{1000}, std::int64_t{1} << 40, INT64_MAX}) {
    GgufBuilder keys = SmallGguf();
    keys.key_count = count;
    ExpectRefused(keys, {std::to_string(count) + " keys"});
    GgufBuilder tensors = SmallGguf();
    tensors.tensor_count = count;
    ExpectRefused(tensors, {std::to_string(count) + " tensors"});
    GgufBuilder array;
    array.keys.emplace_back("list",
                            Bytes().Put<std::uint32_t>(9).Put<std::uint32_t>(8).Put<std::uint64_t>(
                                static_cast<std::uint64_t>(count)));
    ExpectRefused(array, {"'list'", std::to_string(count) + " elements"});
    GgufBuilder text;
    text.keys.emplace_back("text", Bytes().Put<std::uint32_t>(8).Put<std::uint64_t>(
                                       static_cast<std::uint64_t>(count)));
    ExpectRefused(text, {"'text'"});
  }
}

TEST(GgufTest, UnknownTypesAreRefused) {
  GgufBuilder file;
  file.Scalar<std::uint64_t>("odd", static_cast<GgufType>(13), 1);
  ExpectRefused(file, {"'odd'", "unknown type 13"});
  GgufBuilder array;
  array.keys.emplace_back(
      "odd", Bytes().Put<std::uint32_t>(9).Put<std::uint32_t>(77).Put<std::uint64_t>(0));
  ExpectRefused(array, {"'odd'", "unknown type 77"});
}

Bytes NestedArray(int depth) {
  Bytes bytes;
  bytes.Put<std::uint32_t>(9);
  for (int i = 1; i < depth; ++i) bytes.Put<std::uint32_t>(9).Put<std::uint64_t>(1);
  return bytes.Put<std::uint32_t>(0).Put<std::uint64_t>(1).Put<std::uint8_t>(1);
}

TEST(GgufTest, ArraysMayNestButNotDeep) {
  GgufBuilder file;
  file.keys.emplace_back("nest", NestedArray(4));
  EXPECT_TRUE(file.Parse().ok());
  file.keys[0].second = NestedArray(5);
  ExpectRefused(file, {"'nest'", "deeper than 4"});
  file.keys[0].second = NestedArray(100'000);
  ExpectRefused(file, {"'nest'", "deeper than 4"});
}

TEST(GgufTest, DuplicatesAreRefused) {
  GgufBuilder keys = SmallGguf();
  keys.Scalar<std::uint32_t>("count", GgufType::kUint32, 8);
  ExpectRefused(keys, {"'count' appears twice"});
  GgufBuilder tensors = SmallGguf();
  tensors.tensors[1].name = "first";
  ExpectRefused(tensors, {"'first' appears twice"});
}

TEST(GgufTest, TensorsMustLieInsideAlignedAndApart) {
  GgufBuilder file = SmallGguf();
  file.tensors[1].offset = 64;
  ExpectRefused(file, {"'first'", "'second'", "overlap"});
  file.tensors[1].offset = 97;
  ExpectRefused(file, {"'second'", "offset 97", "alignment 32"});
  file.tensors[1].offset = 128;
  ExpectRefused(file, {"'second'", "offset 128", "128 bytes"});
  file.tensors[1].offset = ~std::uint64_t{31};
  ExpectRefused(file, {"'second'"});
}

TEST(GgufTest, TensorShapesAreChecked) {
  GgufBuilder file = SmallGguf();
  file.tensors[1].dims = {};
  ExpectRefused(file, {"'second'", "0 dimensions"});
  file.tensors[1].dims = {1, 1, 1, 1, 1};
  ExpectRefused(file, {"'second'", "5 dimensions"});
  file.tensors[1].dims = {8, 0};
  ExpectRefused(file, {"'second'", "0 elements"});
  file.tensors[1].dims = {std::uint64_t{1} << 33, std::uint64_t{1} << 33};
  ExpectRefused(file, {"'second'", "product"});
  file.tensors[1].dims = {std::uint64_t{1} << 63, 2};
  ExpectRefused(file, {"'second'", "product"});
  file.tensors[1] = {"second", {40}, 8, 96};
  ExpectRefused(file, {"'second'", "rows of 40", "Q8_0", "multiple of 32"});
}

TEST(GgufTest, UnsupportedTensorTypesAreNamed) {
  GgufBuilder file = SmallGguf();
  file.tensors[0].type = 10;
  ExpectRefused(file, {"'first'", "Q2_K", "not supported"});
  file.tensors[0].type = 20;
  ExpectRefused(file, {"'first'", "IQ4_NL"});
  file.tensors[0].type = 4'000'000;
  ExpectRefused(file, {"'first'", "number 4000000"});
}

TEST(GgufTest, AlignmentIsReadAndChecked) {
  GgufBuilder file = SmallGguf();
  file.alignment = 64;
  file.Scalar<std::uint32_t>("general.alignment", GgufType::kUint32, 64);
  ExpectRefused(file, {"'second'", "alignment 64"});
  file.tensors[1].offset = 128;
  file.data_bytes = 160;
  EXPECT_TRUE(file.Parse().ok());
  for (const std::uint32_t bad : {0u, 1u, 24u, 1u << 30}) {
    GgufBuilder wrong = SmallGguf();
    wrong.Scalar<std::uint32_t>("general.alignment", GgufType::kUint32, bad);
    ExpectRefused(wrong, {"'general.alignment' is " + std::to_string(bad)});
  }
  GgufBuilder text = SmallGguf();
  text.String("general.alignment", "32");
  ExpectRefused(text, {"'general.alignment'", "string"});
}

TEST(GgufTest, NamesInMessagesStayPrintableAndShort) {
  GgufBuilder file;
  file.tensors.push_back({"bad\nname\x1b[2J" + std::string(100, 'x'), {1}, 99, 0});
  ExpectRefused(file, {"bad?name?[2J", "...'"});
  file.tensors[0].name = std::string(300, 'x');
  ExpectRefused(file, {"a tensor's name", "300 bytes", "256 bytes"});
}

TEST(GgufTest, AFileShortenedAfterOpeningIsAnErrorNotASignal) {
  const testing_support::TempFolder folder;
  const std::string path = folder.File("model.gguf");
  testing_support::WriteBytes(path, SmallGguf().Build());
  const auto file = GgufFile::Open(path).value();
  std::filesystem::resize_file(path, 100);
  std::vector<std::byte> data(32);
  const Status read = file->ReadTensor(*file->FindTensor("second"), data);
  EXPECT_EQ(read.code(), StatusCode::kDataLoss);
  EXPECT_THAT(read.message(), HasSubstr("'second'"));
  EXPECT_THAT(read.message(), HasSubstr("now has 100 bytes"));
}

TEST(GgufTest, PathsThatAreNoFilesAreRefused) {
  EXPECT_EQ(GgufFile::Open("/nonexistent/model.gguf").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(GgufFile::Open("/").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(GgufFile::Open("/dev/zero").status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace pliant
