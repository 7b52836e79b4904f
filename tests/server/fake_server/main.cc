// A server over the fake engine, to try clients against: pliant_fake_server [PORT]. Ends with its
// standard input.
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "server/support/test_server.h"

int main(int argc, char** argv) {
  using namespace pliant;           // NOLINT
  using namespace pliant::testing;  // NOLINT
  const TinyTokenizer tokenizer;
  FakeEngine engine(&tokenizer);
  const auto chat_template = std::move(ChatTemplate::Parse(ChatMlSource())).value();
  ServerOptions options;
  options.port = argc > 1 ? std::atoi(argv[1]) : 0;
  ServedModel model;
  model.engine = &engine;
  model.tokenizer = &tokenizer;
  model.chat_template = chat_template.get();
  model.model_id = "fake";
  auto server = Server::Start(options, model);
  if (!server.ok()) {
    std::fprintf(stderr, "%s\n", server.status().message().c_str());
    return 1;
  }
  (*server)->SetReady(true);
  std::printf("http://127.0.0.1:%d\n", (*server)->port());
  std::fflush(stdout);
  std::cin.ignore(std::numeric_limits<std::streamsize>::max());
}
