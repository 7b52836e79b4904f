// Room: kv. The states a block can be in and the legal ways between them. Three axes that are kept
// apart: residency (where the block lives), precision (its level: how many planes of K and V are on
// the device) and pins (sequences that read it, copies under way). Pure values, any thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "backend/plane_code.h"

namespace pliant {

/// Leading planes of K and of V that are resident.
struct PlaneCount {
  std::uint8_t k = 0, v = 0;
  constexpr int pages() const { return k + v; }
  friend constexpr bool operator==(PlaneCount, PlaneCount) = default;
};

/// Index into kLevels; larger is lower precision.
using Level = std::uint8_t;
inline constexpr int kLevelCount = 7;
/// The steps of the precision axis, each with fewer pages than the one before: 16/16 (TARGET),
/// 12/12, 12/8, 8/8 (BASE), 8/4, 4/4 (DEEP), 4/0 (SENSOR).
inline constexpr std::array<PlaneCount, kLevelCount> kLevels = {
    {{4, 4}, {3, 3}, {3, 2}, {2, 2}, {2, 1}, {1, 1}, {1, 0}}};
inline constexpr Level kTargetLevel = 0, kBaseLevel = 3, kDeepLevel = 5, kSensorLevel = 6;
/// What the ladder demotes to lies below this; a SENSOR block takes no part in attention.
inline constexpr int kLadderLevels = kSensorLevel;

constexpr int PagesOf(Level level) { return kLevels[level].pages(); }
/// Smallest plane index that `level` leaves out, of K or of V: what an exact copy must hold from
/// there on down.
constexpr int FirstAbsentPlane(Level level) { return kLevels[level].v; }
/// 16, 12, 8 or 4 bits for K and V alike; kLevelCount for other numbers.
constexpr Level LevelOfBits(int bits) {
  switch (bits) {
    case 16:
      return 0;
    case 12:
      return 1;
    case 8:
      return 3;
    case 4:
      return 5;
    default:
      return kLevelCount;
  }
}

enum class Residency : std::uint8_t {
  kDevice,  // at least the planes of its level are in device pages
  kStore,   // no device page; all planes of the ceiling are in the exact store
};

/// At most one copy of a block is under way.
enum class Copying : std::uint8_t { kNone, kSaving, kBringing };

enum class BlockEvent : std::uint8_t {
  kAppend,
  kSave,
  kDemote,
  kRestore,
  kOffload,
  kLoad,
  kEvict,
  kCount
};

/// One row of the transition table. A transition that no row allows is a bug and stops the process.
struct TransitionRule {
  BlockEvent event;
  std::string_view name;
  bool from_device, from_store;  // where the block may be
  Residency to;                  // where it is afterwards (kEvict: gone)
  enum class Content : std::uint8_t { kAny, kFilling, kFull } content;
  bool needs_copy;   // every plane that leaves the device (or comes back) is in the exact store,
                     // valid
  bool may_be_read;  // allowed while running sequences read it
  bool may_be_held;  // allowed while any sequence, running or not, holds it
  bool while_saving, while_bringing;  // allowed while a copy is under way
};
std::span<const TransitionRule> TransitionTable();

/// What the table looks at.
struct BlockFacts {
  Residency residency = Residency::kDevice;
  bool full = false;
  bool copy_valid = false;  // for the planes in question
  bool read = false, held = false;
  Copying copying = Copying::kNone;
};
bool IsLegal(BlockEvent event, const BlockFacts& facts);

}  // namespace pliant
