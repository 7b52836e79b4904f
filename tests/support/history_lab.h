// Histories with a capacity on a backend against the oracle: the same steps over the same page
// tables, each side with histories of its own.
//
// After each step the oracle's scores are set to the backend's: what is decided next is decided
// from the same numbers, and must be decided alike. Only whether a page is above the threshold may
// be a matter of roundings; where it is close, the oracle follows the backend, which must then have
// made the very moves that belong to the pages it brought back.
#pragma once

#include <utility>

#include "support/history_lab_sides.h"

namespace pliant::testing {

class HistoryLab {
 public:
  HistoryLab(std::unique_ptr<Backend> backend, const LabShape& shape,
             const RetentionOptions& options, LabPlanes kept_planes, std::uint32_t pages = 900,
             int most_rows = 512)
      : model_(shape),
        options_(options),
        kept_planes_(kept_planes),
        backend_(std::move(backend), model_, pages, most_rows),
        oracle_(model_, pages),
        same_codes_(backend_->Name() == "cuda"),
        free_(pages) {
    for (std::uint32_t p = 0; p < pages; ++p) free_[p] = PageId(p);
    std::shuffle(free_.begin(), free_.end(), random_);
  }

  LabBackend& backend() { return backend_; }
  LabSequence& operator[](int s) { return *sequences_[s]; }
  /// (row, layer) pairs of histories, and how many of them were too close to compare.
  int rows() const { return rows_; }
  int undecided() const { return undecided_; }
  int compared_tokens() const { return compared_tokens_; }
  int query_signals() const { return query_signals_; }

  /// A sequence, with a capacity or without.
  int Add(bool retains = true) {
    auto& sequence = *sequences_.emplace_back(std::make_unique<LabSequence>());
    sequence.retains = retains;
    if (retains) {
      sequence.got_source = std::make_shared<LabOriginals>();
      sequence.want_source = std::make_shared<LabOriginals>();
      sequence.got_source->page_bytes = backend_.PageBytes();
      sequence.got.emplace(model_.geometry, model_.shape.heads, options_, sequence.got_source);
      sequence.want.emplace(model_.geometry, model_.shape.heads, options_, sequence.want_source);
      backend_->StartHistory(*sequence.got);
    }
    return static_cast<int>(sequences_.size()) - 1;
  }

  /// From now on the backend takes the largest element of each row as its token itself, so that
  /// steps of single rows may be graphs.
  void Sample() { samples_ = true; }

  /// rows[s] new tokens of each sequence; queries of size 1 give logits of about 0.6. With attends
  /// false the oracle takes the backend's word for outputs and scores.
  void Step(const std::vector<int>& rows, float size = 1, bool attends = true) {
    Batch batch = Lay(rows);
    std::vector<RetainedHistory> before;  // by slice, where there is one
    std::vector<int> before_of(batch.who.size(), -1);
    for (std::size_t i = 0; i < batch.who.size(); ++i) {
      if (!sequences_[batch.who[i]]->retains) continue;
      before_of[i] = static_cast<int>(before.size());
      before.push_back(*sequences_[batch.who[i]]->want);
    }
    // Steps that may be graphs must have the same ops.
    const int layer = samples_ ? model_.shape.layers - 1 : steps_++ % model_.shape.layers;
    const float scale = size / (8 * std::sqrt(static_cast<float>(model_.shape.dim)));
    const auto got = backend_.Step(batch.For(&LabSequence::got, sequences_), layer, scale);
    const auto want =
        oracle_.Step(batch.For(&LabSequence::want, sequences_), layer, scale, attends);
    ASSERT_EQ(got.size(), samples_ ? 0 : want.size());
    for (std::size_t i = 0; i < batch.who.size(); ++i) {
      LabSequence& sequence = *sequences_[batch.who[i]];
      const SequenceSlice& slice = batch.slices[i];
      sequence.context += slice.rows;
      if (attends && oracle_.closest(i, layer) > kClose)
        samples_ ? CompareTokens(slice, want) : CompareRows(slice, got, want);
      if (!same_codes_) TakeCodes(sequence, slice);
      CopyFullBlocks(sequence);
      if (before_of[i] < 0) continue;
      Settle(sequence, i, before[before_of[i]], attends);
      if (sequence.want->drops()) ExpectOriginalRows(sequence);
    }
  }

  void Note(int s) {
    LabSequence& sequence = *sequences_[s];
    const Status got = backend_->NoteHistory(*sequence.got, sequence.FullBlocks());
    EXPECT_TRUE(got.ok()) << got.ToString();
    EXPECT_TRUE(
        oracle_.kv().NoteHistory(*sequence.want, model_.rope.inv_freq, sequence.FullBlocks()).ok());
    ExpectSameState(sequence, "noted");
  }

  void Drop(int s, bool into_new) {
    LabSequence& sequence = *sequences_[s];
    if (into_new) sequence.kept.push_back(Block(kept_planes_));
    const Status got = backend_->DropFromHistory(*sequence.got, sequence.kept);
    EXPECT_TRUE(got.ok()) << got.ToString();
    EXPECT_TRUE(oracle_.kv().DropFromHistory(*sequence.want, sequence.kept).ok());
    if (!options_.returns) Leave(s, sequence.want->frontier() - 1, {0, 0});
    ExpectSameState(sequence, "dropped");
    ExpectOriginalRows(sequence);
  }

  /// Kept blocks are made anew in other pages.
  void Refill(int s) {
    LabSequence& sequence = *sequences_[s];
    for (BlockView& block : sequence.kept) {
      for (const auto* side : {&block.k, &block.v})
        for (const PageId page : *side) backend_.Spoil(page);
      block = Block(kept_planes_);
    }
    const Status got = backend_->RefillHistory(*sequence.got, sequence.kept);
    EXPECT_TRUE(got.ok()) << got.ToString();
    EXPECT_TRUE(oracle_.kv().RefillHistory(*sequence.want, sequence.kept).ok());
    ExpectSameState(sequence, "refilled");
    ExpectOriginalRows(sequence);
  }

  /// Planes of a full block leave the device; they can be read from host memory, or not any more.
  void Leave(int s, int block, LabPlanes stay, bool readable = true) {
    LabSequence& sequence = *sequences_[s];
    BlockView& view = sequence.blocks[block];
    const BlockView left = OnlyPlanes(view, stay);
    for (int p = stay.k; p < kPlanes; ++p) backend_.Spoil(view.k[p]);
    for (int p = stay.v; p < kPlanes; ++p) backend_.Spoil(view.v[p]);
    view = sequence.got_source->device[block] = left;
    if (readable) return;
    sequence.got_source->gone.insert(block);
    sequence.want_source->gone.insert(block);
  }
  /// Originals are read from host memory, also where there are pages of them.
  void ReadFromHost(int s, int block) { sequences_[s]->got_source->host_first.insert(block); }

  /// Tables of one unit, wherever they are kept.
  static RemoteTables::Unit Read(const RetainedHistory& history, int unit, std::int32_t tokens) {
    if (history.remote() != nullptr) return history.remote()->Read(unit, tokens);
    RemoteTables::Unit read;
    const auto kept = history.KeptTokens(unit);
    read.kept_token.assign(kept.begin(), kept.end());
    for (std::int32_t t = 0; t < tokens; ++t) {
      read.score.push_back(history.score(unit, t));
      read.weight.push_back(history.weight(unit, t));
    }
    return read;
  }

 private:
  /// A decision this near to its threshold is left to the backend.
  static constexpr double kClose = 3e-4;

  struct Batch {
    std::vector<int> who;  // sequences, by slice
    std::vector<std::int32_t> tokens, positions, logit_rows;
    std::vector<SequenceSlice> slices;
    std::vector<BlockView> blocks;

    std::vector<RowSampling> sampling;
    std::int32_t columns = 0;

    StepBatch For(std::optional<RetainedHistory> LabSequence::*side,
                  std::vector<std::unique_ptr<LabSequence>>& sequences) {
      for (std::size_t i = 0; i < who.size(); ++i) {
        auto& history = (*sequences[who[i]]).*side;
        slices[i].history = history ? &*history : nullptr;
      }
      StepBatch batch{tokens, positions, slices, blocks, logit_rows};
      batch.sampling = sampling;
      batch.sampled_columns = columns;
      return batch;
    }
  };

  PageId Take() {
    const PageId page = free_.at(free_.size() - 1);
    free_.pop_back();
    return page;
  }
  BlockView Block(LabPlanes planes) {
    BlockView block;
    for (int p = 0; p < planes.k; ++p) block.k[p] = Take();
    for (int p = 0; p < planes.v; ++p) block.v[p] = Take();
    return block;
  }

  Batch Lay(const std::vector<int>& rows) {
    Batch batch;
    for (std::size_t s = 0; s < rows.size(); ++s) {
      if (rows[s] == 0) continue;
      LabSequence& sequence = *sequences_[s];
      const int tokens = sequence.context + rows[s];
      while (static_cast<int>(sequence.blocks.size()) * kBlockTokens < tokens) {
        sequence.blocks.push_back(Block({}));
        if (!sequence.retains) continue;
        sequence.got_source->device.push_back(sequence.blocks.back());
        sequence.want_source->device.push_back(sequence.blocks.back());
      }
      SequenceSlice slice;
      slice.first_row = static_cast<std::int32_t>(batch.tokens.size());
      slice.rows = rows[s];
      slice.context = sequence.context;
      slice.first_block = static_cast<std::int32_t>(batch.blocks.size());
      slice.blocks = static_cast<std::int32_t>(sequence.blocks.size());
      batch.blocks.insert(batch.blocks.end(), sequence.blocks.begin(), sequence.blocks.end());
      slice.first_kept = static_cast<std::int32_t>(batch.blocks.size());
      batch.blocks.insert(batch.blocks.end(), sequence.kept.begin(), sequence.kept.end());
      for (int i = 0; i < rows[s]; ++i) {
        batch.logit_rows.push_back(static_cast<std::int32_t>(batch.tokens.size()));
        batch.tokens.push_back(static_cast<std::int32_t>(random_() % LabModel::kVocabulary));
        batch.positions.push_back(sequence.context + i);
      }
      batch.slices.push_back(slice);
      batch.who.push_back(static_cast<int>(s));
      if (!sequence.retains) continue;
      sequence.got->Reserve(tokens);
      sequence.want->Reserve(tokens);
    }
    if (samples_) batch.sampling.resize(batch.tokens.size());
    batch.columns = samples_ ? model_.Width() : 0;
    return batch;
  }

  /// Where the oracle's largest element leads by more than CompareRows' room it is the token.
  void CompareTokens(const SequenceSlice& slice, const std::vector<float>& want) {
    const auto width = static_cast<std::size_t>(model_.Width());
    for (int r = slice.first_row; r < slice.first_row + slice.rows; ++r) {
      const auto row = std::span(want).subspan(r * width, width);
      const auto best = std::ranges::max_element(row) - row.begin();
      std::vector<float> others(row.begin(), row.end());
      others[best] = -INFINITY;
      if (row[best] - std::ranges::max(others) < 0.08f) continue;
      EXPECT_EQ(backend_->SampledTokens()[r], best);
      ++compared_tokens_;
    }
  }

  /// Results are bf16 and were operands once more: 2^-8 of values of up to four times the rms.
  void CompareRows(const SequenceSlice& slice, const std::vector<float>& got,
                   const std::vector<float>& want) const {
    double largest = 0;
    const auto width = static_cast<std::size_t>(model_.Width());
    for (std::size_t i = slice.first_row * width; i < (slice.first_row + slice.rows) * width; ++i) {
      const double d = std::abs(double{got[i]} - want[i]);
      if (!(d <= largest)) largest = d;
    }
    EXPECT_LE(largest, 0.04) << "output of rows from token " << slice.context << " on";
  }

  /// Both sides hold the same, bit for bit.
  void ExpectSameState(const LabSequence& sequence, const char* after) const {
    EXPECT_EQ(sequence.got->frontier(), sequence.want->frontier());
    EXPECT_EQ(sequence.got->kept_blocks(), sequence.want->kept_blocks());
    EXPECT_EQ(sequence.got->noted(), sequence.want->noted());
    for (int unit = 0; unit < sequence.want->units(); ++unit) {
      SCOPED_TRACE(::testing::Message() << after << ", unit " << unit);
      const auto got = Read(*sequence.got, unit, sequence.context);
      const auto want = Read(*sequence.want, unit, sequence.context);
      EXPECT_EQ(got.kept_token, want.kept_token);
      for (int t = 0; t < sequence.context; ++t) {
        if (!TakesPart(sequence, want, t) && !options_.returns) continue;
        EXPECT_EQ(got.score[t], want.score[t]) << "token " << t;
        EXPECT_EQ(got.weight[t], want.weight[t]) << "token " << t;
        if (::testing::Test::HasFailure()) return;
      }
    }
  }

  static bool TakesPart(const LabSequence& sequence, const RemoteTables::Unit& unit, int token) {
    return token >= sequence.want->frontier() * kBlockTokens ||
           std::find(unit.kept_token.begin(), unit.kept_token.end(), token) !=
               unit.kept_token.end();
  }

  /// After a step of slice `i`: the same came back, scores are near; then they are the same.
  void Settle(LabSequence& sequence, std::size_t i, const RetainedHistory& before, bool attends) {
    const int units = sequence.want->units();
    std::vector<RemoteTables::Unit> got;
    bool follow = false;
    for (int unit = 0; unit < units; ++unit) {
      got.push_back(Read(*sequence.got, unit, sequence.context));
      const bool same = std::ranges::equal(got[unit].kept_token, sequence.want->KeptTokens(unit));
      const bool close = oracle_.closest(i, unit / model_.geometry.kv_heads) <= kClose;
      EXPECT_TRUE(same || close) << "unit " << unit << " at token " << sequence.context
                                 << " brought back something else";
      follow |= !same;
      if (unit % model_.geometry.kv_heads == 0) ++rows_, undecided_ += close;
      if (attends && !close) CompareScores(sequence, unit, got[unit], before);
    }
    if (follow) Follow(sequence, got, before);
    for (int unit = 0; unit < units; ++unit) {
      const std::span<float> scores = sequence.want->Scores(unit);
      std::size_t at = 0;
      for (const std::int32_t token : sequence.want->KeptTokens(unit))
        scores[at++] = got[unit].score[token];
      for (int t = sequence.want->frontier() * kBlockTokens; t < sequence.context; ++t)
        scores[at++] = got[unit].score[t];
    }
    if (options_.query_means && sequence.context % kQuerySignalTokens == 0) {
      EXPECT_NEAR(sequence.got->QuerySignal(), sequence.want->QuerySignal(), 1e-9);
      ++query_signals_;
    }
    if (undecided_ == 0) {
      EXPECT_EQ(sequence.got->returned_pages(), sequence.want->returned_pages());
      EXPECT_EQ(sequence.got->returned_tokens(), sequence.want->returned_tokens());
      EXPECT_EQ(sequence.got->lost_pages(), sequence.want->lost_pages());
    }
  }

  /// What the step added to the scores; weights, and scores of what takes no part, are the same.
  void CompareScores(const LabSequence& sequence, int unit, const RemoteTables::Unit& got,
                     const RetainedHistory& before) const {
    const auto want = Read(*sequence.want, unit, sequence.context);
    for (int t = 0; t < sequence.context; ++t) {
      if (!TakesPart(sequence, want, t) && !options_.returns) continue;
      const float added = want.score[t] - before.score(unit, t);
      const float room = added == 0 ? 0.f : 1e-3f + 1e-2f * added;
      EXPECT_NEAR(got.score[t], want.score[t], room + 1e-6f * want.score[t])
          << "unit " << unit << ", token " << t << " of " << sequence.context;
      EXPECT_EQ(got.weight[t], want.weight[t]) << "unit " << unit << ", token " << t;
      if (::testing::Test::HasFailure()) return;
    }
  }

  /// The oracle's history becomes the backend's: the one before, and the returns, of up to two
  /// pages, that lead from it to what is kept now.
  void Follow(LabSequence& sequence, const std::vector<RemoteTables::Unit>& got,
              const RetainedHistory& before) {
    RetainedHistory history = before;
    for (std::size_t unit = 0; unit < got.size(); ++unit)
      EXPECT_TRUE(FollowUnit(history, static_cast<int>(unit), got[unit]))
          << "unit " << unit << " kept what belongs to no returns";
    *sequence.want = std::move(history);
    EXPECT_TRUE(oracle_.kv().RefillHistory(*sequence.want, sequence.kept).ok());
  }
  static bool FollowUnit(RetainedHistory& history, int unit, const RemoteTables::Unit& got) {
    const auto is_there = [&](const RetainedHistory& reached) {
      if (!std::ranges::equal(got.kept_token, reached.KeptTokens(unit))) return false;
      for (std::int32_t t = 0; t < reached.frontier() * kBlockTokens; ++t) {
        const bool kept = (reached.Kept(unit, t / kBlockTokens) >> (t % kBlockTokens) & 1) != 0;
        if (!kept && got.score[t] != reached.score(unit, t)) return false;  // as it left
      }
      return true;
    };
    if (is_there(history)) return true;
    const std::int32_t pages = history.frontier() * (kBlockTokens / kReturnTokens);
    for (std::int32_t first = 0; first < pages; ++first) {
      RetainedHistory once = history;
      std::vector<RetainedHistory::Move> moves;
      once.Return(unit, first, moves);
      bool found = is_there(once);
      for (std::int32_t second = 0; second < pages && !found && !moves.empty(); ++second) {
        RetainedHistory twice = once;
        std::vector<RetainedHistory::Move> more;
        twice.Return(unit, second, more);
        found = is_there(twice);
        if (found) once = std::move(twice);
      }
      if (!found) continue;
      history = std::move(once);
      return true;
    }
    return false;
  }

  /// A backend that rounds otherwise in RoPE: the oracle takes what it has written.
  void TakeCodes(const LabSequence& sequence, const SequenceSlice& slice) {
    std::vector<std::byte> bytes(backend_.PageBytes());  // the oracle's are fewer
    for (int b = slice.context / kBlockTokens; b < slice.blocks; ++b) {
      for (const auto* side : {&sequence.blocks[b].k, &sequence.blocks[b].v}) {
        for (const PageId page : *side) {
          backend_.Read(page, bytes.data());
          const std::span<std::byte> to = oracle_.kv().Page(page);
          std::copy_n(bytes.begin(), to.size(), to.begin());
        }
      }
    }
  }

  /// Keeps what the backend wrote into blocks that have filled; it is what the oracle wrote.
  void CopyFullBlocks(LabSequence& sequence) {
    const std::size_t bytes = backend_.PageBytes();
    const KvGeometry& g = model_.geometry;
    for (int b = static_cast<int>(sequence.copies.size()); b < sequence.FullBlocks(); ++b) {
      sequence.copies.push_back(backend_.Host(2 * kPlanes * bytes));
      std::byte* const copy = sequence.copies.back().get();
      if (sequence.retains) sequence.got_source->host.push_back(copy);
      for (int p = 0; p < 2 * kPlanes; ++p) {
        const bool is_v = p >= kPlanes;
        const PageId page = (is_v ? sequence.blocks[b].v : sequence.blocks[b].k)[p % kPlanes];
        backend_.Read(page, copy + p * bytes);
        const std::byte* const want = oracle_.kv().Page(page).data();
        int other = 0;
        for (std::size_t unit = 0; unit < g.Units(); ++unit) {
          const int layer = static_cast<int>(unit) / g.kv_heads;
          const int head = static_cast<int>(unit) % g.kv_heads;
          for (int t = 0; t < kBlockTokens; ++t) {
            const std::byte* const row = want + g.RowOffset(layer, head, t);
            for (int dim = 0; dim < g.head_dim; ++dim)
              other += backend_.Digit(copy + p * bytes, is_v, layer, head, t, dim) !=
                       (static_cast<int>(row[dim / 2]) >> (dim % 2 * 4) & 15);
          }
        }
        EXPECT_EQ(other, 0) << "digits of plane " << p << " of block " << b
                            << " are not the oracle's";
      }
    }
  }

  /// Every slot holds the very digits and scales of its token.
  void ExpectOriginalRows(LabSequence& sequence) {
    const std::size_t bytes = backend_.PageBytes();
    const KvGeometry& g = model_.geometry;
    std::vector<std::vector<std::byte>> kept;  // [block][plane], empty: absent
    for (const BlockView& block : sequence.kept) {
      for (int p = 0; p < 2 * kPlanes; ++p) {
        const PageId page = (p >= kPlanes ? block.v : block.k)[p % kPlanes];
        kept.emplace_back(page.valid() ? bytes : 0);
        if (page.valid()) backend_.Read(page, kept.back().data());
      }
    }
    for (int unit = 0; unit < sequence.want->units(); ++unit) {
      const int layer = unit / g.kv_heads, head = unit % g.kv_heads;
      const auto tokens = sequence.want->KeptTokens(unit);
      for (std::size_t s = 0; s < tokens.size(); ++s) {
        const int slot = static_cast<int>(s) % kBlockTokens, token = tokens[s] % kBlockTokens;
        const std::byte* const original = sequence.copies[tokens[s] / kBlockTokens].get();
        int other = 0;
        for (int p = 0; p < 2 * kPlanes; ++p) {
          const std::vector<std::byte>& page = kept[s / kBlockTokens * 2 * kPlanes + p];
          if (page.empty()) continue;
          for (int dim = 0; dim < g.head_dim; ++dim)
            other += backend_.Digit(page.data(), p >= kPlanes, layer, head, slot, dim) !=
                     backend_.Digit(original + p * bytes, p >= kPlanes, layer, head, token, dim);
          if (p % kPlanes == 0)
            other += backend_.Scale(page.data(), layer, head, slot) !=
                     backend_.Scale(original + p * bytes, layer, head, token);
        }
        EXPECT_EQ(other, 0) << "slot " << s << " of unit " << unit << " does not hold token "
                            << tokens[s];
        if (other != 0) return;
      }
    }
  }

  const LabModel model_;
  const RetentionOptions options_;
  const LabPlanes kept_planes_;
  LabBackend backend_;
  LabOracle oracle_;
  const bool same_codes_;  // the backend caches K and V as the oracle does, bit for bit
  std::mt19937 random_{17};
  std::vector<PageId> free_;
  std::vector<std::unique_ptr<LabSequence>> sequences_;
  bool samples_ = false;
  int steps_ = 0, rows_ = 0, undecided_ = 0, compared_tokens_ = 0, query_signals_ = 0;
};

}  // namespace pliant::testing
