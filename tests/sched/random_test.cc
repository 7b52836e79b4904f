// Thousands of random turns against a simple model: whatever is admitted, cancelled, squeezed or
// spoilt, every byte that is read is right (the driver compares), every exact request gets the
// tokens of an ample pool, pages sum, and in the end all is free again.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "sched/support/driver.h"
#include "support/rounds.h"

namespace pliant {
namespace {

using testing::Driver;
using testing::DriverOptions;
using testing::Tokens;

struct Setting {
  const char* name;
  KvPolicy policy;
  int pool_blocks, store_blocks;
  int ceiling = 16, floor = 8;
  int delay = 0, fail_out = 0, fail_in = 0;
  bool ahead = false, constant_hash = false, always = false, reference = false;
  bool capacities = false;  // half of the requests have one
};

constexpr Setting kSettings[] = {
    {.name = "full", .policy = KvPolicy::kFull, .pool_blocks = 24, .store_blocks = 0},
    {.name = "full_ahead",
     .policy = KvPolicy::kFull,
     .pool_blocks = 24,
     .store_blocks = 0,
     .ahead = true},
    {.name = "offload", .policy = KvPolicy::kOffload, .pool_blocks = 24, .store_blocks = 64},
    {.name = "offload_late",
     .policy = KvPolicy::kOffload,
     .pool_blocks = 24,
     .store_blocks = 64,
     .delay = 3,
     .ahead = true},
    {.name = "elastic", .policy = KvPolicy::kElastic, .pool_blocks = 24, .store_blocks = 200},
    {.name = "elastic_deep",
     .policy = KvPolicy::kElastic,
     .pool_blocks = 24,
     .store_blocks = 200,
     .floor = 4},
    {.name = "pliant_late",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 24,
     .store_blocks = 200,
     .floor = 4,
     .delay = 4},
    {.name = "pliant_ahead",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 24,
     .store_blocks = 200,
     .floor = 4,
     .delay = 2,
     .ahead = true},
    {.name = "pliant_failing",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 24,
     .store_blocks = 200,
     .floor = 4,
     .delay = 1,
     .fail_out = 3,
     .fail_in = 2,
     .ahead = true},
    {.name = "pliant_small_store",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 24,
     .store_blocks = 6,
     .floor = 4,
     .delay = 1},
    {.name = "pliant_12",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 24,
     .store_blocks = 200,
     .ceiling = 12,
     .floor = 4,
     .ahead = true},
    {.name = "pliant_8",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 24,
     .store_blocks = 200,
     .ceiling = 8,
     .floor = 4,
     .delay = 1},
    {.name = "always_demote",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 48,
     .store_blocks = 200,
     .floor = 4,
     .delay = 1,
     .always = true},
    {.name = "colliding",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 24,
     .store_blocks = 200,
     .floor = 4,
     .constant_hash = true},
    {.name = "budget",
     .policy = KvPolicy::kBudget,
     .pool_blocks = 30,
     .store_blocks = 0,
     .capacities = true},
    {.name = "returns",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 30,
     .store_blocks = 300,
     .floor = 4,
     .capacities = true},
    {.name = "returns_late",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 30,
     .store_blocks = 300,
     .floor = 4,
     .delay = 3,
     .ahead = true,
     .capacities = true},
    {.name = "returns_failing",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 30,
     .store_blocks = 300,
     .floor = 4,
     .delay = 1,
     .fail_out = 5,
     .fail_in = 3,
     .ahead = true,
     .capacities = true},
    {.name = "returns_small_store",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 30,
     .store_blocks = 12,
     .floor = 4,
     .capacities = true},
#if !defined(__SANITIZE_THREAD__)  // it has one thread, and takes long
    {.name = "returns_reference",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 30,
     .store_blocks = 300,
     .floor = 4,
     .delay = 1,
     .fail_in = 7,
     .reference = true,
     .capacities = true},
    {.name = "reference",
     .policy = KvPolicy::kPliant,
     .pool_blocks = 24,
     .store_blocks = 200,
     .floor = 4,
     .delay = 2,
     .fail_out = 5,
     .fail_in = 3,
     .ahead = true,
     .reference = true},
#endif
};

/// Each seed is a run of 500 turns of its own.
constexpr std::uint64_t kSeeds = Rounds(6, 4), kSeedsOfReference = 2;

/// How often each kind of decision was taken, over all seeds: a setting that never does what it is
/// there for tests nothing.
using Counts = std::array<std::uint64_t, static_cast<std::size_t>(Reason::kCount)>;

class RandomTest : public ::testing::TestWithParam<Setting> {};

void CheckModel(Driver& d) {
  const KvStats s = d.kv().Stats();
  std::int64_t pages =
      s.pages_free + s.pages_fenced + s.pages_copying + s.pages_withheld + s.pages_kept;
  for (const BlockInfo& b : d.kv().MemoryMap()) pages += b.planes.pages();
  ASSERT_EQ(pages, s.pages_total);
  ASSERT_LE(s.store_bytes_used, s.store_bytes_total);
}

TEST_P(RandomTest, NothingIsLost) {
  const Setting& setting = GetParam();
  Counts counts{};
  std::int64_t exact_tokens = 0, returned_pages = 0, low_tokens = 0;
  for (std::uint64_t seed = 1; seed <= (setting.reference ? kSeedsOfReference : kSeeds); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed * 7919);
    const auto upto = [&](std::int64_t n) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
    };
    DriverOptions o;
    o.kv.policy = setting.policy;
    o.kv.ceiling_bits = setting.ceiling;
    o.kv.floor_bits = setting.floor;
    o.kv.dwell_steps = static_cast<int>(upto(20));
    o.kv.horizon_steps = static_cast<int>(upto(20));
    o.kv.recent_tokens_base = 32;
    o.kv.recent_tokens_deep = 64;
    o.kv.sink_tokens = upto(2) == 0 ? 32 : 64;
    o.kv.always_demote = setting.always;
    o.pages = setting.pool_blocks * 8 + upto(7);
    o.store_pages = setting.store_blocks * 8;
    o.faults = {.delay_polls = setting.delay,
                .fail_every_out = setting.fail_out,
                .fail_every_in = setting.fail_in};
    o.ahead = setting.ahead;
    o.reference = setting.reference;
    o.constant_hash = setting.constant_hash;
    o.sched.max_running = 10;
    o.sched.max_batch_tokens = 48;
    o.sched.history.start_blocks = 5;
    o.sched.history.recent_blocks = static_cast<std::int32_t>(upto(3));
    o.sched.history.retention.returns = setting.policy != KvPolicy::kBudget;
    o.sched.history.kept_level = static_cast<Level>(upto(kSensorLevel));
    Driver d(o);
    std::uint64_t next = 1;
    for (int turn = 0; turn < 500; ++turn) {
      const std::int64_t dice = upto(100);
      if (dice < 12 && d.live() < 20) {
        // A few prefixes in common, of any length.
        auto prompt = Tokens(upto(250), static_cast<std::uint64_t>(upto(4)));
        for (std::int32_t t : Tokens(1 + upto(60), 100 + next)) prompt.push_back(t);
        static constexpr int kBits[] = {0, 16, 8, 4, 12};
        Driver::Ask ask{.prompt = prompt,
                        .max_new = 1 + upto(160),
                        .min_bits = kBits[upto(5)],
                        .priority = static_cast<int>(upto(3) / 2)};
        if (upto(4) == 0) ask.stop_after = 1 + upto(ask.max_new);
        if (upto(5) == 0) ask.salt = "s";
        if (setting.capacities && upto(2) == 0) {
          ask.capacity = upto(3) == 0 ? Capacity{Capacity::Kind::kGrow, 0}
                                      : Capacity{Capacity::Kind::kFixed, 1 + upto(200)};
        }
        const Status status = d.Add(next, ask);
        ASSERT_TRUE(status.ok() || status.code() == StatusCode::kTooLarge) << status.ToString();
        ++next;
      } else if (dice < 15 && next > 1) {
        d.Cancel(1 + static_cast<std::uint64_t>(upto(static_cast<std::int64_t>(next) - 1)));
      } else if (dice < 17) {
        d.kv().Withhold(static_cast<std::uint32_t>(upto(setting.pool_blocks * 3)));
      } else if (dice < 19) {
        d.kv().Withhold(0);
      } else if (dice < 20) {
        d.AbandonStep();
      } else {
        d.Step();
      }
      CheckModel(d);
      if (HasFailure()) return;
    }
    d.kv().Withhold(0);
    ASSERT_TRUE(d.Run(60'000)) << d.live() << " requests never end";
    for (auto& [id, c] : d.clients()) {
      if (!c.error.ok()) {
        EXPECT_EQ(c.error.code(), StatusCode::kOutOfMemory);
      }
      if (c.floor == d.kv().ceiling() && !c.capacity) {
        EXPECT_TRUE(d.Exact(id)) << "exact request " << id;
      }
      if (!c.capacity && c.facts) {
        EXPECT_EQ(c.facts->dropped, 0) << "nobody asked for it";
      }
      if (c.facts) returned_pages += c.facts->returned;
      if (c.facts && !c.cancelled) {
        EXPECT_EQ(c.facts->tokens_below_16_bits, c.sampled_below) << id;
      }
    }
    // Copies end, then everything is free or cached.
    for (int i = 0; i < 200; ++i) d.Step();
    const KvStats s = d.kv().Stats();
    EXPECT_EQ(s.pages_free + s.pages_cached, s.pages_total);
    EXPECT_EQ(s.blocks, s.blocks_cached);
    for (std::size_t r = 0; r < counts.size(); ++r) counts[r] += d.Count(static_cast<Reason>(r));
    for (auto& [id, c] : d.clients()) {
      (c.floor == d.kv().ceiling() ? exact_tokens : low_tokens) +=
          static_cast<std::int64_t>(c.output.size());
    }
    if (HasFailure()) return;
  }
  std::string line;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    if (counts[r] > 0)
      line +=
          std::string(ReasonName(static_cast<Reason>(r))) + " " + std::to_string(counts[r]) + ", ";
  }
  RecordProperty("decisions", line);
  const auto count = [&](Reason r) { return counts[static_cast<std::size_t>(r)]; };
  EXPECT_GT(exact_tokens, setting.reference ? 200 : 1000);
  EXPECT_GT(count(Reason::kAdmitCached), 0u) << line;
  const bool bends = setting.policy == KvPolicy::kElastic || setting.policy == KvPolicy::kPliant;
  if (bends && setting.ceiling > 8) {
    EXPECT_GT(count(Reason::kDemoteBase), 20u) << line;
  }
  if (bends && setting.floor == 4) {
    EXPECT_GT(count(Reason::kDemoteDeep), 20u) << line;
  }
  if (bends) {
    EXPECT_GT(low_tokens, 1000);
  }
  if (bends) {
    EXPECT_GT(count(Reason::kRestore), 20u) << line;
  }
  if (setting.capacities) {
    const bool returns = setting.policy != KvPolicy::kBudget;
    EXPECT_GT(count(returns ? Reason::kDrop : Reason::kForget), setting.reference ? 5u : 50u)
        << line;
    EXPECT_EQ(count(returns ? Reason::kForget : Reason::kDrop), 0u) << line;
    EXPECT_EQ(returned_pages > 0, returns) << line;
  }
  if (setting.policy == KvPolicy::kOffload) {
    EXPECT_GT(count(Reason::kOffload), 10u) << line;
  }
  if (setting.policy == KvPolicy::kFull) {
    EXPECT_GT(count(Reason::kPreempt), 10u) << line;
  }
  if (setting.fail_in > 0) {
    EXPECT_GT(count(Reason::kRestoreFailed), 10u) << line;
  }
  if (setting.fail_out > 0) {
    EXPECT_GT(count(Reason::kWriteAheadFailed), 10u) << line;
  }
  if (std::getenv("PLIANT_SHOW_DECISIONS") != nullptr)
    std::printf("%s: %s\n", setting.name, line.c_str());
}

INSTANTIATE_TEST_SUITE_P(Settings, RandomTest, ::testing::ValuesIn(kSettings),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace pliant
