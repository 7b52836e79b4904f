// Room: kv. Copies of block planes between device pages and the exact store, several stages each,
// driven by polling. It moves bytes and knows nothing of states: KvManager decides what to copy and
// what the end of a copy means. Owned by the engine thread.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "kv/block.h"
#include "kv/exact_store.h"

namespace pliant {

/// Some planes of one block on their way out (save) or in (bring).
struct CopyJob {
  enum class Kind : std::uint8_t { kSave, kBring };
  enum class End : std::uint8_t { kRunning, kDone, kFailed, kCorrupt };

  struct Item {
    bool is_v = false;
    std::uint8_t plane = 0;
    SlotId slot;
    PageId page;         // the block's own (save)
    OwnedPage arriving;  // where the bytes go (bring); the job owns it until the block does
  };

  Kind kind = Kind::kSave;
  bool background = true;  // subject to the limit of bytes in flight
  Block* block = nullptr;
  std::uint8_t save_from = 0;  // save: saved_from afterwards
  Level to_level = 0;          // bring: level afterwards
  std::vector<Item> items;
  Nanoseconds started = 0;
  End end = End::kRunning;

 private:
  friend class CopyEngine;
  enum class Stage : std::uint8_t { kQueued, kFetching, kCopying, kStoring };
  Stage stage = Stage::kQueued;
  CopyTicket ticket;
};

class CopyEngine {
 public:
  CopyEngine(Backend& backend, ExactStore* store, std::uint64_t bytes_in_flight)
      : backend_(backend), store_(store), limit_(bytes_in_flight) {}
  ~CopyEngine();

  void Submit(CopyJob job);
  /// Moves every job on as far as it goes and hands over those that ended, in the order they ended.
  void Poll(std::vector<CopyJob>& ended);
  /// Waits until no job is left; what they brought is handed over. For shutdown.
  void Finish(std::vector<CopyJob>& ended);

  bool Idle() const { return urgent_.empty() && background_.empty() && active_.empty(); }
  /// May another background copy start now?
  bool HasRoom() const { return bytes_queued_ < limit_; }
  std::size_t jobs() const { return urgent_.size() + background_.size() + active_.size(); }
  /// Pages that running brings own.
  std::int64_t arriving_pages() const { return arriving_pages_; }
  template <typename F>
  void ForEachJob(F&& fn) const {
    for (const auto* queue : {&urgent_, &background_}) {
      for (const CopyJob& job : *queue) fn(job);
    }
    for (const CopyJob& job : active_) fn(job);
  }

 private:
  bool Start(CopyJob& job);    // false: no staging buffers now
  void Advance(CopyJob& job);  // until it waits or ends
  void StartTransfer(CopyJob& job);
  IoState PollStore(const CopyJob& job);
  void UnmapAll(const CopyJob& job);

  Backend& backend_;
  ExactStore* store_;
  std::uint64_t limit_;
  std::deque<CopyJob> urgent_, background_;
  std::vector<CopyJob> active_;
  std::vector<PageCopy> scratch_;
  std::uint64_t bytes_queued_ = 0;  // of background jobs, queued and active
  std::int64_t arriving_pages_ = 0;
};

}  // namespace pliant
