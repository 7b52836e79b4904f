// Room: base. Expected failures as values. Any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace pliant {

/// What kind of failure a Status carries. HTTP codes map from these in one table (server/).
enum class StatusCode {
  kOk = 0,
  kInvalidArgument,    ///< The caller's input is wrong (HTTP 400).
  kNotFound,           ///< No such file, model or key.
  kTooLarge,           ///< Over a stated limit (HTTP 413 or 400).
  kOutOfMemory,        ///< Memory or pages are not there; nothing was changed.
  kResourceExhausted,  ///< A bounded queue or store is full; try again later (HTTP 429).
  kUnavailable,        ///< Shutting down or not ready (HTTP 503).
  kCancelled,          ///< The client went away.
  kDataLoss,           ///< A file is truncated, or a checksum does not match.
  kUnimplemented,      ///< Valid, but not supported by this build or model.
  kIo,                 ///< The operating system refused a read, write or socket call.
  kInternal,           ///< A bug, reported instead of hidden.
};

/// Stable lower-case word for a code ("out_of_memory").
std::string_view StatusCodeName(StatusCode code);

/// Success, or a code with one line that says what, where and which limit.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return {}; }
  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  /// "code_name: message", or "ok".
  std::string ToString() const;
  /// The same failure with "context: " in front of its message; ok stays ok.
  Status WithContext(std::string_view context) const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string m) {
  return {StatusCode::kInvalidArgument, std::move(m)};
}
inline Status NotFound(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
inline Status TooLarge(std::string m) { return {StatusCode::kTooLarge, std::move(m)}; }
inline Status OutOfMemory(std::string m) { return {StatusCode::kOutOfMemory, std::move(m)}; }
inline Status ResourceExhausted(std::string m) {
  return {StatusCode::kResourceExhausted, std::move(m)};
}
inline Status Unavailable(std::string m) { return {StatusCode::kUnavailable, std::move(m)}; }
inline Status Cancelled(std::string m) { return {StatusCode::kCancelled, std::move(m)}; }
inline Status DataLoss(std::string m) { return {StatusCode::kDataLoss, std::move(m)}; }
inline Status Unimplemented(std::string m) { return {StatusCode::kUnimplemented, std::move(m)}; }
inline Status IoError(std::string m) { return {StatusCode::kIo, std::move(m)}; }
inline Status Internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

/// A value or the Status that says why there is none. Reading the value of a failure stops the process.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}            // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {     // NOLINT(google-explicit-constructor)
    PLIANT_CHECK(!status_.ok(), "a Result built from a Status needs a failure");
  }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & {
    PLIANT_CHECK(ok(), status_.message());
    return *value_;
  }
  const T& value() const& {
    PLIANT_CHECK(ok(), status_.message());
    return *value_;
  }
  T&& value() && {
    PLIANT_CHECK(ok(), status_.message());
    return *std::move(value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace pliant

#define PLIANT_CONCAT_INNER(a, b) a##b
#define PLIANT_CONCAT(a, b) PLIANT_CONCAT_INNER(a, b)

/// Returns the Status of `expr` from the enclosing function when it is a failure.
#define PLIANT_RETURN_IF_ERROR(expr)                       \
  do {                                                     \
    ::pliant::Status pliant_status_ = (expr);              \
    if (!pliant_status_.ok()) return pliant_status_;       \
  } while (false)

/// Evaluates a Result; on failure returns its Status, else assigns its value to `lhs` (a declaration or a variable).
#define PLIANT_ASSIGN_OR_RETURN(lhs, expr) \
  PLIANT_ASSIGN_OR_RETURN_IMPL(PLIANT_CONCAT(pliant_result_, __LINE__), lhs, expr)
#define PLIANT_ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                                 \
  if (!result.ok()) return result.status();             \
  lhs = std::move(result).value()
