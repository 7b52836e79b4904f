// Room: text. Byte pair encoding of one pre-token: bytes become their tokens, then the adjacent
// pair of the lowest rank, leftmost first, is merged until no pair is left (Sennrich et al. 2016,
// in the order of the reference). A Bpe is immutable after Create; any thread may use it, each with
// a Scratch of its own.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/token_table.h"
#include "text/tokenizer.h"

namespace pliant {

class Bpe {
 public:
  /// `arena` holds the bytes of every token and must outlive the result. Takes the kNormal and
  /// kUserDefined tokens, and merges whose two sides and result are such tokens; other merges are
  /// ignored (a GGUF file without merges must name one that does not count). A merge that is not
  /// two words with one space between is refused.
  static Result<std::unique_ptr<Bpe>> Create(const Vocabulary& vocabulary,
                                             const TokenBytesArena* arena);

  /// Buffers of one encoding thread.
  struct Scratch {
    struct Symbol {
      TokenId id;
      std::int32_t previous, next;  // -1: none
    };
    struct Candidate {
      std::uint32_t rank;
      std::int32_t position;
      TokenId result;
      friend bool operator<(const Candidate& a,
                            const Candidate& b) {  // the heap's top is the least
        return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
      }
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
    std::vector<TokenId> ids;
  };

  /// Appends the ids of one pre-token of fewer than 2^31 bytes. O(n log n).
  void Encode(std::string_view piece, Scratch* scratch, std::vector<TokenId>* out) const;
  /// Appends one id a byte, nothing merged; bytes without a token as Encode has them.
  void EncodeBytes(std::string_view bytes, std::vector<TokenId>* out) const;

 private:
  static constexpr std::size_t kShort = 48;  // up to here a plain scan beats the heap

  Bpe() = default;
  Status AddMerges(const Vocabulary& vocabulary);
  void MergePiece(std::string_view piece, Scratch* scratch, std::vector<TokenId>* out) const;
  void MergeShort(Scratch* scratch, std::vector<TokenId>* out) const;
  void MergeLong(Scratch* scratch, std::vector<TokenId>* out) const;
  /// Whether encoding a token's bytes gives that token; found out once a token.
  bool IsCanonical(TokenId id, std::string_view piece, Scratch* scratch) const;

  TokenIndex index_;
  MergeTable merges_;
  std::array<TokenId, 256> byte_tokens_;
  TokenId unk_ = kNoToken;  // stands for bytes without a token
  bool fuse_unk_ = false, ignore_merges_ = false;
  mutable std::unique_ptr<std::atomic<std::uint8_t>[]>
      canonical_;  // by id: 0 not yet known, 1 yes, 2 no
};

}  // namespace pliant
