// Room: server. What /metrics says: the engine's counters and gauges as they are, and what the
// server counts itself. Any thread.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>

#include "engine/engine.h"

namespace pliant {

class ServerMetrics {
 public:
  explicit ServerMetrics(std::string model_name);
  ~ServerMetrics();
  ServerMetrics(const ServerMetrics&) = delete;
  ServerMetrics& operator=(const ServerMetrics&) = delete;

  /// One HTTP answer; `route` is one of a fixed set of words. Code 499: the client left before its
  /// answer was complete.
  void CountResponse(std::string_view route, int code, double seconds);
  void ObserveTimeToFirstToken(double seconds);
  void ObserveInterTokenLatency(double seconds);

  // Gauges and counters of the connections.
  std::atomic<std::int64_t> open_connections{0};
  std::atomic<std::int64_t> open_requests{0};  // POST requests that are being read or worked on
  std::atomic<std::int64_t> open_streams{0};
  std::atomic<std::int64_t> body_bytes_held{0};
  std::atomic<std::int64_t> refused_connections{0}, slow_readers{0}, timeouts{0};

  /// Prometheus' text format.
  std::string Text(const EngineStats& engine, bool ready) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pliant
