// Room: backend. Which kept tokens of a unit (retained_history.h) are of least use, for those that
// return in their place. A return wants a dozen of hundreds, and most units have several before a
// weight changes; so all are asked once, and the least are listed.
//
// The list is exact: scores only rise and weights stay as they are while it is known, so a use that
// was computed once is the least that it can be now. Whoever is not listed is above the bound of
// the list, and of the listed only those are asked again whose old use is below what is wanted.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/history_keys.h"

namespace pliant {

class LeavingOrder {
 public:
  /// The most that come in one exchange.
  static constexpr int kMostComing = 16;
  /// The most that are listed: what a dropped block takes, and some returns.
  static constexpr int kListed = 64;

  /// A kept token, or one that becomes one.
  struct Token {
    std::int32_t token = 0;
    std::int32_t slot = 0;
    float score = 0, weight = 0;
  };

  /// Weights have changed, or tokens moved in another way than by Exchange.
  void Forget() { known_ = false; }
  bool known() const { return known_; }
  /// Asks memory for what Exchange reads first.
  void AskFor() const {
    if (!known_) return;
    const auto* const at = reinterpret_cast<const char*>(entries_.data() + begin_);
    for (std::size_t line = 0; line < 2 * kMostComing * sizeof(Entry); line += 64)
      __builtin_prefetch(at + line);
  }
  /// Lists the least useful of `table`, whose places are slots, but for a block that is dropped.
  void List(const UseTable& table, const KeyKernel& kernel);
  /// The first of the list, who are of least use while nothing has changed since List, are taken
  /// off it: into `least`, all of which the list must have.
  void TakeLeast(const float* scores, std::span<Token> least);
  /// The tokens of a block that were listed at places from `first` on have moved to slots [32].
  void Place(std::int32_t first, std::span<const std::int32_t> slots);

  /// `coming`, at most kMostComing, take the places of kept tokens of least use, the first that of
  /// the least; of equals the older leaves. Tokens of [never_from, never_to) and those whose use is
  /// without end stay. scores: by slot. Fills `leaving` [coming] and the slots of `coming`; returns
  /// how many there are, which are fewer when no more can leave, or -1 when the list does not tell:
  /// then nothing has changed. Only while known.
  int Exchange(std::span<Token> coming, std::int32_t never_from, std::int32_t never_to,
               const float* scores, Token* leaving);

  /// Use, as UseTable has it, above the token: what orders.
  static std::uint64_t KeyOf(float score, float weight, std::int32_t token) {
    const float use = score * weight;
    const auto bits = use > 0 ? std::bit_cast<std::uint32_t>(use) : 0;
    return std::uint64_t{bits} << 32 | static_cast<std::uint32_t>(token);
  }

 private:
  struct Entry {
    std::uint64_t key;  // as of when it was last computed
    std::int32_t slot;
    float weight;
    std::int32_t token() const { return static_cast<std::int32_t>(key); }
  };
  static constexpr std::uint64_t kAll = ~std::uint64_t{0};
  static bool Endless(std::uint64_t key) { return key >> 32 >= std::uint64_t{kEndlessUse}; }

  std::vector<Entry> entries_;  // from begin_ on, by key
  std::size_t begin_ = 0;
  std::uint64_t bound_ = 0;  // no key of who is not listed is below, but endless ones
  bool known_ = false;
};

}  // namespace pliant
