#include "kv/history.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>

#include "backend/plane_code.h"
#include "base/check.h"

namespace pliant {

namespace {

/// Of a sequence of so many tokens, the one being written included.
std::int32_t BlocksWith(std::int64_t tokens) {
  return static_cast<std::int32_t>(tokens / kBlockTokens + 1);
}

}  // namespace

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

HistoryOptions DroppingForGood(HistoryOptions options) {
  options.retention.returns = false;
  options.retention.redundancy = 16;
  options.retention.squared = true;
  options.recent_blocks = 2;
  options.growth = GrowthSignal::kDivergence;
  options.grow_above = 0.035f;
  options.start_from_prompt = true;
  options.start_blocks = 8;
  return options;
}

HistoryOptions GrowingBy(HistoryOptions options, std::shared_ptr<const GrowthWeights> weights) {
  options.growth = GrowthSignal::kLearned;
  options.grow_above = weights->above;
  options.retention.growth_weights = std::move(weights);
  return options;
}

History::History(const HistoryOptions& options, std::int32_t capacity, bool grows)
    : recent_blocks_(options.recent_blocks),
      growth_(options.growth),
      grow_above_(options.grow_above),
      // The recent ones, the block being written, and one that tokens are kept in.
      capacity_(std::max(capacity, options.recent_blocks + 2)),
      grows_(grows) {}

bool History::IsUpToDate(std::int64_t tokens) const {
  const bool asks = grows_ && growth_ != GrowthSignal::kReturns &&
                    tokens % kQuerySignalTokens == 0 && asked_at_ != tokens;
  return BlocksWith(tokens) == blocks_ && !asks;
}

History::Growth History::Extend(std::int64_t tokens, const RetainedHistory& retained) {
  const std::int32_t blocks = BlocksWith(tokens);
  PLIANT_CHECK(blocks >= blocks_, "a history does not shrink");
  const std::int32_t filled = blocks - std::exchange(blocks_, blocks);
  if (!grows_) return Growth::kNotAsked;
  bool asked = filled != 0;
  if (growth_ != GrowthSignal::kReturns) {
    asked = tokens % kQuerySignalTokens == 0 && std::exchange(asked_at_, tokens) != tokens;
    if (asked) signal_ = retained.QuerySignal();
    if (asked && signal_ > grow_above_) ++halves_;
  } else if (asked) {
    const std::int64_t returned = retained.returned_pages();
    signal_ = static_cast<double>(returned - returned_before_) /
              (static_cast<double>(filled) * kBlockTokens * retained.units());
    returned_before_ = returned;
    halves_ = signal_ > grow_above_ ? 2 : 0;
  }
  if (filled != 0) {
    if (retained.TakingPart(blocks) <= capacity_) halves_ = 0;  // no answer was needed
    if (halves_ >= 2) {
      halves_ -= 2;
      ++capacity_;
      return Growth::kGrew;
    }
  }
  return asked ? Growth::kStayed : Growth::kNotAsked;
}

}  // namespace pliant
