// Room: backend. AMX attention for few columns (decode): bound by the planes it reads, so each is
// unpacked once and nothing is transposed on its way but the weights.
//
// Columns go in groups of 4. K's tiles are the left operand, [16 tokens][64 dims]; the right one
// holds a group's query twice,
//   hi pass: | qh | ql |    lo pass: | 0 | qh |     (4 columns each, 8 unused)
// so that one sum tile takes both passes and its columns are (hh) and (x) as kv_amx.h names them.
// For V the weights are the left operand and their rows are grouped the same way. Unpacking deals
// tokens to tiles so that softmax vectors hold tokens in order.
//
// A tile store whose tile is still being summed fills the scheduler with waiting micro-operations
// and nothing overlaps. So between a product and its store there is always vector work of another
// phase: K of a step is unpacked, multiplied and turned into logits while V of the step before is
// unpacked and multiplied.
#if defined(__x86_64__)

#include <type_traits>

#include "backend/cpu/kv_amx.h"
#include "backend/cpu/kv_amx_unpack.h"

namespace pliant::kv_amx {
namespace {

constexpr int kGroup = 4;  // columns of a group
constexpr int kGroups = kNarrowColumns / kGroup;
constexpr int kHalves = kStep / kHalf;

template <int kDim>
struct alignas(64) Scratch {
  std::byte keys[2][kHalf * kDim];                          // hi, lo of half a step
  std::byte values[2][kSpanTiles<kDim> * kHalves * kTile];  // hi, lo of a span of a step
  std::byte query_tiles[kGroups][2][kDim / 64][kTile];      // hi pass, lo pass
  std::byte query_sums[kGroups][3][64];                     // a row that sum tiles start from
  std::byte weights[kGroups][2][kHalves][kTile];            // left operands: hi pass, lo pass
  std::int32_t key_sums[kGroups][kHalves][4][kVector][16];
  std::int32_t value_sums[2][2][kVector][16];
  float logits[kGroups][kGroup][kStep];
  float output[kNarrowColumns][kDim];  // [column][tile][16]
  QueryColumn<kDim> column;
  alignas(64) std::int8_t zero[64];
  StepScales scales;
  // Of each group's columns: running maximum and sum, and how the last step changes them.
  struct alignas(64) State {
    float maximum[kVector];
    float total[kVector];
    float keep[kVector];
    float add[kVector];
    std::int32_t constant[kVector];  // added to every sum of the step
    float query_scale[kVector];
  } state[kGroups];
};

template <int kDim>
PLIANT_KV_AMX void PrepareQueries(const QueryTile& tile, Scratch<kDim>& s) {
  alignas(64) std::int8_t parts[2][kGroup][kDim];
  std::memset(s.zero, 0, sizeof(s.zero));
  std::memset(s.query_sums, 0, sizeof(s.query_sums));
  std::memset(s.weights, 0, sizeof(s.weights));
  std::memset(s.output, 0, sizeof(s.output));
  for (int g = 0; g * kGroup < tile.Columns(); ++g) {
    const int columns = std::min(kGroup, tile.Columns() - g * kGroup);
    for (int c = 0; c < columns; ++c) {
      const int column = g * kGroup + c;
      QuantizeQuery<kDim>(tile.query + column / tile.group * tile.query_stride +
                              static_cast<std::ptrdiff_t>(column % tile.group) * kDim,
                          tile.softmax_scale, s.column);
      std::memcpy(parts[0][c], s.column.hi, kDim);
      std::memcpy(parts[1][c], s.column.lo, kDim);
      s.state[g].query_scale[c] = s.column.scale;
      for (int depth = 0; depth < 3; ++depth) {
        std::memcpy(s.query_sums[g][depth] + (kGroup + c) * 4, &s.column.constant[depth], 4);
      }
    }
    for (int chunk = 0; chunk < kDim / 64; ++chunk) {
      const std::int8_t* rows[2][16];
      for (int r = 0; r < 16; ++r) {
        const int c = r % kGroup;
        const int block = r / kGroup;
        rows[0][r] = rows[1][r] = s.zero;
        if (c >= columns) continue;
        if (block < 2) rows[0][r] = parts[block][c] + 64 * chunk;
        if (block == 1) rows[1][r] = parts[0][c] + 64 * chunk;
      }
      StoreQueryTile(rows[0], s.query_tiles[g][0][chunk]);
      StoreQueryTile(rows[1], s.query_tiles[g][1][chunk]);
    }
    _mm512_store_ps(s.state[g].maximum, _mm512_set1_ps(kNoLogit));
    _mm512_store_ps(s.state[g].total, _mm512_setzero_ps());
  }
}

/// Starts the sums of a half of K against one group, in tiles 0 to 3 (a quarter of the tokens
/// each).
template <int kDim>
PLIANT_KV_AMX_INLINE void MultiplyKeys(int group, int depth, Scratch<kDim>& s) {
  constexpr int kChunks = kDim / 64;
  const std::byte* start = s.query_sums[group][DepthIndex(depth)];
  PLIANT_KV_FENCE();
  _tile_loadd(0, start, 0);  // stride 0: the same row for every token
  _tile_loadd(1, start, 0);
  _tile_loadd(2, start, 0);
  _tile_loadd(3, start, 0);
#pragma GCC unroll 4
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const std::byte* hi = s.keys[0] + chunk * kTile;
    const std::byte* lo = s.keys[1] + chunk * kTile;
    _tile_loadd(4, s.query_tiles[group][0][chunk], 64);
    _tile_loadd(6, hi, 64);
    _tile_dpbssd(0, 6, 4);
    _tile_loadd(7, hi + kChunks * kTile, 64);
    _tile_dpbssd(1, 7, 4);
    _tile_loadd(6, hi + 2 * kChunks * kTile, 64);
    _tile_dpbssd(2, 6, 4);
    _tile_loadd(7, hi + 3 * kChunks * kTile, 64);
    _tile_dpbssd(3, 7, 4);
    if (depth == kPlanes) {
      _tile_loadd(5, s.query_tiles[group][1][chunk], 64);
      _tile_loadd(6, lo, 64);
      _tile_dpbusd(0, 6, 5);
      _tile_loadd(7, lo + kChunks * kTile, 64);
      _tile_dpbusd(1, 7, 5);
      _tile_loadd(6, lo + 2 * kChunks * kTile, 64);
      _tile_dpbusd(2, 6, 5);
      _tile_loadd(7, lo + 3 * kChunks * kTile, 64);
      _tile_dpbusd(3, 7, 5);
    }
  }
}

template <int kDim>
PLIANT_KV_AMX_INLINE void StoreKeySums(int group, int half, Scratch<kDim>& s) {
  _tile_stored(0, s.key_sums[group][half][0], 64);
  _tile_stored(1, s.key_sums[group][half][1], 64);
  _tile_stored(2, s.key_sums[group][half][2], 64);
  _tile_stored(3, s.key_sums[group][half][3], 64);
}

/// Columns 4 part .. 4 part + 3 of row `row` of four sum tiles, tile t in lane t.
PLIANT_KV_AMX_INLINE __m512i FourTiles(const std::int32_t (*sums)[kVector][16], int row, int part) {
  const auto* at = reinterpret_cast<const __m128i*>(sums[0][row]) + part;
  constexpr int kNext = kTile / 16;
  __m512i v = _mm512_castsi128_si512(_mm_load_si128(at));
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_load_si128(at + kNext));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_load_si128(at + 2 * kNext));
  return _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_load_si128(at + 3 * kNext));
}

/// Integer dot products of tokens 16k .. 16k + 15 of a half with the 4 columns of a group, a vector
/// each.
PLIANT_KV_AMX_INLINE void JoinSums(const std::int32_t (*sums)[kVector][16], int k, __m512i sum[4]) {
  __m512i v[4];
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) {
    const int row = 4 * k + b;
    v[b] = _mm512_add_epi32(_mm512_slli_epi32(FourTiles(sums, row, 0), 8), FourTiles(sums, row, 1));
  }
  // From [lane t][column] of token 4t + b, for each b, to [lane t][b] for each column.
  const __m512i a0 = _mm512_unpacklo_epi32(v[0], v[1]), a1 = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i a2 = _mm512_unpacklo_epi32(v[2], v[3]), a3 = _mm512_unpackhi_epi32(v[2], v[3]);
  sum[0] = _mm512_unpacklo_epi64(a0, a2);
  sum[1] = _mm512_unpackhi_epi64(a0, a2);
  sum[2] = _mm512_unpacklo_epi64(a1, a3);
  sum[3] = _mm512_unpackhi_epi64(a1, a3);
}

/// Logits of 16 tokens (`sixteen` of the step) for one group into s.logits[group][column][token].
template <int kDim>
PLIANT_KV_AMX_INLINE void StoreLogits(const QueryTile& tile, int group, int columns, int first,
                                      int sixteen, bool masked, Scratch<kDim>& s) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const int n = kVector * sixteen;
  __m512i sum[4];
  JoinSums(s.key_sums[group][sixteen / 4], sixteen % 4, sum);
  const __m512 key = _mm512_load_ps(s.scales.key + n);
  const __m512 log_value = _mm512_load_ps(s.scales.log_value + n);
#pragma GCC unroll 4
  for (int c = 0; c < kGroup; ++c) {
    if (c >= columns) break;
    const __m512 scale = _mm512_set1_ps(s.state[group].query_scale[c]);
    __m512 logit = Logit(sum[c], key, scale, log_value);
    if (masked) {
      const int limit = tile.first_position + (group * kGroup + c) / tile.group - first - n;
      logit = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY),
                                 _mm512_cmple_epi32_mask(lanes, _mm512_set1_epi32(limit)), logit);
    }
    _mm512_store_ps(s.logits[group][c] + n, logit);
  }
}

struct StepSum {
  float maximum;
  float total;
  std::int32_t constant;
};

/// Softmax of column `c` of a group over a step: its weights go into the left operands. `depth` is
/// of the V they will meet.
template <int kDim>
PLIANT_KV_AMX_INLINE StepSum StoreWeights(int group, int c, int depth, Scratch<kDim>& s) {
  const float* logits = s.logits[group][c];
  __m512 largest = _mm512_set1_ps(kNoLogit);
#pragma GCC unroll 8
  for (int n = 0; n < kStep; n += kVector) {
    largest = _mm512_max_ps(_mm512_load_ps(logits + n), largest);
  }
  const float maximum = _mm512_reduce_max_ps(largest);
  const __m512 base = _mm512_set1_ps(maximum - kWeightBits);
  __m512 total = _mm512_setzero_ps();
  __m512i high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    __m512i w[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const int n = half * kHalf + 16 * k;
      const __m512 p = Exp2(_mm512_sub_ps(_mm512_load_ps(logits + n), base));
      const __m512 inverse = _mm512_load_ps(s.scales.inverse_value + n);
      // The wide kernel sums in the same order: a lane's tokens 16 apart, then across lanes.
      total = n == 0 ? _mm512_mul_ps(p, inverse) : _mm512_fmadd_ps(p, inverse, total);
      w[k] = _mm512_cvtps_epi32(p);
    }
    // Lane l of the packed bytes: tokens 4l .. 4l + 3 of k = 0, 1, 2, 3, which is row order 4l + k
    // of V's tiles.
    const __m512i low = _mm512_packus_epi32(w[0], w[1]);
    const __m512i high = _mm512_packus_epi32(w[2], w[3]);
    const __m512i byte = _mm512_set1_epi16(0xff);
    const __m512i hi = _mm512_packus_epi16(_mm512_srli_epi16(low, 8), _mm512_srli_epi16(high, 8));
    const __m512i lo =
        _mm512_packus_epi16(_mm512_and_si512(low, byte), _mm512_and_si512(high, byte));
    low_sum = _mm512_dpbusd_epi32(low_sum, lo, _mm512_set1_epi8(1));
    if (depth == 2) high_sum = _mm512_dpbusd_epi32(high_sum, hi, _mm512_set1_epi8(1));
    std::byte* hi_pass = s.weights[group][0][half];
    std::byte* lo_pass = s.weights[group][1][half];
    _mm512_store_si512(hi_pass + 64 * c, hi);
    _mm512_store_si512(hi_pass + 64 * (kGroup + c), lo);
    _mm512_store_si512(lo_pass + 64 * (kGroup + c), hi);
  }
  const __m512 t8 = _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0x4e));
  const __m512 t4 = _mm512_add_ps(t8, _mm512_shuffle_f32x4(t8, t8, 0xb1));
  const __m512 t2 = _mm512_add_ps(t4, _mm512_shuffle_ps(t4, t4, 0x4e));
  const __m512 t1 = _mm512_add_ps(t2, _mm512_shuffle_ps(t2, t2, 0xb1));
  // What counts: all of a weight where lo is 128 for certain, else its low byte (kv_amx.h).
  const __m512i counted = _mm512_add_epi32(low_sum, _mm512_slli_epi32(high_sum, 8));
  return {maximum, _mm512_cvtss_f32(t1), _mm512_reduce_add_epi32(counted) >> 1};
}

/// Weights of one group, and how they change its output.
template <int kDim>
PLIANT_KV_AMX void SoftmaxOfGroup(int group, int columns, int depth, Scratch<kDim>& s) {
  auto& state = s.state[group];
  alignas(64) float maximum[kVector], total[kVector];
  _mm512_store_ps(maximum, _mm512_set1_ps(kNoLogit));
  _mm512_store_ps(total, _mm512_setzero_ps());
  for (int c = 0; c < columns; ++c) {
    KeepTilesAwake<3>();
    const StepSum sum = StoreWeights<kDim>(group, c, depth, s);
    maximum[c] = sum.maximum;
    total[c] = sum.total;
    state.constant[c] = sum.constant;
  }
  const Rescale factors =
      Advance(_mm512_load_ps(maximum), _mm512_load_ps(total), state.maximum, state.total);
  _mm512_store_ps(state.keep, factors.keep);
  _mm512_store_ps(state.add, factors.add);
}

/// Starts the sums of pair `pair` of the span of V at hand, in tiles 0 and 1; tiles 4 to 7 hold the
/// weights.
template <int kDim>
PLIANT_KV_AMX_INLINE void MultiplyValues(int pair, int depth, Scratch<kDim>& s) {
  const std::byte* hi = s.values[0] + 4 * pair * kTile;
  const std::byte* lo = s.values[1] + 4 * pair * kTile;
  PLIANT_KV_FENCE();
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(2, hi, 64);
  _tile_dpbusd(0, 4, 2);
  _tile_loadd(3, hi + 2 * kTile, 64);
  _tile_dpbusd(1, 4, 3);
  _tile_loadd(2, hi + kTile, 64);
  _tile_dpbusd(0, 5, 2);
  _tile_loadd(3, hi + 3 * kTile, 64);
  _tile_dpbusd(1, 5, 3);
  if (depth == kPlanes) {
    _tile_loadd(2, lo, 64);
    _tile_dpbuud(0, 6, 2);
    _tile_loadd(3, lo + 2 * kTile, 64);
    _tile_dpbuud(1, 6, 3);
    _tile_loadd(2, lo + kTile, 64);
    _tile_dpbuud(0, 7, 2);
    _tile_loadd(3, lo + 3 * kTile, 64);
    _tile_dpbuud(1, 7, 3);
  }
}

/// output[column][tile] = output * keep + sums * add for pair `pair` of all spans.
template <int kDim>
PLIANT_KV_AMX_INLINE void AddSums(int group, int columns, int pair,
                                  const std::int32_t (*sums)[kVector][16], Scratch<kDim>& s) {
  const auto& state = s.state[group];
#pragma GCC unroll 4
  for (int c = 0; c < kGroup; ++c) {
    if (c >= columns) break;
    const __m512i constant = _mm512_set1_epi32(state.constant[c]);
    const __m512 keep = _mm512_set1_ps(state.keep[c]);
    const __m512 add = _mm512_set1_ps(state.add[c]);
    float* to = s.output[group * kGroup + c] + 32 * pair;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i, to += 16) {
      const __m512i v = _mm512_add_epi32(
          _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[i][c]), 8), constant),
          _mm512_load_si512(sums[i][kGroup + c]));
      const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(v), add);
      _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), keep, part));
    }
  }
}

/// A step as the phases see it.
struct Step {
  int first = 0;
  PlaneSource key;
  PlaneSource value;
};

template <int kDim>
PLIANT_KV_AMX_INLINE void UnpackKeyHalf(const PlaneSource& key, Prefetcher& ahead, int half,
                                        Scratch<kDim>& s) {
  const TileBuffer tiles = {s.keys[0], s.keys[1]};
  switch (key.depth) {
    case 1:
      UnpackKeys<kDim, 1, 7>(key, ahead, half, tiles);
      break;
    case 2:
      UnpackKeys<kDim, 2, 7>(key, ahead, half, tiles);
      break;
    default:
      UnpackKeys<kDim, 4, 7>(key, ahead, half, tiles);
      break;
  }
}

template <int kDim, int kAwake>
PLIANT_KV_AMX_INLINE void UnpackSpan(const PlaneSource& value, Prefetcher& ahead, int span,
                                     Scratch<kDim>& s) {
  const TileBuffer tiles = {s.values[0], s.values[1]};
  switch (value.depth) {
    case 1:
      UnpackValueSpan<kDim, 1, kAwake>(value, ahead, span, tiles);
      break;
    case 2:
      UnpackValueSpan<kDim, 2, kAwake>(value, ahead, span, tiles);
      break;
    default:
      UnpackValueSpan<kDim, 4, kAwake>(value, ahead, span, tiles);
      break;
  }
}

/// K of a step to sums for every group. The last sums are left in their tiles.
template <int kDim>
PLIANT_KV_AMX void KeyPhase(const Step& step, int groups, Prefetcher& ahead, Scratch<kDim>& s) {
  for (int half = 0; half < kHalves; ++half) {
    UnpackKeyHalf<kDim>(step.key, ahead, half, s);
    if (half > 0) StoreKeySums<kDim>(groups - 1, half - 1, s);
    for (int g = 0; g < groups; ++g) {
      MultiplyKeys<kDim>(g, step.key.depth, s);
      if (g + 1 < groups) StoreKeySums<kDim>(g, half, s);
    }
  }
}

/// The sums of V in tiles 0 and 1 that are yet to be stored and added.
struct Pending {
  int group = -1;  // -1: none
  int pair = 0;
};
template <int kDim>
PLIANT_KV_AMX_INLINE void StoreAndAdd(Pending& pending, const QueryTile& tile, Scratch<kDim>& s) {
  if (pending.group < 0) return;
  auto* sums = s.value_sums[pending.pair % 2];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  const int columns = std::min(kGroup, tile.Columns() - pending.group * kGroup);
  AddSums<kDim>(pending.group, columns, pending.pair, sums, s);
  pending.group = -1;
}

/// V of `before` (where there is one) meets its weights; between products the logits of `step`
/// (where there is one) are made.
template <int kDim>
PLIANT_KV_AMX void ValuePhase(const QueryTile& tile, int groups, const Step* before,
                              const Step* step, Prefetcher& ahead, Scratch<kDim>& s) {
  constexpr int kSpanPairs = kSpanTiles<kDim> / 2;
  constexpr int kSixteens = kStep / kVector / (kDim / 32);  // of logits beside one product
  const bool masked =
      step != nullptr && tile.rows > 1 && step->first + kStep > tile.first_position + 1;
  Pending pending;
  bool keys_stored = step == nullptr;
  for (int span = 0; span < kSpans<kDim>; ++span) {
    if (before != nullptr) {
      // At first tiles 0 to 3 hold sums of keys, later 4 to 7 hold weights.
      if (span == 0) {
        UnpackSpan<kDim, 7>(before->value, ahead, span, s);
      } else {
        UnpackSpan<kDim, 3>(before->value, ahead, span, s);
      }
    }
    if (!keys_stored) StoreKeySums<kDim>(groups - 1, kHalves - 1, s);
    keys_stored = true;
    for (int g = 0; g < groups; ++g) {
      const int columns = std::min(kGroup, tile.Columns() - g * kGroup);
      for (int i = 0; i < kSpanPairs; ++i) {
        const int pair = span * kSpanPairs + i;
        StoreAndAdd<kDim>(pending, tile, s);
        if (before != nullptr) {
          if (i == 0 && (groups > 1 || span == 0)) {
            PLIANT_KV_FENCE();
            _tile_loadd(4, s.weights[g][0][0], 64);
            _tile_loadd(5, s.weights[g][0][1], 64);
            _tile_loadd(6, s.weights[g][1][0], 64);
            _tile_loadd(7, s.weights[g][1][1], 64);
          }
          MultiplyValues<kDim>(i, before->value.depth, s);
          pending = {g, pair};
        }
        if (step == nullptr) continue;
        for (int n = 0; n < kSixteens; ++n) {
          StoreLogits<kDim>(tile, g, columns, step->first, pair * kSixteens + n, masked, s);
        }
      }
    }
  }
  StoreAndAdd<kDim>(pending, tile, s);
}

/// Hands out the logits of K alone, of every column and token of the step whose logits are at hand.
/// `first` is the step's first token, in its split.
template <int kDim>
PLIANT_KV_AMX void ExportLogits(const QueryTile& tile, int first, Scratch<kDim>& s) {
  for (int column = 0; column < tile.Columns(); ++column) {
    const float* logits = s.logits[column / kGroup][column % kGroup];
    float* to = tile.weights + column * kSplitTokens + first;
#pragma GCC unroll 8
    for (int n = 0; n < kStep; n += kVector) {
      // Where a token is not there both are -infinity, and their difference is no number: max takes
      // its second operand then.
      _mm512_storeu_ps(to + n, _mm512_max_ps(_mm512_sub_ps(_mm512_load_ps(logits + n),
                                                           _mm512_load_ps(s.scales.log_value + n)),
                                             _mm512_set1_ps(-INFINITY)));
    }
  }
}

template <int kDim>
PLIANT_KV_AMX void Attend(const AttentionHead& head, const QueryTile& tile, int first, int end,
                          float* partials, Scratch<kDim>& s) {
  const TileScope tiles;
  Prefetcher ahead;
  ahead.Start(head, first, end);
  ahead.IssueAll();
  PrepareQueries<kDim>(tile, s);
  const int groups = (tile.Columns() + kGroup - 1) / kGroup;
  Step steps[2];
  const Step* before = nullptr;
  for (int at = first, i = 0; at < end; at += kStep) {
    Step& step = steps[i];
    step.first = at;
    ahead.Start(head, at + kStep, end);
    if (!DescribeStep(head, at, end, step.key, step.value)) continue;
    KeyPhase<kDim>(step, groups, ahead, s);
    LoadScales(head, at, end, s.scales);
    ValuePhase<kDim>(tile, groups, before, &step, ahead, s);
    if (tile.weights != nullptr) ExportLogits<kDim>(tile, at - first, s);
    for (int g = 0; g < groups; ++g) {
      SoftmaxOfGroup<kDim>(g, std::min(kGroup, tile.Columns() - g * kGroup), step.value.depth, s);
    }
    before = &step;
    i ^= 1;
  }
  if (before != nullptr) ValuePhase<kDim>(tile, groups, before, nullptr, ahead, s);
  for (int column = 0; column < tile.Columns(); ++column) {
    float* to = partials + column * PartialFloats(kDim);
    for (int t = 0; t < kDim / 16; ++t) {
      for (int i = 0; i < 16; ++i) {
        to[ValueDim<kDim>(t, i)] = s.output[column][16 * t + i] * kOutputUnit;
      }
    }
    to[kDim] = s.state[column / kGroup].maximum[column % kGroup];
    to[kDim + 1] = s.state[column / kGroup].total[column % kGroup];
  }
}

}  // namespace

std::size_t NarrowScratchBytes(int head_dim) {
  return head_dim == 64    ? sizeof(Scratch<64>)
         : head_dim == 128 ? sizeof(Scratch<128>)
                           : sizeof(Scratch<256>);
}

void AttendNarrow(const AttentionHead& head, const QueryTile& tile, int first, int end,
                  float* partials, std::byte* scratch) {
  switch (head.head_dim) {
    case 64:
      return Attend<64>(head, tile, first, end, partials, *reinterpret_cast<Scratch<64>*>(scratch));
    case 128:
      return Attend<128>(head, tile, first, end, partials,
                         *reinterpret_cast<Scratch<128>*>(scratch));
    default:
      return Attend<256>(head, tile, first, end, partials,
                         *reinterpret_cast<Scratch<256>*>(scratch));
  }
}

}  // namespace pliant::kv_amx

#endif  // x86_64
