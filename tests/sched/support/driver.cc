#include "sched/support/driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace pliant::testing {
namespace {

std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

Level LevelOf(const BlockView& view) {
  int k = 0, v = 0;
  while (k < kPlanes && view.k[k].valid()) ++k;
  while (v < kPlanes && view.v[v].valid()) ++v;
  for (int p = k; p < kPlanes; ++p) EXPECT_FALSE(view.k[p].valid()) << "resident planes come first";
  for (int p = v; p < kPlanes; ++p) EXPECT_FALSE(view.v[p].valid()) << "resident planes come first";
  for (int level = 0; level < kLevelCount; ++level) {
    if (kLevels[level] == PlaneCount{static_cast<std::uint8_t>(k), static_cast<std::uint8_t>(v)})
      return static_cast<Level>(level);
  }
  ADD_FAILURE() << "no such state: " << k << "/" << v;
  return 0;
}

constexpr std::size_t kRowBytes = 16;

void RowOf(std::uint64_t hash, int plane, bool is_v, Level mark, std::byte* row) {
  const std::uint64_t a = Mix(hash ^ Mix(static_cast<std::uint64_t>(plane) * 2 + is_v)), b = Mix(a);
  std::memcpy(row, &a, 8);
  std::memcpy(row + 8, &b, 8);
  row[8] = static_cast<std::byte>(mark);
}

}  // namespace

std::vector<std::int32_t> Tokens(std::int64_t n, std::uint64_t seed) {
  std::vector<std::int32_t> out;
  for (std::int64_t i = 0; i < n; ++i)
    out.push_back(
        static_cast<std::int32_t>(Mix(seed * 1'000'003 + static_cast<std::uint64_t>(i)) % 50'000));
  return out;
}

std::int32_t ExactToken(std::uint64_t chain) {
  return static_cast<std::int32_t>(Mix(chain) % 50'000);
}

Driver::Driver(DriverOptions options) : options_(std::move(options)) {
  faulty_ = std::make_unique<FaultyBackend>(fake_, options_.faults);
  KvOptions& kv = options_.kv;
  const std::size_t page = kTinyGeometry.PageBytes();
  if (options_.pages > 0) kv.memory_bytes = static_cast<std::uint64_t>(options_.pages) * page;
  if (options_.store_pages > 0) {
    kv.store.kind = StoreSpec::Kind::kRam;
    kv.store.bytes = static_cast<std::uint64_t>(options_.store_pages) * page;
  }
  auto made = KvManager::Create(
      *faulty_, kTinyGeometry, kv, clock_,
      options_.constant_hash
          ? PrefixHash([](std::uint64_t, std::span<const std::int32_t>) { return 7ull; })
          : PrefixHash(DefaultPrefixHash));
  PLIANT_CHECK(made.ok(), made.status().ToString());
  kv_ = std::move(*made);
  scheduler_ = std::make_unique<Scheduler>(options_.sched, *kv_, clock_);
}

Driver::~Driver() {
  Drain();
  scheduler_.reset();
  kv_.reset();
}

Status Driver::Add(std::uint64_t id, const Ask& ask) {
  const Status status = scheduler_->Add(
      {RequestId(id), ask.prompt, ask.max_new, ask.priority, ask.min_bits, ask.salt});
  if (!status.ok()) return status;
  Client c;
  c.prompt = ask.prompt;
  c.salt = ask.salt;
  c.min_bits = ask.min_bits;
  c.floor = kv_->FloorLevel(ask.min_bits);
  c.stop_after = ask.stop_after;
  std::uint64_t h = Mix(std::hash<std::string>()(ask.salt));
  for (std::int32_t t : ask.prompt) c.chain.push_back(h = Mix(h ^ static_cast<std::uint32_t>(t)));
  EXPECT_FALSE(clients_.contains(id));
  clients_[id] = std::move(c);
  return status;
}

void Driver::Cancel(std::uint64_t id) {
  scheduler_->Cancel(RequestId(id));
  const auto it = clients_.find(id);
  if (it != clients_.end() && !it->second.done) {
    it->second.done = it->second.cancelled = true;
    it->second.facts = scheduler_->Facts(RequestId(id));
  }
}

std::int64_t Driver::live() const {
  return std::count_if(clients_.begin(), clients_.end(),
                       [](const auto& c) { return !c.second.done; });
}

void Driver::CheckRow(const Client& c, const BlockView& view, std::int64_t position, Level* mark) {
  const std::size_t offset =
      kTinyGeometry.RowOffset(0, 0, static_cast<int>(position % kBlockTokens));
  const auto seen_mark = static_cast<Level>(fake_.Page(view.k[0])[offset + 8]);
  for (int is_v = 0; is_v < 2; ++is_v) {
    for (int p = 0; p < kPlanes; ++p) {
      const PageId page = is_v != 0 ? view.v[p] : view.k[p];
      if (!page.valid()) continue;
      std::byte want[kRowBytes];
      RowOf(c.chain.at(static_cast<std::size_t>(position)), p, is_v != 0, seen_mark, want);
      ASSERT_EQ(std::memcmp(want, fake_.Page(page).data() + offset, kRowBytes), 0)
          << "position " << position << " plane " << p << (is_v != 0 ? " of V" : " of K")
          << ", page " << page.value() << ": not what this sequence wrote";
    }
  }
  *mark = std::max(*mark, seen_mark);
}

void Driver::WriteRow(const Client& c, const BlockView& view, std::int64_t position, Level mark) {
  const std::size_t offset =
      kTinyGeometry.RowOffset(0, 0, static_cast<int>(position % kBlockTokens));
  for (int is_v = 0; is_v < 2; ++is_v) {
    for (int p = 0; p < kPlanes; ++p) {
      const PageId page = is_v != 0 ? view.v[p] : view.k[p];
      if (!page.valid()) continue;
      RowOf(c.chain.at(static_cast<std::size_t>(position)), p, is_v != 0, mark,
            fake_.Page(page).data() + offset);
    }
  }
}

std::vector<SampledToken> Driver::Forward(const StepPlan& plan) {
  const StepBatch batch = plan.batch();
  EXPECT_EQ(batch.sequences.size(), plan.entries().size());
  EXPECT_LE(plan.rows(), options_.sched.max_batch_tokens);
  std::vector<SampledToken> sampled;
  std::set<std::uint32_t> written;
  std::int32_t row = 0;
  for (std::size_t i = 0; i < plan.entries().size(); ++i) {
    const SequenceSlice& slice = batch.sequences[i];
    const StepPlan::Entry& entry = plan.entries()[i];
    EXPECT_EQ(slice.first_row, row);
    EXPECT_EQ(slice.rows, entry.rows);
    row += slice.rows;
    EXPECT_EQ(slice.blocks, (slice.context + slice.rows + kBlockTokens - 1) / kBlockTokens);
    Client& c = clients_.at(entry.request.value());
    Level worst = kv_->ceiling(), mark = kv_->ceiling();
    std::uint64_t digest = 0;
    const auto blocks = batch.blocks.subspan(static_cast<std::size_t>(slice.first_block),
                                             static_cast<std::size_t>(slice.blocks));
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const Level level = LevelOf(blocks[b]);
      EXPECT_GE(level, kv_->ceiling());
      EXPECT_LE(level, c.floor) << "a block stands below the request's floor";
      worst = std::max(worst, level);
      digest = Mix(digest ^ level);
      // The sink is never demoted, not even in the prefix cache.
      if (static_cast<std::int64_t>(b) * kBlockTokens < kv_->options().sink_tokens) {
        EXPECT_EQ(level, kv_->ceiling());
      }
      if (static_cast<std::int64_t>(b + 1) * kBlockTokens > slice.context) {
        EXPECT_EQ(level, kv_->ceiling()) << "a block being written is not whole";
        for (int p = 0; p < kLevels[level].k; ++p)
          EXPECT_TRUE(written.insert(blocks[b].k[p].value()).second);
        for (int p = 0; p < kLevels[level].v; ++p)
          EXPECT_TRUE(written.insert(blocks[b].v[p].value()).second);
      }
    }
    for (std::int64_t p = 0; options_.check_bytes && p < slice.context; ++p) {
      // (a failed comparison would repeat for each position: stop at the first)
      CheckRow(c, blocks[static_cast<std::size_t>(p / kBlockTokens)], p, &mark);
      if (::testing::Test::HasFatalFailure()) {
        ADD_FAILURE() << "request " << entry.request.value() << ", context " << slice.context
                      << ", step " << plan.step();
        std::abort();
      }
    }
    EXPECT_LE(mark, c.floor) << "an exact request reads content computed below its floor";
    for (std::int32_t r = 0; r < slice.rows; ++r) {
      const std::int64_t position = slice.context + r;
      EXPECT_EQ(batch.positions[static_cast<std::size_t>(slice.first_row + r)], position);
      const std::int32_t token = batch.tokens[static_cast<std::size_t>(slice.first_row + r)];
      const auto at = static_cast<std::size_t>(position);
      EXPECT_EQ(token, at < c.prompt.size() ? c.prompt[at] : c.output.at(at - c.prompt.size()));
      WriteRow(c, blocks[at / kBlockTokens], position, std::max(worst, mark));
    }
    if (!entry.samples) continue;
    EXPECT_EQ(slice.context + slice.rows, static_cast<std::int64_t>(c.chain.size()))
        << "sampled before the prompt's end";
    EXPECT_EQ(batch.logit_rows[sampled.size()], slice.first_row + slice.rows - 1);
    // What is sampled depends on every plane that was missing, and on nothing else besides the
    // tokens.
    const std::uint64_t h =
        c.chain.back() ^
        (worst == kv_->ceiling() && mark == kv_->ceiling() ? 0 : Mix(digest + mark));
    if (worst > 0) ++c.sampled_below;
    const std::int32_t token = ExactToken(h);
    const bool finished =
        c.stop_after > 0 && static_cast<std::int64_t>(c.output.size()) + 1 >= c.stop_after;
    sampled.push_back({entry.request, token, finished});
    if (!c.done) {
      c.output.push_back(token);
      c.chain.push_back(Mix(c.chain.back() ^ static_cast<std::uint32_t>(token)));
    }
  }
  ++steps_run_;
  return sampled;
}

void Driver::TakeEvents() {
  for (SchedEvent& event : scheduler_->TakeEvents()) {
    Client& c = clients_.at(event.request.value());
    EXPECT_FALSE(c.done);
    c.done = true;
    c.error = event.error;
    c.facts = scheduler_->Facts(event.request);
    EXPECT_TRUE(c.facts.has_value());
  }
}

void Driver::SettleOldest() {
  StepPlan plan = std::move(flight_.front());
  flight_.pop_front();
  const std::vector<SampledToken> sampled = Forward(plan);
  scheduler_->Settle(std::move(plan), sampled);
  TakeEvents();
  for (const SampledToken& s : sampled) {
    Client& c = clients_.at(s.request.value());
    if (!s.finished || c.done) continue;
    c.done = true;
    c.facts = scheduler_->Facts(s.request);
    EXPECT_TRUE(c.facts.has_value());
  }
  if (options_.check_bytes) scheduler_->Audit();
}

bool Driver::Step() {
  clock_.Advance(options_.step_time);
  StepPlan plan = scheduler_->Plan();
  if (options_.check_bytes) scheduler_->Audit();
  TakeEvents();
  const bool ran = !plan.empty();
  if (ran) {
    flight_.push_back(std::move(plan));
  } else {
    EXPECT_EQ(plan.idle(), live() == 0);
    if (!plan.idle()) {
      EXPECT_GT(plan.wait(), 0);
    }
  }
  while (!flight_.empty() && (flight_.size() > (options_.ahead ? 1u : 0u) || !ran)) SettleOldest();
  return ran;
}

bool Driver::AbandonStep() {
  Drain();
  StepPlan plan = scheduler_->Plan();
  TakeEvents();
  if (plan.empty()) return false;
  scheduler_->Abandon(std::move(plan));
  scheduler_->Audit();
  return true;
}

void Driver::Drain() {
  while (!flight_.empty()) SettleOldest();
}

bool Driver::Run(int most) {
  for (int i = 0; i < most && live() > 0; ++i) Step();
  Drain();
  return live() == 0;
}

}  // namespace pliant::testing
