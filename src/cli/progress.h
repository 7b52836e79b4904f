// Room: cli. One line of progress on a terminal; nothing at all where standard error is not one. Main thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace pliant {

class Progress {
 public:
  /// Shows nothing before `label` has been running for 300 ms, so that quick work stays quiet.
  explicit Progress(std::string label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Draws "label 45 % detail" at most ten times a second.
  void Update(std::uint64_t done, std::uint64_t total, const std::string& detail = "");
  /// Removes the line.
  void Clear();

 private:
  using Time = std::chrono::steady_clock::time_point;
  std::string label_;
  bool terminal_;
  bool drawn_ = false;
  Time start_, last_;
};

}  // namespace pliant
