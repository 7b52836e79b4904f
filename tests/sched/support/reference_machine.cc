// A real model on the reference backend behind the scheduler. What a step has written is remembered
// page by page, and every later read is compared with it, so that a restored, loaded or shared
// block that differs in one bit fails the test.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <unordered_map>

#include "model/model.h"
#include "sched/support/machine.h"

namespace pliant::testing {
namespace {

constexpr int kMaxRows = 1024;
constexpr std::uint64_t kTurns = 8;
constexpr std::int32_t kVocabulary = 96;  // the scheduler's tokens, of a larger range, are folded
constexpr std::uint32_t kOraclePages = 128 * 2 * kPlanes;

std::unique_ptr<Model> OpenTinyModel() {
  const std::string path =
      ::testing::TempDir() + "pliant_tiny_" + std::to_string(getpid()) + ".json";
  const std::string config = R"({"model_type": "llama", "vocab_size": 96, "hidden_size": 32,
      "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
      "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 65536,
      "tie_word_embeddings": true})";
  const std::string folder = path + ".d";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json") << config;
  auto model = Model::Open(folder, {.random_weights = true, .random_seed = 11});
  std::filesystem::remove_all(folder);
  PLIANT_CHECK(model.ok(), model.status().message());
  return std::move(*model);
}

/// Model and backend together: a model is loaded into one backend only.
struct Loaded {
  std::unique_ptr<Model> model = OpenTinyModel();
  std::unique_ptr<Backend> backend = MakeReferenceBackend();
  Loaded() {
    const Status status = model->Load(*backend, kMaxRows, kMaxRows, {});
    PLIANT_CHECK(status.ok(), status.message());
  }
};

/// Runs a batch with folded token ids; a token for each logit row.
std::vector<std::int32_t> Forward(Loaded& loaded, StepBatch batch) {
  std::vector<std::int32_t> folded(batch.tokens.begin(), batch.tokens.end());
  for (std::int32_t& t : folded) t %= kVocabulary;
  batch.tokens = folded;
  const Status status = loaded.model->Forward(*loaded.backend, batch);
  PLIANT_CHECK(status.ok(), status.message());
  const std::span<const float> logits = loaded.backend->LogitRows();
  std::vector<std::int32_t> tokens;
  for (std::size_t row = 0; row < batch.logit_rows.size(); ++row) {
    std::uint64_t hash = 1;
    for (std::int32_t i = 0; i < kVocabulary; ++i) {
      hash = Mix(hash ^ std::bit_cast<std::uint32_t>(
                            logits[row * kVocabulary + static_cast<std::size_t>(i)]));
    }
    tokens.push_back(static_cast<std::int32_t>(hash % 50'000));
  }
  return tokens;
}

/// What a block holds: the bytes of the planes it was written with.
struct Content {
  std::vector<std::byte> k[kPlanes], v[kPlanes];
  Level mark = 0;
};
using ContentPtr = std::shared_ptr<const Content>;

class ReferenceMachine final : public Machine {
 public:
  Backend& backend() override { return *loaded_.backend; }
  KvGeometry geometry() const override { return loaded_.model->config().Kv(); }

  std::vector<std::int32_t> Run(const StepPlan& plan, std::span<Part> parts,
                                bool check_bytes) override {
    for (Part& part : parts) {
      History& history = histories_[part.id];
      if (part.preemptions > history.preemptions) history.blocks.clear();
      history.preemptions = std::max(history.preemptions, part.preemptions);
      const std::size_t read =
          static_cast<std::size_t>((part.slice.context + kBlockTokens - 1) / kBlockTokens);
      history.blocks.resize(read);
      for (std::size_t b = 0; check_bytes && b < read; ++b) {
        // Blocks that did not change are looked at in turns.
        Block& block = history.blocks[b];
        if (block.seen == part.blocks[b] && (b + plan.step()) % kTurns != 0) {
          part.mark = std::max(part.mark, block.mark);
          continue;
        }
        Check(part, b, block);
        if (::testing::Test::HasFailure()) std::abort();  // it would repeat for each block
      }
    }
    const std::vector<std::int32_t> tokens = Forward(loaded_, plan.batch());
    for (const Part& part : parts) Remember(part);
    for (const Part& part : parts) {
      if (check_bytes && part.slice.history != nullptr) CheckKept(part);
    }
    return tokens;
  }

  bool Exact(const Client& client, Level ceiling) override {
    std::vector<std::int32_t> tokens = client.prompt;
    tokens.insert(tokens.end(), client.output.begin(), client.output.end());
    return client.output.empty() ||
           Expected(tokens, client.prompt.size(), ceiling) == client.output;
  }

 private:
  struct Block {
    // What it may hold. A block taken from the prefix cache with planes missing may be one of
    // several until more of it is seen.
    std::vector<ContentPtr> may_hold;
    BlockView seen;  // at the last comparison
    Level mark = 0;
  };
  struct History {
    std::int64_t computed = 0, preemptions = 0;
    std::vector<Block> blocks;
  };

  std::vector<std::byte> PageBytes(PageId page) {
    std::vector<std::byte> bytes(loaded_.backend->PageBytes(geometry()));
    const PageCopy copy{page, bytes.data()};
    PLIANT_CHECK(loaded_.backend->Wait(loaded_.backend->CopyOut({&copy, 1})) == CopyState::kDone,
                 "a page is read");
    return bytes;
  }

  bool Holds(const BlockView& view, const Content& content) {
    for (int p = 0; p < kPlanes; ++p) {
      if (view.k[p].valid() && PageBytes(view.k[p]) != content.k[p]) return false;
      if (view.v[p].valid() && PageBytes(view.v[p]) != content.v[p]) return false;
    }
    return true;
  }

  static std::uint64_t ChainAt(const Part& part, std::size_t block) {
    return part.client->chain.at((block + 1) * kBlockTokens - 1);
  }

  void Check(Part& part, std::size_t b, Block& block) {
    const bool from_cache = block.may_hold.empty();
    if (from_cache) block.may_hold = published_[ChainAt(part, b)];
    std::erase_if(block.may_hold, [&](const ContentPtr& c) { return !Holds(part.blocks[b], *c); });
    if (block.may_hold.empty()) {
      ADD_FAILURE() << "request " << part.id << ", context " << part.slice.context << ", block "
                    << b << (from_cache ? " (from the prefix cache)" : "")
                    << ": not what was written";
      return;
    }
    block.seen = part.blocks[b];
    block.mark = kLevelCount;
    for (const ContentPtr& c : block.may_hold) block.mark = std::min(block.mark, c->mark);
    part.mark = std::max(part.mark, block.mark);
  }

  /// Every kept row is the original's, bit for bit.
  void CheckKept(const Part& part) {
    const RetainedHistory& retained = *part.slice.history;
    const KvGeometry g = geometry();
    std::map<std::uint32_t, std::vector<std::byte>> pages;
    const auto bytes = [&](PageId page) -> const std::vector<std::byte>& {
      auto& found = pages[page.value()];
      if (found.empty()) found = PageBytes(page);
      return found;
    };
    for (int unit = 0; unit < retained.units(); ++unit) {
      const std::span<const std::int32_t> tokens = retained.KeptTokens(unit);
      for (std::size_t slot = 0; slot < tokens.size(); ++slot) {
        const auto& may_hold = histories_[part.id]
                                   .blocks.at(static_cast<std::size_t>(tokens[slot]) / kBlockTokens)
                                   .may_hold;
        if (may_hold.size() != 1) continue;  // not yet known which
        const BlockView& view = part.kept[slot / kBlockTokens];
        const int layer = unit / g.kv_heads, head = unit % g.kv_heads;
        const std::size_t at = g.RowOffset(layer, head, static_cast<int>(slot % kBlockTokens));
        const std::size_t from = g.RowOffset(layer, head, tokens[slot] % kBlockTokens);
        const auto same = [&](PageId page, const std::vector<std::byte>& original) {
          return !page.valid() ||
                 std::equal(original.begin() + static_cast<std::ptrdiff_t>(from),
                            original.begin() + static_cast<std::ptrdiff_t>(from + g.RowBytes()),
                            bytes(page).begin() + static_cast<std::ptrdiff_t>(at));
        };
        for (int p = 0; p < kPlanes; ++p) {
          ASSERT_TRUE(same(view.k[p], may_hold[0]->k[p]) && same(view.v[p], may_hold[0]->v[p]))
              << "request " << part.id << ", unit " << unit << ", slot " << slot
              << " does not hold token " << tokens[slot];
        }
      }
    }
  }

  void Remember(const Part& part) {
    History& history = histories_[part.id];
    history.computed = part.slice.context + part.slice.rows;
    history.blocks.resize(part.blocks.size());
    for (auto b = static_cast<std::size_t>(part.slice.context / kBlockTokens);
         b < part.blocks.size(); ++b) {
      auto content = std::make_shared<Content>();
      for (int p = 0; p < kPlanes; ++p) {
        if (part.blocks[b].k[p].valid()) content->k[p] = PageBytes(part.blocks[b].k[p]);
        if (part.blocks[b].v[p].valid()) content->v[p] = PageBytes(part.blocks[b].v[p]);
      }
      content->mark = std::max(part.worst, part.mark);
      history.blocks[b] = {{content}, part.blocks[b], content->mark};
      const bool full = static_cast<std::int64_t>(b + 1) * kBlockTokens <= history.computed;
      if (full) published_[ChainAt(part, b)].push_back(std::move(content));
    }
  }

  /// The tokens after `given`, `given + 1`, ... of `tokens`, each with all before it in place at
  /// the ceiling.
  static std::vector<std::int32_t> Expected(const std::vector<std::int32_t>& tokens,
                                            std::size_t given, Level ceiling) {
    static Loaded* const oracle = [] {
      auto* loaded = new Loaded();
      const Status status =
          loaded->backend->AllocatePages(loaded->model->config().Kv(), kOraclePages);
      PLIANT_CHECK(status.ok(), status.message());
      return loaded;
    }();
    std::vector<BlockView> blocks(tokens.size() / kBlockTokens + 1);
    PLIANT_CHECK(blocks.size() * 2 * kPlanes <= kOraclePages, "the oracle's pages suffice");
    std::uint32_t next = 0;
    for (BlockView& block : blocks) {
      for (int p = 0; p < kLevels[ceiling].k; ++p) block.k[p] = PageId(next++);
      for (int p = 0; p < kLevels[ceiling].v; ++p) block.v[p] = PageId(next++);
    }
    std::vector<std::int32_t> expected;
    for (std::size_t done = 0; done + 1 < tokens.size();) {
      const std::size_t rows = std::min<std::size_t>(tokens.size() - 1 - done, kMaxRows);
      std::vector<std::int32_t> positions, logit_rows;
      for (std::size_t r = 0; r < rows; ++r) {
        positions.push_back(static_cast<std::int32_t>(done + r));
        if (done + r + 1 >= given) logit_rows.push_back(static_cast<std::int32_t>(r));
      }
      const SequenceSlice slice{
          .first_row = 0,
          .rows = static_cast<std::int32_t>(rows),
          .context = static_cast<std::int32_t>(done),
          .first_block = 0,
          .blocks = static_cast<std::int32_t>((done + rows + kBlockTokens - 1) / kBlockTokens)};
      const auto more = Forward(*oracle, {std::span(tokens).subspan(done, rows), positions,
                                          std::span(&slice, 1), blocks, logit_rows});
      expected.insert(expected.end(), more.begin(), more.end());
      done += rows;
    }
    return expected;
  }

  Loaded loaded_;
  std::map<std::uint64_t, History> histories_;
  std::unordered_map<std::uint64_t, std::vector<ContentPtr>> published_;  // by chain hash
};

}  // namespace

std::unique_ptr<Machine> MakeReferenceMachine() { return std::make_unique<ReferenceMachine>(); }

}  // namespace pliant::testing
