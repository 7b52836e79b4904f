#include "server/support/http_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace pliant::testing {
namespace {
constexpr int kReceiveTimeoutSeconds = 60;  // a test that hangs fails
}

HttpClient::HttpClient(int port, int receive_buffer) {
  fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (receive_buffer > 0) {
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
  }
  const timeval timeout{kReceiveTimeoutSeconds, 0};
  ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  const int on = 1;
  ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) Close();
}

HttpClient::~HttpClient() { Close(); }

HttpClient::HttpClient(HttpClient&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      buffer_(std::move(other.buffer_)),
      events_(std::move(other.events_)),
      stream_status_(other.stream_status_),
      stream_ended_(other.stream_ended_) {}

HttpClient& HttpClient::operator=(HttpClient&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(buffer_, other.buffer_);
  std::swap(events_, other.events_);
  std::swap(stream_status_, other.stream_status_);
  std::swap(stream_ended_, other.stream_ended_);
  return *this;
}

void HttpClient::Close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void HttpClient::Reset() {
  const linger now{1, 0};
  ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  Close();
}

void HttpClient::HalfClose() { ::shutdown(fd_, SHUT_WR); }

bool HttpClient::Send(std::string_view data) {
  while (!data.empty()) {
    const ssize_t sent = ::send(fd_, data.data(), data.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

void HttpClient::SendRequest(std::string_view method, std::string_view path, std::string_view body,
                             std::string_view more_headers) {
  std::string text;
  text.append(method)
      .append(" ")
      .append(path)
      .append(" HTTP/1.1\r\nHost: test\r\n")
      .append(more_headers);
  if (method == "POST") text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
  text.append("\r\n").append(body);
  Send(text);
}

bool HttpClient::Fill() {
  char bytes[16384];
  const ssize_t got = fd_ < 0 ? -1 : ::recv(fd_, bytes, sizeof bytes, 0);
  if (got <= 0) return false;
  buffer_.append(bytes, static_cast<std::size_t>(got));
  return true;
}

bool HttpClient::ReadHead(ClientResponse* out) {
  std::size_t end;
  while ((end = buffer_.find("\r\n\r\n")) == buffer_.npos) {
    if (!Fill()) return false;
  }
  const std::string head = buffer_.substr(0, end);
  buffer_.erase(0, end + 4);
  out->status = std::stoi(head.substr(9, 3));
  for (std::size_t at = head.find("\r\n"); at != head.npos;) {
    const std::size_t next = head.find("\r\n", at + 2);
    const std::string line = head.substr(at + 2, next == head.npos ? next : next - at - 2);
    const std::size_t colon = line.find(": ");
    if (colon != line.npos) {
      std::string name = line.substr(0, colon);
      std::transform(name.begin(), name.end(), name.begin(), ::tolower);
      out->headers[name] = line.substr(colon + 2);
    }
    at = next;
  }
  return true;
}

/// The next chunk of a chunked body; empty at its end; nothing when the connection broke.
std::optional<std::string> HttpClient::ReadChunk() {
  std::size_t line;
  while ((line = buffer_.find("\r\n")) == buffer_.npos) {
    if (!Fill()) return std::nullopt;
  }
  const std::size_t size = std::stoul(buffer_.substr(0, line), nullptr, 16);
  while (buffer_.size() < line + 2 + size + 2) {
    if (!Fill()) return std::nullopt;
  }
  std::string chunk = buffer_.substr(line + 2, size);
  buffer_.erase(0, line + 2 + size + 2);
  return chunk;
}

ClientResponse HttpClient::Receive(std::string_view method) {
  ClientResponse out;
  do {
    out = {};
    if (!ReadHead(&out)) return {};
  } while (out.status == 100);
  if (method == "HEAD" || out.status == 204) return out;
  if (out.headers.count("transfer-encoding") != 0) {
    for (;;) {
      const std::optional<std::string> chunk = ReadChunk();
      if (!chunk) return {};
      if (chunk->empty()) return out;
      out.body += *chunk;
    }
  }
  if (out.headers.count("content-length") == 0) {
    while (Fill()) {
    }
    out.body = std::exchange(buffer_, {});
    return out;
  }
  const std::size_t length = std::stoul(out.headers["content-length"]);
  while (buffer_.size() < length) {
    if (!Fill()) return {};
  }
  out.body = buffer_.substr(0, length);
  buffer_.erase(0, length);
  return out;
}

ClientResponse HttpClient::Get(std::string_view path) {
  SendRequest("GET", path);
  return Receive();
}

ClientResponse HttpClient::Post(std::string_view path, std::string_view body) {
  SendRequest("POST", path, body);
  return Receive();
}

std::optional<std::string> HttpClient::NextEvent() {
  if (stream_status_ == 0) {
    ClientResponse head;
    if (!ReadHead(&head)) return std::nullopt;
    stream_status_ = head.status;
    stream_ended_ = head.headers.count("transfer-encoding") == 0;  // an error, not a stream
  }
  std::size_t end;
  while ((end = events_.find("\n\n")) == events_.npos) {
    if (stream_ended_) return std::nullopt;
    const std::optional<std::string> chunk = ReadChunk();
    if (!chunk || chunk->empty()) {
      stream_ended_ = true;
      continue;
    }
    events_ += *chunk;
  }
  std::string event = events_.substr(0, end);
  events_.erase(0, end + 2);
  return event.starts_with("data: ") ? event.substr(6) : event;
}

bool HttpClient::WaitClosed(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd poll_fd{fd_, POLLIN, 0};
    if (::poll(&poll_fd, 1, static_cast<int>(left.count())) <= 0) return false;
    char bytes[16384];
    if (::recv(fd_, bytes, sizeof bytes, 0) <= 0) return true;
  }
}

std::vector<std::string> ReadStream(HttpClient* client) {
  std::vector<std::string> out;
  while (std::optional<std::string> event = client->NextEvent()) out.push_back(std::move(*event));
  return out;
}

}  // namespace pliant::testing
