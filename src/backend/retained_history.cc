#include "backend/retained_history.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "backend/history_keys.h"
#include "base/check.h"

namespace pliant {
RetainedHistory::RetainedHistory(const KvGeometry& geometry, int heads,
                                 const RetentionOptions& options, std::shared_ptr<RowSource> source)
    : geometry_(geometry),
      heads_(heads),
      options_(options),
      source_(std::move(source)),
      words_((geometry.head_dim + 63) / 64),
      units_(geometry.Units()) {
  PLIANT_CHECK(heads >= 1 && heads % geometry.kv_heads == 0, "heads are a multiple of KV heads");
  const std::size_t queries =
      options.query_means ? static_cast<std::size_t>(geometry.layers) * heads : 0;
  short_mean_.resize(queries * geometry.head_dim);
  long_mean_.resize(queries * geometry.head_dim);
  query_seen_.resize(queries);
  if (options.growth_weights != nullptr) {
    const GrowthWeights& weights = *options.growth_weights;
    PLIANT_CHECK(weights.short_mean.size() == short_mean_.size() &&
                     weights.long_mean.size() == long_mean_.size(),
                 "growth weights are of this model, and the means of queries are kept");
  }
  for (Unit& unit : units_) unit.key_sum.resize(geometry.head_dim);
  for (int differ = 0; differ <= geometry.head_dim; ++differ) {
    weight_at_.push_back(WeightAt(std::cos(std::numbers::pi_v<float> * static_cast<float>(differ) /
                                           static_cast<float>(geometry.head_dim))));
  }
}

void RetainedHistory::KeepRemotely(std::shared_ptr<RemoteTables> tables) {
  remote_ = std::move(tables);
  short_mean_ = {};
  long_mean_ = {};
  query_seen_ = {};
}

void RetainedHistory::Reserve(std::int64_t tokens) {
  if (remote_ != nullptr || tokens <= reserved_) return;
  constexpr std::int64_t kBlocksAtOnce = 8;  // not every table in every block
  const std::int64_t blocks =
      (tokens + kBlocksAtOnce * kBlockTokens - 1) / (kBlocksAtOnce * kBlockTokens) * kBlocksAtOnce;
  reserved_ = blocks * kBlockTokens;
  const auto size = static_cast<std::size_t>(reserved_);
  for (Unit& unit : units_) {
    unit.kept.resize(static_cast<std::size_t>(blocks));
    const std::size_t part =
        unit.kept_token.size() + size - static_cast<std::size_t>(frontier_) * kBlockTokens;
    unit.score.resize(part);
    unit.weight.resize(part, 1.0f);
    if (!options_.returns) continue;
    unit.left.resize(size);
    unit.signs.resize(size * words_);
  }
}

// ---- keys and queries

void RetainedHistory::AddToMean(int unit, std::span<const float> keys) {
  PLIANT_CHECK(noted_ == 0, "the mean of keys is made once");
  Unit& u = units_[unit];
  const std::size_t dim = u.key_sum.size();
  for (std::size_t row = 0; row + dim <= keys.size(); row += dim) {
    for (std::size_t c = 0; c < dim; ++c) u.key_sum[c] += keys[row + c];
  }
  u.keys_summed += static_cast<std::int64_t>(keys.size() / dim);
}

void RetainedHistory::NoteKeys(int unit, std::span<const float> keys, const KeyKernel& kernel) {
  Unit& u = units_[unit];
  PLIANT_CHECK(keys.size() == static_cast<std::size_t>(kBlockTokens) * geometry_.head_dim &&
                   (noted_ + 1) * kBlockTokens <= reserved_,
               "keys of one block, with room for it");
  options_.returns ? NoteSigns(u, keys, kernel) : NoteExactly(u, keys, kernel);
  u.order.Forget();
}

void RetainedHistory::NoteSigns(Unit& u, std::span<const float> keys, const KeyKernel& kernel) {
  const int dim = geometry_.head_dim;
  const std::int32_t first = noted_ * kBlockTokens, whole = frontier_ * kBlockTokens;
  PLIANT_CHECK(whole <= first, "what was dropped has been noted");
  const auto kept = static_cast<int>(u.kept_token.size());
  // Once a block, and not looked at since: weights are asked for, and where signs begin.
  const auto ask = [](const auto* from, std::size_t count) {
    for (std::size_t i = 0; i < count; i += 64 / sizeof(*from)) __builtin_prefetch(from + i);
  };
  ask(u.slot_signs.data(), std::min<std::size_t>(64, u.slot_signs.size()));
  ask(u.signs.data() + static_cast<std::size_t>(whole) * words_, 64);
  ask(u.weight.data(), static_cast<std::size_t>(kept + first - whole));
  if (u.mean.empty()) {
    // What lies above the mean lies above the largest f32 that does not.
    const double share = u.keys_summed > 0 ? 1.0 / static_cast<double>(u.keys_summed) : 0.0;
    for (const double sum : u.key_sum) {
      const double mean = sum * share;
      float below = static_cast<float>(mean);
      if (below > mean) below = std::nextafter(below, -INFINITY);
      u.mean.push_back(below);
    }
  }
  std::vector<std::int32_t> fewest;
  std::uint64_t* const fresh = u.signs.data() + static_cast<std::size_t>(first) * words_;
  kernel.signs(kBlockTokens, dim, keys.data(), u.mean.data(), fresh);
  // Who of the older ones is nearly repeated? What was dropped has no say and is not asked.
  const auto compare = [&](const std::uint64_t* rows, int count, const std::uint64_t* later,
                           int later_count, float* weight) {
    fewest.resize(std::max(fewest.size(), static_cast<std::size_t>(count)));
    kernel.fewest(words_, count, rows, later_count, later, fewest.data());
    for (int i = 0; i < count; ++i) weight[i] = std::min(weight[i], weight_at_[fewest[i]]);
  };
  float* weight = u.weight.data();
  compare(u.slot_signs.data(), kept, fresh, kBlockTokens, weight);
  weight += kept;
  compare(&u.signs[static_cast<std::size_t>(whole) * words_], first - whole, fresh, kBlockTokens,
          weight);
  weight += first - whole;
  for (int t = 0; t + 1 < kBlockTokens; ++t) {  // of the block itself, what comes after
    const std::uint64_t* row = fresh + static_cast<std::ptrdiff_t>(t) * words_;
    compare(row, 1, row + words_, kBlockTokens - 1 - t, weight + t);
  }
}

void RetainedHistory::NoteExactly(Unit& u, std::span<const float> keys, const KeyKernel& kernel) {
  const std::size_t dim = static_cast<std::size_t>(geometry_.head_dim);
  const double share = u.keys_summed > 0 ? 1.0 / static_cast<double>(u.keys_summed) : 0.0;
  std::vector<float> row(dim);
  for (std::size_t t = 0; t < kBlockTokens; ++t) {
    float most = 0, squares = 0;
    for (std::size_t c = 0; c < dim; ++c) {
      row[c] = keys[t * dim + c] - static_cast<float>(u.key_sum[c] * share);
      most = std::max(most, std::abs(row[c]));
    }
    const float step = most > 0 ? 127 / most : 0;
    for (std::size_t c = 0; c < dim; ++c) {
      const float code = std::nearbyint(row[c] * step);
      u.whole_keys.codes.push_back(static_cast<std::int8_t>(code));
      squares += code * code;
    }
    u.whole_keys.inverse_norm.push_back(squares > 0 ? 1 / std::sqrt(squares) : 0);
  }
  const std::int8_t* fresh =
      u.whole_keys.codes.data() + u.whole_keys.codes.size() - kBlockTokens * dim;
  const float* norms = &u.whole_keys.inverse_norm[u.whole_keys.inverse_norm.size() - kBlockTokens];
  // What is older, and of the block itself what comes before: row i is asked for later ones from
  // `from` + i on.
  std::vector<float> nearest;
  const auto compare = [&](const Keys& table, int count, int from, float* weight) {
    nearest.resize(static_cast<std::size_t>(count));
    kernel.nearest(geometry_.head_dim, count, table.codes.data(), from, fresh, norms,
                   nearest.data());
    for (int i = 0; i < count; ++i) {
      const float likeness = nearest[i] * table.inverse_norm[i];
      if (nearest[i] > 0) weight[i] = std::min(weight[i], WeightAt(likeness));
    }
  };
  const auto kept = static_cast<int>(u.kept_token.size());
  compare(u.slot_keys, kept, -kept, u.weight.data());
  const std::int32_t older = (noted_ - frontier_) * kBlockTokens;
  compare(u.whole_keys, older + kBlockTokens, 1 - older, u.weight.data() + kept);
}

void RetainedHistory::NoteQuery(int layer, int head, const float* query) {
  PLIANT_CHECK(options_.query_means, "the means of queries are kept");
  const std::size_t at = static_cast<std::size_t>(layer) * heads_ + head;
  const int dim = geometry_.head_dim;
  float* quick = short_mean_.data() + at * dim;
  float* slow = long_mean_.data() + at * dim;
  const bool first = query_seen_[at] == 0;
  query_seen_[at] = 1;
  const float quick_share = first ? 1 : 1 / kShortSteps;
  const float slow_share = first ? 1 : 1 / kLongSteps;
  for (int c = 0; c < dim; ++c) quick[c] += (query[c] - quick[c]) * quick_share;
  for (int c = 0; c < dim; ++c) slow[c] += (query[c] - slow[c]) * slow_share;
}

double RetainedHistory::QuerySignal() const {
  if (remote_ != nullptr) return remote_query_signal_;
  if (query_seen_.empty() || query_seen_[0] == 0) return 0;
  const GrowthWeights* const weights = options_.growth_weights.get();
  const auto dim = static_cast<std::size_t>(geometry_.head_dim);
  const auto dot = [dim](const float* a, const float* b) {
    double sum = 0;
    for (std::size_t c = 0; c < dim; ++c) sum += double{a[c]} * b[c];
    return sum;
  };
  double sum = 0;
  for (std::size_t at = 0; at < query_seen_.size(); ++at) {
    const float* a = short_mean_.data() + at * dim;
    const float* b = long_mean_.data() + at * dim;
    const double aa = dot(a, a), bb = dot(b, b);
    if (weights != nullptr) {
      if (aa > 0) sum += dot(a, &weights->short_mean[at * dim]) / std::sqrt(aa);
      if (bb > 0) sum += dot(b, &weights->long_mean[at * dim]) / std::sqrt(bb);
    } else if (aa * bb > 0) {
      sum += 1 - dot(a, b) / std::sqrt(aa * bb);
    }
  }
  if (weights != nullptr) return 1 / (1 + std::exp(-(weights->bias + sum)));
  return sum / static_cast<double>(query_seen_.size());
}

// ---- what stays

float RetainedHistory::WeightAt(float likeness) const {
  return UnlikenessPower(likeness, options_.redundancy);
}

void RetainedHistory::Place(Unit& unit, std::int32_t token, std::int32_t slot) {
  unit.kept_token[slot] = token;
  unit.kept[token / kBlockTokens] |= 1u << (token % kBlockTokens);
  if (options_.returns) {
    std::copy_n(unit.signs.begin() + std::ptrdiff_t{token} * words_, words_,
                unit.slot_signs.begin() + std::ptrdiff_t{slot} * words_);
    return;
  }
  const std::int32_t row = token - frontier_ * kBlockTokens;
  PLIANT_CHECK(row >= 0 && frontier_ < noted_, "what is kept for good comes from a noted block");
  std::copy_n(unit.whole_keys.codes.begin() + std::ptrdiff_t{row} * geometry_.head_dim,
              geometry_.head_dim,
              unit.slot_keys.codes.begin() + std::ptrdiff_t{slot} * geometry_.head_dim);
  unit.slot_keys.inverse_norm[slot] = unit.whole_keys.inverse_norm[row];
}

void RetainedHistory::Leave(Unit& unit, std::int32_t token, Left left) {
  unit.kept[token / kBlockTokens] &= ~(1u << (token % kBlockTokens));
  if (options_.returns) unit.left[token] = left;
}

void RetainedHistory::ForgetOldestWhole() {
  if (options_.returns || remote_ != nullptr) return;
  for (Unit& unit : units_) {
    Keys& keys = unit.whole_keys;
    keys.codes.erase(keys.codes.begin(),
                     keys.codes.begin() + std::ptrdiff_t{kBlockTokens} * geometry_.head_dim);
    keys.inverse_norm.erase(keys.inverse_norm.begin(), keys.inverse_norm.begin() + kBlockTokens);
  }
}

void RetainedHistory::Drop(int unit, std::vector<Move>& moves, const KeyKernel& kernel) {
  Unit& u = units_[unit];
  moves.clear();
  const auto kept = static_cast<std::int32_t>(u.kept_token.size());
  // By where they are in u.score: kept tokens, then the block's.
  std::vector<std::int32_t> tokens;
  tokens.reserve(u.kept_token.size() + kBlockTokens);
  tokens = u.kept_token;
  for (int t = 0; t < kBlockTokens; ++t) tokens.push_back(frontier_ * kBlockTokens + t);
  u.order.List({.tokens = static_cast<int>(tokens.size()),
                .score = u.score.data(),
                .weight = u.weight.data(),
                .token = tokens.data(),
                .never_before = options_.sink_tokens},
               kernel);
  LeavingOrder::Token leaving[kBlockTokens];
  u.order.TakeLeast(u.score.data(), leaving);
  // As many slots come free as tokens of the block stay; both in order of use.
  std::uint32_t gone = 0;
  for (const LeavingOrder::Token& leaves : leaving) {
    if (leaves.slot >= kept) gone |= 1u << (leaves.slot - kept);
  }
  std::vector<std::pair<std::uint64_t, int>> staying;  // by use; in the block
  for (int t = 0; t < kBlockTokens; ++t) {
    if ((gone >> t & 1) != 0) continue;
    staying.emplace_back(
        LeavingOrder::KeyOf(u.score[kept + t], u.weight[kept + t], tokens[kept + t]), t);
  }
  std::sort(staying.begin(), staying.end());
  auto stays = staying.begin();
  std::int32_t slots[kBlockTokens] = {};
  for (const LeavingOrder::Token& leaves : leaving) {
    Leave(u, leaves.token, {leaves.score, leaves.weight});
    if (leaves.slot >= kept) continue;
    const std::int32_t at = kept + stays->second;
    Place(u, tokens[at], leaves.slot);
    u.score[leaves.slot] = u.score[at];
    u.weight[leaves.slot] = u.weight[at];
    slots[stays->second] = leaves.slot;
    moves.push_back({tokens[at], leaves.slot});
    ++stays;
  }
  for (std::vector<float>* part : {&u.score, &u.weight}) {
    const auto whole = part->begin() + kept;
    part->erase(whole, whole + kBlockTokens);
  }
  u.order.Place(kept, slots);
}

void RetainedHistory::DropIntoNewBlock(int unit, std::vector<Move>& moves) {
  Unit& u = units_[unit];
  u.order.Forget();
  moves.clear();
  u.kept_token.resize(u.kept_token.size() + kBlockTokens);  // scores are where they must be
  if (options_.returns) {
    u.slot_signs.resize(u.kept_token.size() * words_);
  } else {
    u.slot_keys.codes.resize(u.kept_token.size() * geometry_.head_dim);
    u.slot_keys.inverse_norm.resize(u.kept_token.size());
  }
  for (int t = 0; t < kBlockTokens; ++t) {
    const Move move = {frontier_ * kBlockTokens + t, kept_blocks_ * kBlockTokens + t};
    Place(u, move.token, move.slot);
    moves.push_back(move);
  }
}

void RetainedHistory::AddScores(int unit, std::span<const float> shares) {
  std::vector<float>& score = units_[unit].score;
  PLIANT_CHECK(shares.size() <= score.size(), "shares of what takes part");
  for (std::size_t i = 0; i < shares.size(); ++i) score[i] += shares[i];
}

void RetainedHistory::AskFor(int unit, std::int32_t page) const {
  const Unit& u = units_[unit];
  const std::size_t token = static_cast<std::size_t>(page) * kReturnTokens;
  __builtin_prefetch(&u.left[token]);
  __builtin_prefetch(&u.left[token + kReturnTokens - 1]);
  __builtin_prefetch(&u.signs[token * words_]);
  __builtin_prefetch(&u.signs[(token + kReturnTokens) * words_ - 1]);
  __builtin_prefetch(&u.kept[token / kBlockTokens], 1);
  u.order.AskFor();
}

std::int32_t RetainedHistory::Wanted(int unit, std::span<const float> masses) const {
  const Unit& u = units_[unit];
  std::int32_t wanted = -1;
  float most = options_.return_weight;
  for (std::size_t p = 0; p < masses.size(); ++p) {
    const float share = masses[p] / (1 + masses[p]);
    if (!(share > most)) continue;
    const auto page = static_cast<std::int32_t>(p);
    if (std::find(u.lost.begin(), u.lost.end(), page) != u.lost.end()) continue;
    most = share;
    wanted = page;
  }
  return wanted;
}

void RetainedHistory::Return(int unit, std::int32_t page, std::vector<Move>& moves,
                             const KeyKernel& kernel) {
  Unit& u = units_[unit];
  moves.clear();
  const std::int32_t first = page * kReturnTokens;
  LeavingOrder::Token coming[kReturnTokens], leaving[kReturnTokens];
  std::size_t wanted = 0;
  for (std::int32_t token = first; token < first + kReturnTokens; ++token) {
    if ((u.kept[token / kBlockTokens] >> (token % kBlockTokens) & 1) != 0) continue;
    coming[wanted++] = {
        .token = token, .score = u.left[token].score, .weight = u.left[token].weight};
  }
  const std::span<LeavingOrder::Token> back(coming, std::min(wanted, u.kept_token.size()));
  const auto exchange = [&] {
    return u.order.Exchange(back, first, first + kReturnTokens, u.score.data(), leaving);
  };
  int count = u.order.known() ? exchange() : -1;
  if (count < 0) {
    u.order.List({.tokens = static_cast<int>(u.kept_token.size()),
                  .score = u.score.data(),
                  .weight = u.weight.data(),
                  .token = u.kept_token.data(),
                  .never_before = options_.sink_tokens},
                 kernel);
    count = exchange();
  }
  // What is written lies anywhere: all of it is asked for before the first of it is waited for.
  for (int i = 0; i < count; ++i) {
    const std::ptrdiff_t slot = leaving[i].slot;
    __builtin_prefetch(&u.left[leaving[i].token], 1);
    __builtin_prefetch(&u.weight[slot], 1);
    __builtin_prefetch(&u.kept_token[slot], 1);
    __builtin_prefetch(&u.slot_signs[slot * words_], 1);
  }
  for (int i = 0; i < count; ++i) Leave(u, leaving[i].token, {leaving[i].score, leaving[i].weight});
  for (int i = 0; i < count; ++i) {
    const LeavingOrder::Token& token = coming[i];
    Place(u, token.token, token.slot);
    u.score[token.slot] = token.score;
    u.weight[token.slot] = token.weight;
    moves.push_back({token.token, token.slot});
  }
  ++u.returned_pages;
  u.returned_tokens += count;
}

// ---- for reports

std::ptrdiff_t RetainedHistory::PlaceOf(const Unit& unit, std::int32_t token) const {
  const std::int32_t whole = frontier_ * kBlockTokens;
  if (token >= whole) return static_cast<std::ptrdiff_t>(unit.kept_token.size()) + token - whole;
  const auto slot = std::find(unit.kept_token.begin(), unit.kept_token.end(), token);
  return slot == unit.kept_token.end() ? -1 : slot - unit.kept_token.begin();
}

float RetainedHistory::score(int unit, std::int32_t token) const {
  if (remote_ != nullptr) return remote_->Read(unit, token + 1).score[token];
  const Unit& u = units_[unit];
  const std::ptrdiff_t at = PlaceOf(u, token);
  return at >= 0 ? u.score[at] : options_.returns ? u.left[token].score : 0;
}

float RetainedHistory::weight(int unit, std::int32_t token) const {
  if (remote_ != nullptr) return remote_->Read(unit, token + 1).weight[token];
  const Unit& u = units_[unit];
  const std::ptrdiff_t at = PlaceOf(u, token);
  return at >= 0 ? u.weight[at] : options_.returns ? u.left[token].weight : 0;
}

std::int64_t RetainedHistory::dropped_tokens() const {
  return std::int64_t{frontier_ - kept_blocks_} * kBlockTokens * units();
}
std::int64_t RetainedHistory::returned_pages() const {
  std::int64_t sum = remote_returned_pages_;
  for (const Unit& unit : units_) sum += unit.returned_pages;
  return sum;
}
std::int64_t RetainedHistory::returned_tokens() const {
  std::int64_t sum = remote_returned_tokens_;
  for (const Unit& unit : units_) sum += unit.returned_tokens;
  return sum;
}
std::int64_t RetainedHistory::lost_pages() const {
  std::int64_t sum = remote_lost_pages_;
  for (const Unit& unit : units_) sum += static_cast<std::int64_t>(unit.lost.size());
  return sum;
}

}  // namespace pliant
