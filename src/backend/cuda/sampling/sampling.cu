#include <cmath>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/sampling/sampling.h"

namespace pliant::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffffu;
// A weight is a float in [0, 1], whose bits are below 2^30 and grow with it.
constexpr int kLevelBits = 10, kBins = 1 << kLevelBits;
static_assert(kBins == kThreads, "each thread owns a bin");
constexpr double kUnit = 0x1.0p44;  // of an integer weight; 2^19 weights of 1 fit in 64 bits

using Sum = unsigned long long;

struct Shared {
  Sum sums[kBins];
  unsigned counts[kBins];
  Sum warp_sums[kWarps];
  float warp_values[kWarps];
  int warp_ids[kWarps];
  int warp_flags[kWarps];
  Sum target;    // what is still lacking below the chosen bin
  unsigned bin;  // chosen; kBins: none
  int token;
  double warp_masses[kWarps];
  double log_sum;
  float own_logit;  // of the token, as the model gave it
  RowLogprobs logprobs;
};

/// Where the tokens that are kept end: those of a larger key, and the first `equals` of this key.
struct Cut {
  unsigned key = 0;
  Sum equals = ~Sum{0};
};

struct Row {
  const float* logits;
  int columns;
  float peak, inverse_temperature, cutoff;

  /// False when the token takes no part.
  __device__ bool Key(int i, unsigned& key) const {
    const float below = logits[i] - peak;
    const float exponent = below * inverse_temperature;
    // !(>=): NaN (an infinity less an infinity cannot come up: the peak is finite) takes no part.
    if (!(below >= cutoff) || !(exponent >= -104.0f)) return false;
    key = __float_as_uint(expf(exponent));
    return true;
  }
};

__device__ __forceinline__ Sum Integer(unsigned key) {
  return __double2ull_rn(static_cast<double>(__uint_as_float(key)) * kUnit);
}

/// Ids of a warp's part of the row: contiguous, so that the order of warps is the order of ids.
struct Part {
  int begin, end;
  __device__ Part(int columns, int warp) {
    const int each = ((columns + kWarps - 1) / kWarps + 31) / 32 * 32;
    begin = min(columns, warp * each);
    end = min(columns, begin + each);
  }
};

/// Sum over the threads before this one; `total` of all. Every thread calls it.
__device__ Sum PrefixSum(Sum own, Shared& shared, Sum& total) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Sum inclusive = own;
  for (int d = 1; d < 32; d <<= 1) {
    const Sum other = __shfl_up_sync(kAll, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) shared.warp_sums[warp] = inclusive;
  __syncthreads();
  Sum before = 0;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += shared.warp_sums[w];
    total += shared.warp_sums[w];
  }
  return before + inclusive - own;
}

/// Histogram of the tokens whose key starts with `prefix` (level 0: all), by the next 10 bits.
__device__ void Histogram(const Row& row, int level, unsigned prefix, Shared& shared) {
  __syncthreads();
  shared.sums[threadIdx.x] = 0;
  shared.counts[threadIdx.x] = 0;
  __syncthreads();
  const int shift = (2 - level) * kLevelBits;
#pragma unroll 4
  for (int i = threadIdx.x; i < row.columns; i += kThreads) {
    unsigned key;
    if (!row.Key(i, key)) continue;
    if (level > 0 && (key >> (shift + kLevelBits)) != prefix) continue;
    const unsigned bin = (key >> shift) & (kBins - 1);
    atomicAdd(&shared.counts[bin], 1u);
    atomicAdd(&shared.sums[bin], Integer(key));
  }
  __syncthreads();
}

/// Finds the cut at which the weights (or, with kCount, the tokens) from the heaviest on first
/// reach `target`. False when all together do not: nothing is cut. Level 0's histogram must be in
/// `shared`; it is gone after.
template <bool kCount>
__device__ bool FindCut(const Row& row, Sum target, Shared& shared, Cut& cut) {
  unsigned prefix = 0;
  for (int level = 0;; ++level) {
    // Bins from the heaviest: thread t looks at bin kBins - 1 - t.
    const unsigned bin = kBins - 1 - threadIdx.x;
    const Sum own = kCount ? Sum{shared.counts[bin]} : shared.sums[bin];
    if (threadIdx.x == 0) shared.bin = kBins;
    Sum total;
    const Sum above = PrefixSum(own, shared, total);
    if (above < target && above + own >= target) {
      shared.bin = bin;
      shared.target = target - above;
    }
    __syncthreads();
    if (shared.bin == kBins) return false;
    prefix = prefix << kLevelBits | shared.bin;
    target = shared.target;
    if (level == 2) break;
    Histogram(row, level + 1, prefix, shared);
  }
  cut.key = prefix;
  if constexpr (kCount) {
    cut.equals = target;
  } else {
    const Sum each = Integer(prefix);
    cut.equals = each == 0 ? 1 : (target + each - 1) / each;
  }
  return true;
}

/// The larger of two cuts: what both keep.
__device__ Cut Both(const Cut& a, const Cut& b) {
  if (a.key != b.key) return a.key > b.key ? a : b;
  return {a.key, a.equals < b.equals ? a.equals : b.equals};
}

__device__ __forceinline__ bool Better(float a, int a_id, float b, int b_id) {
  return a > b || (a == b && a_id < b_id);
}
/// The best of a warp's, to all its lanes.
__device__ __forceinline__ void BestOfWarp(float& value, int& id) {
  for (int d = 16; d > 0; d >>= 1) {
    const float other = __shfl_xor_sync(kAll, value, d);
    const int other_id = __shfl_xor_sync(kAll, id, d);
    if (Better(other, other_id, value, id)) value = other, id = other_id;
  }
}
constexpr int kNoId = 0x7fffffff;

/// Largest logit, its lowest id, and whether the row is sound. All threads get it.
__device__ bool FindPeak(const float* logits, int columns, Shared& shared, float& peak, int& id) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  peak = -INFINITY;
  id = kNoId;
  int poison = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    const float x = logits[i];
    poison |= isnan(x);
    if (x > peak) peak = x, id = i;
  }
  BestOfWarp(peak, id);
  poison = __any_sync(kAll, poison);
  if (lane == 0)
    shared.warp_values[warp] = peak, shared.warp_ids[warp] = id, shared.warp_flags[warp] = poison;
  __syncthreads();
  peak = -INFINITY;
  id = kNoId;
  poison = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (Better(shared.warp_values[w], shared.warp_ids[w], peak, id))
      peak = shared.warp_values[w], id = shared.warp_ids[w];
    poison |= shared.warp_flags[w];
  }
  return poison == 0 && isfinite(peak);
}

/// The token at which the running sum of what `cut` keeps, in the order of ids, passes uniform *
/// total. `equals_before`: tokens of the cut's key in earlier warps' parts.
__device__ void Walk(const Row& row, const Cut& cut, double uniform, Shared& shared) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Part part(row.columns, warp);
  // Tokens of exactly the cut's key, by warp: only the first of them are kept.
  Sum equals = 0;
  if (cut.equals != ~Sum{0}) {
    for (int i = part.begin + lane; i < part.end; i += 32) {
      unsigned key;
      equals += row.Key(i, key) && key == cut.key;
    }
    for (int d = 16; d > 0; d >>= 1) equals += __shfl_xor_sync(kAll, equals, d);
  }
  if (lane == 0) shared.counts[warp] = static_cast<unsigned>(equals);
  __syncthreads();
  Sum equals_before = 0;
  for (int w = 0; w < warp; ++w) equals_before += shared.counts[w];
  // Calls f(id, kept weight of this lane) for 32 ids at a time.
  const auto each = [&](auto&& f) {
    Sum seen = equals_before;
    for (int first = part.begin; first < part.end; first += 32) {
      const int i = first + lane;
      unsigned key = 0;
      const bool there = i < part.end && row.Key(i, key);
      const bool equal = there && key == cut.key;
      const unsigned all_equal = __ballot_sync(kAll, equal);
      const Sum rank = seen + __popc(all_equal & ((1u << lane) - 1));
      seen += __popc(all_equal);
      const bool kept = there && (key > cut.key || (equal && rank < cut.equals));
      if (!f(i, kept ? Integer(key) : Sum{0})) return;
    }
  };
  Sum sum = 0;
  each([&](int, Sum weight) {
    sum += weight;
    return true;
  });
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(kAll, sum, d);
  if (lane == 0) shared.warp_sums[warp] = sum;
  __syncthreads();
  Sum before = 0, total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += shared.warp_sums[w];
    total += shared.warp_sums[w];
  }
  Sum goal = static_cast<Sum>(uniform * static_cast<double>(total));
  if (goal >= total) goal = total - 1;  // rounding of the product
  if (goal < before || goal >= before + sum) return;
  Sum passed = before;
  each([&](int i, Sum weight) {
    Sum inclusive = weight;
    for (int d = 1; d < 32; d <<= 1) {
      const Sum other = __shfl_up_sync(kAll, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    const unsigned over = __ballot_sync(kAll, passed + inclusive > goal);
    if (over == 0) {
      passed += __shfl_sync(kAll, inclusive, 31);
      return true;
    }
    if (lane == __ffs(over) - 1) shared.token = i;
    return false;
  });
}

/// What shared.logprobs says of a sound row but for the token taken, and shared.log_sum. The best
/// are found one after the other: each thread knows the best of its ids, and the warp of the one
/// that was found last looks for that thread's next.
__device__ void Logprobs(const float* logits, int columns, float peak, int top, Shared& shared) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  double mass = 0;
  float value = -INFINITY;
  int id = kNoId;
#pragma unroll 4
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    const float x = logits[i];
    mass += expf(x - peak);
    if (Better(x, i, value, id)) value = x, id = i;
  }
  for (int d = 16; d > 0; d >>= 1) mass += __shfl_xor_sync(kAll, mass, d);
  if (lane == 0) shared.warp_masses[warp] = mass;
  __syncthreads();
  mass = 0;
  for (int w = 0; w < kWarps; ++w) mass += shared.warp_masses[w];
  const double log_sum = peak + log(mass);
  const int count = min(top, columns);
  if (threadIdx.x == 0) {
    shared.log_sum = log_sum;
    shared.logprobs.count = count;
  }
  for (int n = 0; n < count; ++n) {
    float best = value;
    int best_id = id;
    BestOfWarp(best, best_id);
    __syncthreads();  // the round before has been read
    if (lane == 0) shared.warp_values[warp] = best, shared.warp_ids[warp] = best_id;
    __syncthreads();
    best = shared.warp_values[lane];
    best_id = shared.warp_ids[lane];
    BestOfWarp(best, best_id);
    if (threadIdx.x == 0) {
      shared.logprobs.ids[n] = best_id;
      shared.logprobs.values[n] = static_cast<float>(best - log_sum);
    }
    const int owner = best_id % kThreads;
    if (owner >> 5 != warp) continue;
    float next = -INFINITY;
    int next_id = kNoId;
#pragma unroll 4
    for (int i = owner + lane * kThreads; i < columns; i += 32 * kThreads) {
      const float x = logits[i];
      if (Better(best, best_id, x, i) && Better(x, i, next, next_id)) next = x, next_id = i;
    }
    BestOfWarp(next, next_id);
    if (lane == (owner & 31)) value = next, id = next_id;
  }
}

/// Unfused, so that the logits are the oracle's bit for bit. `keep`: what was added becomes the
/// logit as it was.
__device__ void Change(float* logits, int columns, LogitChange* changes, int count, bool keep) {
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const LogitChange change = changes[i];
    if (change.id < 0 || change.id >= columns) continue;
    float x = logits[change.id];
    if (keep) changes[i].add = x;
    x = x > 0.f ? __fdiv_rn(x, change.penalty) : __fmul_rn(x, change.penalty);
    logits[change.id] = __fadd_rn(__fsub_rn(x, change.subtract), change.add);
  }
}

/// The token (all threads get it) of a row whose peak is `best`.
__device__ int Draw(Row row, const RowSampling& how, int best, Shared& shared) {
  const int columns = row.columns;
  row.inverse_temperature = 1.0f / fmaxf(how.temperature, 1e-5f);
  if (how.min_p > 0) row.cutoff = logf(how.min_p) / row.inverse_temperature;
  Cut cut;
  if (how.top_k > 0) {
    Histogram(row, 0, 0, shared);
    FindCut<true>(row, static_cast<Sum>(how.top_k), shared, cut);
  }
  if (how.top_p < 1.0f) {
    // The total that top_k left: all tokens above its key, and its equals.
    Histogram(row, 0, 0, shared);
    Sum total = 0;
    PrefixSum(shared.sums[threadIdx.x], shared, total);
    if (cut.equals != ~Sum{0}) {
      Sum own = 0;
      for (int i = threadIdx.x; i < columns; i += kThreads) {
        unsigned key;
        if (row.Key(i, key) && key > cut.key) own += Integer(key);
      }
      PrefixSum(own, shared, total);
      total += cut.equals * Integer(cut.key);
    }
    const double needed = ceil(static_cast<double>(how.top_p) * static_cast<double>(total));
    Cut by_mass;
    if (FindCut<false>(row, needed < 1 ? Sum{1} : static_cast<Sum>(needed), shared, by_mass))
      cut = Both(cut, by_mass);
  }
  if (threadIdx.x == 0) shared.token = best;
  __syncthreads();
  Walk(row, cut, how.uniform, shared);
  __syncthreads();
  return shared.token;
}

__global__ void __launch_bounds__(kThreads)
    SampleKernel(float* all_logits, std::int64_t stride, int columns, const RowSampling* rows,
                 LogitChange* all_changes, std::int32_t* tokens, RowLogprobs* logprobs) {
  __shared__ Shared shared;
  const RowSampling how = rows[blockIdx.x];
  if (how.on_host != 0) return;
  float* const logits = all_logits + blockIdx.x * stride;
  LogitChange* const changes = all_changes + how.first_change;
  Row row{logits, columns, 0, 0, -INFINITY};
  int best;
  bool sound = FindPeak(logits, columns, shared, row.peak, best);
  if (sound && how.logprobs >= 0) {
    Logprobs(logits, columns, row.peak, how.logprobs, shared);
    __syncthreads();
  }
  if (sound && how.changes > 0) {
    Change(logits, columns, changes, how.changes, how.logprobs >= 0);
    __syncthreads();
    sound = FindPeak(logits, columns, shared, row.peak, best);
  }
  const int token = !sound ? kNoToken : how.temperature == 0 ? best : Draw(row, how, best, shared);
  if (threadIdx.x == 0) tokens[blockIdx.x] = token;
  if (token == kNoToken || how.logprobs < 0) return;
  if (threadIdx.x == 0) shared.own_logit = logits[token];
  __syncthreads();
  for (int i = threadIdx.x; i < how.changes; i += kThreads) {
    if (changes[i].id == token) shared.own_logit = changes[i].add;  // see Change
  }
  __syncthreads();
  if (threadIdx.x == 0)
    shared.logprobs.chosen = static_cast<float>(shared.own_logit - shared.log_sum);
  __syncthreads();
  constexpr int kWords = sizeof(RowLogprobs) / sizeof(int);
  if (threadIdx.x < kWords)
    reinterpret_cast<int*>(logprobs + blockIdx.x)[threadIdx.x] =
        reinterpret_cast<const int*>(&shared.logprobs)[threadIdx.x];
}

}  // namespace

void LaunchSample(float* logits, std::int64_t stride, int columns, int rows, const RowSampling* how,
                  LogitChange* changes, std::int32_t* tokens, RowLogprobs* logprobs,
                  cudaStream_t stream) {
  if (rows == 0) return;
  SampleKernel<<<rows, kThreads, 0, stream>>>(logits, stride, columns, how, changes, tokens,
                                              logprobs);
  PLIANT_CUDA_CHECK_LAUNCH();
}

}  // namespace pliant::cuda
