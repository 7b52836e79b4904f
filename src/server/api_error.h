// Room: server. Failures as OpenAI clients expect them, and the one table from StatusCode to HTTP.
// Any thread.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace pliant {

/// One error answer: {"error": {"message", "type", "param", "code"}} with an HTTP status.
struct ApiError {
  int http_status = 400;
  std::string message;
  std::string type = "invalid_request_error";
  std::string param;            // the field at fault; empty: null
  std::string code;             // a stable word; empty: null
  int retry_after_seconds = 0;  // 0: no Retry-After header
};

/// 400 for a field.
ApiError BadField(std::string param, std::string message, std::string code = "");

/// How a failure of the layers below reaches the client.
struct HttpMapping {
  int http_status;
  std::string_view type;
  std::string_view code;
  int retry_after_seconds;
};

/// The table. kOk must not be asked for.
const HttpMapping& MapStatus(StatusCode code);

/// The table applied; `param` names the field when one is known.
ApiError FromStatus(const Status& status, std::string param = "");

/// The body of an error answer.
std::string ErrorBody(const ApiError& error);

/// The reason phrase of an HTTP status this server sends.
std::string_view ReasonPhrase(int http_status);

}  // namespace pliant
