// Room: kv. The KV cache of one device: page pool, blocks and their states, sequences' block tables, prefix cache, exact store,
// and the copies between them. The scheduler decides; this carries out. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/status.h"
#include "kv/decision_log.h"
#include "kv/kv_options.h"

namespace pliant {

/// Gauges and counters of the cache.
struct KvStats {
  std::int64_t page_bytes = 0;
  std::int64_t pages_total = 0, pages_free = 0, pages_fenced = 0, pages_cached = 0;  // cached: held only by the prefix cache
  std::int64_t blocks = 0, blocks_cached = 0;       // cached: idle, held only by the prefix cache
  std::int64_t blocks_by_state[5][5] = {};          // [planes of K][planes of V]
  std::int64_t demotions = 0, restores = 0;         // blocks; a step down or up counts one
  std::int64_t restore_bytes = 0, write_ahead_bytes = 0;
  std::int64_t restore_nanoseconds = 0;             // from the decision to the last byte, summed over restores
  std::int64_t copies_failed = 0, checksum_failures = 0;
  std::int64_t store_bytes_total = 0, store_bytes_used = 0;
  std::int64_t cache_evictions = 0;
};

class KvManager {
 public:
  /// Computes how many pages the budget holds and reserves them on the backend (AllocatePages is called here, once). OutOfMemory or
  /// TooLarge when the budget does not hold a few blocks. The backend and the clock must outlive it.
  static Result<std::unique_ptr<KvManager>> Create(Backend& backend, const KvGeometry& geometry, const KvOptions& options,
                                                   const Clock& clock);
  ~KvManager();

  const KvOptions& options() const;
  const KvGeometry& geometry() const;
  KvStats Stats() const;
  const DecisionLog& log() const;

 private:
  KvManager();
};

}  // namespace pliant
