#include "cli/http_get.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace pliant {
namespace {

constexpr std::size_t kMaxAnswer = 64u << 20;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

Result<std::string> HttpGet(const std::string& host, int port, const std::string& path, const std::string& api_key) {
  const std::string place = host + ":" + std::to_string(port);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0 || found == nullptr) {
    return NotFound(host + " is no address");
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  const Socket socket(::socket(found->ai_family, found->ai_socktype, found->ai_protocol));
  const timeval timeout{.tv_sec = 10, .tv_usec = 0};
  setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  setsockopt(socket.fd(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  if (socket.fd() < 0 || connect(socket.fd(), found->ai_addr, found->ai_addrlen) != 0) {
    return Unavailable("no server answers at " + place + ": " + std::strerror(errno));
  }
  std::string request = "GET " + path + " HTTP/1.1\r\nHost: " + place + "\r\nConnection: close\r\n";
  if (!api_key.empty()) request += "Authorization: Bearer " + api_key + "\r\n";
  request += "\r\n";
  for (std::size_t sent = 0; sent < request.size();) {
    const ssize_t n = send(socket.fd(), request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return IoError("sending to " + place + ": " + std::strerror(errno));
    sent += static_cast<std::size_t>(n);
  }
  std::string answer;
  char buffer[16384];
  for (ssize_t n; (n = recv(socket.fd(), buffer, sizeof(buffer), 0)) != 0;) {
    if (n < 0) return IoError("reading from " + place + ": " + std::strerror(errno));
    answer.append(buffer, static_cast<std::size_t>(n));
    if (answer.size() > kMaxAnswer) return TooLarge(place + " answers with more than 64 MiB");
  }
  const std::size_t body = answer.find("\r\n\r\n");
  if (body == std::string::npos || !answer.starts_with("HTTP/1.")) return DataLoss(place + " does not speak HTTP");
  if (answer.compare(8, 4, " 200") != 0) {
    return Unavailable(place + path + " answers" + answer.substr(8, answer.find("\r\n") - 8));
  }
  return answer.substr(body + 4);
}

}  // namespace pliant
