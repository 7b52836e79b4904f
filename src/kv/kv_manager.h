// Room: kv. The KV cache of one device: page pool, blocks and their states, sequences' block
// tables, prefix cache, exact store, and the copies between them. The scheduler and the controller
// decide; this carries out. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/status.h"
#include "kv/block.h"
#include "kv/copy_engine.h"
#include "kv/decision_log.h"
#include "kv/exact_store.h"
#include "kv/kv_options.h"
#include "kv/page_pool.h"
#include "kv/prefix_cache.h"

namespace pliant {

/// Gauges and counters of the cache.
struct KvStats {
  std::int64_t page_bytes = 0;
  // cached: held only by the prefix cache; copying: on their way in
  std::int64_t pages_total = 0, pages_free = 0, pages_fenced = 0, pages_cached = 0,
               pages_copying = 0, pages_withheld = 0;
  std::int64_t blocks = 0, blocks_cached = 0;  // cached: idle, held only by the prefix cache
  std::int64_t blocks_in_store = 0;            // with no page on the device
  std::int64_t blocks_by_state[5][5] = {};  // [planes of K][planes of V]; [0][0]: in the store only
  std::int64_t demotions = 0, restores = 0;  // blocks; a step down or up counts one
  std::int64_t restore_bytes = 0, write_ahead_bytes = 0;
  std::int64_t restore_nanoseconds = 0;  // from the decision to the last byte, summed over restores
  std::int64_t copies_failed = 0, checksum_failures = 0;
  std::int64_t store_bytes_total = 0, store_bytes_used = 0;
  std::int64_t cache_evictions = 0;
  std::int64_t pages_kept = 0;  // by kept blocks of requests with a capacity
};

/// Blocks of the prefix cache that a new sequence can start with.
struct PrefixMatch {
  std::vector<Block*> blocks;
  std::int64_t tokens() const { return static_cast<std::int64_t>(blocks.size()) * kBlockTokens; }
};

/// One block for GET /v1/kv.
struct BlockInfo {
  BlockId id;
  RequestId request;  // the first holder; invalid for idle cached blocks
  std::int32_t index = 0, holders = 0;
  PlaneCount planes;
  bool full = false, cached = false, exact_copy = false, copying = false;
};

class KvManager {
 public:
  /// Computes how many pages the budget holds and reserves them on the backend (AllocatePages is
  /// called here, once). InvalidArgument: options that contradict each other. OutOfMemory: the
  /// budget does not hold four blocks, or the backend or the exact store refuses. The backend and
  /// the clock must outlive it.
  static Result<std::unique_ptr<KvManager>> Create(Backend& backend, const KvGeometry& geometry,
                                                   const KvOptions& options, const Clock& clock,
                                                   PrefixHash hash = DefaultPrefixHash);
  /// Every sequence must have been released. Waits for copies under way.
  ~KvManager();
  KvManager(const KvManager&) = delete;
  KvManager& operator=(const KvManager&) = delete;

  const KvOptions& options() const { return options_; }
  const KvGeometry& geometry() const { return geometry_; }
  KvStats Stats() const;
  std::vector<BlockInfo> MemoryMap() const;
  const DecisionLog& log() const { return log_; }
  DecisionLog& log() { return log_; }
  const PagePool& pool() const { return pool_; }
  std::size_t page_bytes() const { return page_bytes_; }

  Level ceiling() const { return ceiling_; }
  int pages_per_block() const { return PagesOf(ceiling_); }  // of a block at the ceiling
  bool planes_bend() const {
    return bends_;
  }  // the policy lets blocks change precision, and there is a store
  bool can_offload() const { return can_offload_; }
  bool has_store() const { return store_ != nullptr; }
  /// Level of a request's floor; kLevelCount for bits that are no state. Never lower than the
  /// server's floor, nor above the ceiling.
  Level FloorLevel(int min_bits) const;
  /// Tokens that one request alone could hold, with everything else out of the way.
  std::int64_t MaxTokens(Level floor) const;

  // ---- sequences
  // ----------------------------------------------------------------------------------------------------------
  Sequence* Open(RequestId request, Level floor, std::string salt);
  /// Drops every block (published ones stay in the prefix cache) and the sequence. Allowed at any
  /// time.
  void Release(Sequence* sequence);

  /// Longest run of cached blocks that `tokens` starts with and that a floor allows; at least one
  /// token stays out. Changes nothing.
  PrefixMatch Match(Level floor, std::string_view salt, std::span<const std::int32_t> tokens) const;
  /// Gives an empty sequence the matched blocks.
  void Attach(Sequence& sequence, const PrefixMatch& match);
  /// Pages that must come to the device before a sequence holding these blocks is Ready.
  int PagesToReady(std::span<Block* const> blocks, Level floor) const;
  int PagesToReady(const Sequence& s) const;

  int PagesToExtend(const Sequence& sequence, std::int64_t rows) const {
    const std::int64_t blocks = (sequence.computed + rows + kBlockTokens - 1) / kBlockTokens;
    const std::int64_t more = blocks - static_cast<std::int64_t>(sequence.blocks.size());
    return more > 0 ? static_cast<int>(more) * pages_per_block() : 0;
  }
  /// Adds the blocks that `rows` more tokens need. The caller has checked that the pages are free.
  void Extend(Sequence& sequence, std::int64_t rows);
  /// `rows` more tokens have been computed, while the context stood at `context` or better;
  /// `tokens` are all of the sequence so far. Full blocks are published and queued for their exact
  /// copy.
  void Advance(Sequence& sequence, std::int64_t rows, std::span<const std::int32_t> tokens,
               Level context);

  /// Makes `to` the sequence's views, all of them, where it holds what they were when `mark` was
  /// set by this function; with any other mark (0) whatever it holds is overwritten. Sets `mark`.
  void CopyViews(Sequence& sequence, BlockView* to, std::uint64_t& mark);

  /// Brings missing planes to the device until the sequence is Ready. Call again after each Poll
  /// while it says kPending.
  enum class LoadState { kReady, kPending, kNoPages, kLost };
  LoadState Load(Sequence& sequence);

  /// Takes the sequence off the device: its blocks go to the store unless running sequences read
  /// them. Slots for all must be there: see SlotsToOffload. Call OffloadProgress after each Poll.
  void Offload(Sequence& sequence);
  enum class OffloadState { kDone, kPending, kFailed };
  OffloadState OffloadProgress(const Sequence& sequence) const;
  /// The sequence takes part again: its blocks are read from now on. Load must follow.
  void Reactivate(Sequence& sequence);
  int SlotsToOffload(const Sequence& sequence) const;
  std::int64_t StoreSlotsAvailable()
      const;  // free, or held by blocks that only the prefix cache knows
  std::int64_t idle_pages() const { return idle_pages_; }  // held only by the prefix cache
  /// Pages that will be free when copies and steps under way have ended.
  std::int64_t PagesComing() const {
    return static_cast<std::int64_t>(pool_.fenced()) + pages_leaving_ + pages_abandoned_;
  }

  // ---- histories with a capacity (kv/history.h decides, backend/retained_history.h chooses)
  /// An empty sequence gets one, for a model with so many query heads. Its kept blocks are at
  /// `kept_level`. With returns every full block gets a whole exact copy from now on.
  void Retain(Sequence& sequence, int heads, const RetentionOptions& options, Level kept_level);
  /// Takes note of the keys of full blocks that are new. False: one cannot be read
  /// (LoadState::kLost).
  bool NoteHistory(Sequence& sequence);
  enum class DropState { kDropped, kNoPages, kLost };
  /// The first whole block, noted, is dropped: into a kept block more, or into those there are. Its
  /// pages but plane 0 of K go as soon as its exact copy is whole, unless others use it; without
  /// returns all of them go. kNoPages (only with `add_kept`) and kLost: nothing has changed.
  DropState DropOldest(Sequence& sequence, bool add_kept);
  /// Pages on the device of a sequence with a history, shared ones included.
  std::int64_t PagesHeld(const Sequence& sequence) const;

  // ---- steps and copies
  // ---------------------------------------------------------------------------------------------------
  /// Takes the results of copies; starts queued write-aheads, unless StartSaves will.
  void Poll(bool start_saves = true);
  void StartSaves() {
    if (!saves_.empty()) StartQueuedSaves();
  }
  void BeginStep(std::uint64_t step);
  void EndStep(std::uint64_t step) {
    now_ = clock_.Now();
    pool_.EndStep(step);
  }
  std::uint64_t step() const { return step_; }
  bool CopiesUnderWay() const { return !copies_.Idle(); }
  /// Bytes of background restores that the rate allows now.
  double restore_allowance() const { return restore_allowance_; }
  /// May another background copy start now?
  bool CopiesHaveRoom() const { return copies_.HasRoom(); }
  /// Do state, dwell time, rate and copies under way allow a background restore to `level`?
  bool MayRestore(const Block& block, Level level) const;
  /// Starts one if so and if pages are free.
  bool StartRestore(Block& block, Level level);
  std::int64_t lowered_blocks() const {
    return lowered_blocks_;
  }  // held blocks on the device below the ceiling that take part in attention

  /// Keeps so many pages out of use from now on (memory lent to someone else); 0 gives them back.
  /// They are taken as they become free; the scheduler makes room for what is still lacking by
  /// rungs 2 to 5.
  void Withhold(std::uint32_t pages);
  void TakeWithheld();
  std::int64_t withheld_lacking() const {
    return static_cast<std::int64_t>(withhold_target_) -
           static_cast<std::int64_t>(withheld_.size());
  }

  // ---- what the controller decides
  // ----------------------------------------------------------------------------------------
  void DemoteNow(Block& block, Level level, Reason reason, Sequence* donor);
  /// Rung 2: an idle block leaves the device; it lives on in the store when all of it is there.
  void EvictIdle(Block& block);
  /// Is there a valid exact copy of all that `level` leaves out?
  bool MayDrop(const Block& block, Level level) const {
    return block.full && !block.copy_bad && block.saved_from <= FirstAbsentPlane(level);
  }
  const PrefixCache& prefix() const { return prefix_; }
  std::span<Sequence* const> active() const { return active_; }
  Level idle_floor() const { return idle_floor_; }  // how low idle cached blocks may go

  /// For tests: spoils whatever the exact store holds.
  void CorruptStoreForTest();
  /// Every invariant of the room, in O(everything); stops the process when one is broken.
  void Audit() const;

 private:
  KvManager(Backend& backend, const KvGeometry& geometry, const KvOptions& options,
            const Clock& clock, PrefixHash hash, std::uint32_t pages,
            std::unique_ptr<ExactStore> store);

  // kv_blocks.cc: blocks and their accounts
  Block& NewBlock(int index);
  void FreeBlock(Block& block);  // no holder, not idle; waits for a copy under way
  void Recycle(Block& block);
  /// Changes what the sums over blocks depend on.
  template <typename F>
  void Mutate(Block& block, F&& change) {
    Count(block, -1);
    change();
    Count(block, +1);
    NotePlaces(block);
  }
  /// Pages, slots of the store or holders of the block changed.
  static void NotePlaces(Block& block) {
    for (Sequence* holder : block.holders) ++holder->place_changes;
  }
  void Count(const Block& block, int sign);
  void AddHolder(Block& block, Sequence& sequence);
  void RemoveHolder(Block& block, Sequence& sequence);
  void UpdateFloor(Block& block);  // from its holders
  void DemoteIfUnwanted(Block& block);
  KeptBlock TakeKept(Level level);
  void GiveKept(Sequence& sequence);
  void EndHistory(Sequence& sequence);
  /// All kept blocks anew, when the originals are at hand.
  LoadState RefillKept(Sequence& sequence);
  bool IsLowered(const Block& block) const {
    return block.residency == Residency::kDevice && block.level > ceiling_ &&
           !block.holders.empty() && !block.Unwanted();
  }
  void NoReaderLeft(Block& block);
  void BecomeIdle(Block& block);
  IdleList IdleListFor(const Block& block) const;
  void DropPlanes(Block& block, Level level);
  void DropToStore(Block& block);
  void DropStoreCopy(Block& block);
  void Publish(Sequence& sequence, Block& block, std::span<const std::int32_t> tokens);
  BlockFacts FactsOf(const Block& block, bool copy_valid) const;
  void LogBlock(Reason reason, const Block& block, PlaneCount from, PlaneCount to, int pages,
                RequestId request);

  // kv_copies.cc: copies and what their ends mean
  bool StartSave(Block& block, int from, bool background);
  bool StartBring(Block& block, Level level, bool background);
  void Leave(Block& block);
  void QueueSave(Block& block, int from);
  void StartQueuedSaves();
  Level LevelToLoad(const Block& block, Level floor) const;
  bool MakeSlots(int count);
  void SaveEnded(CopyJob& job);
  void BringEnded(CopyJob& job);
  void AbandonBring(Block& block);
  void ReopenSearch(Block& block);

  Backend& backend_;
  const KvGeometry geometry_;
  const KvOptions options_;
  const Clock& clock_;
  const std::size_t page_bytes_;
  Level ceiling_ = 0, floor_ = 0, idle_floor_ = 0;
  std::int32_t sink_blocks_ = 0;
  bool bends_ = false, can_offload_ = false;

  PagePool pool_;
  std::unique_ptr<ExactStore> store_;
  CopyEngine copies_;
  PrefixCache prefix_;
  DecisionLog log_;
  std::deque<Block> blocks_;
  std::vector<Block*> free_blocks_;
  std::deque<Sequence> sequences_;
  std::vector<Sequence*> free_sequences_;
  std::vector<Sequence*> active_;

  std::uint32_t withhold_target_ = 0;
  std::vector<OwnedPage> withheld_;

  struct PendingSave {
    Block* block;
    std::uint32_t generation;
    std::uint8_t from;
  };
  std::deque<PendingSave> saves_;
  bool store_was_full_ = false;
  std::vector<CopyJob> ended_;  // scratch of Poll

  std::uint64_t step_ = 0;  // the step being planned
  Nanoseconds now_ = 0;     // of the last Poll or EndStep: decisions of one plan have one time
  std::uint64_t view_marks_ = 0;  // given out by CopyViews
  double restore_allowance_ = 0;  // bytes
  Nanoseconds restore_allowance_at_ = 0;

  // Sums over blocks.
  std::array<std::int64_t, kLevelCount> level_blocks_{};
  std::int64_t kept_pages_ = 0;
  std::int64_t store_blocks_ = 0, idle_pages_ = 0, pages_leaving_ = 0, pages_abandoned_ = 0,
               lowered_blocks_ = 0, live_blocks_ = 0;
  KvStats counters_;
};

}  // namespace pliant
