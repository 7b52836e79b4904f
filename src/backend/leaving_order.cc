#include "backend/leaving_order.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace pliant {

void LeavingOrder::List(const UseTable& table, const KeyKernel& kernel) {
  const int count = std::min(kListed, table.tokens);
  std::vector<std::int32_t> uses(2 * static_cast<std::size_t>(table.tokens));
  std::int32_t* const places = uses.data() + table.tokens;
  entries_.clear();
  begin_ = 0;
  bound_ = kAll;
  known_ = true;
  if (count == 0) return;
  kernel.least_useful(table, count, uses.data(), places);
  for (int i = 0; i < count; ++i) {
    const std::int32_t at = places[i];
    const std::uint64_t key = std::uint64_t{static_cast<std::uint32_t>(uses[at])} << 32 |
                              static_cast<std::uint32_t>(table.token[at]);
    entries_.push_back({key, at, table.weight[at]});
  }
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& a, const Entry& b) { return a.key < b.key; });
  if (count < table.tokens && !Endless(entries_.back().key)) bound_ = entries_.back().key;
}

void LeavingOrder::TakeLeast(const float* scores, std::span<Token> least) {
  PLIANT_CHECK(known_ && begin_ + least.size() <= entries_.size(), "so many are listed");
  for (Token& token : least) {
    const Entry& entry = entries_[begin_++];
    token = {entry.token(), entry.slot, scores[entry.slot], entry.weight};
  }
}

void LeavingOrder::Place(std::int32_t first, std::span<const std::int32_t> slots) {
  for (std::size_t i = begin_; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (entry.slot >= first) entry.slot = slots[static_cast<std::size_t>(entry.slot - first)];
  }
}

int LeavingOrder::Exchange(std::span<Token> coming, std::int32_t never_from, std::int32_t never_to,
                           const float* scores, Token* leaving) {
  PLIANT_CHECK(known_ && coming.size() <= kMostComing, "an order that is known");
  const auto wanted = static_cast<int>(coming.size());
  std::array<Entry, kListed> asked, stay;  // asked: by key, as it is now
  int asked_count = 0, stay_count = 0;
  std::size_t at = begin_;
  while (
      asked_count < wanted ||
      (wanted > 0 && asked[wanted - 1].key > (at < entries_.size() ? entries_[at].key : bound_))) {
    if (at == entries_.size()) {
      if (bound_ == kAll) break;
      return -1;
    }
    Entry entry = entries_[at++];
    if (Endless(entry.key)) continue;
    const std::int32_t token = entry.token();
    if (token >= never_from && token < never_to) {
      stay[stay_count++] = entry;
      continue;
    }
    entry.key = KeyOf(scores[entry.slot], entry.weight, token);
    if (Endless(entry.key)) continue;
    int to = asked_count++;
    for (; to > 0 && asked[to - 1].key > entry.key; --to) asked[to] = asked[to - 1];
    asked[to] = entry;
  }
  const int count = std::min(wanted, asked_count);
  // Who has been asked and stays, and who comes, are listed again.
  std::array<Entry, kListed> again;
  auto end = std::merge(asked.begin() + count, asked.begin() + asked_count, stay.begin(),
                        stay.begin() + stay_count, again.begin(),
                        [](const Entry& a, const Entry& b) { return a.key < b.key; });
  while (end != again.begin() && end[-1].key > bound_) --end;  // no longer among the least
  for (int i = 0; i < count; ++i) {
    const Entry& leaves = asked[i];
    leaving[i] = {leaves.token(), leaves.slot, scores[leaves.slot], leaves.weight};
    coming[i].slot = leaves.slot;
    const Entry entry = {KeyOf(coming[i].score, coming[i].weight, coming[i].token), leaves.slot,
                         coming[i].weight};
    if (entry.key > bound_ || Endless(entry.key)) continue;
    auto to = end++;
    for (; to != again.begin() && to[-1].key > entry.key; --to) *to = to[-1];
    *to = entry;
  }
  // No more than have been taken out: what is merged never overtakes what is read.
  std::size_t from = at, to = at - static_cast<std::size_t>(end - again.begin());
  begin_ = to;
  for (auto next = again.begin(); next != end; ++to) {
    if (from < entries_.size() && entries_[from].key < next->key) {
      entries_[to] = entries_[from++];
    } else {
      entries_[to] = *next++;
    }
  }
  return count;
}

}  // namespace pliant
