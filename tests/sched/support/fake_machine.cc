#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "sched/support/fake_backend.h"
#include "sched/support/machine.h"

namespace pliant::testing {
namespace {

constexpr std::size_t kRowBytes = 16;

void RowOf(std::uint64_t hash, int plane, bool is_v, Level mark, std::byte* row) {
  const std::uint64_t a = Mix(hash ^ Mix(static_cast<std::uint64_t>(plane) * 2 + is_v)), b = Mix(a);
  std::memcpy(row, &a, 8);
  std::memcpy(row + 8, &b, 8);
  row[8] = static_cast<std::byte>(mark);
}

class FakeMachine final : public Machine {
 public:
  Backend& backend() override { return fake_; }
  KvGeometry geometry() const override { return kTinyGeometry; }

  std::vector<std::int32_t> Run(const StepPlan& plan, std::span<Part> parts,
                                bool check_bytes) override {
    std::vector<std::int32_t> tokens;
    for (Part& part : parts) {
      for (std::int64_t p = 0; check_bytes && p < part.slice.context; ++p) {
        CheckRow(part, p);
        // (a failed comparison would repeat for each position: stop at the first)
        if (::testing::Test::HasFatalFailure()) {
          ADD_FAILURE() << "request " << part.id << ", context " << part.slice.context << ", step "
                        << plan.step();
          std::abort();
        }
      }
      for (std::int32_t r = 0; r < part.slice.rows; ++r) WriteRow(part, part.slice.context + r);
      if (part.slice.history != nullptr && part.slice.rows == 1) Attend(part, check_bytes);
      if (!part.samples) continue;
      // What is sampled depends on every plane that was missing, and on nothing else besides the
      // tokens.
      const std::uint64_t lower = part.worst == part.ceiling && part.mark == part.ceiling
                                      ? 0
                                      : Mix(part.states + part.mark);
      tokens.push_back(ExactToken(part.client->chain.back() ^ lower));
    }
    return tokens;
  }

  bool Exact(const Client& c, Level) override {
    for (std::size_t i = 0; i < c.output.size(); ++i) {
      if (c.output[i] != ExactToken(c.chain.at(c.prompt.size() - 1 + i))) return false;
    }
    return true;
  }

 private:
  static std::size_t Offset(std::int64_t position) {
    return kTinyGeometry.RowOffset(0, 0, static_cast<int>(position % kBlockTokens));
  }

  void CheckRow(Part& part, std::int64_t position) {
    const BlockView& view = part.blocks[static_cast<std::size_t>(position / kBlockTokens)];
    if (!view.k[0].valid()) return;  // forgotten
    const std::size_t offset = Offset(position);
    const auto seen_mark = static_cast<Level>(fake_.Page(view.k[0])[offset + 8]);
    for (int is_v = 0; is_v < 2; ++is_v) {
      for (int p = 0; p < kPlanes; ++p) {
        const PageId page = is_v != 0 ? view.v[p] : view.k[p];
        if (!page.valid()) continue;
        std::byte want[kRowBytes];
        RowOf(part.client->chain.at(static_cast<std::size_t>(position)), p, is_v != 0, seen_mark,
              want);
        ASSERT_EQ(std::memcmp(want, fake_.Page(page).data() + offset, kRowBytes), 0)
            << "position " << position << " plane " << p << (is_v != 0 ? " of V" : " of K")
            << ", page " << page.value() << ": not what this sequence wrote";
      }
    }
    part.mark = std::max(part.mark, seen_mark);
  }

  /// What attention does to a history: kept rows are read, some of what was dropped returns, and
  /// everything is looked at. Made up, and the same for the same step.
  void Attend(const Part& part, bool check_bytes) {
    RetainedHistory& history = *part.slice.history;
    const std::uint64_t now = part.client->chain.back();
    if (check_bytes) CheckKept(part);
    std::vector<float> masses(static_cast<std::size_t>(history.frontier()) * 2);
    for (std::size_t p = 0; p < masses.size(); ++p) {
      const bool all_kept =
          (history.Kept(0, static_cast<std::int32_t>(p / 2)) >> (p % 2 * 16) & 0xffff) == 0xffff;
      const bool wanted = static_cast<int>(Mix(now ^ Mix(p)) % 100) < wanted_percent;
      masses[p] = wanted && !all_kept ? 100.0f : 0.0f;
    }
    const std::int32_t page = history.options().returns ? history.Wanted(0, masses) : -1;
    if (page >= 0) ReturnRows(fake_.Memory(), history, 0, 0, page, part.kept);
    std::vector<float> shares(static_cast<std::size_t>(history.kept_blocks() * kBlockTokens +
                                                       part.slice.context + 1 -
                                                       history.frontier() * kBlockTokens));
    for (std::size_t t = 0; t < shares.size(); ++t)
      shares[t] = static_cast<float>(Mix(now + t) % 1000) * 1e-6f;
    history.AddScores(0, shares);
    if (check_bytes) CheckKept(part);
  }

  void CheckKept(const Part& part) {
    const std::span<const std::int32_t> tokens = part.slice.history->KeptTokens(0);
    for (std::size_t slot = 0; slot < tokens.size(); ++slot) {
      const BlockView& view = part.kept[slot / kBlockTokens];
      const std::size_t offset = Offset(static_cast<std::int64_t>(slot));
      const auto mark = static_cast<Level>(fake_.Page(view.k[0])[offset + 8]);
      for (int is_v = 0; is_v < 2; ++is_v) {
        for (int p = 0; p < kPlanes; ++p) {
          const PageId page = is_v != 0 ? view.v[p] : view.k[p];
          if (!page.valid()) continue;
          std::byte want[kRowBytes];
          RowOf(part.client->chain.at(static_cast<std::size_t>(tokens[slot])), p, is_v != 0, mark,
                want);
          ASSERT_EQ(std::memcmp(want, fake_.Page(page).data() + offset, kRowBytes), 0)
              << "slot " << slot << " does not hold token " << tokens[slot];
        }
      }
    }
  }

  void WriteRow(const Part& part, std::int64_t position) {
    const BlockView& view = part.blocks[static_cast<std::size_t>(position / kBlockTokens)];
    for (int is_v = 0; is_v < 2; ++is_v) {
      for (int p = 0; p < kPlanes; ++p) {
        const PageId page = is_v != 0 ? view.v[p] : view.k[p];
        if (!page.valid()) continue;
        RowOf(part.client->chain.at(static_cast<std::size_t>(position)), p, is_v != 0,
              std::max(part.worst, part.mark), fake_.Page(page).data() + Offset(position));
      }
    }
  }

  FakeBackend fake_;
};

}  // namespace

std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

std::int32_t ExactToken(std::uint64_t chain) {
  return static_cast<std::int32_t>(Mix(chain) % 50'000);
}

std::unique_ptr<Machine> MakeFakeMachine() { return std::make_unique<FakeMachine>(); }

}  // namespace pliant::testing
