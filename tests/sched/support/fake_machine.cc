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
