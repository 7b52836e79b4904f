// Templates that try to hang, crash or fill the memory of the server: each gets an error that names
// the limit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "text/chat_template.h"

namespace pliant {
namespace {

using Json = nlohmann::ordered_json;
using testing::HasSubstr;

std::string Repeated(std::string_view text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

Status Outcome(const std::string& source, const Json& context = Json::object(),
               TemplateLimits limits = {}) {
  const auto parsed = ChatTemplate::Parse(source, limits);
  if (!parsed.ok()) return parsed.status();
  const auto rendered = (*parsed)->Render(context);
  return rendered.ok() ? Status::Ok() : rendered.status();
}

// The defaults are for real conversations; the tests reach smaller limits sooner.
TemplateLimits Small() {
  TemplateLimits limits;
  limits.max_output_bytes = 1 << 20;
  limits.max_steps = 1'000'000;
  return limits;
}

TEST(ChatTemplateLimits, DeepSourcesAreRefused) {
  const int deep = 5000;
  const std::string sources[] = {
      "{{ " + Repeated("(", deep) + "1" + Repeated(")", deep) + " }}",
      "{{ " + Repeated("[", deep) + Repeated("]", deep) + " }}",
      "{{ " + Repeated("{'a':", deep) + "1" + Repeated("}", deep) + " }}",
      "{{ " + Repeated("not ", deep) + "1 }}",
      "{{ " + Repeated("-", deep) + "1 }}",
      "{{ " + Repeated("- ", deep) + "1 }}",
      "{{ a" + Repeated(".a", deep) + " }}",
      "{{ a" + Repeated("[0]", deep) + " }}",
      "{{ a" + Repeated("()", deep) + " }}",
      "{{ a" + Repeated("|upper", deep) + " }}",
      "{{ a" + Repeated(" is odd", deep) + " }}",
      "{{ 1" + Repeated(" + 1", deep) + " }}",
      "{{ 1" + Repeated(" * 1", deep) + " }}",
      "{{ 1" + Repeated(" ** 1", deep) + " }}",
      "{{ 1" + Repeated(" if 1", deep) + " }}",
      "{{ " + Repeated("1 if 0 else ", deep) + "1 }}",
      "{{ " + Repeated("f(", deep) + Repeated(")", deep) + " }}",
      "{{ " + Repeated("a|f(", deep) + Repeated(")", deep) + " }}",
      "{{ " + Repeated("a[", deep) + "0" + Repeated("]", deep) + " }}",
      Repeated("{% if 1 %}", deep) + Repeated("{% endif %}", deep),
      Repeated("{% for i in [1] %}", deep) + Repeated("{% endfor %}", deep),
      Repeated("{% macro m() %}", deep) + Repeated("{% endmacro %}", deep),
      Repeated("{% call m() %}", deep) + Repeated("{% endcall %}", deep),
      Repeated("{% filter upper %}", deep) + Repeated("{% endfilter %}", deep),
      Repeated("{% set x %}", deep) + Repeated("{% endset %}", deep),
      Repeated("{% with %}", deep) + Repeated("{% endwith %}", deep),
      "{% set " + Repeated("(", deep) + "a" + Repeated(")", deep) + " = 1 %}",
      "{% for " + Repeated("(", deep) + "a" + Repeated(")", deep) + " in x %}{% endfor %}",
      // Never closed.
      "{{ " + Repeated("(", deep),
      Repeated("{% if 1 %}", deep),
      "{{ " + Repeated("{", deep),
      "{{ a[" + Repeated("a[", deep),
  };
  for (const std::string& source : sources) {
    const Status status = Outcome(source);
    EXPECT_FALSE(status.ok()) << source.substr(0, 40);
    EXPECT_THAT(status.message(), HasSubstr("line 1")) << source.substr(0, 40);
  }
}

TEST(ChatTemplateLimits, LongFlatSourcesAreFine) {
  const int many = 5000;
  EXPECT_TRUE(Outcome("{{ 1" + Repeated(" ~ 1", many) + " }}").ok());
  EXPECT_TRUE(Outcome("{{ [" + Repeated("1, ", many) + "] }}").ok());
  EXPECT_TRUE(Outcome("{{ 1" + Repeated(" and 1", many) + " }}").ok());
  EXPECT_TRUE(Outcome("{% if 0 %}" + Repeated("{% elif 0 %}", many) + "{% endif %}").ok());
  EXPECT_TRUE(Outcome(Repeated("{% if 1 %}x{% endif %}", many)).ok());
  EXPECT_TRUE(Outcome("{{ 1" + Repeated(" < 2", many) + " }}").ok());
}

TEST(ChatTemplateLimits, EveryLimitIsNamed) {
  const auto expect = [](const std::string& source, const char* words) {
    const Status status = Outcome(source, Json::object(), Small());
    EXPECT_EQ(status.code(), StatusCode::kTooLarge) << source << ": " << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr(words)) << source;
  };
  // Endless calls.
  expect("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "max_depth");
  expect("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
         "max_depth");
  expect("{% macro m() %}{{ caller }}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}",
         "max_depth");
  expect("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "max_depth");
  // Endless work, and work that is cheap to write: many names, many parameters.
  {
    std::string source = "{% macro m(";
    for (int i = 0; i < 5000; ++i) source += "p" + std::to_string(i) + "=0,";
    source.pop_back();
    expect(source + ") %}{% endmacro %}{% for i in range(100000) %}{{ m() }}{% endfor %}",
           "max_steps");
  }
  expect("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
         "max_steps");
  expect("{% set l = range(100000)|list %}{% for a in l %}{{ a in l }}{% endfor %}", "max_steps");
  expect("{% set l = range(20000)|list %}{% for a in l %}{% set m = l + [1] %}{% endfor %}",
         "max_steps");
  expect(
      "{% set s = 'ab' * 500000 %}{% for a in range(100000) %}{% set m = s|replace('b', 'c') %}{% "
      "endfor %}",
      "max_steps");
  expect("{% set s = 'a' * 1000000 %}{% for a in range(100000) %}{{ s.find('b') }}{% endfor %}",
         "max_steps");
}

TEST(ChatTemplateLimits, LargeStringsAreRefusedBeforeTheyAreMade) {
  const auto expect = [](const std::string& source) {
    const Status status = Outcome(source, Json::object(), Small());
    EXPECT_EQ(status.code(), StatusCode::kTooLarge) << source << ": " << status.ToString();
    EXPECT_THAT(status.message(),
                testing::AnyOf(HasSubstr("max_output_bytes"), HasSubstr("max_steps")))
        << source;
  };
  expect("{{ 'a' * 1000000000000 }}");
  expect("{{ 'abc' * 9223372036854775807 }}");
  expect("{{ [1] * 9223372036854775807 }}");
  expect("{{ [1, 2, 3] * 1000000000 }}");
  expect("{{ 'a'.center(1000000000) }}");
  expect("{{ 'a'.zfill(9223372036854775807) }}");
  expect("{{ 'a'.ljust(9223372036854775807) }}");
  expect("{{ 'a\\t'.expandtabs(1000000000) }}");
  expect("{{ '%1000000000d' % 1 }}");
  expect("{{ '%*d' % (1000000000, 1) }}");
  expect("{{ '%.1000000000d' % 1 }}");
  expect("{{ '{:1000000000}'.format(1) }}");
  expect("{{ '{:{w}}'.format(1, w=1000000000) }}");
  expect("{{ '{:99999999999999999999999}'.format(1) }}");
  expect("{{ [1]|tojson(indent=1000000000) }}");
  expect("{{ 'a'|indent(1000000000) }}");
  expect("{{ 'a'|center(1000000000) }}");
  expect("{{ [1]|batch(1000000000, 'x')|list }}");
  expect("{{ [1]|slice(1000000000, 'x')|list }}");
  expect(
      "{% set ns = namespace(s='a') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% "
      "endfor %}");
  expect(
      "{% set ns = namespace(s='a') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% "
      "endfor %}");
  expect(
      "{% set ns = namespace(s='ab') %}{% for i in range(100) %}{% set ns.s = ns.s.replace('a', "
      "ns.s) %}{% endfor %}");
  expect(
      "{% set ns = namespace(s='ab') %}{% for i in range(100) %}{% set ns.s = ns.s.join(ns.s) %}{% "
      "endfor %}");
  expect("{% for i in range(100000) %}{% for i in range(10) %}" + std::string(1000, 'x') +
         "{% endfor %}{% endfor %}");
}

TEST(ChatTemplateLimits, MemoryOfManyValuesIsBounded) {
  const Status status = Outcome(
      "{% set ns = namespace(l=[]) %}{% set s = 'a' * 1000000 %}"
      "{% for i in range(1000) %}{% set ns.l = ns.l + [s ~ i] %}{% endfor %}",
      Json::object(), Small());
  EXPECT_EQ(status.code(), StatusCode::kTooLarge) << status.ToString();
  // What is let go of is free again.
  EXPECT_TRUE(
      Outcome("{% set s = 'a' * 1000000 %}{% for i in range(20) %}{% set t = s ~ i %}{% endfor %}",
              Json::object(), Small())
          .ok());
}

TEST(ChatTemplateLimits, ValuesThatHoldThemselvesOrNestWithoutEnd) {
  // Cycles through namespaces neither leak (the address sanitizer looks) nor print without end.
  EXPECT_FALSE(Outcome("{% set a = namespace() %}{% set a.a = a %}{{ a }}").ok());
  EXPECT_TRUE(
      Outcome(
          "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = [b] %}{{ a == b }}")
          .ok());
  EXPECT_TRUE(Outcome("{% set a = namespace() %}{% for x in [1] %}{% set a.l = [loop] %}{% endfor "
                      "%}{{ a.l is defined }}")
                  .ok());
  const char* const growing[] = {
      "[ns.x]",         "(ns.x,)",           "{'a': ns.x}",  "ns.x|map('upper')",
      "[ns.x].count",   "{1: ns.x}.items()", "cycler(ns.x)", "joiner(ns.x)",
      "[ns.x]|reverse", "[ns.x]|batch(1)",   "dict(a=ns.x)"};
  for (const char* grow : growing) {
    const Status status =
        Outcome("{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = " +
                std::string(grow) + " %}{% endfor %}");
    EXPECT_EQ(status.code(), StatusCode::kTooLarge) << grow << ": " << status.ToString();
  }
  EXPECT_TRUE(Outcome("{% set ns = namespace() %}{% for i in range(1000) %}{% for y in "
                      "[ns]|map(attribute='x') %}"
                      "{% set ns.x = [loop] %}{% endfor %}{% endfor %}")
                  .ok());
}

TEST(ChatTemplateLimits, DeepAndInvalidVariables) {
  Json deep = 1;
  for (int i = 0; i < 1000; ++i) deep = Json::array({std::move(deep)});
  const Status status = Outcome("{{ x }}", Json{{"x", deep}});
  EXPECT_EQ(status.code(), StatusCode::kTooLarge) << status.ToString();
  EXPECT_TRUE(Outcome("{{ y }}", Json{{"x", deep}}).ok())
      << "variables that the template does not read cost nothing";
  EXPECT_EQ(Outcome("{{ x }}", Json{{"x", "\xff\xfe"}}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Outcome("\xff").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Outcome("x", Json::array()).code(), StatusCode::kInvalidArgument);
  TemplateLimits small;
  small.max_source_bytes = 3;
  EXPECT_EQ(Outcome("abcd", Json::object(), small).code(), StatusCode::kTooLarge);
}

TEST(ChatTemplateLimits, IntegersDoNotWrapAround) {
  const char* const sources[] = {
      "{{ 9223372036854775807 + 1 }}",
      "{{ -9223372036854775807 - 2 }}",
      "{{ 9223372036854775807 * 2 }}",
      "{{ 2 ** 63 }}",
      "{{ 10 ** 100 }}",
      "{{ 99999999999999999999 }}",
      "{{ '99999999999999999999'|int }}",
      "{{ (-9223372036854775807 - 1) // -1 }}",
      "{{ -(-9223372036854775807 - 1) }}",
      "{{ (-9223372036854775807 - 1)|abs }}",
      "{{ [9223372036854775807, 1]|sum }}",
      "{{ 1e300|int }}",
  };
  for (const char* source : sources) {
    EXPECT_EQ(Outcome(source).code(), StatusCode::kInvalidArgument) << source;
  }
  EXPECT_TRUE(
      Outcome("{{ range(-9223372036854775807, 9223372036854775807, 9000000000000000000)|list }}"
              "{{ range(9223372036854775806, 9223372036854775807)[::-1] }}{{ "
              "'abc'[-9223372036854775807:] }}"
              "{{ 'abc'[::9223372036854775807] }}{{ 'abc'[::-9223372036854775807] }}{{ 5 in "
              "range(1, 9, 2) }}"
              "{{ (-9223372036854775807 - 1) % -1 }}{{ 'abc'.find('c', -9223372036854775807, "
              "9223372036854775807) }}")
          .ok());
}

TEST(ChatTemplateLimits, DeepCallsEndBeforeTheStackDoes) {
  // The deepest that the limits allow, on the thread that runs the tests: must end in an error or a
  // text, not in a crash.
  std::string source = "{% macro m(n) %}";
  source += Repeated("{% if 1 %}", 90) + "{{ " + Repeated("(", 60) + "m(n + 1)" +
            Repeated(")", 60) + " }}" + Repeated("{% endif %}", 90);
  source += "{% endmacro %}{{ m(0) }}";
  EXPECT_EQ(Outcome(source).code(), StatusCode::kTooLarge);
}

TEST(ChatTemplate, ManyThreadsRenderOneTemplate) {
  const auto parsed = ChatTemplate::Parse(
      "{% macro m(x) %}[{{ x|upper }}{{ 'const' ~ x }}]{% endmacro %}{% for i in l %}{{ m(i) }}{% "
      "endfor %}{{ ['a', {'b': 1}] }}");
  ASSERT_TRUE(parsed.ok());
  const Json context = {{"l", {"x", "y"}}};
  const std::string expected = *(*parsed)->Render(context);
  EXPECT_EQ(expected, "[Xconstx][Yconsty]['a', {'b': 1}]");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) EXPECT_EQ(*(*parsed)->Render(context), expected);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(ChatTemplate, UsesTellsWhichVariablesAreRead) {
  const auto uses = [](const std::string& source, std::string_view name) {
    return (*ChatTemplate::Parse(source))->Uses(name);
  };
  EXPECT_TRUE(uses("{% if tools %}{{ tools|tojson }}{% endif %}", "tools"));
  EXPECT_FALSE(uses("{{ messages }}", "tools"));
  EXPECT_FALSE(uses("{{ message.tools }}{{ 'tools' }} tools {# tools #}", "tools"));
  EXPECT_FALSE(uses("{% for tools in x %}{{ tools }}{% endfor %}", "tools"));
  EXPECT_TRUE(uses("{% for tools in x %}{% endfor %}{{ tools }}", "tools"));
  EXPECT_TRUE(uses("{% set tools = tools or [] %}", "tools"));
  EXPECT_FALSE(uses("{% set tools = [] %}{{ tools }}", "tools"));
  EXPECT_TRUE(uses("{% if x %}{% set tools = none %}{% endif %}{{ tools }}", "tools"));
  EXPECT_FALSE(uses("{% macro m(tools) %}{{ tools }}{% endmacro %}", "tools"));
  EXPECT_TRUE(uses("{% macro m() %}{{ tools }}{% endmacro %}", "tools"));
}

// F1: templates that refuse a system message, or roles that do not alternate, say so in their own
// words.
TEST(ChatTemplate, RefusalsArePassedOnWordForWord) {
  const std::string gemma =
      "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
      "supported') }}{% endif %}"
      "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
      "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') "
      "}}{% endif %}"
      "{{ message['content'] | trim }}{% endfor %}";
  const auto message = [](const char* role) { return Json{{"role", role}, {"content", "x"}}; };
  const auto outcome = [&](Json messages) {
    return Outcome(gemma, Json{{"messages", std::move(messages)}, {"bos_token", "<bos>"}});
  };
  for (Json messages :
       {Json::array({message("system"), message("user")}), Json::array({message("system")})}) {
    const Status status = outcome(messages);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "System role not supported");
  }
  for (Json messages :
       {Json::array({message("user"), message("user")}), Json::array({message("assistant")})}) {
    EXPECT_EQ(outcome(messages).message(),
              "Conversation roles must alternate user/assistant/user/assistant/...");
  }
  EXPECT_TRUE(outcome(Json::array({message("user"), message("assistant")})).ok());
  EXPECT_EQ(outcome(Json::array()).message(),
            "chat template, line 1: list object has no element 0");
}

}  // namespace
}  // namespace pliant
