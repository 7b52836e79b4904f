#include "replay/cache_state.h"

namespace pliant {
namespace {

int PlanesOf(std::string_view bits) {
  if (bits == "16") return 4;
  if (bits == "12") return 3;
  if (bits == "8") return 2;
  if (bits == "4") return 1;
  return 0;
}

}  // namespace

Result<CacheState> ParseCacheState(std::string_view text) {
  const std::size_t slash = text.find('/');
  CacheState state{0, 0};
  if (slash != std::string_view::npos) {
    state = {PlanesOf(text.substr(0, slash)), PlanesOf(text.substr(slash + 1))};
  }
  if (state.k_planes == 0 || state.v_planes == 0) {
    return InvalidArgument("\"" + std::string(text) +
                           "\" is not a state: bits of K and of V, each 16, 12, 8 or 4, e.g. 8/4");
  }
  return state;
}

Result<std::vector<CacheState>> ParseCacheStates(std::string_view text) {
  std::vector<CacheState> states;
  while (true) {
    const std::size_t comma = text.find(',');
    PLIANT_ASSIGN_OR_RETURN(const CacheState state, ParseCacheState(text.substr(0, comma)));
    states.push_back(state);
    if (comma == std::string_view::npos) return states;
    text.remove_prefix(comma + 1);
  }
}

std::string CacheStateName(const CacheState& state) {
  return std::to_string(state.k_planes * kBitsPerPlane) + "/" +
         std::to_string(state.v_planes * kBitsPerPlane);
}

bool Degraded(const CacheState& state, const Protection& protection, std::int64_t index,
              std::int64_t context) {
  if (state.whole()) return false;
  return index * kBlockTokens >= protection.sink &&
         (index + 1) * kBlockTokens <= context - protection.Recent(state);
}

BlockView ViewAt(const BlockView& whole, const CacheState& state) {
  BlockView view = whole;
  for (int plane = state.k_planes; plane < kPlanes; ++plane) view.k[plane] = PageId();
  for (int plane = state.v_planes; plane < kPlanes; ++plane) view.v[plane] = PageId();
  return view;
}

std::vector<BlockView> OwnBlocks(std::uint32_t first_page, std::int64_t blocks) {
  std::vector<BlockView> own(static_cast<std::size_t>(blocks));
  for (BlockView& block : own) {
    for (PageId& page : block.k) page = PageId(first_page++);
    for (PageId& page : block.v) page = PageId(first_page++);
  }
  return own;
}

}  // namespace pliant
