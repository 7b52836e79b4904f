// Room: replay. States of a block as people write them ("8/4": bits of K and of V), and block
// tables seen at a state. Pure functions, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/status.h"

namespace pliant {

struct CacheState {
  int k_planes = kPlanes, v_planes = kPlanes;
  bool whole() const { return k_planes == kPlanes && v_planes == kPlanes; }
  friend bool operator==(const CacheState&, const CacheState&) = default;
};

/// "16/16", "12/8", ...: each 4, 8, 12 or 16. InvalidArgument otherwise.
Result<CacheState> ParseCacheState(std::string_view text);
/// "16/16,12/12,8/4".
Result<std::vector<CacheState>> ParseCacheStates(std::string_view text);
std::string CacheStateName(const CacheState& state);

/// Tokens that keep all their bits. Blocks are whole: one stays whole as long as one of its tokens
/// is protected.
struct Protection {
  int sink = 0;         // first tokens of a sequence
  int recent_base = 0;  // last tokens, for states of 8 bits or more
  int recent_deep = 0;  // last tokens, for states with fewer than 8 bits somewhere
  int Recent(const CacheState& state) const {
    return state.k_planes < 2 || state.v_planes < 2 ? recent_deep : recent_base;
  }
};

/// Whether block `index` of a sequence that holds `context` tokens stands below 16 bits.
bool Degraded(const CacheState& state, const Protection& protection, std::int64_t index,
              std::int64_t context);

/// The block with only its leading planes.
BlockView ViewAt(const BlockView& whole, const CacheState& state);

/// A sequence's own consecutive pages, eight a block, from `first_page` on.
std::vector<BlockView> OwnBlocks(std::uint32_t first_page, std::int64_t blocks);

}  // namespace pliant
