// The endpoints over real sockets: shapes, codes, fields.
#include <gtest/gtest.h>

#include "server/support/test_server.h"

namespace pliant {
namespace {

using namespace testing;  // NOLINT

TEST(Endpoints, HealthReadyAndModels) {
  TestServer test;
  EXPECT_EQ(test.Get("/health").body, R"({"status":"ok"})");
  EXPECT_EQ(test.Get("/ready").status, 200);
  test.server->SetReady(false);
  EXPECT_EQ(test.Get("/health").status, 200);
  const ClientResponse not_ready = test.Get("/ready");
  EXPECT_EQ(not_ready.status, 503);
  EXPECT_EQ(not_ready.headers.count("retry-after"), 1u);
  const ClientResponse refused = test.Post("/v1/chat/completions", ChatBody());
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.headers.count("retry-after"), 1u);
  test.server->SetReady(true);

  const Json models = ParseBody(test.Get("/v1/models"));
  EXPECT_EQ(models["object"], "list");
  EXPECT_EQ(models["data"][0]["id"], "org/tiny");
  EXPECT_EQ(models["data"][0]["max_model_len"], 4096);
  EXPECT_EQ(ParseBody(test.Get("/v1/models/org/tiny"))["object"], "model");
  EXPECT_EQ(test.Get("/v1/models/org%2Ftiny").status, 200);
  const ClientResponse unknown = test.Get("/v1/models/other");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(ParseBody(unknown)["error"]["code"], "model_not_found");
}

TEST(Endpoints, UnknownPathsAndMethods) {
  TestServer test;
  HttpClient client = test.Connect();
  for (const char* path : {"/", "/v1", "/v1/models/", "/v1/chat/completions/x", "/health/",
                           "/../etc/passwd", "/%00"}) {
    const ClientResponse response = client.Get(path);
    EXPECT_EQ(response.status, 404) << path;
    EXPECT_EQ(ParseBody(response)["error"]["type"], "invalid_request_error");
  }
  client.SendRequest("GET", "/v1/completions");
  const ClientResponse wrong = client.Receive();
  EXPECT_EQ(wrong.status, 405);
  EXPECT_EQ(wrong.headers.at("allow"), "POST, OPTIONS");
  client.SendRequest("POST", "/health", "{}");
  EXPECT_EQ(client.Receive().status, 405);
  client.SendRequest("DELETE", "/v1/models");
  EXPECT_EQ(client.Receive().headers.at("allow"), "GET, HEAD, OPTIONS");
  client.SendRequest("HEAD", "/health");
  const ClientResponse head = client.Receive("HEAD");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.headers.at("content-length"), "15");
  client.SendRequest("OPTIONS", "/v1/completions");
  const ClientResponse options = client.Receive();
  EXPECT_EQ(options.status, 204);
  EXPECT_EQ(options.headers.count("access-control-allow-origin"), 0u);
  EXPECT_EQ(client.Get("/health?x=1").status, 200);  // still the same connection
}

TEST(Endpoints, PlainChat) {
  TestServer test;
  test.engine.SetScript(Says("Hello!"));
  const ClientResponse response =
      test.Post("/v1/chat/completions", ChatBody(R"("model":"org/tiny","max_tokens":50)"));
  ASSERT_EQ(response.status, 200) << response.body;
  EXPECT_EQ(response.headers.at("content-type"), "application/json");
  const Json body = ParseBody(response);
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["id"].get<std::string>().substr(0, 9), "chatcmpl-");
  EXPECT_EQ(body["model"], "org/tiny");
  EXPECT_GT(body["created"], 1'600'000'000);
  EXPECT_TRUE(body["system_fingerprint"].is_string());
  EXPECT_EQ(
      body["choices"],
      Json::parse(R"([{"index":0,"message":{"role":"assistant","content":"Hello!","refusal":null},
    "logprobs":null,"finish_reason":"stop"}])"));
  // <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n in tiny tokens
  EXPECT_EQ(body["usage"]["prompt_tokens"], 1 + 5 + 2 + 1 + 1 + 1 + 10);
  EXPECT_EQ(body["usage"]["completion_tokens"], 6);
  EXPECT_EQ(body["usage"]["total_tokens"], 27);
  EXPECT_EQ(body["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  EXPECT_EQ(body["usage"]["kv"]["tokens_below_16_bits"], 0);
  EXPECT_EQ(body["usage"]["kv"]["lowest_k_bits"], 16);
}

TEST(Endpoints, StreamedChat) {
  TestServer test;
  test.engine.SetScript(Says("Hey"));
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/chat/completions", ChatBody(R"("stream":true)"));
  const std::vector<std::string> events = ReadStream(&client);
  ASSERT_GE(events.size(), 4u);  // tokens that come together may share a chunk
  EXPECT_EQ(events.back(), "[DONE]");
  std::string text;
  std::string id;
  for (std::size_t i = 0; i + 1 < events.size(); ++i) {
    const Json chunk = Json::parse(events[i]);
    EXPECT_EQ(chunk["object"], "chat.completion.chunk");
    if (i == 0) id = chunk["id"];
    EXPECT_EQ(chunk["id"], id);
    EXPECT_EQ(chunk.count("usage"), 0u);
    ASSERT_EQ(chunk["choices"].size(), 1u);
    const Json& choice = chunk["choices"][0];
    EXPECT_EQ(choice["index"], 0);
    text += choice["delta"].value("content", "");
    const bool last = i + 2 == events.size();
    EXPECT_EQ(choice["finish_reason"], last ? Json("stop") : Json(nullptr));
    if (last) {
      EXPECT_EQ(choice["delta"], Json::object());
    }
    if (i == 0) {
      EXPECT_EQ(choice["delta"], Json::parse(R"({"role":"assistant","content":""})"));
    }
  }
  EXPECT_EQ(text, "Hey");
  // The connection lives on.
  EXPECT_EQ(client.Get("/health").status, 200);
}

TEST(Endpoints, UsageComesOnlyWhenAskedFor) {  // known fault C3
  TestServer test;
  test.engine.SetScript(Says("ab"));
  const auto usage_chunks = [&](const std::string& members, std::vector<std::string>* events) {
    HttpClient client = test.Connect();
    client.SendRequest("POST", "/v1/chat/completions", ChatBody(members));
    *events = ReadStream(&client);
    std::size_t found = 0;
    for (const std::string& event : *events) {
      if (event != "[DONE]" && Json::parse(event)["choices"].empty()) ++found;
    }
    return found;
  };
  std::vector<std::string> events;
  for (const char* members : {R"("stream":true)", R"("stream":true,"stream_options":null)",
                              R"("stream":true,"stream_options":{})",
                              R"("stream":true,"stream_options":{"include_usage":false})",
                              R"("stream":true,"stream_options":{"include_usage":null})"}) {
    EXPECT_EQ(usage_chunks(members, &events), 0u) << members;
  }
  EXPECT_EQ(usage_chunks(R"("stream":true,"stream_options":{"include_usage":true})", &events), 1u);
  const Json usage = Json::parse(events[events.size() - 2]);
  EXPECT_EQ(events.back(), "[DONE]");
  EXPECT_EQ(usage["usage"]["completion_tokens"], 2);
  EXPECT_TRUE(Json::parse(events[0])["usage"].is_null());
  EXPECT_EQ(test.Post("/v1/chat/completions",
                      ChatBody(R"("stream":false,"stream_options":{"include_usage":true})"))
                .status,
            400);
}

TEST(Endpoints, PlainAndStreamedTextWithManyPrompts) {
  TestServer test;
  test.engine.SetScript([](const GenerateRequest& request) {
    FakeEngine::Script script;  // says its prompt backwards
    script.tokens.assign(request.prompt.rbegin(), request.prompt.rend());
    return script;
  });
  const Json plain =
      ParseBody(test.Post("/v1/completions", R"({"prompt":["ab","cde"],"n":2,"max_tokens":10})"));
  ASSERT_EQ(plain["choices"].size(), 4u) << plain;
  EXPECT_EQ(plain["object"], "text_completion");
  const char* expected[] = {"ba", "ba", "edc", "edc"};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(plain["choices"][i]["index"], i);
    EXPECT_EQ(plain["choices"][i]["text"], expected[i]);
    EXPECT_EQ(plain["choices"][i]["finish_reason"], "stop");
  }
  EXPECT_EQ(plain["usage"]["prompt_tokens"], 5);
  EXPECT_EQ(plain["usage"]["completion_tokens"], 10);

  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/completions",
                     R"({"prompt":["ab",[99,100,101]],"n":2,"max_tokens":10,"stream":true})");
  std::string texts[4];
  int finished = 0;
  for (const std::string& event : ReadStream(&client)) {
    if (event == "[DONE]") continue;
    const Json choice = Json::parse(event)["choices"][0];
    texts[choice["index"].get<int>()] += choice["text"].get<std::string>();
    if (choice["finish_reason"] == "stop") ++finished;
  }
  for (int i = 0; i < 4; ++i) EXPECT_EQ(texts[i], expected[i]);
  EXPECT_EQ(finished, 4);
}

TEST(Endpoints, EchoSeedsAndParameters) {
  TestServer test;
  test.engine.SetScript(Says("!"));
  EXPECT_EQ(ParseBody(test.Post("/v1/completions",
                                R"({"prompt":"ab","echo":true})"))["choices"][0]["text"],
            "ab!");
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/completions", R"({"prompt":[97,98],"echo":true,"stream":true})");
  EXPECT_EQ(Json::parse(*client.NextEvent())["choices"][0]["text"], "ab!");
  test.Post("/v1/completions",
            R"({"prompt":"x","seed":5,"n":3,"kv":{"min_bits":16},"cache_salt":"s","priority":-2})");
  const auto submitted = test.engine.Submitted();
  ASSERT_EQ(submitted.size(), 5u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(submitted[2 + i].sampling.seed, 5 + i);
    EXPECT_EQ(submitted[2 + i].kv.min_bits, 16);
    EXPECT_EQ(submitted[2 + i].kv.cache_salt, "s");
    EXPECT_EQ(submitted[2 + i].priority, -2);
    EXPECT_EQ(submitted[2 + i].stop.max_tokens, 16);
  }
}

TEST(Endpoints, StopAndLength) {
  TestServer test;
  const Json length = ParseBody(test.Post("/v1/completions", R"({"prompt":"x","max_tokens":5})"));
  EXPECT_EQ(length["choices"][0]["text"], "hello");
  EXPECT_EQ(length["choices"][0]["finish_reason"], "length");
  const Json stop =
      ParseBody(test.Post("/v1/completions", R"({"prompt":"x","max_tokens":9,"stop":["o"]})"));
  EXPECT_EQ(stop["choices"][0]["text"], "hell");
  EXPECT_EQ(stop["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(stop["choices"][0]["stop_reason"], "o");
}

TEST(Endpoints, Logprobs) {
  TestServer test;
  test.engine.SetScript(Says("a\xE2"));  // the second token is half a character
  const Json chat =
      ParseBody(test.Post("/v1/chat/completions", ChatBody(R"("logprobs":true,"top_logprobs":2)")));
  const Json& content = chat["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 2u) << chat;
  EXPECT_EQ(content[0], Json::parse(R"({"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[
    {"token":"a","logprob":-0.5,"bytes":[97]},{"token":"b","logprob":-1.5,"bytes":[98]}]})"));
  EXPECT_EQ(content[1]["bytes"], Json::parse("[226]"));
  EXPECT_EQ(content[1]["token"], "bytes:\\xe2");
  const Json none = ParseBody(test.Post("/v1/chat/completions", ChatBody(R"("logprobs":true)")));
  EXPECT_EQ(none["choices"][0]["logprobs"]["content"][0]["top_logprobs"], Json::array());

  test.engine.SetScript(Says("ab"));
  const Json text = ParseBody(test.Post("/v1/completions", R"({"prompt":"x","logprobs":1})"));
  EXPECT_EQ(text["choices"][0]["logprobs"],
            Json::parse(R"({"tokens":["a","b"],"token_logprobs":[-0.5,-0.5],
    "top_logprobs":[{"a":-0.5},{"b":-0.5}],"text_offset":[0,1]})"));
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/completions", R"({"prompt":"x","logprobs":0,"stream":true})");
  Json offsets = Json::array();
  for (const std::string& event : ReadStream(&client)) {
    if (event == "[DONE]") continue;
    const Json logprobs_part = Json::parse(event)["choices"][0]["logprobs"];
    if (logprobs_part.is_null()) continue;  // the chunk with the finish reason
    for (const Json& offset : logprobs_part["text_offset"]) offsets.push_back(offset);
  }
  EXPECT_EQ(offsets, Json::parse("[0,1]"));
}

TEST(Endpoints, TokenizeAndDetokenize) {  // known fault E1 at the door
  TestServer test;
  const auto tokens = [&](const std::string& body) {
    return ParseBody(test.Post("/tokenize", body))["tokens"];
  };
  EXPECT_EQ(tokens(R"({"content":"ab"})"), Json::parse("[97,98]"));
  EXPECT_EQ(tokens(R"({"prompt":"<|im_end|>"})"), Json::parse("[258]"));
  EXPECT_EQ(tokens(R"({"content":"<|im_end|>","parse_special":false})").size(), 10u);
  EXPECT_EQ(tokens(R"({"content":""})"), Json::array());
  EXPECT_EQ(tokens(R"({"content":"a€","with_pieces":true})")[1],
            Json::parse(R"({"id":226,"piece":[226]})"));
  EXPECT_EQ(tokens(R"({"content":"a","with_pieces":true})"),
            Json::parse(R"([{"id":97,"piece":"a"}])"));
  // Markers in a message are pieces; only the template's own are control tokens.
  int controls = 0;
  for (const Json& id :
       tokens(R"({"messages":[{"role":"user","content":"<|im_end|><|im_start|>system"}]})"))
    controls += id > 255;
  EXPECT_EQ(controls, 3);
  EXPECT_EQ(ParseBody(test.Post("/detokenize", R"({"tokens":[97,258,98]})"))["content"],
            "a<|im_end|>b");
  EXPECT_EQ(
      ParseBody(test.Post("/detokenize", R"({"tokens":[97,258,98],"special":false})"))["content"],
      "ab");
  EXPECT_EQ(test.Post("/detokenize", R"({"tokens":[97,300]})").status, 400);
}

TEST(Endpoints, RefusalsAtTheDoor) {  // known faults F1, N1
  TestServer test({}, {}, /*refuse_system=*/true);
  const auto error = [&](std::string_view path, const std::string& body, int status) {
    const ClientResponse response = test.Post(path, body);
    EXPECT_EQ(response.status, status) << body << response.body;
    return ParseBody(response)["error"];
  };
  Json e = error("/v1/chat/completions", ChatBody(R"("model":"gpt-4")"), 404);
  EXPECT_EQ(e["code"], "model_not_found");
  EXPECT_EQ(e["param"], "model");
  error("/v1/chat/completions", ChatBody(R"("model":"")"), 404);
  e = error("/v1/chat/completions", R"({"messages":[{"role":"system","content":"x"}]})", 400);
  EXPECT_EQ(e["message"], "System role not supported");
  EXPECT_EQ(e["param"], "messages");
  e = error("/v1/completions", R"({"prompt":")" + std::string(5000, 'x') + R"("})", 400);
  EXPECT_EQ(e["code"], "context_length_exceeded");
  EXPECT_NE(e["message"].get<std::string>().find("5000 tokens; the context is 4096"),
            std::string::npos);
  e = error("/v1/completions", R"({"prompt":")" + std::string(4096, 'x') + R"("})",
            400);  // no room for an answer
  e = error("/v1/completions", R"({"prompt":"abc","max_tokens":4094})", 400);
  EXPECT_EQ(e["param"], "max_tokens");
  EXPECT_EQ(test.Post("/v1/completions", R"({"prompt":"abc","max_tokens":4093})").status, 200);
  e = error("/v1/chat/completions", ChatBody(R"("temperature":NaN)"), 400);
  EXPECT_EQ(e["code"], "invalid_json");
  EXPECT_EQ(e["type"], "invalid_request_error");
  e = error("/v1/chat/completions", "", 400);
  e = error("/v1/chat/completions", "[1]", 400);
  e = error("/v1/chat/completions", ChatBody(R"("temperature":-1)"), 400);
  EXPECT_EQ(e["param"], "temperature");
  std::string deep = R"({"messages":)";
  deep.append(100'000, '[');
  e = error("/v1/chat/completions", deep, 400);
  EXPECT_NE(e["message"].get<std::string>().find("nesting"), std::string::npos);
  EXPECT_TRUE(test.BecomesIdle());
}

// Known faults D1 to D3 and N1: whatever one client sends, another's stream goes on. (Each field by
// itself: parse_test.)
TEST(Endpoints, BadFieldsDisturbNobody) {
  FakeEngineOptions slow;
  slow.tick = std::chrono::milliseconds(2);
  TestServer test({}, slow);
  HttpClient stream = test.Connect();
  stream.SendRequest("POST", "/v1/completions",
                     R"({"prompt":"x","max_tokens":3000,"stream":true})");
  ASSERT_TRUE(stream.NextEvent());
  std::string many = R"("logit_bias":{)";
  for (int i = 0; i < 100'000; ++i) many += "\"" + std::to_string(i) + "\":1,";
  many.back() = '}';
  const std::string nested(100'000, '['), objects = [] {
    std::string out;
    for (int i = 0; i < 100'000; ++i) out += R"({"a":)";
    return out;
  }();
  for (
      const std::string& members :
      {std::string(R"("logit_bias":{"-1":1})"),
       std::string(R"("logit_bias":{"261":1})"),
       std::string(R"("logit_bias":{"260":1})"),
       std::string(R"("logit_bias":{"999999999999":1})"),
       std::string(R"("logit_bias":{"abc":1})"),
       std::string(R"("logit_bias":{"1.5":1})"),
       std::string(R"("logit_bias":{"5":1e308})"),
       std::string(R"("logit_bias":{"5":null})"),
       std::string(R"("logit_bias":{"5":"5"})"),
       many,
       std::string(R"("temperature":999999)"),
       std::string(R"("temperature":-1)"),
       std::string(R"("temperature":1e-320)"),
       std::string(R"("temperature":1e999)"),
       std::string(R"("temperature":NaN)"),
       std::string(R"("top_p":Infinity)"),
       std::string(R"("frequency_penalty":1e30)"),
       std::string(R"("top_p":"0.5")"),
       "\"x\":" + nested,
       "\"x\":" + objects,
       "\"tools\":" + nested,
       "\"chat_template_kwargs\":" + objects,
       R"("response_format":{"type":"json_schema","json_schema":)" + objects,
       std::string(
           R"("response_format":{"type":"json_schema","json_schema":{"schema":{"pattern":"*"}}})")}) {
    EXPECT_EQ(test.Post("/v1/chat/completions", ChatBody(members)).status, 400)
        << members.substr(0, 80);
    EXPECT_EQ(test.Post("/v1/completions", R"({"prompt":"x",)" + members + "}").status, 400)
        << members.substr(0, 80);
  }
  for (const char* prompt : {R"("")", "[]", R"([""])", "[[]]", "null"}) {
    EXPECT_EQ(test.Post("/v1/completions", std::string(R"({"prompt":)") + prompt + "}").status, 400)
        << prompt;
  }
  for (const char* messages :
       {"[]", "[{}]", R"([{"role":"user","content":[]}])",
        R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}])"}) {
    EXPECT_EQ(
        test.Post("/v1/chat/completions", std::string(R"({"messages":)") + messages + "}").status,
        400)
        << messages;
  }
  for (const char* content :
       {R"("")", R"([{"type":"text","text":""}])"}) {  // the template gives text
    EXPECT_EQ(test.Post("/v1/chat/completions",
                        std::string(R"({"max_tokens":1,"messages":[{"role":"user","content":)") +
                            content + "}]}")
                  .status,
              200)
        << content;
  }
  const std::vector<std::string> events = ReadStream(&stream);
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back(), "[DONE]");
  EXPECT_EQ(Json::parse(events[events.size() - 2])["choices"][0]["finish_reason"], "length");
  stream.Close();
  EXPECT_TRUE(test.BecomesIdle());
}

TEST(Endpoints, WithoutMaxTokensAnAnswerTakesWhatTheContextLeaves) {
  TestServer test;
  const auto words = [](std::size_t count) {
    return R"({"prompt":")" + std::string(count, 'x') + "\"}";
  };
  const Json roomy = ParseBody(test.Post("/v1/completions", words(4000)));
  EXPECT_EQ(roomy["usage"]["completion_tokens"], 16);
  const Json tight = ParseBody(test.Post("/v1/completions", words(4090)));
  EXPECT_EQ(tight["usage"]["completion_tokens"], 6) << tight;
  EXPECT_EQ(tight["choices"][0]["finish_reason"], "length");
}

TEST(Endpoints, BodiesOfAnyContentTypeAreRead) {
  TestServer test;
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/tokenize", R"({"content":"a"})",
                     "Content-Type: application/x-www-form-urlencoded\r\n");
  EXPECT_EQ(client.Receive().status, 200);
  client.SendRequest("POST", "/tokenize", R"({"content":"a"})", "Content-Encoding: gzip\r\n");
  EXPECT_EQ(client.Receive().status, 415);
}

TEST(Endpoints, EngineFailuresBecomeAnswers) {
  FakeEngineOptions slow;  // so that a stream has begun before its request fails
  slow.tick = std::chrono::milliseconds(30);
  TestServer test({}, slow);
  const auto failing = [](std::size_t after, Status error) {
    return [after, error](const GenerateRequest&) {
      FakeEngine::Script script;
      script.tokens.assign(after, 'x');
      script.error = error;
      return script;
    };
  };
  test.engine.SetScript(failing(3, Internal("logits are not finite")));
  ClientResponse plain = test.Post("/v1/completions", R"({"prompt":"a"})");
  EXPECT_EQ(plain.status, 500);
  EXPECT_EQ(ParseBody(plain)["error"]["type"], "server_error");
  // A stream that has begun ends with an error event and the done mark.
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/completions", R"({"prompt":"a","stream":true})");
  const auto events = ReadStream(&client);
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(Json::parse(events[events.size() - 2])["error"]["message"], "logits are not finite");
  EXPECT_EQ(events.back(), "[DONE]");
  // One that has not is a plain error.
  test.engine.SetScript(failing(0, OutOfMemory("no pages")));
  HttpClient early = test.Connect();
  early.SendRequest("POST", "/v1/completions", R"({"prompt":"a","stream":true})");
  EXPECT_EQ(early.Receive().status, 503);
  // With n > 1 the rest is cancelled.
  test.engine.SetScript(
      [&, first = std::make_shared<std::atomic<bool>>(true)](const GenerateRequest& request) {
        return first->exchange(false) ? failing(1, Internal("x"))(request) : Silent()(request);
      });
  EXPECT_EQ(test.Post("/v1/completions", R"({"prompt":"a","n":8})").status, 500);
  client.Close();
  early.Close();
  EXPECT_TRUE(test.BecomesIdle());
}

TEST(Endpoints, FullQueueSays429AndTakesNothing) {
  FakeEngineOptions engine;
  engine.max_waiting = 4;
  TestServer test({}, engine);
  test.engine.HoldQueue(true);
  const ClientResponse refused = test.Post("/v1/completions", R"({"prompt":"a","n":5})");
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.headers.at("retry-after"), "1");
  EXPECT_EQ(ParseBody(refused)["error"]["code"], "queue_full");
  EXPECT_TRUE(test.BecomesIdle());  // the four that fitted are gone again
  test.engine.HoldQueue(false);
  EXPECT_EQ(test.Post("/v1/completions", R"({"prompt":"a","n":4})").status, 200);
}

TEST(Endpoints, LargePlainAnswersAreBounded) {
  ServerOptions options;
  options.max_plain_bytes = 100;
  TestServer test(options);
  const ClientResponse response =
      test.Post("/v1/completions", R"({"prompt":"a","max_tokens":200})");
  EXPECT_EQ(response.status, 400);
  EXPECT_EQ(ParseBody(response)["error"]["code"], "answer_too_large");
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/completions", R"({"prompt":"a","max_tokens":200,"stream":true})");
  EXPECT_EQ(ReadStream(&client).back(), "[DONE]");
  client.Close();
  EXPECT_TRUE(test.BecomesIdle());
}

TEST(Endpoints, ApiKeyAndCors) {
  ServerOptions options;
  options.api_key = "secret";
  options.cors_origin = "https://example.org";
  TestServer test(options);
  HttpClient client = test.Connect();
  EXPECT_EQ(client.Get("/health").status, 200);
  const ClientResponse denied = client.Get("/v1/models");
  EXPECT_EQ(denied.status, 401);
  EXPECT_EQ(ParseBody(denied)["error"]["code"], "invalid_api_key");
  for (const char* header : {"Authorization: Bearer wrong!\r\n", "Authorization: Bearer secre\r\n",
                             "Authorization: Bearer \r\n", "Authorization: secret\r\n",
                             "Authorization: Bearer secretx\r\n"}) {
    client.SendRequest("GET", "/v1/models", "", header);
    EXPECT_EQ(client.Receive().status, 401) << header;
  }
  client.SendRequest("GET", "/v1/models", "", "Authorization: Bearer secret\r\n");
  const ClientResponse allowed = client.Receive();
  EXPECT_EQ(allowed.status, 200);
  EXPECT_EQ(allowed.headers.at("access-control-allow-origin"), "https://example.org");
  client.SendRequest("OPTIONS", "/v1/chat/completions");
  EXPECT_EQ(client.Receive().headers.at("access-control-allow-methods"), "POST, OPTIONS");
}

TEST(Endpoints, KvIsTheEnginesOwnReport) {
  TestServer test;
  const auto answer = test.Get("/v1/kv");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body, R"({"requests": []})");
  EXPECT_EQ(test.Post("/v1/kv", "{}").status, 405);
}

// Known fault K1: counters and gauges by their types. (That the counts are right: tests/engine.)
TEST(Endpoints, MetricsAreTypedAndCountWhatHappened) {
  TestServer test;
  EngineStats stats;
  stats.prefix_lookup_tokens = 1000;
  stats.prefix_hit_tokens = 250;
  stats.blocks_by_state[2][1] = 3;
  test.engine.SetStats(stats);
  test.engine.SetScript(Says("abc"));
  for (int i = 0; i < 5; ++i) test.Post("/v1/chat/completions", ChatBody());
  for (int i = 0; i < 10; ++i) test.Get("/health");
  test.Post("/v1/chat/completions", "{");
  const std::string text = test.Get("/metrics").body;
  for (const char* line :
       {"# TYPE pliant_prefix_cache_lookup_tokens_total counter",
        "# TYPE pliant_requests_running gauge", "# TYPE pliant_requests_waiting gauge",
        "# TYPE pliant_kv_bytes_used gauge", "# TYPE pliant_http_streams_open gauge",
        "# TYPE pliant_time_to_first_token_seconds histogram",
        "# TYPE pliant_http_responses_total counter",
        "pliant_kv_blocks{k_bits=\"8\",v_bits=\"4\"} 3",
        "pliant_time_to_first_token_seconds_count 5", "pliant_inter_token_seconds_count 10",
        "pliant_info{model=\"org/tiny\"} 1"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line;
  }
  EXPECT_EQ(test.Metric("pliant_prefix_cache_lookup_tokens_total"),
            1000);  // health probes do not count
  EXPECT_EQ(test.Metric("pliant_prefix_cache_hit_tokens_total"), 250);
  const auto responses = [&](const char* code, const char* route) {
    for (const std::string& name :
         {std::string("{code=\"") + code + "\",route=\"" + route + "\"}",
          std::string("{route=\"") + route + "\",code=\"" + code + "\"}"}) {
      const double value = test.Metric("pliant_http_responses_total" + name);
      if (value >= 0) return value;
    }
    return -1.0;
  };
  EXPECT_EQ(responses("200", "chat_completions"), 5);
  EXPECT_EQ(responses("400", "chat_completions"), 1);
  EXPECT_EQ(responses("200", "health"), 10);
  // Every family whose name ends in _total is a counter, and no other single value is.
  std::size_t at = 0;
  while ((at = text.find("# TYPE ", at)) != text.npos) {
    const std::string line = text.substr(at + 7, text.find('\n', at) - at - 7);
    const std::string name = line.substr(0, line.find(' '));
    EXPECT_EQ(line.ends_with(" counter"), name.ends_with("_total")) << line;
    at += 7;
  }
}

TEST(Endpoints, ThirtyTwoClientsAtOnce) {
  TestServer test;
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 32; ++i) {
    threads.emplace_back([&, i] {
      HttpClient client = test.Connect();
      for (int round = 0; round < 4; ++round) {
        const std::string members = R"("max_tokens":)" + std::to_string(6 + i) +
                                    (round % 2 == 0 ? R"(,"stream":true)" : "");
        std::string text;
        client = test.Connect();
        client.SendRequest("POST", "/v1/completions", R"({"prompt":"x",)" + members + "}");
        if (round % 2 == 0) {
          for (const std::string& event : ReadStream(&client)) {
            if (event != "[DONE]")
              text += Json::parse(event)["choices"][0]["text"].get<std::string>();
          }
        } else {
          text = Json::parse(client.Receive().body)["choices"][0]["text"];
        }
        right += text.size() == static_cast<std::size_t>(6 + i) && text.starts_with("hello ");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 128);
  EXPECT_TRUE(test.BecomesIdle());
}

}  // namespace
}  // namespace pliant
