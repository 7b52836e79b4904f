// Room: kv. How the KV cache of a server is set up: bytes, policy, limits of precision, exact
// store, watermarks. Plain values, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/status.h"

namespace pliant {

/// Which rungs of the pressure ladder a server may use (docs/scheduler.md).
enum class KvPolicy {
  kFull,      ///< 16 bits only: rungs 1, 2 (whole cached blocks), 6 and 8 (preempt and recompute).
  kOffload,   ///< As kFull, and rung 7: whole requests go to the exact store and resume without
              ///< recomputing.
  kElastic,   ///< As kOffload, and rungs 2 (planes), 3 and 5: blocks give up planes.
  kPliant,    ///< All rungs; rung 4 for requests with a capacity.
  kBudget,    ///< As kFull, and requests have a fixed capacity; what they drop is gone.
  kGrowPage,  ///< As kFull, and requests have a capacity that grows; what they drop is gone.
};
Result<KvPolicy> ParseKvPolicy(std::string_view word);
std::string_view KvPolicyName(KvPolicy policy);
constexpr bool KeepsExactCopies(KvPolicy policy) {
  return policy == KvPolicy::kOffload || policy == KvPolicy::kElastic ||
         policy == KvPolicy::kPliant;
}

/// Where exact copies live. "none", "ram:4GiB" or "file:PATH:16GiB".
struct StoreSpec {
  enum class Kind { kNone, kRam, kFile } kind = Kind::kNone;
  std::string path;         // kFile
  std::uint64_t bytes = 0;  // hard budget
};
Result<StoreSpec> ParseStoreSpec(std::string_view text);

struct KvOptions {
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;  // plane pages on the device, one budget
  KvPolicy policy = KvPolicy::kPliant;
  int ceiling_bits = 16;  // 16, 12 or 8: lower planes are never stored
  int floor_bits = 8;  // the server's floor (16, 12, 8 or 4); a request may only ask for more bits,
                       // or for as few as this
  StoreSpec store;     // without a store nothing can be demoted
  bool prefix_cache = true;

  int sink_tokens = 64;          // never demoted
  int recent_tokens_base = 64;   // not demoted down to 8/8
  int recent_tokens_deep = 256;  // not demoted below 8/8
  double low_watermark =
      0.02;  // share of pages that demotion keeps free besides what the horizon predicts
  double high_watermark =
      0.10;                // restores only while more than this share (plus the horizon) stays free
  int horizon_steps = 16;  // how far ahead page needs are predicted
  int dwell_steps = 64;    // a block keeps its state this long before it may be restored
  std::uint64_t restore_bytes_per_second = std::uint64_t{2} << 30;
  std::uint64_t copy_bytes_in_flight = std::uint64_t{256}
                                       << 20;  // write-ahead and restore together
  bool always_demote =
      false;  // for tests and quality runs: act as if memory were always short, down to the floor
};

}  // namespace pliant
