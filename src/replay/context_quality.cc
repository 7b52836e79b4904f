#include "replay/context_quality.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace pliant {
namespace {

std::int64_t BlocksFor(std::int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

// log of the sum of exp, with the largest logit.
struct Normaliser {
  double log_sum = 0;
  std::size_t top = 0;
};
Normaliser Normalise(std::span<const float> logits) {
  const auto top = std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - *top);
  return {*top + std::log(sum), static_cast<std::size_t>(top - logits.begin())};
}

// One text under all states. Sequence 0 is the reference; sequence s reads options.states[s - 1].
// All share the blocks of the text's start and own the blocks of its scored end.
class TextRun {
 public:
  TextRun(Model& model, Backend& backend, std::span<const TokenId> tokens,
          const ContextQualityOptions& options, const std::function<void(double)>& progress)
      : model_(model),
        backend_(backend),
        tokens_(tokens),
        options_(options),
        progress_(progress),
        start_(options.context - options.scored),
        sequences_(options.states.size() + 1),
        vocabulary_(static_cast<std::size_t>(model.config().vocab_size)) {}

  Result<TextReport> Go() {
    PLIANT_RETURN_IF_ERROR(Check());
    shared_ = OwnBlocks(0, BlocksFor(start_));
    PLIANT_RETURN_IF_ERROR(ReadStart());
    const std::int64_t own = options_.scored / kBlockTokens;
    for (std::size_t s = 0; s < sequences_; ++s) {
      const auto first = (shared_.size() + s * static_cast<std::size_t>(own)) * 2 * kPlanes;
      own_.push_back(OwnBlocks(static_cast<std::uint32_t>(first), own));
    }
    kl_.resize(sequences_);
    same_.resize(sequences_);
    nll_.resize(sequences_);
    degraded_.resize(sequences_);
    for (std::int64_t at = start_; at < options_.context; at += kBlockTokens) {
      PLIANT_RETURN_IF_ERROR(ScoreBlock(at));
      Progress(at + kBlockTokens);
    }
    return Report();
  }

 private:
  Status Check() const {
    if (options_.scored < kBlockTokens || options_.scored % kBlockTokens != 0 ||
        options_.context % kBlockTokens != 0 || options_.scored >= options_.context) {
      return InvalidArgument(
          "context and scored tokens must be multiples of 32, and fewer scored than context");
    }
    if (static_cast<std::int64_t>(tokens_.size()) < options_.context + 1) {
      return InvalidArgument("the text has " + std::to_string(tokens_.size()) + " tokens; " +
                             std::to_string(options_.context + 1) + " are needed");
    }
    if (options_.context > model_.config().context_length) {
      return TooLarge("a context of " + std::to_string(options_.context) +
                      " is more than the model's " +
                      std::to_string(model_.config().context_length));
    }
    return Status::Ok();
  }

  void Progress(std::int64_t done) const {
    if (progress_) {
      progress_(static_cast<double>(done) / static_cast<double>(options_.context));
    }
  }

  Status ReadStart() {
    for (std::int64_t at = 0; at < start_;) {
      const std::int64_t rows = std::min<std::int64_t>(options_.max_rows, start_ - at);
      std::vector<std::int32_t> positions(static_cast<std::size_t>(rows));
      std::iota(positions.begin(), positions.end(), static_cast<std::int32_t>(at));
      const auto blocks = static_cast<std::size_t>(BlocksFor(at + rows));
      const SequenceSlice slice{0, static_cast<std::int32_t>(rows), static_cast<std::int32_t>(at),
                                0, static_cast<std::int32_t>(blocks)};
      PLIANT_RETURN_IF_ERROR(model_.Forward(
          backend_, {tokens_.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(rows)),
                     positions,
                     std::span(&slice, 1),
                     std::span(shared_).first(blocks),
                     {}}));
      at += rows;
      Progress(at);
    }
    return Status::Ok();
  }

  // The 32 tokens from `at` on, for as many sequences a step as rows allow; the reference comes
  // first and its logits are kept.
  Status ScoreBlock(std::int64_t at) {
    const std::size_t per_step = static_cast<std::size_t>(options_.max_rows / kBlockTokens);
    for (std::size_t first = 0; first < sequences_; first += per_step) {
      const std::size_t count = std::min(per_step, sequences_ - first);
      PLIANT_RETURN_IF_ERROR(ForwardBlock(at, first, count));
      const std::span<const float> logits = backend_.LogitRows();
      if (first == 0) {
        reference_.assign(logits.begin(),
                          logits.begin() + static_cast<std::ptrdiff_t>(kBlockTokens * vocabulary_));
      }
      for (std::size_t i = 0; i < count; ++i) {
        Score(at, first + i,
              logits.subspan(i * kBlockTokens * vocabulary_, kBlockTokens * vocabulary_));
      }
    }
    return Status::Ok();
  }

  Status ForwardBlock(std::int64_t at, std::size_t first, std::size_t count) {
    std::vector<std::int32_t> tokens, positions, logit_rows;
    std::vector<SequenceSlice> slices;
    std::vector<BlockView> blocks;
    for (std::size_t s = first; s < first + count; ++s) {
      const CacheState state = s == 0 ? CacheState{} : options_.states[s - 1];
      SequenceSlice slice{static_cast<std::int32_t>(tokens.size()), kBlockTokens,
                          static_cast<std::int32_t>(at), static_cast<std::int32_t>(blocks.size()),
                          static_cast<std::int32_t>(BlocksFor(at + kBlockTokens))};
      std::int64_t below = 0;
      for (std::int64_t b = 0; b < slice.blocks; ++b) {
        const auto shared = static_cast<std::int64_t>(shared_.size());
        const BlockView& whole = b < shared ? shared_[static_cast<std::size_t>(b)]
                                            : own_[s][static_cast<std::size_t>(b - shared)];
        const bool degraded = Degraded(state, options_.protection, b, at);
        blocks.push_back(degraded ? ViewAt(whole, state) : whole);
        below += degraded ? kBlockTokens : 0;
      }
      degraded_[s] += static_cast<double>(below) / static_cast<double>(at);
      for (std::int64_t i = 0; i < kBlockTokens; ++i) {
        logit_rows.push_back(static_cast<std::int32_t>(tokens.size()));
        tokens.push_back(tokens_[static_cast<std::size_t>(at + i)]);
        positions.push_back(static_cast<std::int32_t>(at + i));
      }
      slices.push_back(slice);
    }
    return model_.Forward(backend_, {tokens, positions, slices, blocks, logit_rows});
  }

  void Score(std::int64_t at, std::size_t sequence, std::span<const float> logits) {
    for (std::size_t row = 0; row < kBlockTokens; ++row) {
      const std::span<const float> own = logits.subspan(row * vocabulary_, vocabulary_);
      const TokenId next = tokens_[static_cast<std::size_t>(at) + row + 1];
      nll_[sequence] += NegativeLogLikelihood(own, next);
      if (sequence == 0) continue;
      const Divergence divergence =
          Compare(std::span(reference_).subspan(row * vocabulary_, vocabulary_), own);
      kl_[sequence].push_back(divergence.kl);
      same_[sequence] += divergence.same_top ? 1 : 0;
    }
  }

  TextReport Report() {
    const auto scored = static_cast<double>(options_.scored);
    TextReport report;
    report.reference_perplexity = std::exp(nll_[0] / scored);
    for (std::size_t s = 1; s < sequences_; ++s) {
      report.states.push_back({.kl = Describe(std::move(kl_[s])),
                               .top1 = static_cast<double>(same_[s]) / scored,
                               .perplexity = std::exp(nll_[s] / scored),
                               .degraded = degraded_[s] / (scored / kBlockTokens)});
    }
    return report;
  }

  Model& model_;
  Backend& backend_;
  std::span<const TokenId> tokens_;
  const ContextQualityOptions& options_;
  const std::function<void(double)>& progress_;
  const std::int64_t start_;  // tokens read before the scored ones
  const std::size_t sequences_, vocabulary_;
  std::vector<BlockView> shared_;
  std::vector<std::vector<BlockView>> own_;
  std::vector<float> reference_;  // logits of the reference for the current block
  std::vector<std::vector<double>> kl_;
  std::vector<std::int64_t> same_;
  std::vector<double> nll_, degraded_;
};

}  // namespace

Divergence Compare(std::span<const float> reference, std::span<const float> other) {
  const Normaliser p = Normalise(reference), q = Normalise(other);
  double kl = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const double log_p = reference[i] - p.log_sum;
    kl += std::exp(log_p) * (log_p - (other[i] - q.log_sum));
  }
  return {std::max(kl, 0.0), p.top == q.top};
}

double NegativeLogLikelihood(std::span<const float> logits, std::int64_t token) {
  return Normalise(logits).log_sum - logits[static_cast<std::size_t>(token)];
}

int ContextLogitRows(const ContextQualityOptions& options) {
  return std::min(options.max_rows / kBlockTokens, static_cast<int>(options.states.size()) + 1) *
         kBlockTokens;
}

std::uint32_t ContextPages(const ContextQualityOptions& options) {
  const std::int64_t blocks =
      BlocksFor(options.context) +
      static_cast<std::int64_t>(options.states.size() + 1) * BlocksFor(options.scored);
  return static_cast<std::uint32_t>(blocks * 2 * kPlanes);
}

Result<TextReport> MeasureText(Model& model, Backend& backend, std::span<const TokenId> tokens,
                               const ContextQualityOptions& options,
                               const std::function<void(double)>& progress) {
  return TextRun(model, backend, tokens, options, progress).Go();
}

}  // namespace pliant
