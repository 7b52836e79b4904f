#include "kv/history.h"

#include <algorithm>
#include <charconv>
#include <cmath>
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
    : options_(options),
      fade_(std::exp(-1.0f / std::max(options.memory_steps, 1.0f))),
      // What may never be dropped, the block being written, and one that may.
      capacity_(std::max(capacity, options.sink_blocks + options.recent_blocks + 2)),
      grows_(grows) {}

bool History::Extend(std::int32_t blocks) {
  const std::int32_t more = blocks - this->blocks();
  PLIANT_CHECK(more >= 0, "a history does not shrink");
  if (more == 0) return false;
  taking_part_ += more;
  blocks_.resize(static_cast<std::size_t>(blocks));
  const bool grow =
      grows_ && static_cast<float>(recent_returns_) > options_.grow_above * kBlockTokens;
  capacity_ += grow ? 1 : 0;
  recent_returns_ = 0;
  return grow;
}

void History::Note(std::span<const float> weights) {
  PLIANT_CHECK(static_cast<std::int32_t>(weights.size()) == blocks(), "a weight for each block");
  for (std::size_t b = 0; b < weights.size(); ++b) {
    Entry& entry = blocks_[b];
    entry.score = std::max(entry.score * fade_, weights[b]);
  }
}

std::int32_t History::Wanted(std::span<const float> weights) const {
  std::int32_t wanted = -1;
  float most = options_.return_weight;
  for (std::int32_t b = 0; b < blocks(); ++b) {
    if (blocks_[b].takes_part || !(weights[b] > most)) continue;
    most = weights[b];
    wanted = b;
  }
  return wanted;
}

void History::Drop(std::int32_t block) {
  PLIANT_CHECK(blocks_[block].takes_part, "dropped already");
  blocks_[block].takes_part = false;
  --taking_part_;
}

void History::Return(std::int32_t block) {
  PLIANT_CHECK(!blocks_[block].takes_part, "takes part already");
  blocks_[block].takes_part = true;
  ++taking_part_;
  ++recent_returns_;
}

}  // namespace pliant
