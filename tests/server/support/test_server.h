// A whole server on a free port over the fake engine.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "server/json.h"
#include "server/server.h"
#include "server/support/fake_engine.h"
#include "server/support/http_client.h"
#include "server/support/tiny_tokenizer.h"

namespace pliant::testing {

/// ChatML that refuses system messages when `refuse_system`.
inline std::string ChatMlSource(bool refuse_system = false) {
  std::string out = "{% for message in messages %}";
  if (refuse_system) {
    out +=
        "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% "
        "endif %}";
  }
  out +=
      "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' "
      "}}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
  return out;
}

struct TestServer {
  explicit TestServer(ServerOptions options = {}, FakeEngineOptions engine_options = {},
                      bool refuse_system = false)
      : engine(&tokenizer, engine_options) {
    auto parsed = ChatTemplate::Parse(ChatMlSource(refuse_system));
    EXPECT_TRUE(parsed.ok()) << parsed.status().ToString();
    chat_template = std::move(parsed).value();
    options.port = 0;
    ServedModel model;
    model.engine = &engine;
    model.tokenizer = &tokenizer;
    model.chat_template = chat_template.get();
    model.model_id = "org/tiny";
    auto started = Server::Start(options, model);
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    server = std::move(started).value();
    server->SetReady(true);
  }

  HttpClient Connect(int receive_buffer = 0) { return HttpClient(server->port(), receive_buffer); }
  ClientResponse Get(std::string_view path) { return Connect().Get(path); }
  ClientResponse Post(std::string_view path, std::string_view body) {
    return Connect().Post(path, body);
  }

  /// The value of a metric without labels (or with them, written as in the text); -1 when it is not
  /// there.
  double Metric(const std::string& name) {
    const std::string text = "\n" + Get("/metrics").body;
    const std::size_t at = text.find("\n" + name + " ");
    return at == text.npos ? -1 : std::stod(text.substr(at + name.size() + 2));
  }
  /// Polls until `done` holds; a minute at most.
  template <typename F>
  bool Eventually(F done) {
    for (int i = 0; i < 6000; ++i) {
      if (done()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  /// No request anywhere: engine and server are back where they started.
  bool BecomesIdle() {
    return Eventually([&] {
             const EngineStats stats = engine.Stats();
             return stats.running == 0 && stats.waiting == 0;
           }) &&
           Eventually([&] {
             return Metric("pliant_http_requests_open") == 0 &&
                    Metric("pliant_http_streams_open") == 0 &&
                    Metric("pliant_http_body_bytes_held") == 0 &&
                    Metric("pliant_http_connections") == 1;
           });
  }

  TinyTokenizer tokenizer;
  FakeEngine engine;
  std::unique_ptr<ChatTemplate> chat_template;
  std::unique_ptr<Server> server;  // goes first
};

inline Json ParseBody(const ClientResponse& response) {
  Json out = Json::parse(response.body, nullptr, false);
  EXPECT_FALSE(out.is_discarded()) << response.body;
  return out;
}

/// Answers every request with `text`, one token a byte.
inline FakeEngine::ScriptFn Says(const std::string& text) {
  return [text](const GenerateRequest&) {
    FakeEngine::Script script;
    for (unsigned char byte : text) script.tokens.push_back(byte);
    return script;
  };
}

inline FakeEngine::ScriptFn Silent() {
  return [](const GenerateRequest&) {
    FakeEngine::Script script;
    script.silent = true;
    return script;
  };
}

inline std::string ChatBody(const std::string& members = "", const std::string& content = "hi") {
  Json message = {{"role", "user"}, {"content", content}};
  return R"({"messages":[)" + message.dump() + "]" + (members.empty() ? "" : "," + members) + "}";
}

}  // namespace pliant::testing
