#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "text/support/small_vocabulary.h"

namespace pliant::testing {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

Json Added(int id, const char* content, bool special) {
  return {{"id", id},        {"content", content}, {"special", special}, {"single_word", false},
          {"lstrip", false}, {"rstrip", false},    {"normalized", false}};
}

/// A file as the reference's library writes it: 256 bytes, two merges, three added tokens, one hole
/// (id 261).
Json File() {
  Json vocab = Json::object();
  const Vocabulary bytes = ByteTokens();
  for (int i = 0; i < 256; ++i) vocab[bytes.tokens[static_cast<std::size_t>(i)]] = i;
  vocab["th"] = 259;
  vocab["the"] = 260;
  return {
      {"version", "1.0"},
      {"added_tokens",
       {Added(256, "<|start|>", true), Added(257, "<|end|>", true), Added(262, "<think>", false)}},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Digits"}, {"individual_digits", true}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}}}}},
      {"post_processor", nullptr},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"vocab", vocab},
        {"merges", {"t h", "th e"}}}}};
}

Vocabulary MustRead(const Json& file, std::string_view config = "") {
  auto v = Tokenizer::ReadTokenizerJson(file.dump(), config);
  if (!v.ok()) ADD_FAILURE() << v.status().ToString();
  return std::move(v).value();
}

std::string Message(const std::string& text, std::string_view config = "") {
  const auto v = Tokenizer::ReadTokenizerJson(text, config);
  return v.ok() ? "accepted" : v.status().message();
}

TEST(TokenizerJson, ReadsTokensKindsHolesAndMerges) {
  const Vocabulary v = MustRead(
      File(),
      R"({"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}, "pad_token": null})");
  EXPECT_EQ(v.tokens.size(), 263u);
  EXPECT_EQ(v.kinds[256], TokenKind::kControl);
  EXPECT_EQ(v.kinds[262], TokenKind::kUserDefined);
  EXPECT_EQ(v.kinds[261], TokenKind::kUnused);
  EXPECT_EQ(v.kinds[260], TokenKind::kNormal);
  EXPECT_EQ(v.bos, 256);
  EXPECT_EQ(v.eos, 257);
  EXPECT_FALSE(v.add_bos);
  const auto t = MustCreate(v);
  EXPECT_THAT(MustEncode(*t, "the 12<think>"), ElementsAre(260, ' ', '1', '2', 262));
  EXPECT_THAT(MustEncode(*t, "<|end|>", {.parse_special = true}), ElementsAre(257));
}

TEST(TokenizerJson, MergesMayBePairs) {
  Json file = File();
  file["model"]["merges"] = Json::parse(R"([["t", "h"], ["th", "e"]])");
  EXPECT_THAT(MustEncode(*MustCreate(MustRead(file)), "the"), ElementsAre(260));
}

TEST(TokenizerJson, ReadsSplitNfcIgnoreMergesAndTemplate) {
  Json file = File();
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}}}};
  file["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"},
         {"pattern", {{"Regex", "\\p{L}+"}}},
         {"behavior", "Isolated"},
         {"invert", false}},
        {{"type", "Split"}, {"pattern", {{"String", "..."}}}, {"behavior", "Removed"}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  file["model"]["ignore_merges"] = true;
  file["post_processor"] = Json::parse(R"({"type": "Sequence", "processors": [{"type": "ByteLevel"},
      {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|start|>", "type_id": 0}},
       {"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {"<|start|>": {"id": "<|start|>", "ids": [256]}}}]})");
  const Vocabulary v = MustRead(file);
  EXPECT_TRUE(v.normalize_nfc);
  EXPECT_TRUE(v.ignore_merges);
  EXPECT_TRUE(v.add_bos);
  EXPECT_EQ(v.bos, 256);
  EXPECT_THAT(MustEncode(*MustCreate(v), "the...e\u0301.the", {.add_bos = true}),
              ElementsAre(256, 260, 0xC3, 0xA9, '.', 260));
  EXPECT_FALSE(MustRead(file, R"({"add_bos_token": false})").add_bos);
}

TEST(TokenizerJson, UnkOfTheModelStandsForMissingBytes) {
  Json file = File();
  file["model"]["vocab"].erase("z");
  EXPECT_THAT(MustEncode(*MustCreate(MustRead(file)), "azb"), ElementsAre('a', 'b'));
  file["model"]["unk_token"] = "th";
  EXPECT_THAT(MustEncode(*MustCreate(MustRead(file)), "azb"), ElementsAre('a', 259, 'b'));
}

TEST(TokenizerJson, RefusesWithTheKeyAtFault) {
  const auto changed = [](const char* pointer, const Json& value) {
    Json file = File();
    file[Json::json_pointer(pointer)] = value;
    return Message(file.dump());
  };
  EXPECT_THAT(changed("/model", nullptr), HasSubstr("model is missing"));
  EXPECT_THAT(changed("/model/type", "Unigram"), HasSubstr("\"Unigram\""));
  EXPECT_THAT(changed("/model/vocab", Json::array()), HasSubstr("model.vocab"));
  EXPECT_THAT(changed("/model/vocab/a", -1), HasSubstr("id of \"a\""));
  EXPECT_THAT(changed("/model/vocab/a", 1.5), HasSubstr("id of \"a\""));
  EXPECT_THAT(changed("/model/vocab/a", 99999999999), HasSubstr("id of \"a\""));
  EXPECT_THAT(changed("/model/vocab/a", "1"), HasSubstr("id of \"a\""));
  EXPECT_THAT(changed("/model/vocab/a", 98), HasSubstr("id 98 belongs to"));
  EXPECT_THAT(changed("/model/merges", 3), HasSubstr("model.merges"));
  EXPECT_THAT(changed("/model/merges/0", "th"), HasSubstr("merge 0"));
  EXPECT_THAT(changed("/model/merges/1", Json::array({"t"})), HasSubstr("merge 1"));
  EXPECT_THAT(changed("/model/merges/1", "t q"), HasSubstr("merge 1 names \"tq\""));
  EXPECT_THAT(changed("/model/unk_token", "nope"), HasSubstr("model.unk_token"));
  EXPECT_THAT(changed("/model/unk_token", 5), HasSubstr("model.unk_token"));
  EXPECT_THAT(changed("/model/dropout", 0.1), HasSubstr("model.dropout"));
  EXPECT_THAT(changed("/model/byte_fallback", true), HasSubstr("byte_fallback"));
  EXPECT_THAT(changed("/model/byte_fallback", "no"), HasSubstr("byte_fallback"));
  EXPECT_THAT(changed("/model/end_of_word_suffix", "</w>"), HasSubstr("end_of_word_suffix"));
  EXPECT_THAT(changed("/added_tokens", "x"), HasSubstr("added_tokens"));
  EXPECT_THAT(changed("/added_tokens/0", Json::object()), HasSubstr("content"));
  EXPECT_THAT(changed("/added_tokens/0/id", "256"), HasSubstr("<|start|>"));
  EXPECT_THAT(changed("/added_tokens/0/id", 97), HasSubstr("id 97 belongs to"));
  EXPECT_THAT(changed("/added_tokens/0/lstrip", 1), HasSubstr("lstrip"));
  EXPECT_THAT(changed("/normalizer", {{"type", "Lowercase"}}),
              HasSubstr("normalizer \"Lowercase\""));
  EXPECT_THAT(changed("/pre_tokenizer", nullptr), HasSubstr("does not end in ByteLevel"));
  EXPECT_THAT(changed("/pre_tokenizer", {{"type", "Metaspace"}}),
              HasSubstr("pre_tokenizer \"Metaspace\""));
  EXPECT_THAT(changed("/pre_tokenizer/pretokenizers", 1), HasSubstr("pretokenizers"));
  EXPECT_THAT(changed("/pre_tokenizer/pretokenizers/0", {{"type", "Split"}}),
              HasSubstr("no pattern"));
  EXPECT_THAT(changed("/pre_tokenizer/pretokenizers/0",
                      {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Gone"}}),
              HasSubstr("behavior \"Gone\""));
  EXPECT_THAT(changed("/post_processor", {{"type", "RobertaProcessing"}}),
              HasSubstr("RobertaProcessing"));
  EXPECT_THAT(changed("/post_processor", {{"type", "TemplateProcessing"}}), HasSubstr("single"));
  EXPECT_THAT(Message(File().dump(), R"({"bos_token": "<gone>"})"),
              HasSubstr("tokenizer_config.json: bos_token \"<gone>\""));
  EXPECT_THAT(Message(File().dump(), R"({"bos_token": 3})"),
              HasSubstr("bos_token is not a string"));
  EXPECT_THAT(Message(File().dump(), "[]"), HasSubstr("tokenizer_config.json: not a JSON object"));
}

TEST(TokenizerJson, RefusesBrokenAndBottomlessJson) {
  EXPECT_THAT(Message(""), HasSubstr("tokenizer.json"));
  EXPECT_THAT(Message("null"), HasSubstr("not a JSON object"));
  EXPECT_THAT(Message(File().dump().substr(0, 500)), HasSubstr("tokenizer.json"));
  EXPECT_THAT(Message("{\"model\": \"\xFF\"}"), HasSubstr("tokenizer.json"));
  for (const char* open : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 100'000; ++i) deep += open;
    EXPECT_THAT(Message(deep), HasSubstr("nested deeper than 64"));
  }
  std::string brackets = File().dump();
  brackets.insert(1, "\"note\": \"" + std::string(1000, '[') +
                         "\\\"\", ");  // brackets in a string do not count
  EXPECT_EQ(Message(brackets), "accepted");
}

TEST(TokenizerJson, EveryTruncationAndTypeChangeEndsInAStatus) {
  const std::string text = File().dump();
  for (std::size_t cut = 0; cut < text.size(); cut += 37)
    EXPECT_NE(Message(text.substr(0, cut)), "accepted");
  const Json flat = File().flatten();
  int i = 0;
  for (const auto& [pointer, value] : flat.items()) {
    if (++i % 3 != 0 && pointer.starts_with("/model/vocab")) continue;
    for (const Json& other : {Json(nullptr), Json(true), Json(-7), Json(1e300), Json("x"),
                              Json::array({1}), Json::object()}) {
      Json file = File();
      file[Json::json_pointer(pointer)] = other;
      auto v = Tokenizer::ReadTokenizerJson(file.dump(), "");
      if (v.ok()) {
        const auto t = Tokenizer::Create(std::move(v).value());
        EXPECT_TRUE(t.ok() || !t.status().message().empty());
      } else {
        EXPECT_FALSE(v.status().message().empty()) << pointer;
      }
    }
  }
}

}  // namespace
}  // namespace pliant::testing
