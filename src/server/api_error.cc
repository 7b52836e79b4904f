#include "server/api_error.h"

#include <array>

#include "server/json.h"

namespace pliant {
namespace {

constexpr std::string_view kClientFault = "invalid_request_error";
constexpr std::string_view kServerFault = "server_error";

// Indexed by StatusCode. 499 is never sent: there is nobody left to read it; it is what the metrics
// count.
constexpr std::array<HttpMapping, 12> kTable = {{
    {200, "", "", 0},                            // kOk
    {400, kClientFault, "", 0},                  // kInvalidArgument
    {404, kClientFault, "not_found", 0},         // kNotFound
    {400, kClientFault, "too_large", 0},         // kTooLarge
    {503, kServerFault, "out_of_memory", 5},     // kOutOfMemory
    {429, "rate_limit_error", "queue_full", 1},  // kResourceExhausted
    {503, kServerFault, "unavailable", 5},       // kUnavailable
    {499, kClientFault, "cancelled", 0},         // kCancelled
    {500, kServerFault, "data_loss", 0},         // kDataLoss
    {501, kClientFault, "unsupported", 0},       // kUnimplemented
    {500, kServerFault, "io_error", 0},          // kIo
    {500, kServerFault, "internal_error", 0},    // kInternal
}};

}  // namespace

ApiError BadField(std::string param, std::string message, std::string code) {
  ApiError error;
  error.message = std::move(message);
  error.param = std::move(param);
  error.code = std::move(code);
  return error;
}

const HttpMapping& MapStatus(StatusCode code) {
  const auto index = static_cast<std::size_t>(code);
  PLIANT_CHECK(index > 0 && index < kTable.size(), "a failure has a row in the table");
  return kTable[index];
}

ApiError FromStatus(const Status& status, std::string param) {
  const HttpMapping& mapping = MapStatus(status.code());
  ApiError error;
  error.http_status = mapping.http_status;
  error.message = status.message();
  error.type = mapping.type;
  error.code = mapping.code;
  error.param = std::move(param);
  error.retry_after_seconds = mapping.retry_after_seconds;
  return error;
}

std::string ErrorBody(const ApiError& error) {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? Json(nullptr) : Json(text);
  };
  Json inner;
  inner["message"] = error.message;
  inner["type"] = error.type;
  inner["param"] = text_or_null(error.param);
  inner["code"] = text_or_null(error.code);
  Json body;
  body["error"] = std::move(inner);
  return DumpJson(body);
}

std::string_view ReasonPhrase(int http_status) {
  switch (http_status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Payload Too Large";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    default:
      return "Unknown";
  }
}

}  // namespace pliant
