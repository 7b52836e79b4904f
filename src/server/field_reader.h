// Room: server. Reads typed, bounded members of a JSON object; remembers the first fault. One
// thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/json.h"
#include "text/tokenizer.h"

namespace pliant {

/// A member that is absent or null keeps its default. After a fault every getter returns nothing,
/// so that a parser reads straight down and asks for error() once.
class FieldReader {
 public:
  /// `prefix` stands before names in errors ("kv." for kv.min_bits). `object` must be an object and
  /// outlive the reader.
  explicit FieldReader(const Json* object, std::string prefix = "");

  bool failed() const { return error_.has_value(); }
  const std::optional<ApiError>& error() const { return error_; }
  void Fail(std::string_view name, const std::string& message, std::string code = "");
  void Fail(ApiError error);

  /// The member, or null when it is absent, null, or a fault was found before.
  const Json* Find(std::string_view name) const;

  std::optional<bool> Bool(std::string_view name);
  std::optional<std::int64_t> Int(std::string_view name, std::int64_t low, std::int64_t high);
  /// A finite number in [low, high].
  std::optional<double> Number(std::string_view name, double low, double high);
  std::optional<std::string> String(std::string_view name, std::size_t max_bytes);
  std::string Qualified(std::string_view name) const { return prefix_ + std::string(name); }

 private:
  const Json* object_;
  std::string prefix_;
  std::optional<ApiError> error_;
};

/// "a string", "null", "the number 3": what a value is, for messages.
std::string Describe(const Json& value);

/// One token id in [0, size); the message says what is wrong, without the field.
std::optional<std::string> ReadTokenId(const Json& value, std::int32_t vocab_size, TokenId* out);

}  // namespace pliant
