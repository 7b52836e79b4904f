// Room: backend. What takes time in a RetainedHistory between attention: likeness between keys (out
// of their code, their signs, how many signs differ, products of 8-bit codes), and who is of least
// use. The functions of ScalarKeyKernel are the oracle; a backend may have vectors for them
// (cpu/kv_keys.cc). Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/plane_code.h"

namespace pliant {

/// Keys of likeness are read at 8 bits, which every cache has: they tell the sign of all but the
/// smallest differences.
inline constexpr int kLikenessPlanes = 2;

/// The keys of one unit of one block as they lie in pages, and what un-codes them.
struct CodedKeys {
  int head_dim = 0;
  const std::uint8_t* rows[kLikenessPlanes] = {};  // [32][head_dim / 2] of each plane
  const std::byte* scales = nullptr;               // bf16 [32]
  const float* channel_scale = nullptr;            // [head_dim], or null: 1 ...
  const float* channel_center = nullptr;           // ... and 0
  // Of the angles by which RoPE has turned the pairs (i, i + head_dim / 2): [32][head_dim / 2].
  const float* cosine = nullptr;
  const float* sine = nullptr;
};

/// Tokens that take part, and what their use is: score * weight, as bits, which order as uses do,
/// for they are not negative. NaN is no use; that of tokens before `never_before` and of those in
/// [never_from, never_to) is without end.
struct UseTable {
  int tokens = 0;
  const float* score = nullptr;  // [tokens], as the next two
  const float* weight = nullptr;
  const std::int32_t* token = nullptr;
  std::int32_t never_before = 0, never_from = 0, never_to = 0;
};
inline constexpr std::int32_t kEndlessUse = 0x7f800000;

struct KeyKernel {
  /// keys [32][head_dim], before RoPE. Roundings of f32 may be other ones than the oracle's.
  void (*decode)(const CodedKeys& coded, float* keys);
  /// Bit c of a row's signs: keys[c] > mean[c]. keys [rows][dim], signs [rows][words], words as
  /// many as 64 bits need.
  void (*signs)(int rows, int dim, const float* keys, const float* mean, std::uint64_t* signs);
  /// For each of `count` rows of `words` the fewest bits by which it differs from one of
  /// `later_count` rows at `later`, at least one.
  void (*fewest)(int words, int count, const std::uint64_t* rows, int later_count,
                 const std::uint64_t* later, std::int32_t* fewest);
  /// nearest [count]: for row i of `count` rows of 8-bit codes, [dim] each, the largest of 0 and
  /// its product with row t of the 32 rows of `later`, times norms[t], of those with t >= from + i.
  void (*nearest)(int dim, int count, const std::int8_t* rows, int from, const std::int8_t* later,
                  const float* norms, float* nearest);
  /// uses [tokens], and in `places` [tokens], of which the first `count` count, where the least
  /// useful are, in order of place: of equals those with the lowest tokens. 1 <= count <= tokens.
  void (*least_useful)(const UseTable& table, int count, std::int32_t* uses, std::int32_t* places);
};
const KeyKernel& ScalarKeyKernel();

}  // namespace pliant
