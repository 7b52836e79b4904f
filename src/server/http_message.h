// Room: server. Requests and answers as values, between the sockets and the API. Any thread.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/api_error.h"

namespace pliant {

struct HttpRequestHead {
  std::string method;         // "GET"
  std::string path;           // percent-decoded, without the query
  std::string authorization;  // header value
  std::string content_encoding;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>>
      headers;  // besides Content-Type, Content-Length, Connection
};

/// An error answer with its headers.
inline HttpResponse ErrorResponse(const ApiError& error) {
  HttpResponse out;
  out.status = error.http_status;
  out.body = ErrorBody(error);
  if (error.retry_after_seconds > 0) {
    out.headers.emplace_back("Retry-After", std::to_string(error.retry_after_seconds));
  }
  return out;
}

}  // namespace pliant
