#include "cli/progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

namespace pliant {

Progress::Progress(std::string label)
    : label_(std::move(label)), terminal_(isatty(STDERR_FILENO) != 0), start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() { Clear(); }

void Progress::Update(std::uint64_t done, std::uint64_t total, const std::string& detail) {
  if (!terminal_ || total == 0) return;
  const Time now = std::chrono::steady_clock::now();
  if (now - start_ < std::chrono::milliseconds(300)) return;
  if (drawn_ && now - last_ < std::chrono::milliseconds(100) && done != total) return;
  std::fprintf(stderr, "\r\033[K%s %3.0f %% %s", label_.c_str(),
               100.0 * static_cast<double>(done) / static_cast<double>(total), detail.c_str());
  std::fflush(stderr);
  drawn_ = true;
  last_ = now;
}

void Progress::Clear() {
  if (!drawn_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace pliant
