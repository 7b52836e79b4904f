#include "text/bpe.h"

#include <algorithm>

#include "text/byte_alphabet.h"

namespace pliant {

Result<std::unique_ptr<Bpe>> Bpe::Create(const Vocabulary& vocabulary,
                                         const TokenBytesArena* arena) {
  std::unique_ptr<Bpe> bpe(new Bpe);
  const std::size_t count = vocabulary.tokens.size();
  bpe->index_ = TokenIndex(arena, count);
  // Normal tokens come last so that they win over a user-defined one of the same bytes.
  for (const TokenKind kind : {TokenKind::kUserDefined, TokenKind::kNormal}) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto id = static_cast<TokenId>(i);
      if (vocabulary.kinds[i] == kind && !(*arena)[id].empty()) bpe->index_.Insert(id);
    }
  }
  bool any = false;
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    bpe->byte_tokens_[static_cast<std::size_t>(b)] = bpe->index_.Find(std::string_view(&byte, 1));
    any |= bpe->byte_tokens_[static_cast<std::size_t>(b)] != kNoToken;
  }
  if (!any)
    return InvalidArgument(
        "tokenizer: no token stands for a single byte; not a byte-level vocabulary");
  if (vocabulary.unknown_to_unk && vocabulary.unk) bpe->unk_ = *vocabulary.unk;
  bpe->fuse_unk_ = vocabulary.fuse_unk;
  bpe->ignore_merges_ = vocabulary.ignore_merges;
  bpe->canonical_ = std::make_unique<std::atomic<std::uint8_t>[]>(count);
  PLIANT_RETURN_IF_ERROR(bpe->AddMerges(vocabulary));
  return bpe;
}

Status Bpe::AddMerges(const Vocabulary& vocabulary) {
  merges_ = MergeTable(vocabulary.merges.size());
  for (std::size_t rank = 0; rank < vocabulary.merges.size(); ++rank) {
    const std::string_view merge = vocabulary.merges[rank];
    const std::size_t space = merge.find(' ');
    if (space == 0 || space == std::string_view::npos || space + 1 == merge.size() ||
        merge.find(' ', space + 1) != std::string_view::npos) {
      return InvalidArgument("tokenizer: merge " + std::to_string(rank) + " \"" +
                             std::string(merge.substr(0, 80)) +
                             "\" is not two tokens with a space between");
    }
    const auto left_bytes = AlphabetToBytes(merge.substr(0, space));
    const auto right_bytes = AlphabetToBytes(merge.substr(space + 1));
    if (!left_bytes || !right_bytes) continue;
    const TokenId left = index_.Find(*left_bytes), right = index_.Find(*right_bytes);
    const TokenId result = index_.Find(*left_bytes + *right_bytes);
    if (left == kNoToken || right == kNoToken || result == kNoToken) continue;
    merges_.Insert(left, right, {static_cast<std::uint32_t>(rank), result});
  }
  return {};
}

void Bpe::Encode(std::string_view piece, Scratch* scratch, std::vector<TokenId>* out) const {
  const TokenId whole = index_.Find(piece);
  if (whole != kNoToken && (ignore_merges_ || IsCanonical(whole, piece, scratch))) {
    out->push_back(whole);
    return;
  }
  MergePiece(piece, scratch, out);
}

bool Bpe::IsCanonical(TokenId id, std::string_view piece, Scratch* scratch) const {
  std::atomic<std::uint8_t>& known = canonical_[static_cast<std::size_t>(id)];
  std::uint8_t value = known.load(std::memory_order_relaxed);
  if (value == 0) {  // several threads may find out the same
    std::vector<TokenId> ids;
    MergePiece(piece, scratch, &ids);
    value = ids.size() == 1 && ids[0] == id ? 1 : 2;
    known.store(value, std::memory_order_relaxed);
  }
  return value == 1;
}

void Bpe::EncodeBytes(std::string_view bytes, std::vector<TokenId>* out) const {
  TokenId previous = kNoToken;
  for (const char c : bytes) {
    TokenId id = byte_tokens_[static_cast<std::uint8_t>(c)];
    if (id == kNoToken) {
      id = unk_;
      if (id == kNoToken || (fuse_unk_ && previous == unk_)) continue;
    }
    out->push_back(id);
    previous = id;
  }
}

void Bpe::MergePiece(std::string_view piece, Scratch* scratch, std::vector<TokenId>* out) const {
  scratch->ids.clear();
  EncodeBytes(piece, &scratch->ids);
  if (scratch->ids.size() <= kShort) {
    MergeShort(scratch, out);
  } else {
    MergeLong(scratch, out);
  }
}

void Bpe::MergeShort(Scratch* scratch, std::vector<TokenId>* out) const {
  std::vector<TokenId>& ids = scratch->ids;
  std::array<Merge, kShort> pairs;  // pairs[i]: of ids[i] and ids[i + 1]
  std::size_t n = ids.size();
  for (std::size_t i = 0; i + 1 < n; ++i) pairs[i] = merges_.Find(ids[i], ids[i + 1]);
  while (n > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < n; ++i) {
      if (pairs[i].rank < pairs[best].rank) best = i;
    }
    if (pairs[best].result == kNoToken) break;
    ids[best] = pairs[best].result;
    std::copy(ids.begin() + static_cast<std::ptrdiff_t>(best) + 2,
              ids.begin() + static_cast<std::ptrdiff_t>(n),
              ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    std::copy(pairs.begin() + best + 1, pairs.begin() + (n - 1), pairs.begin() + best);
    --n;
    if (best > 0) pairs[best - 1] = merges_.Find(ids[best - 1], ids[best]);
    if (best + 1 < n) pairs[best] = merges_.Find(ids[best], ids[best + 1]);
  }
  out->insert(out->end(), ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n));
}

void Bpe::MergeLong(Scratch* scratch, std::vector<TokenId>* out) const {
  auto& symbols = scratch->symbols;
  auto& heap = scratch->heap;
  const auto n = static_cast<std::int32_t>(scratch->ids.size());
  symbols.resize(static_cast<std::size_t>(n));
  heap.clear();
  for (std::int32_t i = 0; i < n; ++i) {
    symbols[static_cast<std::size_t>(i)] = {scratch->ids[static_cast<std::size_t>(i)], i - 1,
                                            i + 1 < n ? i + 1 : -1};
  }
  const auto at = [&](std::int32_t i) -> Scratch::Symbol& {
    return symbols[static_cast<std::size_t>(i)];
  };
  for (std::int32_t i = 0; i + 1 < n; ++i) {
    const Merge merge = merges_.Find(at(i).id, at(i + 1).id);
    if (merge.result != kNoToken) heap.push_back({merge.rank, i, merge.result});
  }
  std::make_heap(heap.begin(), heap.end());
  const auto push = [&](std::int32_t position) {
    const Merge merge = merges_.Find(at(position).id, at(at(position).next).id);
    if (merge.result == kNoToken) return;
    heap.push_back({merge.rank, position, merge.result});
    std::push_heap(heap.begin(), heap.end());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Scratch::Candidate top = heap.back();
    heap.pop_back();
    Scratch::Symbol& left = at(top.position);
    if (left.id == kNoToken || left.next < 0)
      continue;  // merged into its left neighbour, or the last one now
    // Symbols only grow, so a pair that still gives this token is the pair that was meant.
    if (merges_.Find(left.id, at(left.next).id).result != top.result) continue;
    Scratch::Symbol& right = at(left.next);
    left.id = top.result;
    left.next = right.next;
    right.id = kNoToken;
    if (left.next >= 0) {
      at(left.next).previous = top.position;
      push(top.position);
    }
    if (left.previous >= 0) push(left.previous);
  }
  for (std::int32_t i = 0; i >= 0 && i < n; i = at(i).next) out->push_back(at(i).id);
}

}  // namespace pliant
