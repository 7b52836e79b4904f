// Clients that leave: whatever they asked for ends soon, and nothing stays behind.
#include <gtest/gtest.h>

#include <random>

#include "server/support/test_server.h"
#include "support/rounds.h"

namespace pliant {
namespace {

using namespace testing;  // NOLINT

constexpr const char* kLong = R"({"prompt":"x","max_tokens":4000})";
constexpr const char* kLongStream = R"({"prompt":"x","max_tokens":4000,"stream":true})";

bool EngineIdle(TestServer* test) {
  return test->Eventually([&] {
    const EngineStats stats = test->engine.Stats();
    return stats.running == 0 && stats.waiting == 0;
  });
}
bool EngineHas(TestServer* test, std::int64_t running, std::int64_t waiting) {
  return test->Eventually([&] {
    const EngineStats stats = test->engine.Stats();
    return stats.running == running && stats.waiting == waiting;
  });
}

enum class Way { kClose, kReset, kHalfClose };

class Leaving : public ::testing::TestWithParam<Way> {
 protected:
  void Leave(HttpClient* client) {
    switch (GetParam()) {
      case Way::kClose:
        client->Close();
        break;
      case Way::kReset:
        client->Reset();
        break;
      case Way::kHalfClose:
        client->HalfClose();
        break;
    }
  }
};

TEST_P(Leaving, InTheMiddleOfAStream) {
  TestServer test;
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/completions", kLongStream);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(client.NextEvent());
  Leave(&client);
  EXPECT_TRUE(EngineIdle(&test));
  EXPECT_EQ(test.engine.Stats().requests_cancelled, 1);
  client.Close();
  EXPECT_TRUE(test.BecomesIdle());
}

TEST_P(Leaving, WhileAPlainAnswerIsMade) {
  TestServer test;
  test.engine.SetScript(Silent());
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/completions", R"({"prompt":"x","max_tokens":4000,"n":5})");
  ASSERT_TRUE(EngineHas(&test, 5, 0));
  Leave(&client);
  EXPECT_TRUE(EngineIdle(&test));
  EXPECT_EQ(test.engine.Stats().requests_cancelled, 5);
  client.Close();
  EXPECT_TRUE(test.BecomesIdle());
}

TEST_P(Leaving, WhileInTheQueue) {
  TestServer test;
  test.engine.HoldQueue(true);
  HttpClient plain = test.Connect(), stream = test.Connect();
  plain.SendRequest("POST", "/v1/completions", kLong);
  stream.SendRequest("POST", "/v1/chat/completions", ChatBody(R"("stream":true)"));
  ASSERT_TRUE(EngineHas(&test, 0, 2));
  Leave(&plain);
  Leave(&stream);
  EXPECT_TRUE(EngineIdle(&test));
  plain.Close();
  stream.Close();
  EXPECT_TRUE(test.BecomesIdle());
}

TEST_P(Leaving, WithMoreRequestsSentAhead) {
  TestServer test;
  test.engine.SetScript(Silent());
  HttpClient client = test.Connect();
  client.SendRequest("POST", "/v1/completions", kLong);
  client.SendRequest("GET", "/health");
  ASSERT_TRUE(EngineHas(&test, 1, 0));
  Leave(&client);
  EXPECT_TRUE(EngineIdle(&test));
  // So much sent ahead that the server has stopped reading.
  HttpClient flooding = test.Connect();
  flooding.SendRequest("POST", "/v1/completions", kLong);
  flooding.Send(std::string(100'000, 'x'));
  ASSERT_TRUE(EngineHas(&test, 1, 0));
  Leave(&flooding);
  EXPECT_TRUE(EngineIdle(&test));
  client.Close();
  flooding.Close();
  EXPECT_TRUE(test.BecomesIdle());
}

TEST_P(Leaving, InTheMiddleOfTheRequest) {
  TestServer test;
  for (const char* part :
       {"P", "POST /v1/completions HTTP/1.1\r\n",
        "POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
        "POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"}) {
    HttpClient client = test.Connect();
    client.Send(part);
    Leave(&client);
    if (GetParam() == Way::kHalfClose) {
      EXPECT_EQ(client.Receive().status, 400) << part;
      client.Close();
    }
  }
  EXPECT_TRUE(test.BecomesIdle());
}

INSTANTIATE_TEST_SUITE_P(Ways, Leaving,
                         ::testing::Values(Way::kClose, Way::kReset, Way::kHalfClose));

constexpr int kStreams = Rounds(1000, 200), kVisits = Rounds(10'000, 1'000);

TEST(Disconnect, ThousandStreamsAbortedAtRandom) {  // known fault H1
  TestServer test;
  std::atomic<int> next{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      while (next.fetch_add(1) < kStreams) {
        HttpClient client = test.Connect();
        if (random() % 2) {
          client.SendRequest("POST", "/v1/completions", kLongStream);
        } else {
          client.SendRequest("POST", "/v1/chat/completions",
                             ChatBody(R"("stream":true,"max_tokens":4000)"));
        }
        const unsigned events = random() % 51;
        for (unsigned i = 0; i < events; ++i) client.NextEvent();
        if (random() % 2) {
          client.Reset();
        } else {
          client.HalfClose();
          client.WaitClosed(30);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(test.BecomesIdle());
  for (int i = 0; i < 16; ++i)
    EXPECT_EQ(test.Post("/v1/completions", R"({"prompt":"x"})").status, 200);
}

TEST(Disconnect, NoPermitIsLostOnAnyExit) {  // known fault J1
  FakeEngineOptions engine;
  engine.max_waiting = 8;
  engine.max_running = 8;
  TestServer test({}, engine, /*refuse_system=*/true);
  std::atomic<int> next{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(100 + t));
      HttpClient kept = test.Connect();
      while (next.fetch_add(1) < kVisits) {
        switch (random() % 8) {
          case 0:
            kept = test.Connect();
            kept.Post("/v1/chat/completions", ChatBody(R"("n":0)"));
            break;
          case 1:
            kept = test.Connect();
            kept.Post("/v1/chat/completions", R"({"messages":[{"role":"system","content":"x"}]})");
            break;
          case 2:
            kept = test.Connect();
            kept.Post("/v1/completions", R"({"prompt":")" + std::string(5000, 'x') + "\"}");
            break;
          case 3: {  // reset during the upload
            HttpClient client = test.Connect();
            client.Send(
                "POST /v1/completions HTTP/1.1\r\nContent-Length: 5000\r\n\r\n{\"prompt\":");
            client.Reset();
            break;
          }
          case 4: {  // leave a stream
            HttpClient client = test.Connect();
            client.SendRequest("POST", "/v1/completions", kLongStream);
            if (random() % 2) client.NextEvent();
            client.Reset();
            break;
          }
          case 5: {  // leave a plain answer
            HttpClient client = test.Connect();
            client.SendRequest("POST", "/v1/completions", kLong);
            client.Close();
            break;
          }
          case 6:
            kept = test.Connect();
            kept.Post("/v1/completions", R"({"prompt":"x","max_tokens":3})");
            break;  // 200 or 429
          default:
            kept = test.Connect();
            kept.Post("/v1/completions", R"({"prompt":"x","max_tokens":3,"n":8})");
            break;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(test.BecomesIdle());
  std::vector<std::thread> together;
  std::atomic<int> admitted{0};
  for (int i = 0; i < 8; ++i) {
    together.emplace_back(
        [&] { admitted += test.Post("/v1/completions", R"({"prompt":"x"})").status == 200; });
  }
  for (std::thread& thread : together) thread.join();
  EXPECT_EQ(admitted, 8);
}

TEST(Disconnect, ReaderThatStopsIsCut) {
  ServerOptions options;
  options.max_unsent_bytes = 4096;
  FakeEngineOptions engine;
  engine.context = 10'000'000;
  engine.tick = std::chrono::microseconds(1);
  TestServer test(options, engine);
  test.engine.SetScript([](const GenerateRequest&) {
    FakeEngine::Script script;
    script.tokens.assign(1'000'000, 'x');
    return script;
  });
  HttpClient slow = test.Connect(/*receive_buffer=*/4096);
  slow.SendRequest("POST", "/v1/completions",
                   R"({"prompt":"x","max_tokens":1000000,"stream":true,"logprobs":5})");
  HttpClient good = test.Connect();
  good.SendRequest("POST", "/v1/completions", R"({"prompt":"x","max_tokens":500,"stream":true})");
  EXPECT_EQ(ReadStream(&good).back(), "[DONE]");
  EXPECT_TRUE(test.Eventually([&] { return test.engine.Stats().running == 0; }));
  EXPECT_EQ(test.engine.Stats().requests_cancelled, 1);
  EXPECT_EQ(test.Metric("pliant_http_slow_readers_total"), 1);
}

TEST(Disconnect, ReaderThatNeverTakesAByteTimesOut) {
  ServerOptions options;
  options.write_timeout = 0.3;
  options.max_unsent_bytes = 1u << 30;
  FakeEngineOptions engine;
  engine.context = 10'000'000;
  engine.tick = std::chrono::microseconds(1);
  TestServer test(options, engine);
  test.engine.SetScript([](const GenerateRequest&) {
    FakeEngine::Script script;
    script.tokens.assign(1'000'000, 'x');
    return script;
  });
  HttpClient slow = test.Connect(/*receive_buffer=*/4096);
  slow.SendRequest("POST", "/v1/completions",
                   R"({"prompt":"x","max_tokens":1000000,"stream":true,"logprobs":5})");
  EXPECT_TRUE(test.Eventually([&] { return test.engine.Stats().requests_cancelled == 1; }));
  EXPECT_EQ(test.Metric("pliant_http_timeouts_total"), 1);
}

}  // namespace
}  // namespace pliant
