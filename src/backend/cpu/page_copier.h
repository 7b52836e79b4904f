// Room: backend. Copies pages between the arena and host buffers in the background, in the order
// given.
//
// Threads: the owner thread calls everything; the copies run on one thread of its own, started with
// the first copy. A job's page and host bytes belong to the copier until its ticket is done: the
// caller frees or rewrites neither before (backend.h).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "backend/backend.h"

namespace pliant {

class PageCopier {
 public:
  enum class Direction { kOut, kIn };

  PageCopier() = default;
  /// Finishes what is queued.
  ~PageCopier();
  PageCopier(const PageCopier&) = delete;
  PageCopier& operator=(const PageCopier&) = delete;

  /// One copy: `bytes` between `page` (arena) and `host`.
  struct Piece {
    std::byte* page = nullptr;
    std::byte* host = nullptr;
  };
  CopyTicket Start(Direction direction, std::vector<Piece> pieces, std::size_t bytes);
  /// A ticket that has failed from the start.
  CopyTicket Refuse();

  CopyState Poll(CopyTicket ticket);
  CopyState Wait(CopyTicket ticket);

 private:
  struct Job {
    std::uint64_t ticket = 0;
    Direction direction = Direction::kOut;
    std::size_t bytes = 0;
    std::vector<Piece> pieces;
  };
  void Loop();
  CopyState StateLocked(std::uint64_t ticket) const;

  std::mutex mutex_;
  std::condition_variable work_;      // a job was queued, or stop
  std::condition_variable finished_;  // a job ended
  std::deque<Job> jobs_;
  std::uint64_t next_ticket_ = 0;
  std::uint64_t done_below_ = 0;  // every started ticket below it has ended
  std::set<std::uint64_t> refused_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace pliant
