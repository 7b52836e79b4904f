// Room: text. Two hash tables of a vocabulary: byte strings to ids, and pairs of ids to merges.
// Filled once, then read by any number of threads. Open addressing over flat arrays; the hash is
// seeded per process, so that a model file cannot choose its collisions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace pliant {

inline constexpr TokenId kNoToken = -1;

/// The bytes of every token in one arena.
class TokenBytesArena {
 public:
  void Reserve(std::size_t tokens, std::size_t bytes);
  /// Appends the next id's bytes. The caller keeps the sum below 4 GiB.
  void Add(std::string_view bytes);
  std::string_view operator[](TokenId id) const {
    const auto i = static_cast<std::size_t>(id);
    return std::string_view(bytes_).substr(offsets_[i], offsets_[i + 1] - offsets_[i]);
  }

 private:
  std::string bytes_;
  std::vector<std::uint32_t> offsets_ = {0};
};

class TokenIndex {
 public:
  /// For at most `tokens` entries; keys live in `arena`, which must outlive the index.
  TokenIndex(const TokenBytesArena* arena, std::size_t tokens);
  TokenIndex() = default;
  /// The key is arena[id]; a key already there gets the new id.
  void Insert(TokenId id);
  /// kNoToken when `bytes` is no token.
  TokenId Find(std::string_view bytes) const;

 private:
  std::size_t Slot(std::string_view bytes) const;  // of the key, or the free one where it belongs

  struct Entry {
    std::uint32_t hash = 0;
    TokenId id = kNoToken;
  };
  const TokenBytesArena* arena_ = nullptr;
  std::vector<Entry> entries_;
};

struct Merge {
  std::uint32_t rank = UINT32_MAX;  // the lowest goes first; UINT32_MAX: no such merge
  TokenId result = kNoToken;
};

class MergeTable {
 public:
  explicit MergeTable(std::size_t merges);
  MergeTable() = default;
  /// A pair already there gets the new merge.
  void Insert(TokenId left, TokenId right, Merge merge);
  Merge Find(TokenId left, TokenId right) const {
    const std::uint64_t key = Key(left, right);
    for (std::size_t slot = Home(key);; slot = (slot + 1) & mask_) {
      const Entry& e = entries_[slot];
      if (e.key == key) return e.merge;
      if (e.key == kFree) return {};
    }
  }

 private:
  struct Entry {
    std::uint64_t key = kFree;
    Merge merge;
  };
  static constexpr std::uint64_t kFree = UINT64_MAX;
  static std::uint64_t Key(TokenId left, TokenId right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
           static_cast<std::uint32_t>(right);
  }
  std::size_t Home(std::uint64_t key) const {
    // 64 x 64 -> 128 bits, halves folded.
    const auto product = static_cast<unsigned __int128>(key ^ 0x9E3779B97F4A7C15u) * seed_;
    return (static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64)) &
           mask_;
  }

  std::uint64_t seed_ = 1;
  std::vector<Entry> entries_ = std::vector<Entry>(1);  // a free slot, so that Find ends
  std::size_t mask_ = 0;
};

}  // namespace pliant
