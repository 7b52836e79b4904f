// Renders the real chat templates of other projects' models and compares with the reference engine
// (Python's jinja2 in the sandbox of transformers), through hashes that
// tests/data/text/make_template_golden.py wrote. The templates are fetched, not shipped: they lie
// in PLIANT_LLAMA_CPP_MODELS/templates (default: .cache/llama-cpp-models in the source folder).
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "text/chat_template.h"
#include "text/support/golden.h"

namespace pliant {
namespace {

using Json = nlohmann::ordered_json;

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream buffer;
  buffer << in.rdbuf();
  return buffer.str();
}

std::string Fnv(std::string_view text) {
  std::uint64_t value = 0xcbf29ce484222325ULL;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  char hex[20];
  std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(value));
  return hex;
}

std::string Outcome(const ChatTemplate& chat_template, const Json& context, std::string& shown) {
  const Result<std::string> result = chat_template.Render(context, GoldenTime());
  shown = result.ok() ? *result : result.status().ToString();
  return result.ok() ? "ok " + Fnv(*result)
                     : "error " + Fnv(WithoutPlace(result.status().message()));
}

// Errors that name the template's own words must be equal; for others (TypeError, ...) there must
// be one.
bool Agrees(const std::string& actual, const std::string& golden) {
  if (golden.starts_with("ok ")) return actual == golden;
  if (!actual.starts_with("error ")) return false;
  if (golden.starts_with("TemplateError ") || golden.starts_with("UndefinedError ")) {
    return actual.substr(6) == golden.substr(golden.find(' ') + 1);
  }
  return true;
}

TEST(ChatTemplateConformance, RealTemplatesRenderAsTheReferenceDoes) {
  const char* configured = std::getenv("PLIANT_LLAMA_CPP_MODELS");
  const std::filesystem::path folder =
      std::filesystem::path(configured != nullptr ? configured
                                                  : PLIANT_SOURCE_DIR "/.cache/llama-cpp-models") /
      "templates";
  if (!std::filesystem::is_directory(folder)) {
    const char* required = std::getenv("PLIANT_REQUIRE_MODELS");
    if (required != nullptr && std::string_view(required) == "1")
      FAIL() << "no chat templates in " << folder;
    GTEST_SKIP() << "the real chat templates are not fetched: no folder " << folder;
  }
  const std::filesystem::path data = PLIANT_TEST_DATA "/text";
  const Json golden = Json::parse(ReadFile(data / "template_golden.json"));
  const Json conversations = Json::parse(ReadFile(data / "template_conversations.json"));
  // For looking at a difference: the texts that this engine makes.
  const char* dump = std::getenv("PLIANT_TEMPLATE_DUMP");
  int equal_templates = 0, renderings = 0, equal_renderings = 0;
  for (const auto& [name, expected] : golden.items()) {
    const std::string source = ReadFile(folder / name);
    EXPECT_EQ(Fnv(source), expected["source"].get<std::string>())
        << name << " is not the version that the expectations were made from";
    const auto parsed = ChatTemplate::Parse(source);
    bool equal = true;
    for (const auto& [conversation, context] : conversations.items()) {
      std::string shown;
      const std::string outcome = parsed.ok()
                                      ? Outcome(**parsed, context, shown)
                                      : "error " + Fnv(WithoutPlace(parsed.status().message()));
      if (!parsed.ok()) shown = parsed.status().ToString();
      const bool agrees = Agrees(outcome, expected[conversation].get<std::string>());
      EXPECT_TRUE(agrees) << name << " with " << conversation << ": expected "
                          << expected[conversation] << ", got " << outcome << ": "
                          << shown.substr(0, 200);
      if (dump != nullptr)
        std::ofstream(std::filesystem::path(dump) / (name + "." + conversation)) << shown;
      ++renderings;
      equal_renderings += agrees;
      equal &= agrees;
    }
    equal_templates += equal;
  }
  std::printf("%d of %zu templates equal in all conversations; %d of %d renderings\n",
              equal_templates, golden.size(), equal_renderings, renderings);
  EXPECT_EQ(golden.size(), 70u);
  EXPECT_GE(conversations.size(), 8u);
}

}  // namespace
}  // namespace pliant
