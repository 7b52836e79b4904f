#include "backend/retained_history.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "base/check.h"

namespace pliant {
namespace {

constexpr float kShortSteps = 16, kLongSteps = 64;  // of the running means of queries

}  // namespace

RetainedHistory::RetainedHistory(const KvGeometry& geometry, int heads,
                                 const RetentionOptions& options, std::shared_ptr<RowSource> source)
    : geometry_(geometry),
      heads_(heads),
      options_(options),
      source_(std::move(source)),
      words_((geometry.head_dim + 63) / 64),
      units_(geometry.Units()) {
  PLIANT_CHECK(heads >= 1 && heads % geometry.kv_heads == 0, "heads are a multiple of KV heads");
  const std::size_t queries = static_cast<std::size_t>(geometry.layers) * heads;
  short_mean_.resize(queries * geometry.head_dim);
  long_mean_.resize(queries * geometry.head_dim);
  query_seen_.resize(queries);
  for (Unit& unit : units_) unit.key_sum.resize(geometry.head_dim);
  for (int differ = 0; differ <= geometry.head_dim; ++differ) {
    weight_at_.push_back(WeightAt(std::cos(std::numbers::pi_v<float> * static_cast<float>(differ) /
                                           static_cast<float>(geometry.head_dim))));
  }
}

void RetainedHistory::Reserve(std::int64_t tokens) {
  const std::size_t blocks = static_cast<std::size_t>(tokens + kBlockTokens - 1) / kBlockTokens;
  const std::size_t size = blocks * kBlockTokens;
  if (units_.empty() || size <= units_[0].score.size()) return;
  for (Unit& unit : units_) {
    unit.kept.resize(blocks);
    unit.score.resize(size);
    unit.weight.resize(size, 1.0f);
    if (options_.returns) unit.signs.resize(size * words_);
  }
}

// ---- keys and queries

void RetainedHistory::AddToMean(int unit, std::span<const float> keys) {
  PLIANT_CHECK(noted_ == 0, "the mean of keys is made once");
  Unit& u = units_[unit];
  const std::size_t dim = u.key_sum.size();
  for (std::size_t i = 0; i < keys.size(); ++i) u.key_sum[i % dim] += keys[i];
  u.keys_summed += static_cast<std::int64_t>(keys.size() / dim);
}

void RetainedHistory::NoteKeys(int unit, std::span<const float> keys) {
  Unit& u = units_[unit];
  PLIANT_CHECK(keys.size() == static_cast<std::size_t>(kBlockTokens) * geometry_.head_dim &&
                   (noted_ + 1) * kBlockTokens <= static_cast<std::int32_t>(u.score.size()),
               "keys of one block, with room for it");
  options_.returns ? NoteSigns(u, keys) : NoteExactly(u, keys);
}

void RetainedHistory::NoteSigns(Unit& u, std::span<const float> keys) {
  const int dim = geometry_.head_dim;
  const std::int32_t first = noted_ * kBlockTokens;
  const double share = u.keys_summed > 0 ? 1.0 / static_cast<double>(u.keys_summed) : 0.0;
  for (int t = 0; t < kBlockTokens; ++t) {
    std::uint64_t* signs = u.signs.data() + static_cast<std::size_t>(first + t) * words_;
    for (int c = 0; c < dim; ++c) {
      const bool above = keys[static_cast<std::size_t>(t) * dim + c] > u.key_sum[c] * share;
      signs[c / 64] |= std::uint64_t{above} << (c % 64);
    }
  }
  // Who of the older ones is nearly repeated? What was dropped has no say and is not asked.
  const auto compare = [&](std::int32_t old) {
    const std::uint64_t* a = u.signs.data() + static_cast<std::size_t>(old) * words_;
    int nearest = dim;
    for (std::int32_t t = std::max(first, old + 1); t < first + kBlockTokens; ++t) {
      const std::uint64_t* b = u.signs.data() + static_cast<std::size_t>(t) * words_;
      int differ = 0;
      for (int w = 0; w < words_; ++w) differ += std::popcount(a[w] ^ b[w]);
      nearest = std::min(nearest, differ);
    }
    u.weight[old] = std::min(u.weight[old], weight_at_[nearest]);
  };
  for (const std::int32_t token : u.kept_token) compare(token);
  for (std::int32_t t = frontier_ * kBlockTokens; t < first + kBlockTokens; ++t) compare(t);
}

void RetainedHistory::NoteExactly(Unit& u, std::span<const float> keys) {
  const std::size_t dim = static_cast<std::size_t>(geometry_.head_dim);
  const double share = u.keys_summed > 0 ? 1.0 / static_cast<double>(u.keys_summed) : 0.0;
  std::vector<std::int16_t> fresh(kBlockTokens * dim), old(dim);  // wide, as products are
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
      fresh[t * dim + c] = static_cast<std::int16_t>(code);
      u.whole_keys.codes.push_back(static_cast<std::int8_t>(code));
      squares += code * code;
    }
    u.whole_keys.inverse_norm.push_back(squares > 0 ? 1 / std::sqrt(squares) : 0);
  }
  const float* norms = &u.whole_keys.inverse_norm[u.whole_keys.inverse_norm.size() - kBlockTokens];
  // What is older, and of the block itself what comes before: `from` is the first that is later.
  const auto compare = [&](const Keys& table, std::size_t at, std::int32_t token, int from) {
    std::copy_n(table.codes.begin() + static_cast<std::ptrdiff_t>(at * dim), dim, old.begin());
    float nearest = 0;
    for (std::size_t t = static_cast<std::size_t>(from); t < kBlockTokens; ++t) {
      std::int32_t dot = 0;
      for (std::size_t c = 0; c < dim; ++c)
        dot += std::int32_t{old[c]} * std::int32_t{fresh[t * dim + c]};
      nearest = std::max(nearest, static_cast<float>(dot) * norms[t]);
    }
    if (nearest > 0)
      u.weight[token] = std::min(u.weight[token], WeightAt(nearest * table.inverse_norm[at]));
  };
  for (std::size_t s = 0; s < u.kept_token.size(); ++s) compare(u.slot_keys, s, u.kept_token[s], 0);
  const std::int32_t first = noted_ * kBlockTokens;
  for (std::int32_t t = frontier_ * kBlockTokens; t < first + kBlockTokens; ++t)
    compare(u.whole_keys, t - frontier_ * kBlockTokens, t, std::max(t + 1 - first, 0));
}

void RetainedHistory::NoteQuery(int layer, int head, const float* query) {
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

double RetainedHistory::Divergence() const {
  double sum = 0;
  const int dim = geometry_.head_dim;
  for (std::size_t at = 0; at < query_seen_.size(); ++at) {
    const float* a = short_mean_.data() + at * dim;
    const float* b = long_mean_.data() + at * dim;
    double dot = 0, aa = 0, bb = 0;
    for (int c = 0; c < dim; ++c) {
      dot += double{a[c]} * b[c];
      aa += double{a[c]} * a[c];
      bb += double{b[c]} * b[c];
    }
    const double norms = std::sqrt(aa * bb);
    if (norms > 0) sum += 1 - dot / norms;
  }
  return sum / static_cast<double>(std::max<std::size_t>(query_seen_.size(), 1));
}

// ---- what stays

float RetainedHistory::WeightAt(float likeness) const {
  return std::pow(1 - std::clamp(likeness, 0.0f, 1.0f), options_.redundancy);
}

float RetainedHistory::Use(const Unit& unit, std::int32_t token) const {
  const float use = unit.score[token] * unit.weight[token];
  return use >= 0 ? use : 0;  // no NaN: uses are sorted
}

void RetainedHistory::Place(Unit& unit, std::int32_t token, std::int32_t slot) {
  unit.kept_token[slot] = token;
  unit.kept[token / kBlockTokens] |= 1u << (token % kBlockTokens);
  if (options_.returns) return;
  const std::int32_t row = token - frontier_ * kBlockTokens;
  PLIANT_CHECK(row >= 0 && frontier_ < noted_, "what is kept for good comes from a noted block");
  std::copy_n(unit.whole_keys.codes.begin() + std::ptrdiff_t{row} * geometry_.head_dim,
              geometry_.head_dim,
              unit.slot_keys.codes.begin() + std::ptrdiff_t{slot} * geometry_.head_dim);
  unit.slot_keys.inverse_norm[slot] = unit.whole_keys.inverse_norm[row];
}

void RetainedHistory::ForgetOldestWhole() {
  if (options_.returns) return;
  for (Unit& unit : units_) {
    Keys& keys = unit.whole_keys;
    keys.codes.erase(keys.codes.begin(),
                     keys.codes.begin() + std::ptrdiff_t{kBlockTokens} * geometry_.head_dim);
    keys.inverse_norm.erase(keys.inverse_norm.begin(), keys.inverse_norm.begin() + kBlockTokens);
  }
}

namespace {

struct Candidate {
  float use;
  std::int32_t token, slot;  // slot -1: not in a slot yet
  /// Least use first; older first among equals, so that the order is one.
  bool operator<(const Candidate& other) const {
    return use != other.use ? use < other.use : token < other.token;
  }
};

}  // namespace

void RetainedHistory::Drop(int unit, std::vector<Move>& moves) {
  Unit& u = units_[unit];
  moves.clear();
  std::vector<Candidate> all;
  all.reserve(u.kept_token.size() + kBlockTokens);
  const float never = std::numeric_limits<float>::infinity();
  const auto add = [&](std::int32_t token, std::int32_t slot) {
    all.push_back({token < options_.sink_tokens ? never : Use(u, token), token, slot});
  };
  for (std::size_t s = 0; s < u.kept_token.size(); ++s)
    add(u.kept_token[s], static_cast<std::int32_t>(s));
  for (int t = 0; t < kBlockTokens; ++t) add(frontier_ * kBlockTokens + t, -1);
  std::nth_element(all.begin(), all.begin() + kBlockTokens, all.end());
  // As many slots come free among the first 32 as tokens without a slot stay behind them.
  std::sort(all.begin(), all.begin() + kBlockTokens);
  std::sort(all.begin() + kBlockTokens, all.end());
  auto stays = all.begin() + kBlockTokens;
  for (auto gone = all.begin(); gone != all.begin() + kBlockTokens; ++gone) {
    if (gone->slot < 0) continue;
    u.kept[gone->token / kBlockTokens] &= ~(1u << (gone->token % kBlockTokens));
    while (stays->slot >= 0) ++stays;
    Place(u, stays->token, gone->slot);
    moves.push_back({stays->token, gone->slot});
    ++stays;
  }
}

void RetainedHistory::DropIntoNewBlock(int unit, std::vector<Move>& moves) {
  Unit& u = units_[unit];
  moves.clear();
  u.kept_token.resize(u.kept_token.size() + kBlockTokens);
  if (!options_.returns) {
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
  Unit& u = units_[unit];
  const std::size_t kept = u.kept_token.size();
  for (std::size_t s = 0; s < kept; ++s) u.score[u.kept_token[s]] += shares[s];
  float* tail = u.score.data() + static_cast<std::size_t>(frontier_) * kBlockTokens;
  for (std::size_t t = kept; t < shares.size(); ++t) tail[t - kept] += shares[t];
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

void RetainedHistory::Return(int unit, std::int32_t page, std::vector<Move>& moves) {
  Unit& u = units_[unit];
  moves.clear();
  const std::int32_t first = page * kReturnTokens;
  std::vector<Candidate> slots;
  slots.reserve(u.kept_token.size());
  for (std::size_t s = 0; s < u.kept_token.size(); ++s) {
    const std::int32_t token = u.kept_token[s];
    const bool fixed = token < options_.sink_tokens || token / kReturnTokens == page;
    if (!fixed) slots.push_back({Use(u, token), token, static_cast<std::int32_t>(s)});
  }
  std::int32_t back[kReturnTokens];
  int count = 0;
  for (std::int32_t token = first; token < first + kReturnTokens; ++token) {
    if ((u.kept[token / kBlockTokens] >> (token % kBlockTokens) & 1) == 0) back[count++] = token;
  }
  count = std::min(count, static_cast<int>(slots.size()));
  std::partial_sort(slots.begin(), slots.begin() + count, slots.end());
  for (int i = 0; i < count; ++i) {
    const std::int32_t gone = slots[i].token;
    u.kept[gone / kBlockTokens] &= ~(1u << (gone % kBlockTokens));
    Place(u, back[i], slots[i].slot);
    moves.push_back({back[i], slots[i].slot});
  }
  ++u.returned_pages;
  u.returned_tokens += count;
}

// ---- counters

std::int64_t RetainedHistory::dropped_tokens() const {
  std::int64_t kept = 0;
  for (const Unit& unit : units_) kept += static_cast<std::int64_t>(unit.kept_token.size());
  return std::int64_t{frontier_} * kBlockTokens * units() - kept;
}
std::int64_t RetainedHistory::returned_pages() const {
  std::int64_t sum = 0;
  for (const Unit& unit : units_) sum += unit.returned_pages;
  return sum;
}
std::int64_t RetainedHistory::returned_tokens() const {
  std::int64_t sum = 0;
  for (const Unit& unit : units_) sum += unit.returned_tokens;
  return sum;
}
std::int64_t RetainedHistory::lost_pages() const {
  std::int64_t sum = 0;
  for (const Unit& unit : units_) sum += static_cast<std::int64_t>(unit.lost.size());
  return sum;
}

}  // namespace pliant
