// Safetensors: single and sharded folders, and that damaged or lying headers are refused with one
// clear line.
#include "model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "model/json.h"
#include "model/support/gguf_builder.h"

namespace pliant {
namespace {

using testing::HasSubstr;
using testing_support::Bytes;
using testing_support::TempFolder;
using testing_support::WriteBytes;

std::vector<std::byte> File(std::string_view header, std::size_t data_bytes) {
  Bytes bytes;
  bytes.String(header);
  for (std::size_t i = 0; i < data_bytes; ++i) bytes.Put(static_cast<std::uint8_t>(i));
  return bytes.data();
}

Result<std::vector<TensorInfo>> Read(std::string_view header, std::size_t data_bytes) {
  return ReadSafetensorsHeader(*MemorySource(File(header, data_bytes)), 0);
}

void ExpectRefused(std::string_view header, std::size_t data_bytes,
                   std::initializer_list<std::string> words) {
  const auto read = Read(header, data_bytes);
  ASSERT_FALSE(read.ok()) << header;
  EXPECT_EQ(read.status().message().find('\n'), std::string::npos);
  for (const std::string& word : words) EXPECT_THAT(read.status().message(), HasSubstr(word));
}

constexpr std::string_view kTwo =
    R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}})";

TEST(SafetensorsTest, ReadsTensors) {
  const auto read = Read(kTwo, 32);
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  ASSERT_EQ(read->size(), 2u);
  const TensorInfo& a = (*read)[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.type, DType::kF32);
  EXPECT_THAT(a.shape, testing::ElementsAre(2, 3));
  EXPECT_EQ(a.offset, 8 + kTwo.size());
  EXPECT_EQ(a.bytes, 24u);
  EXPECT_EQ((*read)[1].type, DType::kBF16);
  EXPECT_EQ((*read)[1].offset, a.offset + 24);
}

TEST(SafetensorsTest, TypesThatNoWeightHasAreListedButNotReadable) {
  const auto read = Read(R"({"ids":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}})", 16);
  ASSERT_TRUE(read.ok());
  EXPECT_FALSE((*read)[0].readable);
}

TEST(SafetensorsTest, EveryTruncationIsRefused) {
  const std::vector<std::byte> whole = File(kTwo, 32);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const std::vector<std::byte> cut(whole.begin(),
                                     whole.begin() + static_cast<std::ptrdiff_t>(size));
    ASSERT_FALSE(ReadSafetensorsHeader(*MemorySource(cut), 0).ok()) << size;
  }
}

TEST(SafetensorsTest, EveryFlippedBitIsSurvived) {
  const std::vector<std::byte> whole = File(kTwo, 32);
  for (std::size_t at = 0; at < 8 + kTwo.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<std::byte> bytes = whole;
      bytes[at] ^= std::byte{1} << bit;
      const auto read = ReadSafetensorsHeader(*MemorySource(bytes), 0);
      if (!read.ok()) continue;
      for (const TensorInfo& tensor : *read) {
        ASSERT_LE(tensor.offset, bytes.size());
        ASSERT_LE(tensor.bytes, bytes.size() - tensor.offset);
      }
    }
  }
}

TEST(SafetensorsTest, HeaderLengthIsChecked) {
  std::vector<std::byte> bytes = File(kTwo, 32);
  for (const std::uint64_t length :
       {std::uint64_t{1000}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    std::memcpy(bytes.data(), &length, 8);
    const auto read = ReadSafetensorsHeader(*MemorySource(bytes), 0);
    ASSERT_FALSE(read.ok());
    EXPECT_THAT(read.status().message(), HasSubstr("the header claims"));
  }
}

TEST(SafetensorsTest, OffsetsAreChecked) {
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8,
                {"'a'", "reversed", "8 and 0"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,16]}})", 8,
                {"'a'", "byte 16", "8 bytes"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 8,
                {"'a'", "8 bytes", "span 4 bytes"});
  ExpectRefused(
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
      8, {"overlap"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, {"'a'", "hole"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 8,
                {"the tensors end"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}})", 8,
                {"'a'"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,99999999999999999999999]}})",
                8, {"'a'"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,4]}})", 8,
                {"'a'", "negative"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4,
                {"'a'", "two data_offsets"});
}

TEST(SafetensorsTest, ShapesAndTypesAreChecked) {
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4,
                {"'a'", "product"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}})", 0,
                {"'a'", "product"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4,
                {"'a'", "fraction"});
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}})", 4,
                {"'a'", "more than 8"});
  ExpectRefused(R"({"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,4]}})", 4,
                {"'a'", "Q9", "not supported"});
  ExpectRefused(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4, {"'a'", "no dtype"});
  ExpectRefused(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, {"'a'", "no shape"});
  ExpectRefused(
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
      8, {"'a'", "twice"});
}

TEST(SafetensorsTest, HostileJsonIsRefused) {
  ExpectRefused("", 0, {"does not start"});
  ExpectRefused("[]", 0, {"does not start"});
  ExpectRefused("{", 0, {"not valid"});
  ExpectRefused("{}x", 0, {"not valid"});
  ExpectRefused(R"({"a":1})", 0, {"not valid"});
  ExpectRefused(R"({"a":null})", 0, {"not valid"});
  ExpectRefused(R"({"a":[]})", 0, {"not valid"});
  ExpectRefused(R"({"a":{"shape":[[1]]}})", 0, {"not valid"});
  ExpectRefused(R"({"a":{"b":{}}})", 0, {"not valid"});
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += R"({"a":)";
  ExpectRefused(deep, 0, {"nested too deep"});
}

TEST(SafetensorsTest, OpensASingleFileAndShards) {
  const auto qwen = SafetensorsModel::Open(PLIANT_TEST_DATA "/models/tiny-qwen2");
  ASSERT_TRUE(qwen.ok()) << qwen.status().ToString();
  EXPECT_EQ((*qwen)->files(), 1);
  const auto llama = SafetensorsModel::Open(PLIANT_TEST_DATA "/models/tiny-llama");
  ASSERT_TRUE(llama.ok()) << llama.status().ToString();
  EXPECT_EQ((*llama)->files(), 3);
  EXPECT_NE((*llama)->FindTensor("lm_head.weight"), nullptr);
  for (const TensorInfo& tensor : (*llama)->tensors()) {
    std::vector<std::byte> data(tensor.bytes);
    EXPECT_TRUE((*llama)->ReadTensor(tensor, data).ok());
  }
}

class ShardedFolderTest : public testing::Test {
 protected:
  void SetUp() override {
    WriteBytes(folder_.File("one.safetensors"),
               File(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4));
    WriteBytes(folder_.File("two.safetensors"),
               File(R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4));
  }
  Status OpenWithIndex(std::string_view index) {
    WriteBytes(folder_.File("model.safetensors.index.json"), Bytes().Raw(index).data());
    return SafetensorsModel::Open(folder_.path()).status();
  }
  TempFolder folder_;
};

TEST_F(ShardedFolderTest, IndexAndShardsMustAgree) {
  EXPECT_TRUE(
      OpenWithIndex(R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})").ok());
  EXPECT_THAT(
      OpenWithIndex(R"({"weight_map":{"a":"two.safetensors","b":"one.safetensors"}})").message(),
      HasSubstr("should be in"));
  EXPECT_THAT(
      OpenWithIndex(R"({"weight_map":{"a":"one.safetensors","c":"two.safetensors"}})").message(),
      HasSubstr("'c' should be in two.safetensors and is in no shard"));
  EXPECT_THAT(OpenWithIndex(R"({"weight_map":{"a":"three.safetensors"}})").message(),
              HasSubstr("three.safetensors"));
  WriteBytes(folder_.File("two.safetensors"),
             File(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4));
  EXPECT_THAT(
      OpenWithIndex(R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})").message(),
      HasSubstr("is also in one.safetensors"));
}

TEST_F(ShardedFolderTest, HostileIndexIsRefused) {
  EXPECT_THAT(OpenWithIndex("{}").message(), HasSubstr("weight_map"));
  EXPECT_THAT(OpenWithIndex(R"({"weight_map":{}})").message(), HasSubstr("0 shards"));
  EXPECT_THAT(OpenWithIndex(R"({"weight_map":{"a":1}})").message(), HasSubstr("not a string"));
  EXPECT_THAT(OpenWithIndex("nonsense").message(), HasSubstr("not valid"));
  for (const char* shard : {"../one.safetensors", "/etc/passwd", "", ".hidden", "x/y"}) {
    EXPECT_THAT(OpenWithIndex(std::string(R"({"weight_map":{"a":")") + shard + R"("}})").message(),
                HasSubstr("not a plain file name"))
        << shard;
  }
}

TEST_F(ShardedFolderTest, AFileShortenedAfterOpeningIsAnError) {
  ASSERT_TRUE(
      OpenWithIndex(R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})").ok());
  const auto model = SafetensorsModel::Open(folder_.path()).value();
  std::filesystem::resize_file(folder_.File("two.safetensors"), 20);
  std::vector<std::byte> data(4);
  const Status read = model->ReadTensor(*model->FindTensor("b"), data);
  EXPECT_EQ(read.code(), StatusCode::kDataLoss);
  EXPECT_THAT(read.message(), HasSubstr("two.safetensors: tensor 'b'"));
}

TEST(JsonTest, DepthIsBoundedAndErrorsSayWhere) {
  EXPECT_EQ(JsonDepth(R"({"a":[1,{"b":"]}[[[\"[["}]})"), 3);
  EXPECT_TRUE(ParseJsonObject(R"({"a":[[1]]})", 3).ok());
  EXPECT_THAT(ParseJsonObject(R"({"a":[[1]]})", 2).status().message(), HasSubstr("nests 3 deep"));
  EXPECT_THAT(ParseJsonObject(std::string(1'000'000, '[')).status().message(),
              HasSubstr("nests 1000000 deep"));
  EXPECT_THAT(ParseJsonObject(R"({"a":1,})").status().message(), HasSubstr("near byte 8 of 8"));
  EXPECT_THAT(ParseJsonObject("[1]").status().message(), HasSubstr("not an object"));
  const auto json =
      ParseJsonObject(R"({"n":1,"f":1.5,"s":"x","z":null,"big":18446744073709551615})").value();
  EXPECT_EQ(JsonInt(json, "n").value(), 1);
  EXPECT_EQ(JsonInt(json, "z").value(), std::nullopt);
  EXPECT_EQ(JsonInt(json, "none").value(), std::nullopt);
  EXPECT_FALSE(JsonInt(json, "f").ok());
  EXPECT_FALSE(JsonInt(json, "big").ok());
  EXPECT_EQ(JsonNumber(json, "f").value(), 1.5);
  EXPECT_FALSE(JsonString(json, "n").ok());
  EXPECT_FALSE(JsonBool(json, "n").ok());
}

}  // namespace
}  // namespace pliant
