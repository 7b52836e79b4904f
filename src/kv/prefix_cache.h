// Room: kv. Which full blocks can be found again by their tokens, and which of them nobody uses.
// Blocks are found by a hash chain over tokens, salt and precision mark, and then compared, so that
// equal hashes never serve wrong blocks. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <unordered_map>

#include "kv/block.h"

namespace pliant {

/// hash(key of the prefix before, tokens of the block). Tests inject a constant.
using PrefixHash = std::function<std::uint64_t(std::uint64_t, std::span<const std::int32_t>)>;
std::uint64_t DefaultPrefixHash(std::uint64_t parent, std::span<const std::int32_t> tokens);

class PrefixCache {
 public:
  explicit PrefixCache(PrefixHash hash = DefaultPrefixHash) : hash_(std::move(hash)) {}

  /// Key of the empty prefix under a salt.
  std::uint64_t RootKey(std::string_view salt) const;
  /// Key of prefix + tokens with a precision mark.
  std::uint64_t Key(std::uint64_t parent, std::span<const std::int32_t> tokens, Level mark) const {
    return WithMark(hash_(parent, tokens), mark);
  }
  std::uint64_t Hash(std::uint64_t parent, std::span<const std::int32_t> tokens) const {
    return hash_(parent, tokens);
  }
  static std::uint64_t WithMark(std::uint64_t hash, Level mark) {
    return hash + 0x9e3779b97f4a7c15ull * mark;
  }

  /// The published block with this parent content, these tokens and this mark (and, at index 0,
  /// this salt); null when there is none.
  Block* Find(std::uint64_t key, ContentId parent, std::span<const std::int32_t> tokens, Level mark,
              int index, std::string_view salt) const;
  void Insert(Block& block);  // key, parent, tokens, mark, salt are set; gives the block a content
                              // id of its own
  void Erase(Block& block);
  std::size_t size() const { return index_.size(); }

  // Idle blocks, least recently used first.
  void PushIdle(Block& block, IdleList list);
  void RemoveIdle(Block& block);
  Block* Oldest(IdleList list) const { return lists_[static_cast<int>(list)].head; }
  std::int64_t IdleCount(IdleList list) const { return lists_[static_cast<int>(list)].count; }

 private:
  struct List {
    Block* head = nullptr;
    Block* tail = nullptr;
    std::int64_t count = 0;
  };
  PrefixHash hash_;
  std::unordered_multimap<std::uint64_t, Block*> index_;
  std::array<List, static_cast<int>(IdleList::kCount)> lists_;
  ContentId next_content_ = 1;
};

}  // namespace pliant
