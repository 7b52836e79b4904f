#include "kv/history.h"

#include <algorithm>
#include <charconv>
#include <string>

#include "backend/plane_code.h"
#include "base/check.h"

namespace pliant {

Result<Capacity> ParseCapacity(std::string_view text) {
  if (text == "full") return Capacity{Capacity::Kind::kFull, 0};
  if (text == "grow") return Capacity{Capacity::Kind::kGrow, 0};
  Capacity capacity{Capacity::Kind::kFixed, 0};
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), capacity.tokens);
  if (error != std::errc() || end != text.data() + text.size() || capacity.tokens < 1) {
    return InvalidArgument("capacity '" + std::string(text.substr(0, 40)) +
                           "': expected full, grow, or a number of tokens");
  }
  return capacity;
}

History::History(const HistoryOptions& options, std::int32_t capacity, bool grows)
    : recent_blocks_(options.recent_blocks),
      growth_(options.growth),
      grow_above_(options.grow_above),
      // The recent ones, the block being written, and one that tokens are kept in.
      capacity_(std::max(capacity, options.recent_blocks + 2)),
      grows_(grows) {}

bool History::Extend(std::int32_t blocks, const RetainedHistory& retained) {
  PLIANT_CHECK(blocks >= blocks_, "a history does not shrink");
  if (blocks == blocks_) return false;
  const std::int64_t returned = retained.returned_pages();
  if (growth_ == GrowthSignal::kDivergence) {
    signal_ = retained.Divergence();
  } else {
    signal_ = static_cast<double>(returned - returned_before_) /
              (static_cast<double>(blocks - blocks_) * kBlockTokens * retained.units());
  }
  returned_before_ = returned;
  blocks_ = blocks;
  const bool grow = grows_ && signal_ > grow_above_ && retained.drops();
  capacity_ += grow ? 1 : 0;
  return grow;
}

}  // namespace pliant
