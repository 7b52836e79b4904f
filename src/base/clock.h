// Room: base. Time as a dependency, so that the simulator and tests can own it. Any thread.
#pragma once

#include <chrono>
#include <cstdint>

namespace pliant {

/// Nanoseconds since an arbitrary start; never goes back.
using Nanoseconds = std::int64_t;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Nanoseconds Now() const = 0;
};

/// The machine's monotonic clock.
class SystemClock final : public Clock {
 public:
  Nanoseconds Now() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  static const SystemClock& Instance() {
    static const SystemClock clock;
    return clock;
  }
};

/// A clock that moves only when told to.
class ManualClock final : public Clock {
 public:
  Nanoseconds Now() const override { return now_; }
  void Advance(Nanoseconds by) { now_ += by; }

 private:
  Nanoseconds now_ = 0;
};

inline constexpr Nanoseconds kNanosPerSecond = 1'000'000'000;

}  // namespace pliant
