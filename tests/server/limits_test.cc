// HTTP itself: framing, limits, time-outs, many connections, stopping.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "server/support/test_server.h"

namespace pliant {
namespace {

using namespace testing;  // NOLINT

TEST(Http, KeepsConnectionsAndAnswersPipelinedRequestsInOrder) {
  TestServer test;
  test.engine.SetScript(Says("ok"));
  HttpClient client = test.Connect();
  std::string all;
  const std::string post = R"({"prompt":"x"})";
  for (int i = 0; i < 20; ++i) {
    all += "GET /health HTTP/1.1\r\n\r\n";
    all += "POST /v1/completions HTTP/1.1\r\nContent-Length: " + std::to_string(post.size()) +
           "\r\n\r\n" + post;
    all += "\r\nGET /nothing HTTP/1.1\r\n\r\n";  // an empty line in between is allowed
  }
  client.Send(all);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(client.Receive().body, R"({"status":"ok"})");
    EXPECT_EQ(Json::parse(client.Receive().body)["choices"][0]["text"], "ok");
    EXPECT_EQ(client.Receive().status, 404);
  }
  // "Connection: close" and HTTP/1.0 end it.
  client.SendRequest("GET", "/health", "", "Connection: close\r\n");
  EXPECT_EQ(client.Receive().headers.at("connection"), "close");
  EXPECT_TRUE(client.WaitClosed(30));
  HttpClient old = test.Connect();
  old.Send("GET /health HTTP/1.0\r\n\r\n");
  EXPECT_EQ(old.Receive().status, 200);
  EXPECT_TRUE(old.WaitClosed(30));
  HttpClient old_stream = test.Connect();
  const std::string stream = R"({"prompt":"x","stream":true})";
  old_stream.Send("POST /v1/completions HTTP/1.0\r\nContent-Length: " +
                  std::to_string(stream.size()) + "\r\n\r\n" + stream);
  const ClientResponse unframed = old_stream.Receive();
  EXPECT_EQ(unframed.headers.count("transfer-encoding"), 0u);
  EXPECT_TRUE(unframed.body.ends_with("data: [DONE]\n\n"));
}

TEST(Http, RequestsMayComeByteByByteAndInChunks) {
  TestServer test;
  HttpClient client = test.Connect();
  for (char c : std::string("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
                            "5\r\n{\"con\r\nb;x=y\r\ntent\":\"ab\"}\r\n0\r\nTrailer: 1\r\n\r\n")) {
    ASSERT_TRUE(client.Send(std::string(1, c)));
  }
  EXPECT_EQ(client.Receive().body, R"({"tokens":[97,98],"count":2})");
  client.Send("POST /tokenize HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 15\r\n\r\n");
  client.Send("{\"content\":\"a\"}");
  EXPECT_EQ(client.Receive().status, 200);  // past the 100
}

TEST(Http, MalformedRequestsGetAnAnswerAndAreClosed) {
  TestServer test;
  for (const std::string& bad :
       {std::string("GET\r\n\r\n"), std::string("\x16\x03\x01 hello\r\n\r\n"),
        std::string("GET /health HTTP/9.9\r\n\r\n"),
        std::string("GET /health HTTP/1.1\r\nbad header\r\n\r\n"),
        std::string("POST /tokenize HTTP/1.1\r\nContent-Length: -1\r\n\r\n"),
        std::string("POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"),
        std::string("POST /tokenize HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n"),
        std::string("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        // Taken for no body, these bytes would be the next request's.
        std::string("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n"
                    "GET /health HTTP/1.1\r\n\r\n"),
        std::string("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
                    "2\r\n{}\r\n0\r\n\r\n"),
        std::string("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: "
                    "5\r\n\r\n")}) {
    HttpClient client = test.Connect();
    client.Send(bad);
    const ClientResponse response = client.Receive();
    EXPECT_EQ(response.status, 400) << bad;
    EXPECT_TRUE(ParseBody(response)["error"]["message"].is_string());
    client.HalfClose();
    EXPECT_TRUE(client.WaitClosed(30)) << bad;
  }
  EXPECT_TRUE(test.BecomesIdle());
}

TEST(Http, TargetsMayNameTheServer) {
  TestServer test;
  HttpClient client = test.Connect();
  EXPECT_EQ(client.Get("http://test/health").status, 200);
  EXPECT_EQ(client.Get("HTTP://test:8080/v1/models?x").status, 200);
  EXPECT_EQ(client.Get("http://test").status, 404);
  EXPECT_EQ(client.Get("http://test/http://test/health").status, 404);
}

/// Encodes long texts only once it is let.
class HeldTokenizer final : public TinyTokenizer {
 public:
  Result<std::vector<TokenId>> Encode(std::string_view text, EncodeOptions options) const override {
    if (text.size() > 100'000) {
      ++begun;
      released.wait(false);
    }
    return TinyTokenizer::Encode(text, options);
  }
  mutable std::atomic<int> begun{0};
  std::atomic<bool> released{false};
};

TEST(Http, LargeBodiesHoldUpNoSmallOnes) {
  HeldTokenizer tokenizer;
  FakeEngine engine(&tokenizer);
  ServerOptions options;
  options.port = 0;
  ServedModel model;
  model.engine = &engine;
  model.tokenizer = &tokenizer;
  model.model_id = "m";
  auto server = std::move(Server::Start(options, model)).value();
  server->SetReady(true);
  const std::string large = R"({"content":")" + std::string(300'000, 'x') + "\"}";
  std::vector<HttpClient> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back(server->port());
    clients.back().SendRequest("POST", "/tokenize", large);
  }
  while (tokenizer.begun == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // Would wait for ever if the large ones had the threads.
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(HttpClient(server->port()).Post("/tokenize", R"({"content":"ab"})").status, 200);
  }
  EXPECT_EQ(tokenizer.begun, 1);  // and one at a time
  tokenizer.released = true;
  tokenizer.released.notify_all();
  for (HttpClient& client : clients) EXPECT_EQ(client.Receive().status, 200);
}

TEST(Http, LargeBodiesAndHeadersAreRefusedByName) {
  ServerOptions options;
  options.max_body_bytes = 100'000;
  TestServer test(options);
  const auto expect_413 = [](HttpClient* client) {
    const ClientResponse response = client->Receive();
    EXPECT_EQ(response.status, 413);
    EXPECT_NE(response.body.find("larger than 100000 bytes"), std::string::npos) << response.body;
    client->HalfClose();
    EXPECT_TRUE(client->WaitClosed(30));
  };
  HttpClient announced = test.Connect();
  announced.Send("POST /tokenize HTTP/1.1\r\nContent-Length: 100001\r\n\r\n");
  expect_413(&announced);
  HttpClient sent = test.Connect();  // the whole body is on its way when the answer comes
  sent.SendRequest("POST", "/tokenize", std::string(3'000'000, ' '));
  expect_413(&sent);
  HttpClient chunked = test.Connect();
  chunked.Send("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 120; ++i) chunked.Send("400\r\n" + std::string(1024, ' ') + "\r\n");
  expect_413(&chunked);
  EXPECT_EQ(test.Post("/tokenize", R"({"content":")" + std::string(99'000, 'a') + "\"}").status,
            200);

  HttpClient header = test.Connect();
  header.Send("GET /health HTTP/1.1\r\nX: " + std::string(20'000, 'x') + "\r\n\r\n");
  EXPECT_EQ(header.Receive().status, 431);
  HttpClient chunk_header = test.Connect();  // a chunk's first line without end
  chunk_header.Send("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;" +
                    std::string(200'000, 'x'));
  EXPECT_EQ(chunk_header.Receive().status, 400);
  // A wrong path with a large body is refused without reading it.
  HttpClient lost = test.Connect();
  lost.Send("POST /nowhere HTTP/1.1\r\nContent-Length: 99999\r\n\r\n");
  EXPECT_EQ(lost.Receive().status, 404);
}

TEST(Http, BodiesTogetherAreBounded) {
  ServerOptions options;
  options.max_bodies_bytes = 10'000;
  TestServer test(options);
  HttpClient first = test.Connect();
  first.Send("POST /tokenize HTTP/1.1\r\nContent-Length: 8000\r\n\r\n");
  ASSERT_TRUE(test.Eventually([&] { return test.Metric("pliant_http_body_bytes_held") == 8000; }));
  HttpClient second = test.Connect();
  second.Send("POST /tokenize HTTP/1.1\r\nContent-Length: 8000\r\n\r\n");
  EXPECT_EQ(second.Receive().status, 503);
  HttpClient chunked = test.Connect();
  chunked.Send("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nbb8\r\n" +
               std::string(3000, ' ') + "\r\n");
  EXPECT_EQ(chunked.Receive().status, 503);
  first.Close();
  second.Close();
  chunked.Close();
  EXPECT_TRUE(test.BecomesIdle());
}

TEST(Http, SlowSendersTimeOut) {  // known fault N2: slow ones are cut
  ServerOptions options;
  options.header_timeout = 0.3;
  options.body_timeout = 0.3;
  options.idle_timeout = 0.3;
  TestServer test(options);
  HttpClient header = test.Connect();
  header.Send("GET /health HT");
  EXPECT_EQ(header.Receive().status, 408);
  HttpClient body = test.Connect();
  body.Send("POST /tokenize HTTP/1.1\r\nContent-Length: 10\r\n\r\n{");
  EXPECT_EQ(body.Receive().status, 408);
  HttpClient chunk = test.Connect();
  chunk.Send("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{");
  EXPECT_EQ(chunk.Receive().status, 408);
  HttpClient mute = test.Connect();
  EXPECT_TRUE(mute.WaitClosed(30));
  HttpClient idle = test.Connect();
  EXPECT_EQ(idle.Get("/health").status, 200);
  EXPECT_TRUE(idle.WaitClosed(30));
  // One that is being answered is not idle.
  test.engine.SetScript(Silent());
  HttpClient waiting = test.Connect();
  waiting.SendRequest("POST", "/v1/completions", R"({"prompt":"x"})");
  EXPECT_FALSE(waiting.WaitClosed(1));
  EXPECT_EQ(test.Metric("pliant_http_timeouts_total"), 3);
}

TEST(Http, ConnectionsAreBoundedByPeerAndInTotal) {
  for (const bool by_peer : {false, true}) {
    ServerOptions options;
    (by_peer ? options.max_connections_per_peer : options.max_connections) = 4;
    TestServer test(options);
    std::vector<HttpClient> clients;
    for (int i = 0; i < 4; ++i) {
      clients.push_back(test.Connect());
      EXPECT_EQ(clients.back().Get("/health").status, 200);
    }
    HttpClient more = test.Connect();
    const ClientResponse refused = more.Receive();  // without having asked
    EXPECT_EQ(refused.status, 503);
    EXPECT_EQ(refused.headers.count("retry-after"), 1u);
    EXPECT_NE(refused.body.find(by_peer ? "your address" : "the server has 4"), std::string::npos)
        << refused.body;
    clients.pop_back();
    EXPECT_TRUE(test.Eventually([&] {
      HttpClient again = test.Connect();
      again.SendRequest("GET", "/health");
      return again.Receive().status == 200;
    }));
  }
}

TEST(Http, HealthAnswersWhileHundredsOfConnectionsHang) {  // known fault N2
  FakeEngineOptions engine;
  engine.max_running = 400;
  ServerOptions options;  // time-outs must not thin out the crowd on a slow machine
  options.header_timeout = options.body_timeout = 600;
  TestServer test(options, engine);
  test.engine.SetScript([](const GenerateRequest&) {
    FakeEngine::Script script;
    script.silent = true;
    return script;
  });
  std::vector<HttpClient> clients;
  for (int i = 0; i < 300; ++i) {
    clients.push_back(test.Connect());
    clients.back().SendRequest("POST", "/v1/completions", R"({"prompt":"x","stream":true})");
  }
  for (int i = 0; i < 300; ++i) {
    clients.push_back(test.Connect());
    clients.back().Send("G");
  }
  for (int i = 0; i < 50; ++i) {
    clients.push_back(test.Connect());
    clients.back().Send(
        "POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{\"prompt\"");
  }
  for (const HttpClient& client : clients) ASSERT_TRUE(client.connected());
  ASSERT_TRUE(test.Eventually([&] { return test.engine.Stats().running == 300; }));
  // Not a measurement: each of these would wait for ever if a connection took a thread.
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(test.Get("/health").status, 200);
    EXPECT_EQ(test.Get("/metrics").status, 200);
  }
  // 650 and the one that asks; a probe's connection may take a moment to be counted out.
  EXPECT_TRUE(test.Eventually([&] { return test.Metric("pliant_http_connections") == 651; }));
  clients.clear();
  EXPECT_TRUE(test.BecomesIdle());
}

TEST(Http, AnotherServerOnThePortIsRefusedClearly) {
  TestServer test;
  ServerOptions options;
  options.port = test.server->port();
  ServedModel model;
  model.engine = &test.engine;
  model.tokenizer = &test.tokenizer;
  model.model_id = "m";
  const auto second = Server::Start(options, model);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(second.status().message(),
            "cannot listen on 127.0.0.1:" + std::to_string(options.port) + ": the port is in use");
  options.port = 0;
  options.host = "256.1.1.1";
  EXPECT_EQ(Server::Start(options, model).status().code(), StatusCode::kIo);
  options.host = "127.0.0.1";
  options.port = 70000;
  EXPECT_EQ(Server::Start(options, model).status().code(), StatusCode::kInvalidArgument);
}

TEST(Http, WithoutATemplateChatSaysSo) {
  TinyTokenizer tokenizer;
  FakeEngine engine(&tokenizer);
  ServerOptions options;
  options.port = 0;
  ServedModel model;
  model.engine = &engine;
  model.tokenizer = &tokenizer;
  model.model_id = "m";
  auto server = std::move(Server::Start(options, model)).value();
  server->SetReady(true);
  const ClientResponse response =
      HttpClient(server->port()).Post("/v1/chat/completions", ChatBody());
  EXPECT_EQ(response.status, 400);
  EXPECT_NE(response.body.find("no chat template"), std::string::npos);
}

TEST(Http, StopLetsAnswersEndAndThenCancels) {
  // Draining as the command line does it: what runs ends, new work is refused.
  TestServer test;
  test.engine.SetScript(Says("a long enough answer to be under way"));
  HttpClient client = test.Connect(), idle = test.Connect();
  EXPECT_EQ(idle.Get("/health").status, 200);
  client.SendRequest("POST", "/v1/completions", R"({"prompt":"x","stream":true,"max_tokens":100})");
  ASSERT_TRUE(client.NextEvent());
  test.server->SetReady(false);
  EXPECT_EQ(test.Post("/v1/completions", R"({"prompt":"x"})").status, 503);
  EXPECT_TRUE(test.engine.Drain(60));
  test.server->Stop();
  EXPECT_EQ(ReadStream(&client).back(), "[DONE]");
  EXPECT_TRUE(idle.WaitClosed(30));
  EXPECT_FALSE(test.Connect().connected());

  // What does not end is cut.
  ServerOptions options;
  options.drain_seconds = 0.2;
  TestServer stuck(options);
  stuck.engine.SetScript(Silent());
  HttpClient waiting = stuck.Connect();
  waiting.SendRequest("POST", "/v1/completions", R"({"prompt":"x"})");
  ASSERT_TRUE(stuck.Eventually([&] { return stuck.engine.Stats().running == 1; }));
  stuck.server->Stop();
  EXPECT_TRUE(waiting.WaitClosed(30));
  EXPECT_TRUE(stuck.Eventually([&] { return stuck.engine.Stats().requests_cancelled == 1; }));
}

TEST(Http, ADrainThatCancelsTellsTheClient) {
  TestServer test;
  test.engine.SetScript(Silent());
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/completions", R"({"prompt":"x"})");
  ASSERT_TRUE(test.Eventually([&] { return test.engine.Stats().running == 1; }));
  test.server->SetReady(false);
  EXPECT_FALSE(test.engine.Drain(0.05));
  const ClientResponse response = client.Receive();
  EXPECT_EQ(response.status, 503);
  EXPECT_NE(response.body.find("shutting down"), std::string::npos);
}

}  // namespace
}  // namespace pliant
