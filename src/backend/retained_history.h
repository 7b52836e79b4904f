// Room: backend. What a sequence with a capacity retains of its history (DESIGN.md section 5), and
// what it remembers of the rest. Every (layer, KV head), a unit, chooses for itself. Plain tables
// and arithmetic: no pages are touched here (retained_rows.h does that).
//
// The blocks of the sequence from frontier() on are whole. Of those before it every unit keeps some
// tokens, copied into the sequence's kept blocks: slot s of a unit holds token KeptTokens()[s], and
// every slot of every kept block is in use, so all units keep equally many. Keys stay as they were
// cached, after RoPE; attention does not care for the order. The other tokens are dropped. With
// returns, plane 0 of their keys is still there: a page of 16 tokens to which a query head would
// give more than return_weight of its attention comes back, exactly, before the head attends, and
// as many kept tokens of least use leave.
//
// Use of a token: its attention so far (mean over the query heads of the group, or with `squared`
// the mean of its square in each step, by which one look counts more than many glances), times its
// weight (1 - r)^redundancy, r its likeness to the most similar later key: the cosine before RoPE,
// around the mean of the prompt's keys. With returns it is told by the angle between signs
// (simhash: Charikar, STOC 2002), which is cheap, and a mistake comes back. Without, keys of 8 bits
// are kept of all that takes part, head_dim + 4 bytes a token and unit, and a block that fills
// costs 64 * head_dim operations for each token of a unit that takes part.
//
// Threads: one owner; during a step different units may be handled by different threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/growth_weights.h"
#include "backend/leaving_order.h"
#include "backend/plane_code.h"
#include "base/host_device.h"
#include "base/ids.h"

namespace pliant {

struct KeyKernel;  // history_keys.h
const KeyKernel& ScalarKeyKernel();

/// Tokens that return together.
inline constexpr int kReturnTokens = 16;
/// A device tells the signal of queries when the sequence has a multiple of so many tokens.
inline constexpr int kQuerySignalTokens = kBlockTokens / 2;

struct RetentionOptions {
  bool returns = true;
  float return_weight = 0.3f;     // a page of dropped tokens returns above this
  std::int32_t most_returns = 2;  // of one unit in one step
  std::int32_t sink_tokens = 4;   // first tokens, never dropped
  float redundancy = 2;
  bool squared = false;      // scores add up squared attention
  bool query_means = false;  // running means of the queries are kept, for QuerySignal
  /// What QuerySignal makes of them, of the model's shape; null: their divergence.
  std::shared_ptr<const GrowthWeights> growth_weights;
  bool operator==(const RetentionOptions&) const = default;
};

/// Where a plane of an original block lies: on the device, or in host memory.
struct PlanePlace {
  PageId page;
  const std::byte* host = nullptr;
  bool found() const { return page.valid() || host != nullptr; }
};

/// Knows the originals of a sequence's blocks. Called from the threads of a step.
class RowSource {
 public:
  static constexpr int kAllUnits = -1;
  virtual ~RowSource() = default;
  /// Plane `plane` of K or V of block `block`; not found when it is gone or spoiled. Verified, and
  /// there to be read, is what the page holds of `unit`, or all of it. `buffer`: a page's bytes
  /// that the answer may lie in.
  virtual PlanePlace Find(std::int32_t block, bool is_v, int plane, int unit,
                          std::span<std::byte> buffer) = 0;
  /// Where it lies during the next step, for a device that reads rows by itself: not verified, and
  /// host memory only where it came from Backend::AllocateHost.
  virtual PlanePlace Place(std::int32_t /*block*/, bool /*is_v*/, int /*plane*/) { return {}; }
  /// Place, of all planes of K, then of V.
  virtual void Places(std::int32_t block, std::span<PlanePlace, 2 * kPlanes> places) {
    for (int p = 0; p < 2 * kPlanes; ++p) places[p] = Place(block, p >= kPlanes, p % kPlanes);
  }
  /// Rises when a place of any block may have become another; 0: nobody counts, ask each time.
  virtual std::uint64_t PlaceChanges() const { return 0; }
};

/// Where a backend keeps the tables of units itself, on a device.
class RemoteTables {
 public:
  virtual ~RemoteTables() = default;
  struct Unit {
    std::vector<std::int32_t> kept_token;  // by slot
    std::vector<float> score, weight;      // by token
  };
  /// For reports and tests: waits for the device. Of the first `tokens` tokens.
  virtual Unit Read(int unit, std::int32_t tokens) const = 0;
};

/// (1 - likeness)^redundancy, likeness cut to [0, 1]; whole powers by multiplications in one order,
/// so that every device gets the same bits.
PLIANT_HOST_DEVICE inline float UnlikenessPower(float likeness, float redundancy) {
  const float rest = 1 - (likeness > 0 ? (likeness < 1 ? likeness : 1) : 0);
  if (!(redundancy >= 0 && redundancy <= 64) || redundancy != std::floor(redundancy))
    return std::pow(rest, redundancy);
  float power = 1, factor = rest;
  for (int n = static_cast<int>(redundancy); n > 0; n >>= 1, factor *= factor) {
    if ((n & 1) != 0) power *= factor;
  }
  return power;
}

class RetainedHistory {
 public:
  static constexpr float kShortSteps = 16, kLongSteps = 64;  // of the running means of queries

  RetainedHistory(const KvGeometry& geometry, int heads, const RetentionOptions& options,
                  std::shared_ptr<RowSource> source);

  /// Tables of units are kept by the backend from now on (before anything is in them): of what
  /// follows nothing that names a unit may be called but score and weight.
  void KeepRemotely(std::shared_ptr<RemoteTables> tables);
  RemoteTables* remote() const { return remote_.get(); }
  /// What a step did there, added to the sums over units.
  void CountRemotely(std::int64_t returned_pages, std::int64_t returned_tokens,
                     std::int64_t lost_pages) {
    remote_returned_pages_ += returned_pages;
    remote_returned_tokens_ += returned_tokens;
    remote_lost_pages_ += lost_pages;
  }
  void SetRemoteQuerySignal(double signal) { remote_query_signal_ = signal; }
  /// [head_dim + 1]: the weight of a token by the number of signs in which the most similar later
  /// key differs.
  std::span<const float> weights_by_signs() const { return weight_at_; }

  const RetentionOptions& options() const { return options_; }
  RowSource& source() const { return *source_; }
  const KvGeometry& geometry() const { return geometry_; }
  int heads() const { return heads_; }
  int units() const { return static_cast<int>(units_.size()); }
  int UnitOf(int layer, int kv_head) const { return layer * geometry_.kv_heads + kv_head; }

  std::int32_t frontier() const { return frontier_; }        // blocks before it are dropped
  std::int32_t kept_blocks() const { return kept_blocks_; }  // how many hold kept tokens
  std::int32_t noted() const { return noted_; }              // blocks whose keys are known
  /// Blocks that take part in attention when the sequence has so many.
  std::int32_t TakingPart(std::int32_t blocks) const { return kept_blocks_ + (blocks - frontier_); }
  bool drops() const { return frontier_ > 0; }

  // ---- between steps
  /// Makes room for the state of so many tokens.
  void Reserve(std::int64_t tokens);
  /// Keys of one unit before RoPE, [tokens][head_dim]: they count in the mean that likeness is seen
  /// around. Only before the first NoteKeys.
  void AddToMean(int unit, std::span<const float> keys);
  /// The keys of block noted() of one unit, before RoPE: [32][head_dim]. All units, then EndNote.
  void NoteKeys(int unit, std::span<const float> keys, const KeyKernel& kernel = ScalarKeyKernel());
  void EndNote() { ++noted_; }
  /// What the short and long running means of the queries say: their divergence, the mean over
  /// heads of 1 - cos, or with growth_weights what those make of them. 0 before the first query.
  /// Only with query_means. With tables kept remotely: as of the last step that ended at a multiple
  /// of kQuerySignalTokens.
  double QuerySignal() const;

  /// A slot that a token moves into.
  struct Move {
    std::int32_t token = 0, slot = 0;
  };
  /// What block frontier() becomes when it is dropped, for one unit: its tokens that are kept go to
  /// the slots of kept tokens of less use. Fills `moves`. All units, then EndDrop.
  void Drop(int unit, std::vector<Move>& moves, const KeyKernel& kernel = ScalarKeyKernel());
  void EndDrop() {
    ForgetOldestWhole();
    ++frontier_;
  }
  /// The same with one more kept block, which takes all of block frontier().
  void DropIntoNewBlock(int unit, std::vector<Move>& moves);
  void EndDropIntoNewBlock() {
    EndDrop();
    ++kept_blocks_;
  }
  std::span<const std::int32_t> KeptTokens(int unit) const { return units_[unit].kept_token; }

  // ---- in a step
  /// A query head's row before norm and RoPE. Only with query_means.
  void NoteQuery(int layer, int head, const float* query);
  /// Bit t: token 32 block + t is kept.
  std::uint32_t Kept(int unit, std::int32_t block) const { return units_[unit].kept[block]; }
  /// The attention so far of what takes part, in the order of attention: by slot, then the tokens
  /// from frontier() * 32 on, as far as there is room for (whole blocks). A row adds to it what
  /// each token got, or its square; nobody takes away from it, for returns count on that
  /// (leaving_order.h).
  std::span<float> Scores(int unit) { return units_[unit].score; }
  void AddScores(int unit, std::span<const float> shares);
  // Asks memory for what the next calls for a unit read: its own lines; what Return of `page` does.
  void AskFor(int unit) const {
    const auto* const at = reinterpret_cast<const char*>(&units_[unit]);
    for (std::size_t line = 0; line < kHotBytes; line += 64) __builtin_prefetch(at + line);
  }
  void AskFor(int unit, std::int32_t page) const;
  /// masses [2 frontier()]: of each page of 16 tokens, what a query head would give to its dropped
  /// ones, in units of what it gives to all that take part. The page that should return, or -1.
  std::int32_t Wanted(int unit, std::span<const float> masses) const;
  /// The tokens of `page` that are dropped go to the slots of kept ones of least use.
  void Return(int unit, std::int32_t page, std::vector<Move>& moves,
              const KeyKernel& kernel = ScalarKeyKernel());
  /// The page cannot be read; it is never wanted again.
  void Lose(int unit, std::int32_t page) { units_[unit].lost.push_back(page); }

  // ---- for reports and tests
  /// Attention so far; of a dropped token, until it left.
  float score(int unit, std::int32_t token) const;
  /// (1 - likeness to the most similar later key)^redundancy.
  float weight(int unit, std::int32_t token) const;
  // Sums over units.
  std::int64_t dropped_tokens() const;  // now
  std::int64_t returned_pages() const;  // so far
  std::int64_t returned_tokens() const;
  std::int64_t lost_pages() const;

 private:
  /// Keys around their mean, rounded to 8 bits of the largest channel.
  struct Keys {
    std::vector<std::int8_t> codes;   // [rows][head_dim]
    std::vector<float> inverse_norm;  // [rows], of the codes
  };
  /// What a token had when it left.
  struct Left {
    float score = 0, weight = 0;
  };
  /// What a step touches comes first.
  struct alignas(64) Unit {
    // Of what takes part, one behind the other, as Scores: they are read in each step, and weights
    // once a block.
    std::vector<float> score, weight;
    std::vector<std::int32_t> kept_token;  // by slot
    std::vector<std::uint32_t> kept;       // by block
    std::vector<std::int32_t> lost;        // pages
    // With returns only. Of dropped tokens, by token; signs of all, [token][words_], and of kept
    // ones, [slot][words_]; who of these leaves next.
    std::vector<Left> left;
    LeavingOrder order;
    std::vector<std::uint64_t> signs, slot_signs;
    std::int64_t returned_pages = 0, returned_tokens = 0;
    std::vector<float> mean;      // [head_dim] of keys, once one was noted
    Keys slot_keys, whole_keys;   // without: by slot; of tokens from frontier() on
    std::vector<double> key_sum;  // [head_dim]
    std::int64_t keys_summed = 0;
  };
  static constexpr std::size_t kHotBytes =
      6 * sizeof(std::vector<float>) + sizeof(LeavingOrder) + 2 * sizeof(std::vector<float>);
  float WeightAt(float likeness) const;
  void Place(Unit& unit, std::int32_t token, std::int32_t slot);
  void Leave(Unit& unit, std::int32_t token, Left left);
  /// Where a token that takes part is in Unit::score; of others -1.
  std::ptrdiff_t PlaceOf(const Unit& unit, std::int32_t token) const;
  void NoteSigns(Unit& unit, std::span<const float> keys, const KeyKernel& kernel);
  void NoteExactly(Unit& unit, std::span<const float> keys, const KeyKernel& kernel);
  void ForgetOldestWhole();

  KvGeometry geometry_;
  int heads_;
  RetentionOptions options_;
  std::shared_ptr<RowSource> source_;
  std::shared_ptr<RemoteTables> remote_;
  std::int64_t remote_returned_pages_ = 0, remote_returned_tokens_ = 0, remote_lost_pages_ = 0;
  double remote_query_signal_ = 0;
  int words_;
  std::vector<float> weight_at_;  // by the number of signs that differ
  std::vector<Unit> units_;
  std::vector<float> short_mean_, long_mean_;  // [layers][heads][head_dim] of queries
  std::vector<std::uint8_t> query_seen_;       // [layers][heads]
  std::int64_t reserved_ = 0;                  // tokens, whole blocks
  std::int32_t frontier_ = 0, kept_blocks_ = 0, noted_ = 0;
};

}  // namespace pliant
