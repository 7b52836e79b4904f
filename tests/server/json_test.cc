#include "server/json.h"

#include <gtest/gtest.h>

#include <chrono>

namespace pliant {
namespace {

std::string Repeat(std::string_view text, std::size_t count) {
  std::string out;
  for (std::size_t i = 0; i < count; ++i) out += text;
  return out;
}

std::string MessageOf(std::string_view body) {
  Json out;
  const auto error = ParseJsonBody(body, {}, &out);
  if (!error) return "";
  EXPECT_EQ(error->http_status, 400);
  EXPECT_EQ(error->code, "invalid_json");
  return error->message;
}

TEST(ParseJsonBody, ReadsObjectsAndKeepsTheirOrder) {
  Json out;
  EXPECT_FALSE(ParseJsonBody(R"({"z": 1, "a": [{"b": null}], "z": 2})", {}, &out));
  EXPECT_EQ(DumpJson(out), R"({"z":2,"a":[{"b":null}]})");  // of equal keys the last counts
}

TEST(ParseJsonBody, RefusesWhatIsNoJsonObject) {
  EXPECT_NE(MessageOf(""), "");
  for (const char* body :
       {"{", "}", "nope", "{\"a\":}", "{\"a\": NaN}", "{\"a\": Infinity}", "{\"a\": -Infinity}",
        "{\"a\": 1e999}", "{\"a\": 01}", "{\"a\": 'b'}", "{} {}", "{\"a\": \"\\ud800\"}",
        "{\"a\": 0x10}", "{\"a\": 1,}", "\xEF\xBB"}) {
    EXPECT_NE(MessageOf(body), "") << body;
  }
  for (const char* body : {"[]", "null", "3", "\"text\"", "true"}) {
    EXPECT_NE(MessageOf(body).find("must be a JSON object"), std::string::npos) << body;
  }
}

TEST(ParseJsonBody, RefusesBadUtf8) {
  for (const char* bytes :
       {"\xFF", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82", "\x80"}) {
    EXPECT_EQ(MessageOf(std::string("{\"a\": \"") + bytes + "\"}"), "the body is not valid UTF-8");
  }
  EXPECT_EQ(MessageOf("{\"a\": \"\xF0\x9F\x91\xA9\xE2\x80\x8D\xED\x95\x9C\"}"), "");
}

TEST(ParseJsonBody, BoundsDepthBeforeBuildingAnything) {
  const auto start = std::chrono::steady_clock::now();
  for (const auto& [open, close] :
       {std::pair("[", "]"), std::pair("{\"a\":", "}"), std::pair("[{\"a\":", "}]")}) {
    const std::string body = "{\"x\":" + Repeat(open, 100'000) + "1" + Repeat(close, 100'000) + "}";
    EXPECT_NE(MessageOf(body).find("nesting; the limit is 100"), std::string::npos);
    EXPECT_NE(MessageOf("{\"x\":" + Repeat(open, 100'000)).find("nesting"), std::string::npos);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start,
            std::chrono::seconds(30));  // quadratic work would take hours
  EXPECT_EQ(MessageOf("{\"x\":" + Repeat("[", 99) + Repeat("]", 99) + "}"), "");
  EXPECT_EQ(MessageOf("{\"x\": \"" + Repeat("[{", 1000) + "\\\"[\"}"),
            "");  // brackets in text are text
}

TEST(ParseJsonBody, BoundsValuesAndMembers) {
  EXPECT_NE(MessageOf("{\"x\":[" + Repeat("1,", 1'000'001) + "1]}").find("too many values"),
            std::string::npos);
  std::string wide = "{";
  for (int i = 0; i < 2'500; ++i) wide += (i ? ",\"" : "\"") + std::to_string(i) + "\":1";
  EXPECT_NE(MessageOf(wide + "}").find("too many members"), std::string::npos);
  std::string many = "{\"x\":[";
  for (int i = 0; i < 100'001; ++i) many += (i ? ",{\"a\":1}" : "{\"a\":1}");
  EXPECT_NE(MessageOf(many + "]}").find("too many object members"), std::string::npos);
}

TEST(DumpJson, IsAlwaysUtf8) {
  Json json;
  json["a"] = "x\xFFy";
  EXPECT_TRUE(IsValidUtf8(DumpJson(json)));
}

TEST(Excerpt, CutsOnCharacters) {
  EXPECT_EQ(Excerpt("abc", 3), "abc");
  EXPECT_EQ(Excerpt("a\xE2\x82\xAC"
                    "b",
                    3),
            "a...");
  EXPECT_EQ(Excerpt("\xFF", 10), "\xEF\xBF\xBD");
}

}  // namespace
}  // namespace pliant
