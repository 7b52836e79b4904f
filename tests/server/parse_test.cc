#include <gtest/gtest.h>

#include "server/openai_request.h"
#include "server/support/tiny_tokenizer.h"

namespace pliant {
namespace {

using testing::TinyTokenizer;

const TinyTokenizer& Tiny() {
  static const TinyTokenizer tokenizer;
  return tokenizer;
}

/// A chat body with `members` added.
Json Chat(const std::string& members) {
  return Json::parse(R"({"messages":[{"role":"user","content":"hi"}])" +
                     (members.empty() ? "" : "," + members) + "}");
}
Json Text(const std::string& members) {
  return Json::parse(R"({"prompt":"hi")" + (members.empty() ? "" : "," + members) + "}");
}

/// The field at fault, "-" when there is none.
std::string ChatFault(const Json& body) {
  CompletionRequest out;
  const auto error = ParseChatRequest(body, Tiny(), &out);
  if (!error) return "-";
  EXPECT_EQ(error->http_status, 400);
  EXPECT_FALSE(error->message.empty());
  return error->param;
}
std::string TextFault(const Json& body) {
  CompletionRequest out;
  const auto error = ParseTextRequest(body, Tiny(), &out);
  return error ? error->param : "-";
}

TEST(ParseRequest, Defaults) {
  CompletionRequest chat;
  ASSERT_FALSE(ParseChatRequest(Chat(""), Tiny(), &chat));
  EXPECT_FALSE(chat.max_tokens.has_value());  // up to the context
  EXPECT_EQ(chat.n, 1);
  EXPECT_FALSE(chat.stream);
  EXPECT_EQ(chat.base.sampling.temperature, 1.0f);
  EXPECT_EQ(chat.base.sampling.top_logprobs, -1);
  EXPECT_EQ(chat.base.kv.min_bits, 0);
  EXPECT_TRUE(chat.chat_input.add_generation_prompt);
  CompletionRequest text;
  ASSERT_FALSE(ParseTextRequest(Text(""), Tiny(), &text));
  EXPECT_FALSE(text.max_tokens.has_value());
  EXPECT_EQ(text.default_max_tokens, 16);
  EXPECT_TRUE(text.parse_special);
}

TEST(ParseRequest, TakesEveryField) {
  CompletionRequest out;
  ASSERT_FALSE(ParseChatRequest(
      Chat(
          R"("model":"m","max_completion_tokens":9,"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.05,"seed":-3,
        "n":2,"stop":["a","b"],"stop_token_ids":[258],"presence_penalty":1,"frequency_penalty":-1,
        "repetition_penalty":1.1,"logit_bias":{"5":-100,"257":1.5},"logprobs":true,"top_logprobs":3,"stream":true,
        "stream_options":{"include_usage":true},"ignore_eos":true,"min_tokens":2,"user":"u",
        "response_format":{"type":"text"},"kv":{"min_bits":8,"capacity":512},"cache_salt":"s","priority":7,
        "add_generation_prompt":false,"chat_template_kwargs":{"enable_thinking":false},
        "skip_special_tokens":false,"unknown_field":{"a":1},"tool_choice":"auto",
        "tools":[{"type":"function","function":{"name":"f"}}])"),
      Tiny(), &out));
  EXPECT_EQ(out.model, "m");
  EXPECT_EQ(out.max_tokens, 9);
  EXPECT_EQ(out.n, 2);
  EXPECT_TRUE(out.stream);
  EXPECT_TRUE(out.include_usage);
  const SamplingParams& s = out.base.sampling;
  EXPECT_FLOAT_EQ(s.temperature, 0.5f);
  EXPECT_FLOAT_EQ(s.top_p, 0.9f);
  EXPECT_EQ(s.top_k, 40);
  EXPECT_FLOAT_EQ(s.min_p, 0.05f);
  EXPECT_EQ(s.seed, static_cast<std::uint64_t>(-3));
  EXPECT_FLOAT_EQ(s.presence_penalty, 1);
  EXPECT_FLOAT_EQ(s.frequency_penalty, -1);
  EXPECT_FLOAT_EQ(s.repetition_penalty, 1.1f);
  EXPECT_EQ(s.logit_bias, (std::vector<std::pair<TokenId, float>>{{5, -100.f}, {257, 1.5f}}));
  EXPECT_EQ(s.top_logprobs, 3);
  EXPECT_EQ(out.base.stop.strings, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(out.base.stop.token_ids, (std::vector<TokenId>{258}));
  EXPECT_TRUE(out.base.stop.ignore_eos);
  EXPECT_EQ(out.base.stop.min_tokens, 2);
  EXPECT_EQ(out.base.kv.min_bits, 8);
  EXPECT_EQ(out.base.kv.capacity, (Capacity{Capacity::Kind::kFixed, 512}));
  EXPECT_EQ(out.base.kv.cache_salt, "s");
  EXPECT_EQ(out.base.priority, 7);
  EXPECT_TRUE(out.base.special_in_text);
  EXPECT_FALSE(out.chat_input.add_generation_prompt);
  EXPECT_EQ(out.chat_input.template_kwargs["enable_thinking"], false);
  EXPECT_EQ(out.chat_input.tools.size(), 1u);
}

TEST(ParseRequest, NullIsAbsent) {
  EXPECT_EQ(
      ChatFault(Chat(
          R"("model":null,"max_tokens":null,"temperature":null,"top_p":null,"n":null,"stop":null,
    "logit_bias":null,"logprobs":null,"top_logprobs":null,"stream":null,"stream_options":null,"seed":null,"kv":null,
    "response_format":null,"tools":null,"tool_choice":null,"user":null)")),
      "-");
}

TEST(ParseRequest, NamesTheFieldAtFault) {  // known faults D1, D2
  struct Case {
    const char* members;
    const char* field;
  };
  const Case cases[] = {
      {R"("temperature":999999)", "temperature"},
      {R"("temperature":-1)", "temperature"},
      {R"("temperature":1e-320)", "temperature"},
      {R"("temperature":"1")", "temperature"},
      {R"("temperature":true)", "temperature"},
      {R"("temperature":[])", "temperature"},
      {R"("temperature":1e308)", "temperature"},
      {R"("top_p":-1)", "top_p"},
      {R"("top_p":0)", "top_p"},
      {R"("top_p":2)", "top_p"},
      {R"("top_p":1e-320)", "top_p"},
      {R"("top_k":-2)", "top_k"},
      {R"("top_k":1.5)", "top_k"},
      {R"("top_k":99999999999)", "top_k"},
      {R"("min_p":1.1)", "min_p"},
      {R"("min_p":-0.1)", "min_p"},
      {R"("presence_penalty":1e30)", "presence_penalty"},
      {R"("frequency_penalty":-2.1)", "frequency_penalty"},
      {R"("repetition_penalty":0)", "repetition_penalty"},
      {R"("repetition_penalty":1e30)", "repetition_penalty"},
      {R"("seed":1.5)", "seed"},
      {R"("seed":18446744073709551615)", "seed"},
      {R"("seed":99999999999999999999)", "seed"},
      {R"("n":0)", "n"},
      {R"("n":129)", "n"},
      {R"("n":-1)", "n"},
      {R"("n":"2")", "n"},
      {R"("n":1e300)", "n"},
      {R"("max_tokens":0)", "max_tokens"},
      {R"("max_tokens":-5)", "max_tokens"},
      {R"("max_tokens":99999999999999)", "max_tokens"},
      {R"("max_tokens":1.0)", "max_tokens"},
      {R"("max_completion_tokens":0)", "max_completion_tokens"},
      {R"("max_tokens":3,"max_completion_tokens":4)", "max_completion_tokens"},
      {R"("stop":"")", "stop"},
      {R"("stop":5)", "stop"},
      {R"("stop":["a",null])", "stop"},
      {R"("stop":["a",""])", "stop"},
      {R"("stop":["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"])",
       "stop"},
      {R"("stop_token_ids":5)", "stop_token_ids"},
      {R"("stop_token_ids":[-1])", "stop_token_ids"},
      {R"("stop_token_ids":[261])", "stop_token_ids"},
      {R"("stop_token_ids":["5"])", "stop_token_ids"},
      {R"("logit_bias":[])", "logit_bias"},
      {R"("logit_bias":{"-1":1})", "logit_bias"},
      {R"("logit_bias":{"261":1})", "logit_bias"},
      {R"("logit_bias":{"260":1})", "logit_bias"},
      {R"("logit_bias":{"999999999999":1})", "logit_bias"},
      {R"("logit_bias":{"99999999999999999999999":1})", "logit_bias"},
      {R"("logit_bias":{"abc":1})", "logit_bias"},
      {R"("logit_bias":{"1.5":1})", "logit_bias"},
      {R"("logit_bias":{"":1})", "logit_bias"},
      {R"("logit_bias":{"01":1})", "logit_bias"},
      {R"("logit_bias":{" 1":1})", "logit_bias"},
      {R"("logit_bias":{"1":1e308})", "logit_bias"},
      {R"("logit_bias":{"1":null})", "logit_bias"},
      {R"("logit_bias":{"1":"5"})", "logit_bias"},
      {R"("logit_bias":{"1":100.5})", "logit_bias"},
      {R"("logprobs":5)", "logprobs"},
      {R"("top_logprobs":3)", "top_logprobs"},
      {R"("logprobs":true,"top_logprobs":21)", "top_logprobs"},
      {R"("logprobs":true,"top_logprobs":-1)", "top_logprobs"},
      {R"("stream":1)", "stream"},
      {R"("stream":"true")", "stream"},
      {R"("stream_options":{})", "stream_options"},
      {R"("stream":true,"stream_options":[])", "stream_options"},
      {R"("stream":true,"stream_options":{"include_usage":1})", "stream_options.include_usage"},
      {R"("ignore_eos":0)", "ignore_eos"},
      {R"("min_tokens":-1)", "min_tokens"},
      {R"("max_tokens":3,"min_tokens":4)", "min_tokens"},
      {R"("user":5)", "user"},
      {R"("response_format":{"type":"json_object"})", "response_format"},
      {R"("response_format":"text")", "response_format"},
      {R"("response_format":{"type":"json_schema","json_schema":{}})", "response_format"},
      {R"("kv":{"min_bits":5})", "kv.min_bits"},
      {R"("kv":{"min_bits":"8"})", "kv.min_bits"},
      {R"("kv":{"capacity":"some"})", "kv.capacity"},
      {R"("kv":{"capacity":0})", "kv.capacity"},
      {R"("kv":{"capacity":-5})", "kv.capacity"},
      {R"("kv":{"capacity":1.5})", "kv.capacity"},
      {R"("kv":{"capacity":[]})", "kv.capacity"},
      {R"("kv":8)", "kv"},
      {R"("cache_salt":5)", "cache_salt"},
      {R"("priority":1001)", "priority"},
      {R"("priority":0.5)", "priority"},
      {R"("add_generation_prompt":"yes")", "add_generation_prompt"},
      {R"("chat_template_kwargs":[])", "chat_template_kwargs"},
      {R"("chat_template_kwargs":{"messages":[]})", "chat_template_kwargs"},
      {R"("tools":{})", "tools"},
      {R"("tools":[5])", "tools[0]"},
      {R"("tools":[{"type":"function"}])", "tools[0]"},
      {R"("tool_choice":"required")", "tool_choice"},
      {R"("functions":[])", "functions"},
      {R"("modalities":["audio"])", "modalities"},
      {R"("model":5)", "model"},
      {R"("best_of":3)", "best_of"},
      {R"("suffix":"x")", "suffix"},
      {R"("skip_special_tokens":"no")", "skip_special_tokens"},
  };
  for (const Case& c : cases) EXPECT_EQ(ChatFault(Chat(c.members)), c.field) << c.members;
}

TEST(ParseRequest, TextOnlyFields) {
  EXPECT_EQ(TextFault(Text(R"("logprobs":true)")), "logprobs");
  EXPECT_EQ(TextFault(Text(R"("logprobs":21)")), "logprobs");
  EXPECT_EQ(TextFault(Text(R"("logprobs":-1)")), "logprobs");
  EXPECT_EQ(TextFault(Text(R"("logprobs":0)")), "-");
  EXPECT_EQ(TextFault(Text(R"("echo":true)")), "-");
  EXPECT_EQ(TextFault(Text(R"("echo":true,"logprobs":1)")), "echo");
  EXPECT_EQ(TextFault(Text(R"("echo":1)")), "echo");
  EXPECT_EQ(TextFault(Text(R"("parse_special":1)")), "parse_special");
  EXPECT_EQ(TextFault(Text(R"("n":2,"best_of":2)")), "-");
}

TEST(ParseRequest, LogitBiasIsBounded) {
  Json body = Chat("");
  body["logit_bias"] = Json::object();
  for (int i = 0; i < 1025; ++i) body["logit_bias"][std::to_string(100000 + i)] = 1;
  CompletionRequest out;
  const auto error = ParseChatRequest(body, Tiny(), &out);
  ASSERT_TRUE(error);
  EXPECT_NE(error->message.find("1025 entries; the limit is 1024"), std::string::npos)
      << error->message;
}

TEST(ParseRequest, Prompts) {  // known fault D3
  const auto fault = [](const char* prompt) {
    return TextFault(Json::parse(std::string(R"({"prompt":)") + prompt + "}"));
  };
  for (const char* good :
       {R"("a")", R"(["a","b"])", "[1,2]", "[[1],[2,3]]", R"(["a",[1]])", "[0]", "[260]"}) {
    EXPECT_EQ(fault(good), "-") << good;
  }
  for (const char* bad : {R"("")",
                          "[]",
                          R"([""])",
                          "[[]]",
                          "null",
                          "5",
                          "{}",
                          "true",
                          R"(["a",""])",
                          "[[1],[]]",
                          "[-1]",
                          "[261]",
                          "[1.5]",
                          R"([1,"a"])",
                          R"(["a",1])",
                          "[[1,null]]",
                          "[99999999999999999999]",
                          "[[[1]]]",
                          "[null]",
                          "[true]"}) {
    EXPECT_EQ(fault(bad), "prompt") << bad;
  }
  EXPECT_EQ(TextFault(Json::parse("{}")), "prompt");
  Json many = {{"prompt", Json::array()}};
  for (int i = 0; i < 129; ++i) many["prompt"].push_back("a");
  EXPECT_EQ(TextFault(many), "prompt");
  Json product = Json::parse(R"({"prompt":["a","b"],"n":65})");
  EXPECT_EQ(TextFault(product), "prompt");
}

TEST(ParseRequest, Messages) {  // known fault D3
  const auto fault = [](const std::string& messages) {
    return ChatFault(Json::parse(R"({"messages":)" + messages + "}"));
  };
  for (
      const char* good : {
          R"([{"role":"user","content":""}])",
          R"([{"role":"user","content":[{"type":"text","text":""}]}])",
          R"([{"role":"assistant","content":null}])",
          R"([{"role":"assistant"}])",
          R"([{"role":"tool","content":"5","tool_call_id":"x"}])",
          R"([{"role":"developer","content":"x"}])",
          R"([{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]}])",
      }) {
    EXPECT_EQ(fault(good), "-") << good;
  }
  const std::pair<const char*, const char*> bad[] = {
      {"[]", "messages"},
      {"null", "messages"},
      {"5", "messages"},
      {R"("hi")", "messages"},
      {"{}", "messages"},
      {"[{}]", "messages[0].role"},
      {"[5]", "messages[0]"},
      {"[null]", "messages[0]"},
      {R"([{"role":"user"}])", "messages[0].content"},
      {R"([{"role":"user","content":null}])", "messages[0].content"},
      {R"([{"role":"user","content":5}])", "messages[0].content"},
      {R"([{"role":"user","content":{}}])", "messages[0].content"},
      {R"([{"role":"user","content":[]}])", "messages[0].content"},
      {R"([{"role":"boss","content":"x"}])", "messages[0].role"},
      {R"([{"role":5,"content":"x"}])", "messages[0].role"},
      {R"([{"content":"x"}])", "messages[0].role"},
      {R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}])",
       "messages[0].content[0].type"},
      {R"([{"role":"user","content":[{"type":"text","text":"a"},{"type":"input_audio"}]}])",
       "messages[0].content[1].type"},
      {R"([{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0].text"},
      {R"([{"role":"user","content":[{"type":"text","text":5}]}])", "messages[0].content[0].text"},
      {R"([{"role":"user","content":[{"text":"a"}]}])", "messages[0].content[0].type"},
      {R"([{"role":"user","content":["a"]}])", "messages[0].content[0]"},
      {R"([{"role":"user","content":"a"},{"role":"assistant","tool_calls":5}])",
       "messages[1].tool_calls"},
      {R"([{"role":"assistant","tool_calls":[{}]}])", "messages[0].tool_calls[0].function"},
      {R"([{"role":"assistant","tool_calls":[{"function":{"name":5}}]}])",
       "messages[0].tool_calls[0].function.name"},
      {R"([{"role":"user","content":"a","name":5}])", "messages[0].name"},
  };
  for (const auto& [messages, field] : bad) EXPECT_EQ(fault(messages), field) << messages;
  EXPECT_EQ(ChatFault(Json::object()), "messages");
}

TEST(ParseRequest, MessagesTakeTheFormThatTemplatesExpect) {
  CompletionRequest out;
  ASSERT_FALSE(ParseChatRequest(Json::parse(R"({"messages":[
        {"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
        {"role":"assistant"},
        {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"z\":1,\"a\":[2]}"}},
                                          {"id":"2","type":"function","function":{"name":"g","arguments":"not json"}}]},
        {"role":"tool","tool_call_id":"1","content":"5"}]})"),
                                Tiny(), &out));
  EXPECT_EQ(out.chat_input.messages,
            Json::parse(R"([{"role":"system","content":"a\nb"},{"role":"assistant","content":""},
        {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":{"z":1,"a":[2]}}},
                                          {"id":"2","type":"function","function":{"name":"g","arguments":"not json"}}]},
        {"role":"tool","content":"5","tool_call_id":"1"}])"));
}

TEST(ParseRequest, ToolChoiceNoneHidesTheTools) {
  CompletionRequest out;
  ASSERT_FALSE(ParseChatRequest(
      Chat(R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none")"), Tiny(),
      &out));
  EXPECT_TRUE(out.chat_input.tools.is_null());
}

TEST(ParseTokenize, Fields) {
  const auto fault = [](const char* body) {
    TokenizeRequest out;
    const auto error = ParseTokenizeRequest(Json::parse(body), &out);
    return error ? error->param : "-";
  };
  EXPECT_EQ(fault(R"({"content":"x"})"), "-");
  EXPECT_EQ(fault(R"({"prompt":"x","with_pieces":true})"), "-");
  EXPECT_EQ(fault(R"({"content":""})"), "-");
  EXPECT_EQ(fault(R"({"messages":[{"role":"user","content":"x"}]})"), "-");
  EXPECT_EQ(fault(R"({})"), "content");
  EXPECT_EQ(fault(R"({"content":5})"), "content");
  EXPECT_EQ(fault(R"({"content":"x","add_special":1})"), "add_special");
  EXPECT_EQ(fault(R"({"messages":[]})"), "messages");
  DetokenizeRequest out;
  EXPECT_FALSE(ParseDetokenizeRequest(Json::parse(R"({"tokens":[]})"), Tiny(), &out));
  for (const char* bad : {"{}", R"({"tokens":5})", R"({"tokens":[261]})", R"({"tokens":[-1]})",
                          R"({"tokens":["1"]})"}) {
    const auto error = ParseDetokenizeRequest(Json::parse(bad), Tiny(), &out);
    ASSERT_TRUE(error) << bad;
    EXPECT_EQ(error->param, "tokens");
  }
}

}  // namespace
}  // namespace pliant
