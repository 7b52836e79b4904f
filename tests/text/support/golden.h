// What the comparisons with the reference template engine share.
#pragma once

#include <chrono>
#include <ctime>
#include <string>

namespace pliant {

/// The clock that the scripts in tests/data/text show to the reference engine.
inline std::chrono::system_clock::time_point GoldenTime() {
  std::tm local{};
  local.tm_year = 126, local.tm_mon = 2, local.tm_mday = 9;
  local.tm_hour = 14, local.tm_min = 5, local.tm_sec = 7;
  local.tm_isdst = -1;
  return std::chrono::system_clock::from_time_t(std::mktime(&local));
}

/// The message without the place that this engine puts before it.
inline std::string WithoutPlace(const std::string& message) {
  if (!message.starts_with("chat template, line ")) return message;
  return message.substr(message.find(": ") + 2);
}

}  // namespace pliant
