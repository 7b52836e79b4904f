// Small templates over the whole language, against what the reference engine made of them
// (tests/data/text/make_jinja_golden.py).
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "text/chat_template.h"
#include "text/support/golden.h"

namespace pliant {
namespace {

using Json = nlohmann::ordered_json;

Result<std::string> RenderSource(const std::string& source, const Json& context) {
  auto parsed = ChatTemplate::Parse(source);
  if (!parsed.ok()) return parsed.status();
  return (*parsed)->Render(context, GoldenTime());
}

class JinjaGolden : public testing::Test {
 protected:
  JinjaGolden() {
    std::ifstream in(PLIANT_TEST_DATA "/text/jinja_golden.json", std::ios::binary);
    golden_ = Json::parse(in);
  }
  Json golden_;
};

// Known fault F2: a date variable with a default test, the current time with a format, macros,
// namespaces, tojson with indent and non-ASCII, loop.previtem and nextitem, filter chains,
// whitespace control.
TEST_F(JinjaGolden, OutputsAreEqual) {
  int compared = 0;
  for (const auto& test : golden_["cases"]) {
    if (!test.contains("output")) continue;
    const auto source = test["source"].get<std::string>();
    const Result<std::string> result = RenderSource(source, golden_["context"]);
    ASSERT_TRUE(result.ok()) << source << "\n" << result.status().ToString();
    EXPECT_EQ(*result, test["output"].get<std::string>()) << source;
    ++compared;
  }
  EXPECT_GT(compared, 100);
}

// The template's own words and those of the engine itself are equal; of Python's built-in
// exceptions only that there is one.
TEST_F(JinjaGolden, ErrorsAreErrors) {
  const std::set<std::string> same_words = {"TemplateError",       "UndefinedError",
                                            "SecurityError",       "TemplateRuntimeError",
                                            "TemplateSyntaxError", "TemplateAssertionError"};
  int compared = 0, equal = 0;
  for (const auto& test : golden_["cases"]) {
    if (!test.contains("error")) continue;
    const auto source = test["source"].get<std::string>();
    const auto kind = test["error"].get<std::string>();
    const Result<std::string> result = RenderSource(source, golden_["context"]);
    ASSERT_FALSE(result.ok()) << source << "\n" << *result;
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument) << source;
    const std::string message = WithoutPlace(result.status().message());
    ++compared;
    equal += message == test["message"].get<std::string>();
    if (same_words.contains(kind)) {
      EXPECT_EQ(message, test["message"].get<std::string>()) << kind << ": " << source;
    } else if (message != test["message"].get<std::string>() &&
               std::getenv("PLIANT_SHOW") != nullptr) {
      std::printf("%s: %s\n  reference: %s\n  this:      %s\n", kind.c_str(), source.c_str(),
                  test["message"].get<std::string>().c_str(), message.c_str());
    }
  }
  EXPECT_GT(compared, 100);
  std::printf("%d of %d error messages are word for word those of the reference\n", equal,
              compared);
}

}  // namespace
}  // namespace pliant
