#include "text/token_table.h"

#include <bit>
#include <cstring>
#include <random>

namespace pliant {
namespace {

std::uint64_t Seed() {
  static const std::uint64_t seed = [] {
    std::random_device device;
    return (static_cast<std::uint64_t>(device()) << 32 | device()) | 1;
  }();
  return seed;
}

/// 64 x 64 -> 128 bits, halves folded: every bit of the result depends on every bit of both.
std::uint64_t Fold(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio

std::uint64_t HashBytes(std::string_view bytes) {
  std::uint64_t h = Seed() ^ bytes.size();
  const char* p = bytes.data();
  std::size_t n = bytes.size();
  for (; n >= 8; p += 8, n -= 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    h = Fold(h ^ word, kOdd);
  }
  std::uint64_t tail = 0;
  for (std::size_t i = 0; i < n; ++i)
    tail |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(p[i])) << (8 * i);
  return Fold(h ^ tail, kOdd ^ Seed());
}

/// A power of two that leaves at least half of the slots free.
std::size_t Capacity(std::size_t entries) { return std::bit_ceil(entries * 2 + 1); }

}  // namespace

void TokenBytesArena::Reserve(std::size_t tokens, std::size_t bytes) {
  offsets_.reserve(tokens + 1);
  bytes_.reserve(bytes);
}

void TokenBytesArena::Add(std::string_view bytes) {
  bytes_ += bytes;
  offsets_.push_back(static_cast<std::uint32_t>(bytes_.size()));
}

TokenIndex::TokenIndex(const TokenBytesArena* arena, std::size_t tokens)
    : arena_(arena), entries_(Capacity(tokens)) {}

std::size_t TokenIndex::Slot(std::string_view bytes) const {
  const std::uint64_t h = HashBytes(bytes);
  const auto tag = static_cast<std::uint32_t>(h >> 32);
  std::size_t slot = h & (entries_.size() - 1);
  while (entries_[slot].id != kNoToken &&
         (entries_[slot].hash != tag || (*arena_)[entries_[slot].id] != bytes)) {
    slot = (slot + 1) & (entries_.size() - 1);
  }
  return slot;
}

void TokenIndex::Insert(TokenId id) {
  const std::string_view bytes = (*arena_)[id];
  entries_[Slot(bytes)] = {static_cast<std::uint32_t>(HashBytes(bytes) >> 32), id};
}

TokenId TokenIndex::Find(std::string_view bytes) const {
  return entries_.empty() ? kNoToken : entries_[Slot(bytes)].id;
}

MergeTable::MergeTable(std::size_t merges)
    : seed_(Seed()), entries_(Capacity(merges)), mask_(entries_.size() - 1) {}

void MergeTable::Insert(TokenId left, TokenId right, Merge merge) {
  const std::uint64_t key = Key(left, right);
  std::size_t slot = Home(key);
  while (entries_[slot].key != key && entries_[slot].key != kFree) slot = (slot + 1) & mask_;
  entries_[slot] = {key, merge};
}

}  // namespace pliant
