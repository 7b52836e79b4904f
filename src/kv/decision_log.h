// Room: kv. Every decision of scheduler and controller with its reason code, in a ring buffer that
// replay, simulator and the web page read, and counters that never forget. Owned by the engine
// thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"

namespace pliant {

/// Why something was done. Names are stable: they appear in metrics and logs.
enum class Reason : std::uint8_t {
  kAdmit,              // from the queue into the batch
  kAdmitCached,        // the same, with blocks from the prefix cache
  kCachePlanes,        // rung 2: an idle cached block gave its low planes
  kCacheEvict,         // rung 2: an idle cached block was dropped whole
  kCacheToStore,       // rung 2: an idle cached block lives on in the exact store only
  kDemoteBase,         // rung 3
  kDrop,               // rung 4: a block of a request's history was dropped, and can come back
  kDemoteSensor,       // its pages but plane 0 of K go
  kForget,             // as kDrop, for good
  kGrow,               // a request's capacity grew
  kDemoteDeep,         // rung 5
  kHoldAdmission,      // rung 6: the head of the queue waits for pages
  kOffload,            // rung 7: a request leaves the device whole
  kPreempt,            // rung 8: a request drops its blocks and will recompute
  kPreemptNoProgress,  // rung 8, because nothing else could run at all
  kResume,             // an offloaded or preempted request runs again
  kRestore,            // missing planes come back
  kRestoreFailed,      // the copy failed or its checksum did not match; the block stays as it was
  kWriteAheadFailed,   // the copy failed; the block stays undemotable
  kStoreFull,          // a block stays undemotable because the store is full
  kLostBlock,          // an offloaded block could not be read back: its request recomputes
  kFinish,
  kCancel,
  kFail,  // a request ended with an error
  kCount,
};
std::string_view ReasonName(Reason reason);

struct Decision {
  std::uint64_t step = 0;  // the step being planned
  Nanoseconds time = 0;
  Reason reason = Reason::kAdmit;
  RequestId request;                                        // invalid for cached blocks
  BlockId block;                                            // invalid for whole requests
  std::uint8_t from_k = 0, from_v = 0, to_k = 0, to_v = 0;  // planes, for block decisions
  std::int32_t pages = 0;  // pages freed (positive) or taken (negative)
};

class DecisionLog {
 public:
  explicit DecisionLog(std::size_t capacity = 8192) : ring_(capacity) {}
  void Add(const Decision& decision);
  std::uint64_t Count(Reason reason) const { return counts_[static_cast<std::size_t>(reason)]; }
  /// Decisions ever added; the sequence number of the next one.
  std::uint64_t total() const { return total_; }
  /// Decisions with sequence number >= from that are still held, oldest first.
  std::vector<Decision> Since(std::uint64_t from) const;

 private:
  std::vector<Decision> ring_;
  std::uint64_t total_ = 0;
  std::array<std::uint64_t, static_cast<std::size_t>(Reason::kCount)> counts_{};
};

}  // namespace pliant
