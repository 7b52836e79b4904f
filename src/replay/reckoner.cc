#include "replay/reckoner.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "backend/step_check.h"
#include "replay/line_reader.h"

namespace pliant {
namespace {

constexpr std::size_t kMaxLine = std::size_t{1} << 20;
constexpr std::size_t kMaxProblems = 100'000;

std::string Strip(const std::string& text) {
  constexpr const char* kSpace = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kSpace);
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// One problem being decoded under one state.
struct Slot final : RowSource {
  bool busy = false;
  std::size_t problem = 0, state = 0;
  std::vector<TokenId> tokens;  // prompt and answer so far
  std::size_t prompt = 0;       // tokens of the prompt
  std::int64_t cached = 0;      // tokens in the cache
  std::vector<BlockView> blocks, kept, kept_views;
  std::optional<History> history;  // with a capacity
  std::optional<RetainedHistory> retained;
  std::int64_t peak_pages = 0, whole_peak_pages = 0;
  std::vector<ReckonerCourse::Signal> signals;

  /// Nothing really leaves here: pages are only not shown.
  PlanePlace Find(std::int32_t block, bool is_v, int plane, int, std::span<std::byte>) override {
    const BlockView& view = blocks[static_cast<std::size_t>(block)];
    return {.page = (is_v ? view.v : view.k)[plane]};
  }
  PlanePlace Place(std::int32_t block, bool is_v, int plane) override {
    return Find(block, is_v, plane, kAllUnits, {});
  }
};

class ReckonerRun {
 public:
  ReckonerRun(Model& model, Backend& backend, const Tokenizer& tokenizer,
              const PromptEncoder& encode, std::span<const ReckonerProblem> problems,
              const ReckonerOptions& options)
      : model_(model),
        backend_(backend),
        tokenizer_(tokenizer),
        encode_(encode),
        problems_(problems),
        options_(options),
        geometry_(model.config().Kv()),
        max_tokens_(std::min(options.max_tokens, model.config().context_length)) {}

  Result<std::vector<ReckonerScore>> Go(
      const std::function<void(std::int64_t, std::int64_t)>& progress) {
    if (options_.slots < 1 || options_.max_rows < options_.slots) {
      return InvalidArgument("rows of a step must be at least the sequences decoded together");
    }
    PrepareScores();
    PrepareSlots();
    const std::size_t total = problems_.size() * options_.states.size();
    if (total == 0) return std::move(scores_);
    while (true) {
      for (Slot& slot : slots_) {
        if (!slot.busy && next_ < total) PLIANT_RETURN_IF_ERROR(Start(slot, next_++));
      }
      PLIANT_RETURN_IF_ERROR(Step());
      if (progress) progress(done_, static_cast<std::int64_t>(total));
      if (done_ == static_cast<std::int64_t>(total)) return std::move(scores_);
    }
  }

 private:
  void PrepareScores() {
    std::vector<std::string> levels;
    for (const ReckonerProblem& problem : problems_) {
      if (std::find(levels.begin(), levels.end(), problem.level) == levels.end()) {
        levels.push_back(problem.level);
      }
    }
    for (const CacheState& state : options_.states) {
      for (const std::string& level : levels) scores_.push_back({.state = state, .level = level});
    }
    levels_ = std::move(levels);
  }

  void PrepareSlots() {
    slots_.resize(static_cast<std::size_t>(options_.slots));
    const std::int64_t blocks = (max_tokens_ + kBlockTokens - 1) / kBlockTokens;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const auto first =
          static_cast<std::uint32_t>(i * 2 * static_cast<std::size_t>(blocks) * 2 * kPlanes);
      slots_[i].blocks = OwnBlocks(first, blocks);
      slots_[i].kept = OwnBlocks(first + static_cast<std::uint32_t>(blocks) * 2 * kPlanes, blocks);
    }
  }

  ReckonerScore& ScoreOf(const Slot& slot) {
    const std::string& level = problems_[slot.problem].level;
    const auto at = std::find(levels_.begin(), levels_.end(), level) - levels_.begin();
    return scores_[slot.state * levels_.size() + static_cast<std::size_t>(at)];
  }

  // Job j is problem j / states under state j % states, so that all states advance together.
  Status Start(Slot& slot, std::size_t job) {
    slot.problem = job / options_.states.size();
    slot.state = job % options_.states.size();
    PLIANT_ASSIGN_OR_RETURN(slot.tokens, encode_(problems_[slot.problem].prompt));
    if (slot.tokens.empty() || static_cast<std::int64_t>(slot.tokens.size()) >= max_tokens_) {
      return TooLarge("problem " + problems_[slot.problem].id + " has " +
                      std::to_string(slot.tokens.size()) + " tokens; 1 to " +
                      std::to_string(max_tokens_ - 1) + " are possible");
    }
    slot.prompt = slot.tokens.size();
    slot.cached = 0;
    slot.busy = true;
    if (options_.capacity > 0) {
      const HistoryOptions& history = options_.history;
      const std::int32_t prompt_blocks =
          static_cast<std::int32_t>((slot.prompt + kBlockTokens - 1) / kBlockTokens);
      slot.history.emplace(history,
                           options_.capacity + (history.start_from_prompt ? prompt_blocks : 0),
                           options_.grows);
      slot.retained.emplace(geometry_, model_.config().heads, history.RetentionOf(options_.grows),
                            std::shared_ptr<RowSource>(std::shared_ptr<void>(), &slot));
      backend_.StartHistory(*slot.retained);
    }
    slot.signals.clear();
    slot.peak_pages = slot.whole_peak_pages = 0;
    ++ScoreOf(slot).problems;
    return Status::Ok();
  }

  // One step of all busy slots: decoding ones get their row first, prompts the rows that are left.
  Status Step() {
    batch_tokens_.clear();
    positions_.clear();
    logit_rows_.clear();
    slices_.clear();
    blocks_.clear();
    sampling_.clear();
    int waiting = 0;
    for (const Slot& slot : slots_) waiting += slot.busy ? 1 : 0;
    for (Slot& slot : slots_) {
      if (!slot.busy) continue;
      --waiting;  // each of the others gets a row at least
      const auto left = static_cast<std::int64_t>(slot.tokens.size()) - slot.cached;
      const std::int64_t room =
          options_.max_rows - static_cast<std::int64_t>(batch_tokens_.size()) - waiting;
      PLIANT_RETURN_IF_ERROR(
          AddRows(slot, std::min({left, room, static_cast<std::int64_t>(kBlockTokens)})));
    }
    PLIANT_RETURN_IF_ERROR(
        model_.Forward(backend_, {batch_tokens_, positions_, slices_, blocks_, logit_rows_}));
    const std::span<const float> logits = backend_.LogitRows();
    const auto vocabulary = static_cast<std::size_t>(model_.config().vocab_size);
    for (std::size_t i = 0; i < sampling_.size(); ++i) {
      const std::span<const float> row = logits.subspan(i * vocabulary, vocabulary);
      Take(*sampling_[i],
           static_cast<TokenId>(std::max_element(row.begin(), row.end()) - row.begin()));
    }
    return Status::Ok();
  }

  /// Drops what is over the capacity. Returns whether the sequence's next step has a history.
  Result<bool> MindCapacity(Slot& slot, std::int64_t rows, std::int64_t blocks) {
    if (!slot.history) return false;
    const auto count = static_cast<std::int32_t>(blocks);
    RetainedHistory& retained = *slot.retained;
    retained.Reserve(blocks * kBlockTokens);
    if (rows != 1 || slot.cached < static_cast<std::int64_t>(slot.prompt)) return true;
    PLIANT_RETURN_IF_ERROR(
        backend_.NoteHistory(retained, static_cast<std::int32_t>(slot.cached / kBlockTokens)));
    const History::Growth growth = slot.history->Extend(slot.cached, retained);
    const bool grew = growth == History::Growth::kGrew;
    ScoreOf(slot).growths += grew;
    if (growth != History::Growth::kNotAsked)
      slot.signals.push_back({slot.cached, slot.history->signal(), grew});
    while (slot.history->MustDrop(count, retained)) {
      const std::int32_t kept =
          retained.kept_blocks() + (slot.history->MayAddKept(retained) ? 1 : 0);
      PLIANT_RETURN_IF_ERROR(backend_.DropFromHistory(retained, KeptViews(slot, kept)));
      ++ScoreOf(slot).drops;
    }
    return true;
  }

  /// Kept blocks have the planes of the state that is measured.
  std::span<const BlockView> KeptViews(Slot& slot, std::int32_t count) {
    slot.kept_views.clear();
    for (std::int32_t b = 0; b < count; ++b) {
      slot.kept_views.push_back(
          ViewAt(slot.kept[static_cast<std::size_t>(b)], options_.states[slot.state]));
    }
    return slot.kept_views;
  }

  void CountOperations(const Slot& slot, std::int64_t blocks) {
    if (slot.cached < static_cast<std::int64_t>(slot.prompt)) return;
    const ModelConfig& c = model_.config();
    const double layers = c.layers, heads = c.heads, kv_heads = c.kv_heads, dim = c.head_dim;
    const auto hidden = static_cast<double>(c.hidden_size);
    const double a_layer = 2 * dim * (heads + kv_heads) + 3.0 * c.intermediate_size;
    const double weights = hidden * (layers * a_layer + static_cast<double>(c.vocab_size));
    const std::int64_t taking_part =
        slot.retained ? slot.retained->TakingPart(static_cast<std::int32_t>(blocks)) : blocks;
    const auto tokens =
        static_cast<double>((taking_part - 1) * kBlockTokens + slot.cached % kBlockTokens + 1);
    DecodeOperations& operations = ScoreOf(slot).operations;
    operations.model += 2 * weights + 4 * layers * heads * dim * tokens;
    if (!slot.retained) return;
    const bool returns = options_.history.retention.returns;
    // Every key of a block that fills meets every token once, so one a row. Signs are compared and
    // counted and the fewest taken; else keys of 8 bits are multiplied.
    const double likeness = returns ? 3 : 2 * dim;
    constexpr double kDecode = 8;  // of an element of a key: the mix, its code, RoPE, the sign
    operations.scoring +=
        layers * (2 * heads * tokens + kv_heads * (likeness * tokens + kDecode * dim));
    if (returns) {
      operations.watching += 2 * layers * heads * dim * kBlockTokens * slot.retained->frontier();
    }
  }

  static std::int64_t PagesOf(const BlockView& view) {
    return ResidentPlanes(view.k) + ResidentPlanes(view.v);
  }

  void CountPages(Slot& slot, std::int64_t blocks, std::span<const BlockView> views) {
    if (slot.cached < static_cast<std::int64_t>(slot.prompt)) return;
    const std::int64_t whole = blocks * 2 * kPlanes;
    std::int64_t held = 0;
    for (const BlockView& view : views) held += PagesOf(view);
    ReckonerScore& score = ScoreOf(slot);
    score.held_pages += held;
    score.whole_pages += whole;
    slot.peak_pages = std::max(slot.peak_pages, held);
    slot.whole_peak_pages = std::max(slot.whole_peak_pages, whole);
  }

  Status AddRows(Slot& slot, std::int64_t rows) {
    const CacheState& state = options_.states[slot.state];
    const std::int64_t blocks = (slot.cached + rows + kBlockTokens - 1) / kBlockTokens;
    PLIANT_ASSIGN_OR_RETURN(const bool retains, MindCapacity(slot, rows, blocks));
    SequenceSlice slice{.first_row = static_cast<std::int32_t>(batch_tokens_.size()),
                        .rows = static_cast<std::int32_t>(rows),
                        .context = static_cast<std::int32_t>(slot.cached),
                        .first_block = static_cast<std::int32_t>(blocks_.size()),
                        .blocks = static_cast<std::int32_t>(blocks)};
    std::int32_t frontier = 0;
    if (retains) {
      slice.history = &*slot.retained;
      frontier = slot.retained->frontier();
    }
    for (std::int64_t b = 0; b < blocks; ++b) {
      if (b < frontier) {
        BlockView dropped{};
        if (options_.history.retention.returns)
          dropped.k[0] = slot.blocks[static_cast<std::size_t>(b)].k[0];
        blocks_.push_back(dropped);
        continue;
      }
      const BlockView& whole = slot.blocks[static_cast<std::size_t>(b)];
      blocks_.push_back(Degraded(state, options_.protection, b, slot.cached) ? ViewAt(whole, state)
                                                                             : whole);
    }
    if (retains) {
      slice.first_kept = static_cast<std::int32_t>(blocks_.size());
      const auto kept = KeptViews(slot, slot.retained->kept_blocks());
      blocks_.insert(blocks_.end(), kept.begin(), kept.end());
    }
    CountPages(slot, blocks, std::span(blocks_).subspan(slice.first_block));
    CountOperations(slot, blocks);
    slices_.push_back(slice);
    for (std::int64_t i = 0; i < rows; ++i) {
      batch_tokens_.push_back(slot.tokens[static_cast<std::size_t>(slot.cached)]);
      positions_.push_back(static_cast<std::int32_t>(slot.cached));
      ++slot.cached;
    }
    if (slot.cached == static_cast<std::int64_t>(slot.tokens.size())) {
      logit_rows_.push_back(static_cast<std::int32_t>(batch_tokens_.size()) - 1);
      sampling_.push_back(&slot);
    }
    return {};
  }

  void Take(Slot& slot, TokenId token) {
    ReckonerScore& score = ScoreOf(slot);
    ++score.tokens;
    const bool ended = tokenizer_.IsEndOfGeneration(token);
    if (!ended) slot.tokens.push_back(token);
    const bool full = static_cast<std::int64_t>(slot.tokens.size()) >= max_tokens_;
    if (!ended && !full) return;
    const std::string text =
        tokenizer_.Decode(std::span(slot.tokens).subspan(slot.prompt), /*special=*/true);
    const std::string marker = "</think>";
    const std::size_t at = text.rfind(marker);
    const ReckonerProblem& problem = problems_[slot.problem];
    const bool right = ended && at != std::string::npos &&
                       Strip(text.substr(at + marker.size())) == problem.answer;
    score.right += right ? 1 : 0;
    score.peak_pages += slot.peak_pages;
    score.whole_peak_pages += slot.whole_peak_pages;
    score.unfinished += ended ? 0 : 1;
    if (slot.retained) {
      score.units = slot.retained->units();
      score.returned_pages += slot.retained->returned_pages();
      score.returned_tokens += slot.retained->returned_tokens();
    }
    if (!right) score.wrong.push_back(problem.id);
    if (options_.courses) {
      score.courses.push_back({problem.id, text, right, static_cast<std::int64_t>(slot.prompt),
                               std::move(slot.signals)});
    }
    slot.busy = false;
    ++done_;
  }

  Model& model_;
  Backend& backend_;
  const Tokenizer& tokenizer_;
  const PromptEncoder& encode_;
  std::span<const ReckonerProblem> problems_;
  const ReckonerOptions& options_;
  const KvGeometry geometry_;
  const std::int64_t max_tokens_;
  std::vector<std::string> levels_;
  std::vector<ReckonerScore> scores_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
  std::int64_t done_ = 0;
  // The batch being built, kept for its memory.
  std::vector<std::int32_t> batch_tokens_, positions_, logit_rows_;
  std::vector<SequenceSlice> slices_;
  std::vector<BlockView> blocks_;
  std::vector<Slot*> sampling_;
};

}  // namespace

Result<std::vector<ReckonerProblem>> ReadReckonerProblems(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return NotFound(path + ": cannot be opened");
  std::vector<ReckonerProblem> problems;
  std::string line;
  for (int number = 1; ReadLine(in, line, kMaxLine); ++number) {
    const std::string place = path + ": line " + std::to_string(number);
    if (line.size() > kMaxLine) return TooLarge(place + ": longer than 1 MiB");
    if (problems.size() == kMaxProblems) return TooLarge(place + ": more than 100000 problems");
    if (Strip(line).empty()) continue;
    const nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
    if (!object.is_object()) return InvalidArgument(place + ": not a JSON object");
    ReckonerProblem problem{.id = "line-" + std::to_string(number)};
    const std::pair<const char*, std::string*> fields[] = {
        {"level", &problem.level}, {"prompt", &problem.prompt}, {"answer", &problem.answer}};
    for (const auto& [key, value] : fields) {
      if (!object.contains(key) || !object[key].is_string()) {
        return InvalidArgument(place + ": \"" + key + "\" must be a string");
      }
      *value = object[key].get<std::string>();
    }
    if (object.contains("id") && object["id"].is_string()) {
      problem.id = object["id"].get<std::string>();
    }
    problems.push_back(std::move(problem));
  }
  if (problems.empty()) return InvalidArgument(path + ": no problems");
  return problems;
}

std::vector<ReckonerProblem> LimitPerLevel(std::vector<ReckonerProblem> problems,
                                           std::size_t limit) {
  if (limit == 0) return problems;
  std::map<std::string, std::size_t> taken;
  std::erase_if(problems,
                [&](const ReckonerProblem& problem) { return taken[problem.level]++ >= limit; });
  return problems;
}

std::uint32_t ReckonerPages(const ReckonerOptions& options) {
  const std::int64_t blocks = (options.max_tokens + kBlockTokens - 1) / kBlockTokens;
  return static_cast<std::uint32_t>(2 * options.slots * blocks * 2 * kPlanes);
}

Result<std::vector<ReckonerScore>> MeasureReckoner(
    Model& model, Backend& backend, const Tokenizer& tokenizer, const PromptEncoder& encode,
    std::span<const ReckonerProblem> problems, const ReckonerOptions& options,
    const std::function<void(std::int64_t, std::int64_t)>& progress) {
  return ReckonerRun(model, backend, tokenizer, encode, problems, options).Go(progress);
}

}  // namespace pliant
