#include "backend/cpu/kv_history.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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

/// 2^x, relative error below 1e-4, 0 below 2^-126: scores and thresholds need no more.
template <class V>
V QuickExp2(V x) {
  const F32 d;
  const I32 di;
  const auto tiny = hn::Lt(x, hn::Set(d, -126.0f));
  const auto clamped = hn::Min(hn::Max(x, hn::Set(d, -126.0f)), hn::Set(d, 126.0f));
  const auto whole = hn::Round(clamped);
  const auto f = hn::Sub(clamped, whole);  // |f| <= 1/2: Taylor series of 2^f to degree 4
  auto p = hn::Set(d, 9.6181291e-3f);
  p = hn::MulAdd(p, f, hn::Set(d, 5.5504109e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.4022651e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.9314718e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::NearestInt(whole), hn::Set(di, 127)));
  return hn::IfThenZeroElse(tiny, hn::Mul(p, hn::BitCast(d, exponent)));
}

/// Lanes [at, at + Lanes) of a row of bits.
hn::Mask<F32> BitsAt(std::uint32_t bits, int at) {
  const std::uint32_t shifted = bits >> at;
  std::uint8_t bytes[8] = {};
  std::memcpy(bytes, &shifted, sizeof(shifted));
  return hn::LoadMaskBits(F32(), bytes);
}

void PageMasses(const HistoryTable& table, int unit, const UnitLogits& logits,
                std::vector<float>& masses) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const RetainedHistory& history = *table.history;
  const int pages = table.dropped * (kBlockTokens / kReturnTokens);
  masses.assign(static_cast<std::size_t>(pages), 0.0f);
  const float weight = history.options().return_weight;
  const float least = weight >= 1 ? INFINITY : weight / (1 - weight);
  const auto none = hn::Set(d, -INFINITY);
  for (int column = 0; column < logits.columns; ++column) {
    const float* partial = logits.total + column * PartialFloats(logits.head_dim);
    const float maximum = partial[logits.head_dim];
    const float factor = logits.total_unit / partial[logits.head_dim + 1];
    // No page whose largest logit is below can have a mass of `least`.
    const float cut = maximum + std::log2(least / (kReturnTokens * factor)) - 0.01f;
    for (int page = 0; page < pages; ++page) {
      const int token = page * kReturnTokens;
      const float* row =
          logits.dropped +
          (static_cast<std::size_t>(token / kSplitTokens) * logits.columns + column) *
              kSplitTokens +
          token % kSplitTokens;
      const std::uint32_t kept = history.Kept(unit, token / kBlockTokens);
      auto top = none;
      for (int t = 0; t < kReturnTokens; t += lanes) {
        const auto here = BitsAt(kept, token % kBlockTokens + t);
        top = hn::Max(top, hn::IfThenElse(here, none, hn::LoadU(d, row + t)));
      }
      if (!(hn::GetLane(hn::MaxOfLanes(d, top)) > cut)) continue;
      auto sum = hn::Zero(d);
      for (int t = 0; t < kReturnTokens; t += lanes) {
        const auto here = BitsAt(kept, token % kBlockTokens + t);
        const auto each = QuickExp2(hn::Sub(hn::LoadU(d, row + t), hn::Set(d, maximum)));
        sum = hn::Add(sum, hn::IfThenZeroElse(here, each));
      }
      masses[page] = std::max(masses[page], hn::GetLane(hn::SumOfLanes(d, sum)) * factor);
    }
  }
}

void Shares(const HistoryTable& table, const UnitLogits& logits, std::vector<float>& shares) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const int padded = (table.tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
  shares.assign(static_cast<std::size_t>(padded), 0.0f);
  for (int column = 0; column < logits.columns; ++column) {
    const float* partial = logits.total + column * PartialFloats(logits.head_dim);
    const auto maximum = hn::Set(d, partial[logits.head_dim]);
    const auto factor =
        hn::Set(d, logits.total_unit / partial[logits.head_dim + 1] / logits.columns);
    for (int first = 0; first < padded; first += kSplitTokens) {
      const float* row =
          logits.taking_part +
          (static_cast<std::size_t>(first / kSplitTokens) * logits.columns + column) * kSplitTokens;
      const int end = std::min(kSplitTokens, padded - first);
      for (int t = 0; t < end; t += lanes) {
        float* to = shares.data() + first + t;
        const auto each = QuickExp2(hn::Sub(hn::LoadU(d, row + t), maximum));
        hn::StoreU(hn::MulAdd(each, factor, hn::LoadU(d, to)), d, to);
      }
    }
  }
  shares.resize(static_cast<std::size_t>(table.tokens));
}

constexpr HistoryKernel kHistory = {PageMasses, Shares};
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
