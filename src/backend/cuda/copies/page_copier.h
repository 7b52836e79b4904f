// Room: backend/cuda. Copies pages between the device and host buffers in the background, in the
// order given, on a stream of its own. Pinned host memory is copied directly, any other through
// pinned staging that is filled while the previous part is on the link.
//
// Threads: the owner thread calls everything; the copies are driven by one thread of its own, so
// that a step never waits for one. A job's page and host bytes belong to the copier until its
// ticket is done.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device_memory.h"

namespace pliant::cuda {

class PageCopier {
 public:
  enum class Direction { kOut, kIn };
  struct Piece {
    std::uint8_t* device = nullptr;
    std::byte* host = nullptr;
  };

  /// Takes the pinned staging.
  static Result<std::unique_ptr<PageCopier>> Make(std::size_t page_bytes);
  /// Finishes what is queued.
  ~PageCopier();

  /// The copies begin after the work that `after` holds now; null: nothing is under way.
  CopyTicket Start(Direction direction, std::vector<Piece> pieces, const Stream* after);
  /// A ticket that has failed from the start.
  CopyTicket Refuse();
  CopyState Poll(CopyTicket ticket);
  CopyState Wait(CopyTicket ticket);

 private:
  struct Job {
    std::uint64_t ticket = 0;
    Direction direction = Direction::kOut;
    std::vector<Piece> pieces;
    std::optional<Event> after;
  };
  PageCopier(std::size_t page_bytes, PinnedArray<std::byte> staging);
  void Loop(int device);
  void Run(const Job& job);
  CopyState StateLocked(std::uint64_t ticket) const;

  const std::size_t page_bytes_;
  PinnedArray<std::byte> staging_;  // two halves
  std::size_t half_pages_;
  Stream stream_;
  Event half_done_[2];

  std::mutex mutex_;
  std::condition_variable work_, finished_;
  std::deque<Job> jobs_;
  std::uint64_t next_ticket_ = 0, done_below_ = 0;  // every started ticket below has ended
  std::set<std::uint64_t> refused_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace pliant::cuda
