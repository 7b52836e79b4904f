// Room: kv. What a block and a sequence are inside this room. Plain data; KvManager alone changes
// it. Owned by the engine thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/retained_history.h"
#include "kv/block_state.h"
#include "kv/exact_store.h"
#include "kv/page_pool.h"

namespace pliant {

struct Sequence;

/// Identity of a prefix's content: equal ids mean equal tokens, salt and precision mark from the
/// start. 0: the empty prefix.
using ContentId = std::uint64_t;

/// Which list of idle cached blocks a block is in.
enum class IdleList : std::uint8_t {
  kNone,
  kCanGive,     // on the device, could give planes
  kCannotGive,  // on the device, as low as it may go or without an exact copy
  kStoreOnly,   // in the exact store only
  kCount
};

struct Block {
  BlockId id;
  std::uint32_t generation = 0;  // rises when the block is recycled
  bool live = false;

  // Place and precision.
  std::int32_t index = 0;  // position in its sequences: tokens 32 index .. 32 index + 31
  Level level = 0;         // with Residency::kStore: the level it comes back to
  Residency residency = Residency::kDevice;
  bool full = false;
  std::array<OwnedPage, kPlanes> k, v;
  std::uint64_t changed_step = 0;  // last change of level

  // Pins. Every holder has the block at blocks[index]; readers are those holders that are active.
  std::vector<Sequence*> holders;
  std::int32_t readers = 0;
  Level floor = kLevelCount - 1;  // highest precision that any holder insists on
  Copying copying = Copying::kNone;
  bool doomed = false;           // free it when its copy ends
  bool bring_abandoned = false;  // drop what the copy brings
  std::uint8_t arriving = 0;     // pages that a copy is bringing
  bool leaving = false;          // to be moved to the store as soon as no copy is under way
  bool leave_failed = false;

  // Exact copy: slots of the planes saved_from .. ceiling - 1 of K and V.
  std::uint8_t saved_from = kPlanes;
  bool copy_bad = false;  // a checksum did not match: what is in the store is worthless
  std::uint8_t save_failures = 0, bring_failures = 0;
  std::array<SlotId, kPlanes> k_slot, v_slot;

  // Prefix cache.
  bool published = false;
  Level mark = 0;  // lowest precision its context had while it was computed
  std::uint64_t key = 0;
  ContentId content = 0, parent = 0;
  std::array<std::int32_t, kBlockTokens> tokens{};
  std::string salt;  // of index 0 only; deeper blocks know it by their parent
  IdleList idle = IdleList::kNone;
  Block* idle_prev = nullptr;
  Block* idle_next = nullptr;

  // Scratch of the controller's draft.
  std::uint64_t draft = 0, draft_pin = 0;
  Level draft_level = 0;
  bool draft_evicted = false;

  /// Nobody who holds it, if anybody does, lets it take part in attention.
  bool Unwanted() const { return floor >= kSensorLevel; }
  int device_pages() const { return residency == Residency::kDevice ? PagesOf(level) : 0; }
  BlockView View() const {
    BlockView view;
    for (int p = 0; p < kPlanes; ++p) view.k[p] = k[p].id();
    for (int p = 0; p < kPlanes; ++p) view.v[p] = v[p].id();
    return view;
  }
};

/// A block of kept tokens (backend/retained_history.h): a sequence's own, without exact copy, since
/// every row of it is a copy.
struct KeptBlock {
  std::array<OwnedPage, kPlanes> k, v;
  BlockView View() const {
    BlockView view;
    for (int p = 0; p < kPlanes; ++p) view.k[p] = k[p].id();
    for (int p = 0; p < kPlanes; ++p) view.v[p] = v[p].id();
    return view;
  }
};

/// The block table of one request.
struct Sequence {
  RequestId request;
  Level floor = 0;  // its blocks may not be read below this level
  std::string salt;
  /// Null where a block was dropped for good.
  std::vector<Block*> blocks;
  std::vector<BlockView> views;  // views[i] is what attention sees of blocks[i], kept up to date
  /// Which views changed since KvManager::CopyViews gave out views_mark; more than
  /// kMostViewChanges: too many to list.
  std::vector<std::int32_t> view_changes;
  std::uint64_t views_mark = 0;
  /// Where true, blocks[i] takes no part in attention, but is held: plane 0 of K is watched.
  std::vector<bool> dropped;
  // With a capacity: what is retained, where the originals lie, and the kept blocks; while the
  // sequence is offloaded there are fewer of those than the history has.
  // A step in flight may still use it when the sequence has been released.
  std::shared_ptr<RetainedHistory> retained;
  std::vector<KeptBlock> kept;
  std::vector<BlockView> kept_views;
  Level kept_level = 0;
  std::uint8_t save_from = kPlanes;  // full blocks get an exact copy of the planes from here on
  std::uint64_t place_changes = 1;   // rises with every change of where a block's planes lie
  std::int64_t computed = 0;  // tokens whose K and V are in the blocks, steps in flight not counted
  bool open = false;
  bool active = true;           // false: offloaded; its blocks may leave the device
  std::size_t active_slot = 0;  // place in the manager's list

  // Sums over blocks, kept up to date.
  std::array<std::int32_t, kLevelCount> level_count{};  // on the device, not dropped
  std::int32_t absent = 0;                              // in the store only
  std::int32_t missing_pages = 0;                       // against the ceiling

  // Prefix chain up to the last published (or equal) block.
  std::uint64_t chain_key = 0;
  ContentId chain_content = 0;
  bool chain_broken = false;  // nothing more is published
  Level mark = 0;

  // Where the search for a block to demote to a level starts; every block before it is known not to
  // be a candidate.
  std::array<std::int32_t, kLevelCount> demote_from{};
  std::int32_t lowered_end = 0;  // every block from here on is at the ceiling

  // For the request's facts.
  std::int64_t demotions = 0, restores = 0;

  // Scratch of the controller's draft.
  std::uint64_t draft = 0;
  std::array<std::int32_t, kLevelCount> draft_from{};
  std::int32_t draft_missing = 0;

  static constexpr std::size_t kMostViewChanges = 16;
  void SetView(std::int32_t index, const BlockView& view) {
    views[index] = view;
    if (view_changes.size() <= kMostViewChanges) view_changes.push_back(index);
  }
  /// How low blocks[index] may be for this sequence.
  Level FloorOf(std::int32_t index) const { return dropped[index] ? kSensorLevel : floor; }
  /// What attention sees of a block that is held.
  BlockView ViewOf(const Block& block) const {
    BlockView view = block.View();
    if (dropped[block.index]) view = {.k = {view.k[0]}, .v = {}};
    return view;
  }
  /// Lowest precision among the blocks that take part and are on the device.
  Level WorstLevel() const {
    for (int level = kLevelCount - 1; level > 0; --level) {
      if (level_count[level] > 0) return static_cast<Level>(level);
    }
    return 0;
  }
  std::int32_t kept_missing() const {
    return retained == nullptr ? 0
                               : retained->kept_blocks() - static_cast<std::int32_t>(kept.size());
  }
  /// Every block is on the device at or above the floor.
  bool Ready() const {
    if (absent > 0 || kept_missing() > 0) return false;
    for (int level = floor + 1; level < kLevelCount; ++level) {
      if (level_count[level] > 0) return false;
    }
    return true;
  }
};

}  // namespace pliant
