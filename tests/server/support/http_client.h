// A plain blocking HTTP client on POSIX sockets, for tests: it can also misbehave (send pieces,
// reset, half-close, not read).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pliant::testing {

struct ClientResponse {
  int status = 0;                              // 0: no whole answer came
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // chunks joined
};

class HttpClient {
 public:
  /// Connects to 127.0.0.1:`port`. `receive_buffer` > 0 shrinks the socket's buffer, for clients
  /// that do not read.
  explicit HttpClient(int port, int receive_buffer = 0);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;
  HttpClient(HttpClient&& other) noexcept;
  HttpClient& operator=(HttpClient&& other) noexcept;

  bool connected() const { return fd_ >= 0; }
  /// False when the server has closed.
  bool Send(std::string_view data);
  void SendRequest(std::string_view method, std::string_view path, std::string_view body = "",
                   std::string_view more_headers = "");
  /// Reads one whole answer.
  ClientResponse Receive(std::string_view method = "GET");
  ClientResponse Get(std::string_view path);
  ClientResponse Post(std::string_view path, std::string_view body);

  /// For streams: the next server-sent event's data after SendRequest; nothing at the end of the
  /// stream.
  std::optional<std::string> NextEvent();
  /// Status of the stream, once NextEvent was called.
  int stream_status() const { return stream_status_; }

  /// Waits for the server's end: true when it closes or resets within `seconds`. Data is thrown
  /// away.
  bool WaitClosed(double seconds);
  void HalfClose();
  void Reset();  // closes with a reset
  void Close();

 private:
  bool Fill();  // reads more into buffer_
  bool ReadHead(ClientResponse* out);
  std::optional<std::string> ReadChunk();

  int fd_ = -1;
  std::string buffer_;
  std::string events_;
  int stream_status_ = 0;
  bool stream_ended_ = false;
};

/// All data of a stream, "[DONE]" included.
std::vector<std::string> ReadStream(HttpClient* client);

}  // namespace pliant::testing
