// Room: server. What all connections of one server share: limits, counts, the API, the worker
// threads. Any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/api.h"
#include "server/asio.h"

namespace pliant {

class Connection;

struct ServerCore {
  ServerCore(const ServerOptions& server_options, ServedModel model)
      : options(server_options),
        api(server_options, std::move(model)),
        workers(static_cast<std::size_t>(server_options.worker_threads)) {}

  /// Large bodies are worked on one at a time, by a thread of their own: a few that take seconds to
  /// tokenise hold nobody else up, and only one of them takes memory for it.
  static constexpr std::size_t kLargeBodyBytes = 256u << 10;
  boost::asio::thread_pool& WorkersFor(std::size_t body_bytes) {
    return body_bytes > kLargeBodyBytes ? large_worker : workers;
  }
  /// Waits for what they are at. Nothing may be given to them any more.
  void JoinWorkers() {
    workers.join();
    large_worker.join();
  }

  const ServerOptions options;
  Api api;
  std::atomic<bool> draining{false};
  boost::asio::thread_pool workers;
  boost::asio::thread_pool large_worker{1};

  std::mutex mutex;  // of all below
  std::condition_variable left;
  std::map<Connection*, std::weak_ptr<Connection>> connections;
  std::unordered_map<std::string, int> by_peer;
};

/// The right to be a connection: counted in total and by peer, given back when destroyed.
class ConnectionPermit {
 public:
  /// Takes a place; what() says which limit is in the way when granted() is false. A refused permit
  /// counts nothing.
  ConnectionPermit(ServerCore* core, std::string peer) : core_(core), peer_(std::move(peer)) {
    const std::lock_guard lock(core_->mutex);
    const auto total = core_->api.metrics().open_connections.load();
    if (total >= core_->options.max_connections) {
      what_ = "the server has " + std::to_string(total) + " connections, its limit";
    } else if (int& mine = core_->by_peer[peer_]; mine >= core_->options.max_connections_per_peer) {
      what_ = "your address has " + std::to_string(mine) + " connections, the limit for one";
    } else {
      granted_ = true;
      ++mine;
      ++core_->api.metrics().open_connections;
    }
  }
  ~ConnectionPermit() {
    if (!granted_) return;
    const std::lock_guard lock(core_->mutex);
    --core_->api.metrics().open_connections;
    if (--core_->by_peer[peer_] == 0) core_->by_peer.erase(peer_);
    core_->left.notify_all();
  }
  ConnectionPermit(const ConnectionPermit&) = delete;
  ConnectionPermit& operator=(const ConnectionPermit&) = delete;

  bool granted() const { return granted_; }
  const std::string& what() const { return what_; }

 private:
  ServerCore* core_;
  std::string peer_;
  std::string what_;
  bool granted_ = false;
};

/// The right to hold bytes of request bodies; given back when destroyed. Movable.
class BodyPermit {
 public:
  explicit BodyPermit(ServerCore* core = nullptr) : core_(core) {}
  ~BodyPermit() { Release(); }
  BodyPermit(BodyPermit&& other) noexcept
      : core_(other.core_), bytes_(std::exchange(other.bytes_, 0)) {}
  BodyPermit& operator=(BodyPermit&& other) noexcept {
    Release();
    core_ = other.core_;
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  /// Raises what is held to `bytes`; false, changing nothing, when all bodies together would pass
  /// the limit.
  bool Reserve(std::size_t bytes) {
    const auto wanted = static_cast<std::int64_t>(bytes);
    if (wanted <= bytes_) return true;
    auto& held = core_->api.metrics().body_bytes_held;
    const std::int64_t more = wanted - bytes_;
    if (held.fetch_add(more) + more > static_cast<std::int64_t>(core_->options.max_bodies_bytes)) {
      held.fetch_sub(more);
      return false;
    }
    bytes_ = wanted;
    return true;
  }
  void Release() {
    if (bytes_ > 0) core_->api.metrics().body_bytes_held.fetch_sub(bytes_);
    bytes_ = 0;
  }

 private:
  ServerCore* core_;
  std::int64_t bytes_ = 0;
};

}  // namespace pliant
