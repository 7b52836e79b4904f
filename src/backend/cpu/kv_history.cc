#include "backend/cpu/kv_history.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kv_history.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace pliant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using I32 = hn::Rebind<std::int32_t, F32>;

/// 2^x for x <= 0, relative error below 1.1e-4: scores and thresholds need no more. At most 2^-100
/// for what is below that.
template <class V>
V QuickExp2(V x) {
  const F32 d;
  const I32 di;
  const auto clamped = hn::Max(x, hn::Set(d, -100.0f));
  const auto whole = hn::Round(clamped);
  const auto f = hn::Sub(clamped, whole);  // |f| <= 1/2: the cubic of least relative error
  auto p = hn::Set(d, 5.5171677e-2f);
  p = hn::MulAdd(p, f, hn::Set(d, 2.4261112e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.9326098e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.9992807e-1f));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::NearestInt(whole))));
}

/// Lanes [at, at + Lanes) of a row of bits.
hn::Mask<F32> BitsAt(std::uint32_t bits, int at) {
  const std::uint32_t shifted = bits >> at;
  std::uint8_t bytes[8] = {};
  std::memcpy(bytes, &shifted, sizeof(shifted));
  return hn::LoadMaskBits(F32(), bytes);
}

constexpr int kPagesAtOnce = 4;

/// Whether one of the tokens of kPagesAtOnce pages lies above `cut`.
HWY_INLINE bool AnyAbove(const float* logits, float cut) {
  const F32 d;
  constexpr int kTokens = kPagesAtOnce * kReturnTokens;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto limit = hn::Set(d, cut);
  auto above = hn::Gt(hn::LoadU(d, logits), limit);
  for (int t = lanes; t < kTokens; t += lanes)
    above = hn::Or(above, hn::Gt(hn::LoadU(d, logits + t), limit));
  return !hn::AllFalse(d, above);
}

/// Which of a page's tokens lie above `cut`, as bits.
HWY_INLINE std::uint32_t BitsAbove(const float* logits, float cut) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  std::uint32_t bits = 0;
  for (int t = 0; t < kReturnTokens; t += lanes) {
    std::uint8_t bytes[8] = {};
    hn::StoreMaskBits(d, hn::Gt(hn::LoadU(d, logits + t), hn::Set(d, cut)), bytes);
    std::uint32_t some;
    std::memcpy(&some, bytes, sizeof(some));
    bits |= some << t;
  }
  return bits;
}

bool PageMasses(const HistoryTable& table, int unit, const UnitAttention& attention,
                std::vector<float>& masses) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const RetainedHistory& history = *table.history;
  const int pages = table.watched() / kReturnTokens;
  masses.assign(static_cast<std::size_t>(pages), 0.0f);
  bool any = false;
  const float weight = history.options().return_weight;
  const float least = weight >= 1 ? INFINITY : weight / (1 - weight);
  for (int column = 0; column < attention.columns; ++column) {
    const float* partial = attention.total + column * PartialFloats(attention.head_dim);
    const float maximum = partial[attention.head_dim];
    const float factor = attention.kernel->total_unit / partial[attention.head_dim + 1];
    // No page whose largest logit is below can have a mass of `least`.
    const float cut = maximum + std::log2(least / (kReturnTokens * factor)) - 0.01f;
    for (int page = 0; page < pages; ++page) {
      const int token = page * kReturnTokens;
      const float* row =
          attention.watched +
          (static_cast<std::size_t>(token / kSplitTokens) * attention.columns + column) *
              kSplitTokens +
          token % kSplitTokens;
      if (page % kPagesAtOnce == 0 && page + kPagesAtOnce <= pages && !AnyAbove(row, cut)) {
        page += kPagesAtOnce - 1;
        continue;
      }
      const std::uint32_t above = BitsAbove(row, cut);
      if (above == 0) continue;
      const std::uint32_t dropped =
          ~(history.Kept(unit, token / kBlockTokens) >> (token % kBlockTokens));
      if ((above & dropped) == 0) continue;
      auto sum = hn::Zero(d);
      for (int t = 0; t < kReturnTokens; t += lanes) {
        // Above the maximum only the order counts, and that the mass is more than all of it.
        const auto logit =
            hn::Min(hn::Sub(hn::LoadU(d, row + t), hn::Set(d, maximum)), hn::Set(d, 100.0f));
        sum = hn::Add(sum, hn::IfThenElseZero(BitsAt(dropped, t), QuickExp2(logit)));
      }
      masses[page] = std::max(masses[page], hn::GetLane(hn::SumOfLanes(d, sum)) * factor);
      any = true;
    }
  }
  return any;
}

/// sum + share, or + share squared.
template <bool kSquared, class V>
V AddShare(V weight, V factor, V sum) {
  if constexpr (!kSquared) return hn::MulAdd(weight, factor, sum);
  const V share = hn::Mul(weight, factor);
  return hn::MulAdd(share, share, sum);
}

/// Blocks [0, blocks) of one split: scores += sum over columns of weights * factors[column][block],
/// or of its square. kColumns: as many as there are, or 0.
template <bool kSquared, int kColumns>
void AddWeights(int blocks, int columns, const float* HWY_RESTRICT weights,
                const float (*HWY_RESTRICT factors)[kSplitBlocks], float* HWY_RESTRICT scores) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  if (kColumns > 0) columns = kColumns;
  for (int b = 0; b < blocks; ++b) {
    for (int t = b * kBlockTokens; t < (b + 1) * kBlockTokens; t += lanes) {
      auto sum = hn::LoadU(d, scores + t);
      for (int column = 0; column < columns; ++column) {
        sum = AddShare<kSquared>(hn::LoadU(d, weights + column * kSplitTokens + t),
                                 hn::Set(d, factors[column][b]), sum);
      }
      hn::StoreU(sum, d, scores + t);
    }
  }
}

/// The same from logits: scores += sum over columns of 2^(logit - maximum) * factor.
template <bool kSquared>
void AddLogits(int blocks, int columns, const float* logits, const float* maxima,
               const float* shares, float* scores) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int t = 0; t < blocks * kBlockTokens; t += lanes) {
    auto sum = hn::LoadU(d, scores + t);
    for (int column = 0; column < columns; ++column) {
      const auto logit = hn::LoadU(d, logits + column * kSplitTokens + t);
      const auto weight = QuickExp2(hn::Sub(logit, hn::Set(d, maxima[column])));
      sum = AddShare<kSquared>(weight, hn::Set(d, shares[column]), sum);
    }
    hn::StoreU(sum, d, scores + t);
  }
}

template <bool kSquared>
void AddScoresAs(int tokens, const UnitAttention& attention, std::span<float> scores) {
  const F32 d;
  const int columns = attention.columns;
  const int blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
  PLIANT_CHECK(columns <= kMaxHistoryColumns &&
                   static_cast<std::size_t>(blocks) * kBlockTokens <= scores.size(),
               "a history has room for what takes part");
  float maxima[kMaxHistoryColumns], shares[kMaxHistoryColumns];  // share: of a weight of 1
  const auto heads = static_cast<float>(columns);  // the mean over them, of shares or squares
  const float parts = kSquared ? std::sqrt(heads) : heads;
  for (int column = 0; column < columns; ++column) {
    const float* partial = attention.total + column * PartialFloats(attention.head_dim);
    maxima[column] = partial[attention.head_dim];
    shares[column] = attention.kernel->total_unit / partial[attention.head_dim + 1] / parts;
  }
  for (int first = 0; first < blocks; first += kSplitBlocks) {
    const int count = std::min(kSplitBlocks, blocks - first);
    const std::ptrdiff_t row = std::ptrdiff_t{first} / kSplitBlocks * columns;
    const float* weights = attention.weights + row * kSplitTokens;
    float* to = scores.data() + std::ptrdiff_t{first} * kBlockTokens;
    if (!attention.kernel->exports_weights) {
      AddLogits<kSquared>(count, columns, weights, maxima, shares, to);
      continue;
    }
    float factors[kMaxHistoryColumns][kSplitBlocks];
    for (int column = 0; column < columns; ++column) {
      const float* bases = attention.bases + (row + column) * kSplitBlocks;
      for (int b = 0; b < count; b += static_cast<int>(hn::Lanes(d))) {
        const auto weight = QuickExp2(hn::Sub(hn::LoadU(d, bases + b), hn::Set(d, maxima[column])));
        hn::StoreU(hn::Mul(weight, hn::Set(d, shares[column])), d, factors[column] + b);
      }
    }
    switch (columns) {
      case 3:
        AddWeights<kSquared, 3>(count, columns, weights, factors, to);
        break;
      case 4:
        AddWeights<kSquared, 4>(count, columns, weights, factors, to);
        break;
      default:
        AddWeights<kSquared, 0>(count, columns, weights, factors, to);
    }
  }
}

void AddScores(int tokens, const UnitAttention& attention, std::span<float> scores) {
  attention.squared ? AddScoresAs<true>(tokens, attention, scores)
                    : AddScoresAs<false>(tokens, attention, scores);
}

constexpr HistoryKernel kHistory = {PageMasses, AddScores};
const HistoryKernel& History() { return kHistory; }

}  // namespace HWY_NAMESPACE
}  // namespace pliant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "backend/cpu/cpu_dispatch.h"

namespace pliant {

const HistoryKernel& ChooseHistoryKernel(CpuLevel level) { PLIANT_RETURN_BY_LEVEL(level, History); }

void HistoryTables::Start(const StepBatch& batch) {
  tables_.clear();
  views_.clear();
  table_of_.assign(batch.sequences.size(), -1);
  for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceSlice& slice = batch.sequences[s];
    if (slice.history == nullptr || slice.rows != 1) continue;
    const RetainedHistory& history = *slice.history;
    HistoryTable table;
    table.history = slice.history;
    table.kept = batch.blocks.subspan(static_cast<std::size_t>(slice.first_kept),
                                      static_cast<std::size_t>(history.kept_blocks()));
    const auto blocks = batch.blocks.subspan(static_cast<std::size_t>(slice.first_block),
                                             static_cast<std::size_t>(slice.blocks));
    const auto frontier = static_cast<std::size_t>(history.frontier());
    table.first_taking_part = static_cast<std::int32_t>(views_.size());
    views_.insert(views_.end(), table.kept.begin(), table.kept.end());
    views_.insert(views_.end(), blocks.begin() + frontier, blocks.end());
    table.first_dropped = static_cast<std::int32_t>(views_.size());
    table.taking_part = table.first_dropped - table.first_taking_part;
    if (history.options().returns) {
      views_.insert(views_.end(), blocks.begin(), blocks.begin() + frontier);
      table.dropped = history.frontier();
    }
    table.tokens = (table.taking_part - 1) * kBlockTokens + slice.context % kBlockTokens + 1;
    table_of_[s] = static_cast<std::int32_t>(tables_.size());
    tables_.push_back(table);
  }
}

}  // namespace pliant
#endif  // HWY_ONCE
