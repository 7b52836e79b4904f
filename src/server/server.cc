#include "server/server.h"

#include <netinet/tcp.h>
#include <sys/resource.h>

#include <thread>

#include "base/log.h"
#include "server/connection.h"
#include "server/server_core.h"

namespace pliant {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr int kSendBufferBytes = 256 << 10;  // the kernel's share of what a slow reader may hold
constexpr int kKeepIdleSeconds = 30, kKeepIntervalSeconds = 10, kKeepCount = 3;
constexpr auto kAcceptRetry = std::chrono::milliseconds(50);

/// Each connection is a file descriptor; the usual soft limit of 1024 is below the default number
/// of connections.
void RaiseFileLimit(int connections) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = static_cast<rlim_t>(connections) + 256;
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

void SetSocketOptions(tcp::socket* socket) {
  error_code ignored;
  socket->set_option(tcp::no_delay(true), ignored);
  socket->set_option(asio::socket_base::keep_alive(true), ignored);
  socket->set_option(asio::socket_base::send_buffer_size(kSendBufferBytes), ignored);
  const int fd = socket->native_handle();
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepIdleSeconds, sizeof(int));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepIntervalSeconds, sizeof(int));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kKeepCount, sizeof(int));
}

Status CheckOptions(const ServerOptions& options) {
  if (options.port < 0 || options.port > 65535) {
    return InvalidArgument("port " + std::to_string(options.port) + " is not in 0..65535");
  }
  if (options.io_threads < 1 || options.worker_threads < 1 || options.max_connections < 1 ||
      options.max_connections_per_peer < 1) {
    return InvalidArgument("thread and connection numbers of the server must be at least 1");
  }
  if (options.max_header_bytes < 256 || options.max_header_bytes > (1u << 20)) {
    return InvalidArgument("the header limit must be from 256 bytes to 1 MiB");
  }
  for (const std::string* value : {&options.cors_origin, &options.api_key}) {
    for (char c : *value) {
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
        return InvalidArgument("the API key and the CORS origin may not hold control characters");
      }
    }
  }
  return Status::Ok();
}

}  // namespace

struct Server::Impl {
  Impl(const ServerOptions& options, ServedModel model)
      : core(options, std::move(model)),
        acceptor(asio::make_strand(io)),
        retry(acceptor.get_executor()) {}

  Status Listen();
  void Accept();
  void Admit(tcp::socket socket);
  void Run();
  void Stop();

  ServerCore core;
  // After core, so that handlers that hold connections are destroyed before what the connections
  // use.
  asio::io_context io;
  asio::executor_work_guard<asio::io_context::executor_type> work{io.get_executor()};
  tcp::acceptor acceptor;
  asio::steady_timer retry;
  std::vector<std::thread> threads;
  int port = 0;
  bool stopped = false;
};

Status Server::Impl::Listen() {
  const ServerOptions& options = core.options;
  const std::string where = options.host + ":" + std::to_string(options.port);
  error_code error;
  tcp::resolver resolver(io);
  const auto found =
      resolver.resolve(options.host, std::to_string(options.port),
                       tcp::resolver::passive | tcp::resolver::numeric_service, error);
  if (error || found.empty())
    return IoError("cannot find the address " + where + ": " + error.message());
  tcp::endpoint endpoint = found.begin()->endpoint();
  for (const auto& entry : found) {
    if (entry.endpoint().address().is_v4()) {
      endpoint = entry.endpoint();
      break;
    }
  }
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(1024, error);
  if (error == asio::error::address_in_use) {
    return Unavailable("cannot listen on " + where + ": the port is in use");
  }
  if (error) return IoError("cannot listen on " + where + ": " + error.message());
  port = acceptor.local_endpoint(error).port();
  return Status::Ok();
}

void Server::Impl::Accept() {
  acceptor.async_accept(asio::make_strand(io), [this](error_code error, auto socket) {
    if (!acceptor.is_open()) return;
    if (!error) {
      Admit(tcp::socket(std::move(socket)));
      return Accept();
    }
    // Out of descriptors, or the client left while it waited: try again, but do not spin.
    retry.expires_after(kAcceptRetry);
    retry.async_wait([this](error_code cancelled) {
      if (!cancelled && acceptor.is_open()) Accept();
    });
  });
}

void Server::Impl::Admit(tcp::socket socket) {
  error_code error;
  const tcp::endpoint peer = socket.remote_endpoint(error);
  if (error) return;  // it has left
  SetSocketOptions(&socket);
  auto permit = std::make_unique<ConnectionPermit>(&core, peer.address().to_string());
  if (!permit->granted()) {
    ++core.api.metrics().refused_connections;
    const HttpResponse refusal = ErrorResponse(FromStatus(Unavailable(permit->what())));
    const std::string text =
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
        "Connection: close\r\nContent-Length: " +
        std::to_string(refusal.body.size()) + "\r\n\r\n" + refusal.body;
    // A new socket's buffer takes this at once. The socket stays open a moment so that what the
    // client sends meanwhile does not reset the connection before it has read the answer.
    socket.non_blocking(true, error);
    socket.write_some(asio::buffer(text), error);
    socket.shutdown(tcp::socket::shutdown_send, error);
    auto timer = std::make_shared<asio::steady_timer>(io, std::chrono::milliseconds(200));
    timer->async_wait(
        [timer, held = std::make_shared<tcp::socket>(std::move(socket))](error_code) {});
    return;
  }
  const auto connection = std::make_shared<Connection>(&core, std::move(socket), std::move(permit));
  {
    const std::lock_guard lock(core.mutex);
    core.connections.emplace(connection.get(), connection);
  }
  connection->Start();
}

void Server::Impl::Run() {
  for (;;) {
    try {
      io.run();
      return;
    } catch (const std::exception& e) {
      // A handler's failure (the allocator's, most likely) costs its connection only.
      spdlog::error("a connection failed: {}", e.what());
    }
  }
}

void Server::Impl::Stop() {
  if (std::exchange(stopped, true)) return;
  core.api.SetReady(false);
  core.draining.store(true);
  const auto on_all = [this](void (Connection::*what)()) {
    std::vector<std::shared_ptr<Connection>> all;
    {
      const std::lock_guard lock(core.mutex);
      for (const auto& [raw, weak] : core.connections) {
        if (auto connection = weak.lock()) all.push_back(std::move(connection));
      }
    }
    for (const auto& connection : all) ((*connection).*what)();
  };
  const auto wait_until_none = [this](double seconds) {
    std::unique_lock lock(core.mutex);
    return core.left.wait_for(lock, std::chrono::duration<double>(seconds),
                              [this] { return core.api.metrics().open_connections.load() == 0; });
  };
  asio::post(acceptor.get_executor(), [this] {
    error_code ignored;
    acceptor.close(ignored);
    retry.cancel();
  });
  on_all(&Connection::Drain);
  if (!wait_until_none(core.options.drain_seconds)) {
    on_all(&Connection::Abort);
    wait_until_none(1);
  }
  core.JoinWorkers();
  work.reset();
  io.stop();
  for (std::thread& thread : threads) thread.join();
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() { Stop(); }

Result<std::unique_ptr<Server>> Server::Start(ServerOptions options, ServedModel model) {
  PLIANT_RETURN_IF_ERROR(CheckOptions(options));
  RaiseFileLimit(options.max_connections);
  auto impl = std::make_unique<Impl>(options, std::move(model));
  PLIANT_RETURN_IF_ERROR(impl->Listen());
  impl->Accept();
  for (int i = 0; i < options.io_threads; ++i) {
    impl->threads.emplace_back([raw = impl.get()] { raw->Run(); });
  }
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

int Server::port() const { return impl_->port; }

void Server::SetReady(bool ready) { impl_->core.api.SetReady(ready); }

void Server::Stop() { impl_->Stop(); }

}  // namespace pliant
