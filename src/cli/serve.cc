#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "base/size.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "server/server.h"

namespace pliant {
namespace {

struct ServeFlags {
  ModelFlags model;
  EngineFlags engine;
  ServerOptions server;
  std::string model_name;
  double drain_seconds = 30;
};

// Tells a taken port before the model is loaded, not after. The server's own bind has the last
// word.
Status CheckPortFree(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  if (port == 0 || inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) return Status::Ok();
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0) return Status::Ok();
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const int bound = bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = errno;
  close(fd);
  if (bound == 0) return Status::Ok();
  return Unavailable(
      "cannot listen on " + host + ":" + std::to_string(port) + ": " + std::strerror(error) +
      (error == EADDRINUSE ? "; stop what listens there or choose another --port" : ""));
}

std::string TokenText(const Tokenizer& tokenizer, const std::optional<TokenId>& id) {
  return id ? std::string(tokenizer.TokenBytes(*id, true)) : std::string();
}

int Serve(const ServeFlags& flags) {
  // The signals are taken by sigwait below, on this thread; every thread started from here inherits
  // the mask.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  if (const Status status = CheckPortFree(flags.server.host, flags.server.port); !status.ok())
    return Fail(status);
  Result<OpenedModel> opened = OpenModel(flags.model);
  if (!opened.ok()) return Fail(opened.status());
  Result<std::unique_ptr<Engine>> engine = StartEngine(flags.engine, *opened);
  if (!engine.ok()) return Fail(engine.status());

  const ModelConfig& config = opened->model->config();
  ServedModel served;
  served.engine = engine->get();
  served.tokenizer = opened->tokenizer.get();
  served.chat_template = opened->chat_template.get();
  served.model_id = !flags.model_name.empty() ? flags.model_name
                                              : std::filesystem::path(opened->path).stem().string();
  served.bos_text = TokenText(*opened->tokenizer, opened->tokenizer->vocabulary().bos);
  served.eos_text = TokenText(*opened->tokenizer, opened->tokenizer->vocabulary().eos);
  const int planes = flags.engine.kv_bits / kBitsPerPlane;
  served.kv = {
      .k_bits = flags.engine.kv_bits,
      .v_bits = flags.engine.kv_bits,
      .floor_bits = std::min(flags.engine.kv_floor, flags.engine.kv_bits),
      .bytes_per_token = static_cast<std::int64_t>(config.Kv().BytesPerToken(planes, planes)),
      .policy = flags.engine.policy};
  Result<std::unique_ptr<Server>> server = Server::Start(flags.server, served);
  if (!server.ok()) return Fail(server.status());
  (*server)->SetReady(true);

  const EngineStats stats = (*engine)->Stats();
  const bool ipv6 = flags.server.host.find(':') != std::string::npos;
  const std::string url = "http://" + (ipv6 ? "[" + flags.server.host + "]" : flags.server.host) +
                          ":" + std::to_string((*server)->port());
  std::printf(
      "Serving %s on %s (KV cache %s, exact store %s, %lld tokens a request at most).\nTry:\n  "
      "curl %s/v1/chat/completions -H 'Content-Type: application/json' \\\n"
      "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Name three rivers.\"}], "
      "\"stream\": true}'\n",
      served.model_id.c_str(), url.c_str(),
      FormatSize(static_cast<std::uint64_t>(stats.kv_bytes_total)).c_str(),
      FormatSize(static_cast<std::uint64_t>(stats.store_bytes_total)).c_str(),
      static_cast<long long>((*engine)->MaxContext()), url.c_str());
  std::fflush(stdout);

  int signal = 0;
  sigwait(&signals, &signal);
  std::fprintf(stderr, "pliant: draining (%lld requests); again to stop at once\n",
               static_cast<long long>((*engine)->Stats().running + (*engine)->Stats().waiting));
  std::signal(SIGTERM, SIG_DFL);
  std::signal(SIGINT, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  (*server)->SetReady(false);
  (*engine)->Drain(flags.drain_seconds);
  (*server)->Stop();
  return 0;
}

}  // namespace

Command AddServe(CLI::App& app) {
  auto flags = std::make_shared<ServeFlags>();
  flags->model.AddTo(app);
  app.add_option("--host", flags->server.host, "Address to listen on")->capture_default_str();
  app.add_option("--port", flags->server.port, "Port to listen on; 0: any free one")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535));
  app.add_option("--model-name", flags->model_name, "Name that clients use (default: the file's)");
  app.add_option("--api-key", flags->server.api_key, "Ask clients for this key");
  app.add_option("--cors-origin", flags->server.cors_origin, "Allow browsers of this origin");
  app.add_option("--max-connections", flags->server.max_connections, "Connections open at once")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--http-threads", flags->server.io_threads, "Threads for sockets")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.add_option("--drain-seconds", flags->drain_seconds,
                 "On SIGTERM, how long running requests may take to end")
      ->capture_default_str()
      ->check(Between(0.0, 86400.0));
  flags->engine.AddTo(app);
  return [flags] { return Serve(*flags); };
}

}  // namespace pliant
