// Room: server. The HTTP server: OpenAI's endpoints over an Engine. A few threads of its own do
// sockets (never waiting for anything else), a few more do what takes time (JSON, templates,
// tokenising). Public functions: any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "engine/engine.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace pliant {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int port = 8080;  // 0: any free one
  int io_threads = 2;
  int worker_threads = 2;

  // Limits. A client over one gets an answer that names it.
  int max_connections = 2048;
  int max_connections_per_peer = 1024;  // of one address
  std::size_t max_header_bytes = 16u << 10;
  std::size_t max_body_bytes = 8u << 20;
  std::size_t max_bodies_bytes = 64u << 20;   // all bodies held at one time
  std::size_t max_unsent_bytes = 256u << 10;  // of one stream, beyond the socket's own buffer
  std::size_t max_plain_bytes = 64u << 20;    // an answer that is not streamed

  // Time-outs in seconds.
  double header_timeout =
      10;                    // from connecting, or a request's first byte, to the end of its header
  double body_timeout = 60;  // for the whole body
  double idle_timeout = 75;  // between requests of one connection
  double write_timeout = 30;  // without the client taking a byte
  double drain_seconds = 5;   // Stop: for answers to be handed over

  std::string api_key;  // empty: none asked for. Else "Authorization: Bearer KEY" everywhere but
                        // /health and /ready
  std::string cors_origin;  // empty: no CORS headers. Else the value of Access-Control-Allow-Origin
};

/// What is known about the cache, for /v1/models.
struct KvInfo {
  int k_bits = 16, v_bits = 16;      // the ceiling
  int floor_bits = 8;                // the server's default for kv.min_bits
  std::int64_t bytes_per_token = 0;  // at the ceiling
  std::string policy;
};

/// The model behind the endpoints. All pointers outlive the server.
struct ServedModel {
  Engine* engine = nullptr;
  const Tokenizer* tokenizer = nullptr;
  const ChatTemplate* chat_template = nullptr;  // null: /v1/chat/completions answers 400
  std::string model_id;
  std::string bos_text, eos_text;  // the template's bos_token and eos_token
  KvInfo kv;
};

class Server {
 public:
  /// Listens at once; /ready and the endpoints that generate say 503 until SetReady(true). A port
  /// in use is Unavailable, other socket failures IoError, with the address.
  static Result<std::unique_ptr<Server>> Start(ServerOptions options, ServedModel model);
  /// Stops if Stop was not called.
  ~Server();

  /// The port listened on.
  int port() const;
  /// False while loading and while draining: no new work is taken, what runs goes on.
  void SetReady(bool ready);
  /// Closes the listener and idle connections, lets answers under way end for `drain_seconds`, then
  /// cancels and closes what is left. To drain: SetReady(false), Engine::Drain, Stop.
  void Stop();

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pliant
