#include "kv/prefix_cache.h"

#include <algorithm>

#include "base/check.h"

namespace pliant {
namespace {

constexpr std::uint64_t Mix(std::uint64_t x) {
  x ^= x >> 32;
  x *= 0x9e3779b97f4a7c15ull;
  x ^= x >> 29;
  x *= 0xd6e8feb86659fd93ull;
  return x ^ (x >> 32);
}

}  // namespace

std::uint64_t DefaultPrefixHash(std::uint64_t parent, std::span<const std::int32_t> tokens) {
  std::uint64_t h = Mix(parent + 0x632be59bd9b4e019ull);
  for (std::int32_t token : tokens) h = Mix(h ^ static_cast<std::uint32_t>(token));
  return h;
}

std::uint64_t PrefixCache::RootKey(std::string_view salt) const {
  std::uint64_t key = 0;
  for (char c : salt) {
    const std::int32_t one = static_cast<unsigned char>(c);
    key = hash_(key, {&one, 1});
  }
  return key;
}

Block* PrefixCache::Find(std::uint64_t key, ContentId parent, std::span<const std::int32_t> tokens,
                         Level mark, int index, std::string_view salt) const {
  const auto [begin, end] = index_.equal_range(key);
  for (auto it = begin; it != end; ++it) {
    Block& block = *it->second;
    if (block.parent == parent && block.mark == mark && block.index == index &&
        (index > 0 || block.salt == salt) &&
        std::equal(tokens.begin(), tokens.end(), block.tokens.begin(), block.tokens.end())) {
      return &block;
    }
  }
  return nullptr;
}

void PrefixCache::Insert(Block& block) {
  PLIANT_CHECK(!block.published && block.full, "only full blocks are published, once");
  block.published = true;
  block.content = next_content_++;
  index_.emplace(block.key, &block);
}

void PrefixCache::Erase(Block& block) {
  PLIANT_CHECK(block.published, "block is not published");
  block.published = false;
  block.salt.clear();
  const auto [begin, end] = index_.equal_range(block.key);
  for (auto it = begin; it != end; ++it) {
    if (it->second == &block) {
      index_.erase(it);
      return;
    }
  }
  PLIANT_CHECK(false, "published block is not in the index");
}

void PrefixCache::PushIdle(Block& block, IdleList list) {
  PLIANT_CHECK(block.idle == IdleList::kNone, "block is idle already");
  List& l = lists_[static_cast<int>(list)];
  block.idle = list;
  block.idle_prev = l.tail;
  block.idle_next = nullptr;
  (l.tail != nullptr ? l.tail->idle_next : l.head) = &block;
  l.tail = &block;
  ++l.count;
}

void PrefixCache::RemoveIdle(Block& block) {
  if (block.idle == IdleList::kNone) return;
  List& l = lists_[static_cast<int>(block.idle)];
  (block.idle_prev != nullptr ? block.idle_prev->idle_next : l.head) = block.idle_next;
  (block.idle_next != nullptr ? block.idle_next->idle_prev : l.tail) = block.idle_prev;
  block.idle = IdleList::kNone;
  block.idle_prev = block.idle_next = nullptr;
  --l.count;
}

}  // namespace pliant
