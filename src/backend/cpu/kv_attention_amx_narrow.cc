// Room: backend. AMX attention for few columns (decode): bound by the planes it reads, so each is
// unpacked once and nothing is transposed on its way but the weights.
//
// Columns go in groups of 4. K's tiles are the left operand, [16 tokens][64 dims]; the right one
// holds a group's query three times over,
//   hi pass: | qh | ql | 0 |    lo pass: | 0 | qh | ql |     (4 columns each)
// so that one sum tile takes both passes and its columns are (hh), (x), (ll) as kv_amx.h names
// them. For V the weights are the left operand and their rows are grouped the same way. Unpacking
// deals tokens to tiles so that softmax vectors hold tokens in order.
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
  std::byte keys[2][kHalf * kDim];                      // hi, lo of a half
  std::byte values[2][kHalves][kHalf * kDim];           // hi, lo of a step
  std::byte query_tiles[kGroups][2][kDim / 64][kTile];  // hi pass, lo pass
  std::byte query_sums[kGroups][64];                    // what sum tiles start from at 8 bits
  std::byte weights[2][kHalves][kTile];                 // left operands: hi pass, lo pass
  std::int32_t sums[4][kVector][16];
  float logits[kNarrowColumns][kStep];
  float output[kNarrowColumns][kDim];  // [column][tile][16]
  QueryColumn<kDim> column;
  std::int8_t zero[64];
  StepScales scales;
  float query_scale[kNarrowColumns];
  alignas(64) float maximum[kGroups][kVector];
  float total[kGroups][kVector];
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
      s.query_scale[column] = s.column.scale;
      const std::int32_t half_sum = s.column.sum >> 1;
      std::memcpy(s.query_sums[g] + (kGroup + c) * 4, &half_sum, 4);
    }
    for (int chunk = 0; chunk < kDim / 64; ++chunk) {
      const std::int8_t* rows[2][16];
      for (int r = 0; r < 16; ++r) {
        const int c = r % kGroup;
        const int block = r / kGroup;
        rows[0][r] = rows[1][r] = s.zero;
        if (c >= columns) continue;
        if (block < 2) rows[0][r] = parts[block][c] + 64 * chunk;
        if (block == 1 || block == 2) rows[1][r] = parts[block - 1][c] + 64 * chunk;
      }
      StoreQueryTile(rows[0], s.query_tiles[g][0][chunk]);
      StoreQueryTile(rows[1], s.query_tiles[g][1][chunk]);
    }
    _mm512_store_ps(s.maximum[g], _mm512_set1_ps(kNoLogit));
    _mm512_store_ps(s.total[g], _mm512_setzero_ps());
  }
}

/// Sums of a half against one group: s.sums[tile][row][column].
template <int kDim, int kDepth>
PLIANT_KV_AMX_INLINE void MultiplyKeys(int group, Scratch<kDim>& s) {
  constexpr int kChunks = kDim / 64;
  PLIANT_KV_FENCE();
  if constexpr (kDepth == 2) {
    _tile_loadd(0, s.query_sums[group], 0);  // stride 0: the same for every token
    _tile_loadd(1, s.query_sums[group], 0);
    _tile_loadd(2, s.query_sums[group], 0);
    _tile_loadd(3, s.query_sums[group], 0);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const std::byte* hi = s.keys[0] + chunk * kTile;
    const std::byte* lo = s.keys[1] + chunk * kTile;
    _tile_loadd(4, s.query_tiles[group][0][chunk], 64);
    if constexpr (kDepth == kPlanes) _tile_loadd(5, s.query_tiles[group][1][chunk], 64);
    _tile_loadd(6, hi, 64);
    _tile_dpbssd(0, 6, 4);
    _tile_loadd(7, hi + kChunks * kTile, 64);
    _tile_dpbssd(1, 7, 4);
    _tile_loadd(6, hi + 2 * kChunks * kTile, 64);
    _tile_dpbssd(2, 6, 4);
    _tile_loadd(7, hi + 3 * kChunks * kTile, 64);
    _tile_dpbssd(3, 7, 4);
    if constexpr (kDepth == kPlanes) {
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
  _tile_stored(0, s.sums[0], 64);
  _tile_stored(1, s.sums[1], 64);
  _tile_stored(2, s.sums[2], 64);
  _tile_stored(3, s.sums[3], 64);
}

/// Columns 4 part .. 4 part + 3 of row `row` of the four sum tiles, tile t in lane t.
PLIANT_KV_AMX_INLINE __m512i FourTiles(const std::int32_t (*sums)[kVector][16], int row, int part) {
  const auto* at = reinterpret_cast<const __m128i*>(sums[0][row]) + part;
  constexpr int kNext = kTile / 16;
  __m512i v = _mm512_castsi128_si512(_mm_load_si128(at));
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_load_si128(at + kNext));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_load_si128(at + 2 * kNext));
  return _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_load_si128(at + 3 * kNext));
}

/// Logits of a half for one group, in the order of the tokens.
template <int kDim, int kDepth>
PLIANT_KV_AMX_INLINE void StoreLogits(const QueryTile& tile, int first_column, int columns,
                                      int first, int half, Scratch<kDim>& s) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const bool masked = first + kStep > tile.first_position + 1 && tile.rows > 1;
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    __m512i v[4];
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) {
      const int row = 4 * k + b;
      v[b] = _mm512_add_epi32(_mm512_slli_epi32(FourTiles(s.sums, row, 0), 8),
                              FourTiles(s.sums, row, 1));
      if constexpr (kDepth == kPlanes) {
        v[b] = _mm512_add_epi32(v[b], _mm512_srai_epi32(FourTiles(s.sums, row, 2), 8));
      }
    }
    // [lane t][column] of token 4t + b, for each b, to [lane t][b] for each column: 16 tokens in
    // order.
    const __m512i a0 = _mm512_unpacklo_epi32(v[0], v[1]), a1 = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i a2 = _mm512_unpacklo_epi32(v[2], v[3]), a3 = _mm512_unpackhi_epi32(v[2], v[3]);
    const __m512i sum[4] = {_mm512_unpacklo_epi64(a0, a2), _mm512_unpackhi_epi64(a0, a2),
                            _mm512_unpacklo_epi64(a1, a3), _mm512_unpackhi_epi64(a1, a3)};
    const int n = half * kHalf + 16 * k;
    const __m512 key = _mm512_load_ps(s.scales.key + n);
    const __m512 exponent = _mm512_load_ps(s.scales.exponent + n);
#pragma GCC unroll 4
    for (int c = 0; c < kGroup; ++c) {
      if (c >= columns) break;
      const int column = first_column + c;
      __m512 logit = Logit(sum[c], key, _mm512_set1_ps(s.query_scale[column]), exponent);
      if (masked) {
        const int limit = tile.first_position + column / tile.group - first - n;
        logit = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY),
                                   _mm512_cmple_epi32_mask(lanes, _mm512_set1_epi32(limit)), logit);
      }
      _mm512_store_ps(s.logits[column] + n, logit);
    }
  }
}

struct StepSum {
  float maximum;
  float total;
  std::int32_t weights;  // sum of the integer weights
};

/// Softmax of one column over a step: its weights go into the left operands.
template <int kDim>
PLIANT_KV_AMX_INLINE StepSum StoreWeights(int column, Scratch<kDim>& s) {
  const float* logits = s.logits[column];
  const int c = column % kGroup;
  __m512 x[kStep / kVector];
  __m512 largest = _mm512_set1_ps(kNoLogit);
#pragma GCC unroll 8
  for (int i = 0; i < kStep / kVector; ++i) {
    x[i] = _mm512_load_ps(logits + kVector * i);
    largest = _mm512_max_ps(x[i], largest);
  }
  StepSum sum;
  sum.maximum = _mm512_reduce_max_ps(largest);
  const __m512 base = _mm512_set1_ps(sum.maximum);
  __m512 total = _mm512_setzero_ps();
  __m512i all = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    __m512i w[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const int n = half * kHalf + 16 * k;
      const __m512 p = Exp2(_mm512_sub_ps(x[n / kVector], base));
      const __m512 inverse = _mm512_load_ps(s.scales.inverse_exponent + n);
      // The wide kernel sums in the same order: a lane's tokens 16 apart, then across lanes.
      total = n == 0 ? _mm512_mul_ps(p, inverse) : _mm512_fmadd_ps(p, inverse, total);
      w[k] = _mm512_cvtps_epi32(_mm512_mul_ps(p, _mm512_load_ps(s.scales.weight + n)));
      all = _mm512_add_epi32(all, w[k]);
    }
    // Lane l of the packed bytes: tokens 4l .. 4l + 3 of k = 0, 1, 2, 3, which is row order 4l + k
    // of V's tiles.
    const __m512i low = _mm512_packus_epi32(w[0], w[1]);
    const __m512i high = _mm512_packus_epi32(w[2], w[3]);
    const __m512i byte = _mm512_set1_epi16(0xff);
    const __m512i hi = _mm512_packus_epi16(_mm512_srli_epi16(low, 8), _mm512_srli_epi16(high, 8));
    const __m512i lo =
        _mm512_packus_epi16(_mm512_and_si512(low, byte), _mm512_and_si512(high, byte));
    std::byte* hi_pass = s.weights[0][half];
    std::byte* lo_pass = s.weights[1][half];
    _mm512_store_si512(hi_pass + 64 * c, hi);
    _mm512_store_si512(hi_pass + 64 * (kGroup + c), lo);
    _mm512_store_si512(lo_pass + 64 * (kGroup + c), hi);
    _mm512_store_si512(lo_pass + 64 * (2 * kGroup + c), lo);
  }
  const __m512 t8 = _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0x4e));
  const __m512 t4 = _mm512_add_ps(t8, _mm512_shuffle_f32x4(t8, t8, 0xb1));
  const __m512 t2 = _mm512_add_ps(t4, _mm512_shuffle_ps(t4, t4, 0x4e));
  const __m512 t1 = _mm512_add_ps(t2, _mm512_shuffle_ps(t2, t2, 0xb1));
  sum.total = _mm512_cvtss_f32(t1);
  sum.weights = _mm512_reduce_add_epi32(all);
  return sum;
}

/// output[column][tile] = output * keep + sums * add for one sum tile.
template <int kDepth>
PLIANT_KV_AMX_INLINE void AddSums(const std::int32_t (*sums)[16], int columns, const float* keep,
                                  const float* add, const std::int32_t* constant, float* output,
                                  int dim) {
#pragma GCC unroll 4
  for (int c = 0; c < kGroup; ++c) {
    if (c >= columns) break;
    __m512i v = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[c]), 8),
                                 _mm512_load_si512(sums[kGroup + c]));
    if constexpr (kDepth == kPlanes) {
      v = _mm512_add_epi32(v, _mm512_srai_epi32(_mm512_load_si512(sums[2 * kGroup + c]), 8));
    }
    if constexpr (kDepth == 2) v = _mm512_add_epi32(v, _mm512_set1_epi32(constant[c]));
    float* to = output + c * dim;
    const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(v), _mm512_set1_ps(add[c]));
    _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), _mm512_set1_ps(keep[c]), part));
  }
}

template <int kDim, int kDepth>
PLIANT_KV_AMX_INLINE void MultiplyValues(int first_column, int columns, const float* keep,
                                         const float* add, const std::int32_t* constant,
                                         Scratch<kDim>& s) {
  PLIANT_KV_FENCE();
  _tile_loadd(4, s.weights[0][0], 64);
  _tile_loadd(5, s.weights[0][1], 64);
  if constexpr (kDepth == kPlanes) {
    _tile_loadd(6, s.weights[1][0], 64);
    _tile_loadd(7, s.weights[1][1], 64);
  }
  float* output = s.output[first_column];
  for (int tile = 0; tile < kDim / 16; tile += 2) {
    const std::ptrdiff_t a = tile * kTile;
    const std::ptrdiff_t b = a + kTile;
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, s.values[0][0] + a, 64);
    _tile_dpbusd(0, 4, 2);
    _tile_loadd(3, s.values[0][0] + b, 64);
    _tile_dpbusd(1, 4, 3);
    _tile_loadd(2, s.values[0][1] + a, 64);
    _tile_dpbusd(0, 5, 2);
    _tile_loadd(3, s.values[0][1] + b, 64);
    _tile_dpbusd(1, 5, 3);
    if constexpr (kDepth == kPlanes) {
      _tile_loadd(2, s.values[1][0] + a, 64);
      _tile_dpbuud(0, 6, 2);
      _tile_loadd(3, s.values[1][0] + b, 64);
      _tile_dpbuud(1, 6, 3);
      _tile_loadd(2, s.values[1][1] + a, 64);
      _tile_dpbuud(0, 7, 2);
      _tile_loadd(3, s.values[1][1] + b, 64);
      _tile_dpbuud(1, 7, 3);
    }
    // Two buffers of two tiles, so that one pair is turned into f32 while the next is multiplied.
    std::int32_t(*sums)[kVector][16] = s.sums + (tile / 2 % 2) * 2;
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    AddSums<kDepth>(sums[0], columns, keep, add, constant, output + 16 * tile, kDim);
    AddSums<kDepth>(sums[1], columns, keep, add, constant, output + 16 * (tile + 1), kDim);
  }
}

template <int kDim, int kKeyDepth>
PLIANT_KV_AMX void LogitsOfStep(const PlaneSource& key, const PlaneSource& next,
                                const QueryTile& tile, int first, Scratch<kDim>& s) {
  for (int half = 0; half < kHalves; ++half) {
    UnpackKeys<kDim, kKeyDepth>(key, next, half, {s.keys[0], s.keys[1]});
    for (int g = 0; g * kGroup < tile.Columns(); ++g) {
      MultiplyKeys<kDim, kKeyDepth>(g, s);
      StoreLogits<kDim, kKeyDepth>(tile, g * kGroup, std::min(kGroup, tile.Columns() - g * kGroup),
                                   first, half, s);
    }
  }
}

template <int kDim, int kValueDepth>
PLIANT_KV_AMX void ValuesOfStep(const PlaneSource& value, const PlaneSource& next,
                                const QueryTile& tile, Scratch<kDim>& s) {
  for (int half = 0; half < kHalves; ++half) {
    UnpackValues<kDim, kValueDepth>(value, next, half, {s.values[0][half], s.values[1][half]});
  }
  for (int g = 0; g * kGroup < tile.Columns(); ++g) {
    const int columns = std::min(kGroup, tile.Columns() - g * kGroup);
    alignas(64) float maximum[kVector], total[kVector], keep[kVector], add[kVector];
    std::int32_t constant[kGroup] = {};
    _mm512_store_ps(maximum, _mm512_set1_ps(kNoLogit));
    _mm512_store_ps(total, _mm512_setzero_ps());
    for (int c = 0; c < columns; ++c) {
      const StepSum sum = StoreWeights<kDim>(g * kGroup + c, s);
      maximum[c] = sum.maximum;
      total[c] = sum.total;
      constant[c] = sum.weights >> 1;
    }
    const Rescale factors =
        Advance(_mm512_load_ps(maximum), _mm512_load_ps(total), s.maximum[g], s.total[g]);
    _mm512_store_ps(keep, factors.keep);
    _mm512_store_ps(add, factors.add);
    MultiplyValues<kDim, kValueDepth>(g * kGroup, columns, keep, add, constant, s);
  }
}

template <int kDim>
PLIANT_KV_AMX void Attend(const AttentionHead& head, const QueryTile& tile, int first, int end,
                          float* partials, Scratch<kDim>& s) {
  const TileScope tiles;
  PrepareQueries<kDim>(tile, s);
  PlaneSource sides[2][2];  // [now, next][K, V]
  bool present = DescribeStep(head, first, end, sides[0][0], sides[0][1]);
  for (int at = first, now = 0; at < end; at += kStep, now ^= 1) {
    const PlaneSource& key = sides[now][0];
    const PlaneSource& value = sides[now][1];
    // The last step prefetches itself: it is there already.
    const int after = at + kStep < end ? now ^ 1 : now;
    const bool here = present;
    if (after != now)
      present = DescribeStep(head, at + kStep, end, sides[after][0], sides[after][1]);
    if (!here) continue;
    LoadScales(head, at, end, s.scales);
    switch (key.depth) {
      case 1:
        LogitsOfStep<kDim, 1>(key, sides[after][0], tile, at, s);
        break;
      case 2:
        LogitsOfStep<kDim, 2>(key, sides[after][0], tile, at, s);
        break;
      default:
        LogitsOfStep<kDim, 4>(key, sides[after][0], tile, at, s);
        break;
    }
    switch (value.depth) {
      case 1:
        ValuesOfStep<kDim, 1>(value, sides[after][1], tile, s);
        break;
      case 2:
        ValuesOfStep<kDim, 2>(value, sides[after][1], tile, s);
        break;
      default:
        ValuesOfStep<kDim, 4>(value, sides[after][1], tile, s);
        break;
    }
  }
  for (int column = 0; column < tile.Columns(); ++column) {
    float* to = partials + column * PartialFloats(kDim);
    for (int t = 0; t < kDim / 16; ++t) {
      for (int i = 0; i < 16; ++i) {
        to[ValueDim<kDim>(t, i)] = s.output[column][16 * t + i] * kOutputUnit;
      }
    }
    to[kDim] = s.maximum[column / kGroup][column % kGroup];
    to[kDim + 1] = s.total[column / kGroup][column % kGroup];
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
