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

/// Sums of one tile: hh, x, ll.
using Sums = std::int32_t[3][16][kVector];

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
  std::int32_t query_sum[kColumnTiles][kVector];  // what x starts from at 8 bits
  std::int32_t limit[kColumnTiles][kVector];      // the last position a column sees
  float maximum[kColumnTiles][kVector];
  float total[kColumnTiles][kVector];
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
      s.query_sum[ct][i] = s.columns[i].sum >> 1;
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

/// Sums of key tile `t` (0 .. 7 of the step) against column tile `ct`.
template <int kDim, int kDepth>
PLIANT_KV_AMX_INLINE void MultiplyKeys(int ct, int t, Scratch<kDim>& s, Sums& sums) {
  constexpr int kChunks = kDim / 64;
  const std::ptrdiff_t at = t % 4 * kChunks * kTile;
  const std::byte* hi = s.keys[0][t / 4] + at;
  const std::byte* lo = s.keys[1][t / 4] + at;
  PLIANT_KV_FENCE();
  _tile_zero(0);
  if constexpr (kDepth == 2) {
    _tile_loadd(1, s.query_sum[ct], 0);
  } else {
    _tile_zero(1);
  }
  if constexpr (kDepth == kPlanes) _tile_zero(2);
#pragma GCC unroll 4
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    _tile_loadd(4, hi + chunk * kTile, 64);
    _tile_loadd(6, s.query_tiles[ct][0][chunk], 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, s.query_tiles[ct][1][chunk], 64);
    _tile_dpbssd(1, 4, 7);
    if constexpr (kDepth == kPlanes) {
      _tile_loadd(5, lo + chunk * kTile, 64);
      _tile_dpbusd(2, 5, 7);
      _tile_dpbusd(1, 5, 6);
    }
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if constexpr (kDepth == kPlanes) _tile_stored(2, sums[2], 64);
}

PLIANT_KV_AMX_INLINE __m512i JoinSums(const Sums& sums, int row, bool low) {
  __m512i v = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[0][row]), 8),
                               _mm512_load_si512(sums[1][row]));
  if (low) v = _mm512_add_epi32(v, _mm512_srai_epi32(_mm512_load_si512(sums[2][row]), 8));
  return v;
}

/// Logits of key tile t; returns the running maximum.
template <int kDim, int kDepth, bool kMasked>
PLIANT_KV_AMX_INLINE __m512 StoreLogits(int ct, int t, int first, const Sums& sums, __m512 largest,
                                        Scratch<kDim>& s) {
  const __m512 query_scale = _mm512_load_ps(s.query_scale[ct]);
  const __m512i limit = _mm512_sub_epi32(_mm512_load_si512(s.limit[ct]), _mm512_set1_epi32(first));
#pragma GCC unroll 4
  for (int row = 0; row < 16; ++row) {
    const int n = kHalf * (t / 4) + 16 * (row / 4) + 4 * (t % 4) + row % 4;
    __m512 logit = Logit(JoinSums(sums, row, kDepth == kPlanes), _mm512_set1_ps(s.scales.key[n]),
                         query_scale, _mm512_set1_ps(s.scales.exponent[n]));
    if constexpr (kMasked) {
      logit = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY),
                                 _mm512_cmple_epi32_mask(_mm512_set1_epi32(n), limit), logit);
    }
    _mm512_store_ps(s.logits[n], logit);
    largest = _mm512_max_ps(logit, largest);
  }
  return largest;
}

template <int kDim, int kDepth, bool kMasked>
PLIANT_KV_AMX __m512 LogitsOfStep(int ct, int first, Scratch<kDim>& s) {
  __m512 largest = _mm512_set1_ps(kNoLogit);
  // One tile ahead: the tile unit works on the next while vectors turn this one into logits.
  MultiplyKeys<kDim, kDepth>(ct, 0, s, s.sums[0]);
  for (int t = 0; t < kKeyTiles; ++t) {
    if (t + 1 < kKeyTiles) MultiplyKeys<kDim, kDepth>(ct, t + 1, s, s.sums[(t + 1) % 2]);
    largest = StoreLogits<kDim, kDepth, kMasked>(ct, t, first, s.sums[t % 2], largest, s);
  }
  return largest;
}

struct StepSum {
  __m512 total;
  __m512i weights;
};

/// Softmax of a step: weights as right operands [quad 16][column 16][4 tokens]. The sums run as in
/// the narrow kernel: tokens 16 apart one behind the other, then across the 16 places.
template <int kDim, bool kWantSum>
PLIANT_KV_AMX StepSum StoreWeights(__m512 maximum, Scratch<kDim>& s) {
  const __m512i bytes = _mm512_set1_epi32(0x00ff00ff);
  __m512 place[4][4];
  StepSum sum;
  sum.weights = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    for (int hk = 0; hk < 8; ++hk) {
      const int half = hk / 4;
      const int k = hk % 4;
      __m512i w[4];
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) {
        const int n = half * kHalf + 16 * k + 4 * t + b;
        const __m512 p = Exp2(_mm512_sub_ps(_mm512_load_ps(s.logits[n]), maximum));
        const __m512 inverse = _mm512_set1_ps(s.scales.inverse_exponent[n]);
        place[t][b] =
            hk == 0 ? _mm512_mul_ps(p, inverse) : _mm512_fmadd_ps(p, inverse, place[t][b]);
        w[b] = _mm512_cvtps_epi32(_mm512_mul_ps(p, _mm512_set1_ps(s.scales.weight[n])));
        if constexpr (kWantSum) sum.weights = _mm512_add_epi32(sum.weights, w[b]);
      }
      const __m512i even = _mm512_or_si512(w[0], _mm512_slli_epi32(w[2], 16));
      const __m512i odd = _mm512_or_si512(w[1], _mm512_slli_epi32(w[3], 16));
      _mm512_store_si512(s.weights[0][half] + 64 * (4 * k + t),
                         _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi32(even, 8), odd, 0xca));
      _mm512_store_si512(s.weights[1][half] + 64 * (4 * k + t),
                         _mm512_ternarylogic_epi32(bytes, even, _mm512_slli_epi32(odd, 8), 0xca));
    }
  }
  __m512 across[4];
  for (int b = 0; b < 4; ++b) {
    across[b] = _mm512_add_ps(_mm512_add_ps(place[0][b], place[2][b]),
                              _mm512_add_ps(place[1][b], place[3][b]));
  }
  sum.total =
      _mm512_add_ps(_mm512_add_ps(across[0], across[2]), _mm512_add_ps(across[1], across[3]));
  return sum;
}

template <int kDim, int kDepth>
PLIANT_KV_AMX_INLINE void MultiplyValues(int tile, Scratch<kDim>& s, Sums& sums) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kDepth == kPlanes) _tile_zero(2);
  _tile_loadd(3, s.values[0][0] + tile * kTile, 64);
  _tile_dpbsud(0, 3, 4);
  _tile_dpbsud(1, 3, 5);
  _tile_loadd(3, s.values[0][1] + tile * kTile, 64);
  _tile_dpbsud(0, 3, 6);
  _tile_dpbsud(1, 3, 7);
  if constexpr (kDepth == kPlanes) {
    _tile_loadd(3, s.values[1][0] + tile * kTile, 64);
    _tile_dpbuud(1, 3, 4);
    _tile_dpbuud(2, 3, 5);
    _tile_loadd(3, s.values[1][1] + tile * kTile, 64);
    _tile_dpbuud(1, 3, 6);
    _tile_dpbuud(2, 3, 7);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if constexpr (kDepth == kPlanes) _tile_stored(2, sums[2], 64);
}

template <int kDim, int kDepth>
PLIANT_KV_AMX_INLINE void AddSums(int ct, int tile, Rescale factors, __m512i constant,
                                  const Sums& sums, Scratch<kDim>& s) {
#pragma GCC unroll 4
  for (int row = 0; row < 16; ++row) {
    __m512i v = JoinSums(sums, row, kDepth == kPlanes);
    if constexpr (kDepth == 2) v = _mm512_add_epi32(v, constant);
    float* to = s.output[ct][tile][row];
    const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(v), factors.add);
    _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), factors.keep, part));
  }
}

template <int kDim, int kDepth>
PLIANT_KV_AMX void ValuesOfStep(int ct, __m512 maximum, Scratch<kDim>& s) {
  constexpr int kTiles = kDim / 16;
  const StepSum sum = StoreWeights<kDim, kDepth == 2>(maximum, s);
  const Rescale factors = Advance(maximum, sum.total, s.maximum[ct], s.total[ct]);
  const __m512i constant = _mm512_srai_epi32(sum.weights, 1);
  PLIANT_KV_FENCE();
  _tile_loadd(4, s.weights[0][0], 64);
  _tile_loadd(5, s.weights[1][0], 64);
  _tile_loadd(6, s.weights[0][1], 64);
  _tile_loadd(7, s.weights[1][1], 64);
  MultiplyValues<kDim, kDepth>(0, s, s.sums[0]);
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile + 1 < kTiles) MultiplyValues<kDim, kDepth>(tile + 1, s, s.sums[(tile + 1) % 2]);
    AddSums<kDim, kDepth>(ct, tile, factors, constant, s.sums[tile % 2], s);
  }
}

/// One column tile over one step.
template <int kDim>
PLIANT_KV_AMX void StepOfColumns(int ct, int first, int key_depth, int value_depth,
                                 Scratch<kDim>& s) {
  if (s.limit[ct][kVector - 1] < first) return;  // limits ascend: nothing here is seen
  const bool masked = s.limit[ct][0] < first + kStep - 1;
  __m512 maximum;
  switch (key_depth) {
    case 1:
      maximum = masked ? LogitsOfStep<kDim, 1, true>(ct, first, s)
                       : LogitsOfStep<kDim, 1, false>(ct, first, s);
      break;
    case 2:
      maximum = masked ? LogitsOfStep<kDim, 2, true>(ct, first, s)
                       : LogitsOfStep<kDim, 2, false>(ct, first, s);
      break;
    default:
      maximum = masked ? LogitsOfStep<kDim, 4, true>(ct, first, s)
                       : LogitsOfStep<kDim, 4, false>(ct, first, s);
  }
  switch (value_depth) {
    case 1:
      ValuesOfStep<kDim, 1>(ct, maximum, s);
      break;
    case 2:
      ValuesOfStep<kDim, 2>(ct, maximum, s);
      break;
    default:
      ValuesOfStep<kDim, 4>(ct, maximum, s);
      break;
  }
}

template <int kDim>
PLIANT_KV_AMX void UnpackStep(const PlaneSource& key, const PlaneSource& value, Scratch<kDim>& s) {
  for (int half = 0; half < kHalves; ++half) {
    const TileBuffer keys = {s.keys[0][half], s.keys[1][half]};
    const TileBuffer values = {s.values[0][half], s.values[1][half]};
    switch (key.depth) {
      case 1:
        UnpackKeys<kDim, 1>(key, key, half, keys);
        break;
      case 2:
        UnpackKeys<kDim, 2>(key, key, half, keys);
        break;
      default:
        UnpackKeys<kDim, 4>(key, key, half, keys);
        break;
    }
    switch (value.depth) {
      case 1:
        UnpackValuesTransposed<kDim, 1>(value, half, s.planes, values);
        break;
      case 2:
        UnpackValuesTransposed<kDim, 2>(value, half, s.planes, values);
        break;
      default:
        UnpackValuesTransposed<kDim, 4>(value, half, s.planes, values);
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
    for (int ct = 0; ct * kVector < tile.Columns(); ++ct) {
      StepOfColumns<kDim>(ct, at, key.depth, value.depth, s);
    }
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
