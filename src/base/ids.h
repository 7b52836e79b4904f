// Room: base. Integers that cannot be mixed up: a PageId is not a BlockId. Any thread.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace pliant {

/// An index with a type of its own. Default-constructed ids are invalid.
template <typename Tag, typename T = std::uint32_t>
class StrongId {
 public:
  using Value = T;
  static constexpr T kInvalidValue = static_cast<T>(~T{0});

  constexpr StrongId() = default;
  constexpr explicit StrongId(T value) : value_(value) {}
  constexpr T value() const { return value_; }
  constexpr bool valid() const { return value_ != kInvalidValue; }
  friend constexpr auto operator<=>(StrongId, StrongId) = default;

 private:
  T value_ = kInvalidValue;
};

/// One plane of one block of K or of V, all layers and KV heads (DESIGN: plane page).
using PageId = StrongId<struct PageIdTag>;
/// A logical block of 32 tokens.
using BlockId = StrongId<struct BlockIdTag>;
/// One request of one client.
using RequestId = StrongId<struct RequestIdTag, std::uint64_t>;

}  // namespace pliant

template <typename Tag, typename T>
struct std::hash<pliant::StrongId<Tag, T>> {
  std::size_t operator()(pliant::StrongId<Tag, T> id) const noexcept {
    return std::hash<T>()(id.value());
  }
};
