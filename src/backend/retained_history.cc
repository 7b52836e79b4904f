#include "backend/retained_history.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

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
  for (Unit& unit : units_) unit.key_sum.resize(geometry.head_dim);
  for (int differ = 0; differ <= geometry.head_dim; ++differ) {
    weight_at_.push_back(WeightAt(std::cos(std::numbers::pi_v<float> * static_cast<float>(differ) /
                                           static_cast<float>(geometry.head_dim))));
  }
}

void RetainedHistory::Reserve(std::int64_t tokens) {
  const std::int64_t blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
  if (remote_ != nullptr || blocks * kBlockTokens <= reserved_) return;
  reserved_ = blocks * kBlockTokens;
  const auto size = static_cast<std::size_t>(reserved_);
  for (Unit& unit : units_) {
    unit.kept.resize(static_cast<std::size_t>(blocks));
    const std::size_t part =
        unit.kept_token.size() + size - static_cast<std::size_t>(frontier_) * kBlockTokens;
    unit.score.resize(part);
    unit.weight.resize(part, 1.0f);
    if (!options_.returns) continue;
    unit.left_score.resize(size);
    unit.left_weight.resize(size);
    unit.signs.resize(size * words_);
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
                   (noted_ + 1) * kBlockTokens <= reserved_,
               "keys of one block, with room for it");
  options_.returns ? NoteSigns(u, keys) : NoteExactly(u, keys);
}

namespace {

/// The fewest bits by which a[words] differs from one of the rows [from, to). kWords: their number
/// where it is known.
template <int kWords>
int FewestSigns(const std::uint64_t* a, const std::uint64_t* from, const std::uint64_t* to,
                int words) {
  int fewest = std::numeric_limits<int>::max();
  const int count = kWords > 0 ? kWords : words;
  for (; from != to; from += count) {
    int differ = 0;
    for (int w = 0; w < count; ++w) differ += std::popcount(a[w] ^ from[w]);
    fewest = std::min(fewest, differ);
  }
  return fewest;
}

}  // namespace

void RetainedHistory::NoteSigns(Unit& u, std::span<const float> keys) {
  const int dim = geometry_.head_dim;
  const std::int32_t first = noted_ * kBlockTokens;
  const double share = u.keys_summed > 0 ? 1.0 / static_cast<double>(u.keys_summed) : 0.0;
  std::vector<double> mean(u.key_sum);
  for (double& x : mean) x *= share;
  for (int t = 0; t < kBlockTokens; ++t) {
    std::uint64_t* signs = u.signs.data() + static_cast<std::size_t>(first + t) * words_;
    for (int c = 0; c < dim; ++c) {
      const bool above = keys[static_cast<std::size_t>(t) * dim + c] > mean[c];
      signs[c / 64] |= std::uint64_t{above} << (c % 64);
    }
  }
  // Who of the older ones is nearly repeated? What was dropped has no say and is not asked.
  const std::uint64_t* const end =
      u.signs.data() + static_cast<std::size_t>(first + kBlockTokens) * words_;
  const auto compare = [&](const std::uint64_t* a, std::int32_t next, float& weight) {
    const std::uint64_t* later =
        u.signs.data() + static_cast<std::size_t>(std::max(first, next)) * words_;
    const int nearest =
        words_ == 1 ? FewestSigns<1>(a, later, end, 1) : FewestSigns<0>(a, later, end, words_);
    weight = std::min(weight, weight_at_[std::min(nearest, dim)]);
  };
  const std::size_t kept = u.kept_token.size();
  for (std::size_t s = 0; s < kept; ++s) compare(&u.slot_signs[s * words_], first, u.weight[s]);
  float* weight = u.weight.data() + kept;
  for (std::int32_t t = frontier_ * kBlockTokens; t < first + kBlockTokens; ++t)
    compare(&u.signs[static_cast<std::size_t>(t) * words_], t + 1, *weight++);
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
  const auto compare = [&](const Keys& table, std::size_t at, float& weight, int from) {
    std::copy_n(table.codes.begin() + static_cast<std::ptrdiff_t>(at * dim), dim, old.begin());
    float nearest = 0;
    for (std::size_t t = static_cast<std::size_t>(from); t < kBlockTokens; ++t) {
      std::int32_t dot = 0;
      for (std::size_t c = 0; c < dim; ++c)
        dot += std::int32_t{old[c]} * std::int32_t{fresh[t * dim + c]};
      nearest = std::max(nearest, static_cast<float>(dot) * norms[t]);
    }
    if (nearest > 0) weight = std::min(weight, WeightAt(nearest * table.inverse_norm[at]));
  };
  const std::size_t kept = u.kept_token.size();
  for (std::size_t s = 0; s < kept; ++s) compare(u.slot_keys, s, u.weight[s], 0);
  const std::int32_t whole = frontier_ * kBlockTokens, first = noted_ * kBlockTokens;
  for (std::int32_t t = whole; t < first + kBlockTokens; ++t) {
    const auto at = static_cast<std::size_t>(t - whole);
    compare(u.whole_keys, at, u.weight[kept + at], std::max(t + 1 - first, 0));
  }
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

double RetainedHistory::Divergence() const {
  if (remote_ != nullptr) return remote_divergence_;
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
  return UnlikenessPower(likeness, options_.redundancy);
}

float RetainedHistory::Use(float score, float weight) {
  const float use = score * weight;
  return use >= 0 ? use : 0;  // no NaN: uses are sorted
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

void RetainedHistory::Leave(Unit& unit, std::int32_t token, std::size_t at) {
  unit.kept[token / kBlockTokens] &= ~(1u << (token % kBlockTokens));
  if (!options_.returns) return;
  unit.left_score[token] = unit.score[at];
  unit.left_weight[token] = unit.weight[at];
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
  const std::size_t kept = u.kept_token.size();
  const std::int32_t first = frontier_ * kBlockTokens;
  std::vector<Candidate> all;
  all.reserve(kept + kBlockTokens);
  const float never = std::numeric_limits<float>::infinity();
  const auto add = [&](std::int32_t token, float use, std::int32_t slot) {
    all.push_back({token < options_.sink_tokens ? never : use, token, slot});
  };
  for (std::size_t s = 0; s < kept; ++s)
    add(u.kept_token[s], Use(u.score[s], u.weight[s]), static_cast<std::int32_t>(s));
  for (std::size_t t = kept; t < kept + kBlockTokens; ++t)
    add(first + static_cast<std::int32_t>(t - kept), Use(u.score[t], u.weight[t]), -1);
  std::nth_element(all.begin(), all.begin() + kBlockTokens, all.end());
  // As many slots come free among the first 32 as tokens without a slot stay behind them.
  std::sort(all.begin(), all.begin() + kBlockTokens);
  auto stays = all.begin() + kBlockTokens;
  std::sort(stays, std::partition(stays, all.end(), [](const Candidate& c) { return c.slot < 0; }));
  for (auto gone = all.begin(); gone != all.begin() + kBlockTokens; ++gone) {
    const std::size_t at = gone->slot < 0 ? kept + (gone->token - first) : gone->slot;
    Leave(u, gone->token, at);
    if (gone->slot < 0) continue;
    Place(u, stays->token, gone->slot);
    u.score[at] = u.score[kept + (stays->token - first)];
    u.weight[at] = u.weight[kept + (stays->token - first)];
    moves.push_back({stays->token, gone->slot});
    ++stays;
  }
  for (std::vector<float>* part : {&u.score, &u.weight}) {
    const auto whole = part->begin() + static_cast<std::ptrdiff_t>(kept);
    part->erase(whole, whole + kBlockTokens);
  }
}

void RetainedHistory::DropIntoNewBlock(int unit, std::vector<Move>& moves) {
  Unit& u = units_[unit];
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
  std::int32_t back[kReturnTokens];
  int wanted = 0;
  for (std::int32_t token = first; token < first + kReturnTokens; ++token) {
    if ((u.kept[token / kBlockTokens] >> (token % kBlockTokens) & 1) == 0) back[wanted++] = token;
  }
  // The slots of least use, in order. Most candidates are beaten by the last of them at once.
  Candidate slots[kReturnTokens];
  int count = 0;
  for (std::size_t s = 0; wanted > 0 && s < u.kept_token.size(); ++s) {
    const std::int32_t token = u.kept_token[s];
    const Candidate next = {Use(u.score[s], u.weight[s]), token, static_cast<std::int32_t>(s)};
    if (count == wanted && !(next < slots[count - 1])) continue;
    const bool fixed = token < options_.sink_tokens || token / kReturnTokens == page;
    if (fixed) continue;
    int at = count < wanted ? count++ : count - 1;
    for (; at > 0 && next < slots[at - 1]; --at) slots[at] = slots[at - 1];
    slots[at] = next;
  }
  for (int i = 0; i < count; ++i) {
    const std::int32_t slot = slots[i].slot;
    Leave(u, slots[i].token, slot);
    Place(u, back[i], slot);
    u.score[slot] = u.left_score[back[i]];
    u.weight[slot] = u.left_weight[back[i]];
    moves.push_back({back[i], slots[i].slot});
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
  return at >= 0 ? u.score[at] : options_.returns ? u.left_score[token] : 0;
}

float RetainedHistory::weight(int unit, std::int32_t token) const {
  if (remote_ != nullptr) return remote_->Read(unit, token + 1).weight[token];
  const Unit& u = units_[unit];
  const std::ptrdiff_t at = PlaceOf(u, token);
  return at >= 0 ? u.weight[at] : options_.returns ? u.left_weight[token] : 0;
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
