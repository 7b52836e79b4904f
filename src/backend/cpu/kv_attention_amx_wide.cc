// Room: backend. AMX attention for many columns (prefill): bound by the softmax, so everything is
// laid out for vectors over 16 columns.
//
// Scores come as [token][column] (K's tiles left, 16 columns of the query right), so maxima and
// sums run down vectors and masks are compares; weights go back as right operands with shifts
// alone; V is transposed once a step, [dim][token], and shared by up to kWideColumns columns. The
// results are O^T, [dim][column], turned once a split.
#if defined(__x86_64__)

#include "backend/cpu/kv_amx.h"
#include "backend/cpu/kv_amx_unpack.h"

namespace pliant::kv_amx {
namespace {

constexpr int kColumnTiles = kWideColumns / kVector;
constexpr int kHalves = kStep / kHalf;
constexpr int kKeyTiles = kStep / 16;

/// Sums of one tile: hh, x.
using Sums = std::int32_t[2][16][kVector];

template <int kDim>
struct alignas(64) Scratch {
  std::byte keys[2][kHalves][kHalf * kDim];    // [hi, lo]
  std::byte values[2][kHalves][kHalf * kDim];  // [hi, lo], transposed
  std::byte planes[kPlanes * kTile];
  std::byte query_tiles[kColumnTiles][2][kDim / 64][kTile];  // [qh, ql]
  float output[kColumnTiles][kDim / 16][16][kVector];
  Sums sums[2];
  float logits[kStep][kVector];
  std::byte weights[2][kHalves][kTile];  // [ph, pl]
  StepScales scales;
  QueryColumn<kDim> columns[kVector];
  float query_scale[kColumnTiles][kVector];
  std::int32_t query_sum[kColumnTiles][3][kVector];  // what x starts from, by DepthIndex
  std::int32_t limit[kColumnTiles][kVector];         // the last position a column sees
  float maximum[kColumnTiles][kVector];
  float total[kColumnTiles][kVector];
  // How the weights of the column tile that waits for its V change the output.
  float keep[kVector];
  float add[kVector];
  std::int32_t constant[kVector];
};

template <int kDim>
PLIANT_KV_AMX void PrepareQueries(const QueryTile& tile, Scratch<kDim>& s) {
  for (int ct = 0; ct * kVector < tile.Columns(); ++ct) {
    for (int i = 0; i < kVector; ++i) {
      // Past the end the last column again: its result is not used.
      const int column = std::min(ct * kVector + i, tile.Columns() - 1);
      QuantizeQuery<kDim>(tile.query + column / tile.group * tile.query_stride +
                              static_cast<std::ptrdiff_t>(column % tile.group) * kDim,
                          tile.softmax_scale, s.columns[i]);
      s.query_scale[ct][i] = s.columns[i].scale;
      for (int d = 0; d < 3; ++d) s.query_sum[ct][d][i] = s.columns[i].constant[d];
      s.limit[ct][i] = tile.first_position + column / tile.group;
    }
    for (int chunk = 0; chunk < kDim / 64; ++chunk) {
      const std::int8_t* rows[2][16];
      for (int i = 0; i < kVector; ++i) {
        rows[0][i] = s.columns[i].hi + 64 * chunk;
        rows[1][i] = s.columns[i].lo + 64 * chunk;
      }
      StoreQueryTile(rows[0], s.query_tiles[ct][0][chunk]);
      StoreQueryTile(rows[1], s.query_tiles[ct][1][chunk]);
    }
    _mm512_store_ps(s.maximum[ct], _mm512_set1_ps(kNoLogit));
    _mm512_store_ps(s.total[ct], _mm512_setzero_ps());
    std::memset(s.output[ct], 0, sizeof(s.output[ct]));
  }
}

/// Starts the sums of key tile `t` (0 .. 7 of the step) against column tile `ct`, in tiles 0 and 1
/// or, for odd t, 2 and 3. With head dim 64 the query tiles are loaded with t = 0 and stay in 6
/// and 7.
template <int kDim>
PLIANT_KV_AMX_INLINE void MultiplyKeys(int ct, int t, int depth, Scratch<kDim>& s) {
  constexpr int kChunks = kDim / 64;
  const std::ptrdiff_t at = t % 4 * kChunks * kTile;
  const std::byte* hi = s.keys[0][t / 4] + at;
  const std::byte* lo = s.keys[1][t / 4] + at;
  const std::int32_t* start = s.query_sum[ct][DepthIndex(depth)];
  PLIANT_KV_FENCE();
  if (t % 2 == 0) {
    _tile_zero(0);
    _tile_loadd(1, start, 0);  // stride 0: the same row for every token
  } else {
    _tile_zero(2);
    _tile_loadd(3, start, 0);
  }
#pragma GCC unroll 4
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (kChunks > 1 || t == 0) {
      _tile_loadd(6, s.query_tiles[ct][0][chunk], 64);
      _tile_loadd(7, s.query_tiles[ct][1][chunk], 64);
    }
    _tile_loadd(4, hi + chunk * kTile, 64);
    if (depth == kPlanes) _tile_loadd(5, lo + chunk * kTile, 64);
    if (t % 2 == 0) {
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(0, 4, 6);
      if (depth == kPlanes) _tile_dpbusd(1, 5, 6);
    } else {
      _tile_dpbssd(3, 4, 7);
      _tile_dpbssd(2, 4, 6);
      if (depth == kPlanes) _tile_dpbusd(3, 5, 6);
    }
  }
}

PLIANT_KV_AMX_INLINE __m512i JoinSums(const Sums& sums, int row) {
  return _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[0][row]), 8),
                          _mm512_load_si512(sums[1][row]));
}

/// Logits of key tile t; returns the running maximum.
template <int kDim, bool kMasked>
PLIANT_KV_AMX_INLINE __m512 StoreLogits(int ct, int t, int first, const Sums& sums, __m512 largest,
                                        Scratch<kDim>& s) {
  const __m512 query_scale = _mm512_load_ps(s.query_scale[ct]);
  const __m512i limit = _mm512_sub_epi32(_mm512_load_si512(s.limit[ct]), _mm512_set1_epi32(first));
  const int token = kHalf * (t / 4) + 4 * (t % 4);
  const float* key = s.scales.key + token;
  const float* log_value = s.scales.log_value + token;
  float* to = s.logits[token];
#pragma GCC unroll 16
  for (int row = 0; row < 16; ++row) {
    const int n = 16 * (row / 4) + row % 4;
    __m512 logit = Logit(JoinSums(sums, row), _mm512_set1_ps(key[n]), query_scale,
                         _mm512_set1_ps(log_value[n]));
    if constexpr (kMasked) {
      logit =
          _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY),
                             _mm512_cmple_epi32_mask(_mm512_set1_epi32(token + n), limit), logit);
    }
    _mm512_store_ps(to + n * kVector, logit);
    largest = _mm512_max_ps(logit, largest);
  }
  return largest;
}

/// Softmax of a step for one column tile: weights as right operands [quad 16][column 16][4 tokens],
/// and what they do to the output. Sums of weights run as in the narrow kernel: tokens 16 apart one
/// behind the other, then across the 16 places.
template <int kDim>
PLIANT_KV_AMX void StoreWeights(int ct, __m512 maximum, int depth, Scratch<kDim>& s) {
  const __m512i bytes = _mm512_set1_epi32(0x00ff00ff);
  __m512 place[4][4];
  const __m512 base = _mm512_sub_ps(maximum, _mm512_set1_ps(kWeightBits));
  const __m512i one = _mm512_set1_epi8(1);
  __m512i high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    KeepTilesAwake<5>();  // tiles 0 and 1 hold the first keys of the next column tile
#pragma GCC unroll 2
    for (int hk = 0; hk < 8; ++hk) {
      const int half = hk / 4;
      const int k = hk % 4;
      __m512i w[4];
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) {
        const int n = half * kHalf + 16 * k + 4 * t + b;
        const __m512 p = Exp2(_mm512_sub_ps(_mm512_load_ps(s.logits[n]), base));
        const __m512 inverse = _mm512_set1_ps(s.scales.inverse_value[n]);
        place[t][b] =
            hk == 0 ? _mm512_mul_ps(p, inverse) : _mm512_fmadd_ps(p, inverse, place[t][b]);
        w[b] = _mm512_cvtps_epi32(p);
      }
      const __m512i even = _mm512_or_si512(w[0], _mm512_slli_epi32(w[2], 16));
      const __m512i odd = _mm512_or_si512(w[1], _mm512_slli_epi32(w[3], 16));
      const __m512i hi = _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi32(even, 8), odd, 0xca);
      const __m512i lo = _mm512_ternarylogic_epi32(bytes, even, _mm512_slli_epi32(odd, 8), 0xca);
      _mm512_store_si512(s.weights[0][half] + 64 * (4 * k + t), hi);
      _mm512_store_si512(s.weights[1][half] + 64 * (4 * k + t), lo);
      low_sum = _mm512_dpbusd_epi32(low_sum, lo, one);
      if (depth == 2) high_sum = _mm512_dpbusd_epi32(high_sum, hi, one);
    }
  }
  __m512 across[4];
  for (int b = 0; b < 4; ++b) {
    across[b] = _mm512_add_ps(_mm512_add_ps(place[0][b], place[2][b]),
                              _mm512_add_ps(place[1][b], place[3][b]));
  }
  const __m512 total =
      _mm512_add_ps(_mm512_add_ps(across[0], across[2]), _mm512_add_ps(across[1], across[3]));
  const Rescale factors = Advance(maximum, total, s.maximum[ct], s.total[ct]);
  _mm512_store_ps(s.keep, factors.keep);
  _mm512_store_ps(s.add, factors.add);
  const __m512i counted = _mm512_add_epi32(low_sum, _mm512_slli_epi32(high_sum, 8));
  _mm512_store_si512(s.constant, _mm512_srai_epi32(counted, 1));
}

/// Starts the sums of V tile `tile` against the weights, in tiles 0 and 1 (odd tiles: 2 and 3). All
/// four tiles of weights do not fit beside them, so that they are loaded anew.
template <int kDim>
PLIANT_KV_AMX_INLINE void MultiplyValues(int tile, int depth, Scratch<kDim>& s) {
  PLIANT_KV_FENCE();
  if (tile % 2 == 0) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_zero(2);
    _tile_zero(3);
  }
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    _tile_loadd(6, s.weights[0][half], 64);
    _tile_loadd(7, s.weights[1][half], 64);
    _tile_loadd(4, s.values[0][half] + tile * kTile, 64);
    if (depth == kPlanes) _tile_loadd(5, s.values[1][half] + tile * kTile, 64);
    if (tile % 2 == 0) {
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(0, 4, 6);
      if (depth == kPlanes) _tile_dpbuud(1, 5, 6);
    } else {
      _tile_dpbsud(3, 4, 7);
      _tile_dpbsud(2, 4, 6);
      if (depth == kPlanes) _tile_dpbuud(3, 5, 6);
    }
  }
}

template <int kDim>
PLIANT_KV_AMX_INLINE void AddSums(int ct, int tile, const Sums& sums, Scratch<kDim>& s) {
  const __m512 keep = _mm512_load_ps(s.keep);
  const __m512 add = _mm512_load_ps(s.add);
  const __m512i constant = _mm512_load_si512(s.constant);
  float* to = s.output[ct][tile][0];
#pragma GCC unroll 16
  for (int row = 0; row < 16; ++row, to += kVector) {
    const __m512i v = _mm512_add_epi32(JoinSums(sums, row), constant);
    const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(v), add);
    _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), keep, part));
  }
}

/// One step over the column tiles that see it, as a pipeline of products: first the keys of a
/// column tile (kKeyTiles products), then the values of the column tile before it, whose weights
/// have long been stored then. A product's sums leave their tiles only after vectors have worked on
/// the product before it: a tile store that waits for its sums fills the scheduler and stops
/// everything.
template <int kDim>
class StepPipeline {
 public:
  PLIANT_KV_AMX_INLINE StepPipeline(int first, int key_depth, int value_depth, Scratch<kDim>& s)
      : first_(first), key_depth_(key_depth), value_depth_(value_depth), s_(s) {}

  PLIANT_KV_AMX void Run(int begin, int end) {
    StartKeys(begin, 0);
    for (int ct = begin; ct < end; ++ct) {
      const __m512 largest = s_.limit[ct][0] < first_ + kStep - 1 ? Keys<true>(ct, ct > begin)
                                                                  : Keys<false>(ct, ct > begin);
      if (ct > begin) Values(ct - 1);
      if (ct + 1 < end) StartKeys(ct + 1, 0);
      StoreWeights<kDim>(ct, largest, value_depth_, s_);
    }
    MultiplyValues<kDim>(0, value_depth_, s_);
    Values(end - 1);
  }

 private:
  static constexpr int kValueTiles = kDim / 16;

  PLIANT_KV_AMX_INLINE void StartKeys(int ct, int t) { MultiplyKeys<kDim>(ct, t, key_depth_, s_); }
  /// Sums of product `i` of a kind to memory.
  PLIANT_KV_AMX_INLINE void Store(int i) {
    if (i % 2 == 0) {
      _tile_stored(0, s_.sums[0][0], 64);
      _tile_stored(1, s_.sums[0][1], 64);
    } else {
      _tile_stored(2, s_.sums[1][0], 64);
      _tile_stored(3, s_.sums[1][1], 64);
    }
  }

  /// All logits of a column tile; the products of its keys have begun. Begins its predecessor's
  /// values.
  template <bool kMasked>
  PLIANT_KV_AMX __m512 Keys(int ct, bool values_follow) {
    __m512 largest = _mm512_set1_ps(kNoLogit);
#pragma GCC unroll 2
    for (int t = 0; t < kKeyTiles; ++t) {
      Store(t);
      if (t + 1 < kKeyTiles) {
        StartKeys(ct, t + 1);
      } else if (values_follow) {
        MultiplyValues<kDim>(0, value_depth_, s_);
      }
      largest = StoreLogits<kDim, kMasked>(ct, t, first_, s_.sums[t % 2], largest, s_);
    }
    return largest;
  }

  /// Adds what the weights of a column tile make of V; the first product has begun.
  PLIANT_KV_AMX void Values(int ct) {
#pragma GCC unroll 2
    for (int tile = 0; tile < kValueTiles; ++tile) {
      Store(tile);
      if (tile + 1 < kValueTiles) MultiplyValues<kDim>(tile + 1, value_depth_, s_);
      AddSums<kDim>(ct, tile, s_.sums[tile % 2], s_);
    }
  }

  int first_;
  int key_depth_;
  int value_depth_;
  Scratch<kDim>& s_;
};

template <int kDim>
PLIANT_KV_AMX void UnpackStep(const PlaneSource& key, const PlaneSource& value, Scratch<kDim>& s) {
  Prefetcher none;  // prefill waits for no memory
  for (int half = 0; half < kHalves; ++half) {
    const TileBuffer keys = {s.keys[0][half], s.keys[1][half]};
    const TileBuffer values = {s.values[0][half], s.values[1][half]};
    switch (key.depth) {
      case 1:
        UnpackKeys<kDim, 1, 5>(key, none, half, keys);
        break;
      case 2:
        UnpackKeys<kDim, 2, 5>(key, none, half, keys);
        break;
      default:
        UnpackKeys<kDim, 4, 5>(key, none, half, keys);
        break;
    }
    switch (value.depth) {
      case 1:
        UnpackValuesTransposed<kDim, 1, 5>(value, half, s.planes, values);
        break;
      case 2:
        UnpackValuesTransposed<kDim, 2, 5>(value, half, s.planes, values);
        break;
      default:
        UnpackValuesTransposed<kDim, 4, 5>(value, half, s.planes, values);
        break;
    }
  }
}

/// Turns O^T into rows: a pair of tiles holds the even and the odd dims of 32 neighbouring ones.
template <int kDim>
PLIANT_KV_AMX void StorePartials(const QueryTile& tile, float* partials, Scratch<kDim>& s) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 unit = _mm512_set1_ps(kOutputUnit);
  for (int ct = 0; ct * kVector < tile.Columns(); ++ct) {
    const int columns = std::min(kVector, tile.Columns() - ct * kVector);
    for (int pair = 0; pair < kDim / 32; ++pair) {
      __m512i even[16], odd[16];
      for (int i = 0; i < 16; ++i) {
        even[i] = _mm512_load_si512(s.output[ct][2 * pair][i]);
        odd[i] = _mm512_load_si512(s.output[ct][2 * pair + 1][i]);
      }
      Transpose16(even);
      Transpose16(odd);
      for (int i = 0; i < columns; ++i) {
        float* to = partials + (ct * kVector + i) * PartialFloats(kDim) + 32 * pair;
        const __m512 a = _mm512_castsi512_ps(even[i]);
        const __m512 b = _mm512_castsi512_ps(odd[i]);
        _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_permutex2var_ps(a, low, b), unit));
        _mm512_storeu_ps(to + 16, _mm512_mul_ps(_mm512_permutex2var_ps(a, high, b), unit));
      }
    }
    for (int i = 0; i < columns; ++i) {
      float* to = partials + (ct * kVector + i) * PartialFloats(kDim) + kDim;
      to[0] = s.maximum[ct][i];
      to[1] = s.total[ct][i];
    }
  }
}

template <int kDim>
PLIANT_KV_AMX void Attend(const AttentionHead& head, const QueryTile& tile, int first, int end,
                          float* partials, Scratch<kDim>& s) {
  const TileScope tiles;
  PrepareQueries<kDim>(tile, s);
  PlaneSource key, value;
  for (int at = first; at < end; at += kStep) {
    if (!DescribeStep(head, at, end, key, value)) continue;
    LoadScales(head, at, end, s.scales);
    UnpackStep<kDim>(key, value, s);
    // Limits ascend: the column tiles that see something of the step are the last ones.
    const int end_tile = (tile.Columns() + kVector - 1) / kVector;
    int begin = 0;
    while (begin < end_tile && s.limit[begin][kVector - 1] < at) ++begin;
    if (begin < end_tile) StepPipeline<kDim>(at, key.depth, value.depth, s).Run(begin, end_tile);
  }
  StorePartials<kDim>(tile, partials, s);
}

}  // namespace

std::size_t WideScratchBytes(int head_dim) {
  return head_dim == 64    ? sizeof(Scratch<64>)
         : head_dim == 128 ? sizeof(Scratch<128>)
                           : sizeof(Scratch<256>);
}

void AttendWide(const AttentionHead& head, const QueryTile& tile, int first, int end,
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
