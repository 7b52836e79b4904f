#include "sched/support/driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

namespace pliant::testing {
namespace {

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

}  // namespace

std::vector<std::int32_t> Tokens(std::int64_t n, std::uint64_t seed) {
  std::vector<std::int32_t> out;
  for (std::int64_t i = 0; i < n; ++i)
    out.push_back(
        static_cast<std::int32_t>(Mix(seed * 1'000'003 + static_cast<std::uint64_t>(i)) % 50'000));
  return out;
}

Driver::Driver(DriverOptions options) : options_(std::move(options)) {
  machine_ = options_.reference ? MakeReferenceMachine() : MakeFakeMachine();
  faulty_ = std::make_unique<FaultyBackend>(machine_->backend(), options_.faults);
  KvOptions& kv = options_.kv;
  const std::size_t page = machine_->geometry().PageBytes();
  // Rates are given in pages of the fake machine.
  kv.restore_bytes_per_second = kv.restore_bytes_per_second / kTinyGeometry.PageBytes() * page;
  if (options_.pages > 0) kv.memory_bytes = static_cast<std::uint64_t>(options_.pages) * page;
  if (options_.store_pages > 0) {
    kv.store.kind = StoreSpec::Kind::kRam;
    kv.store.bytes = static_cast<std::uint64_t>(options_.store_pages) * page;
  }
  auto made = KvManager::Create(
      *faulty_, machine_->geometry(), kv, clock_,
      options_.constant_hash
          ? PrefixHash([](std::uint64_t, std::span<const std::int32_t>) { return 7ull; })
          : PrefixHash(DefaultPrefixHash));
  PLIANT_CHECK(made.ok(), made.status().ToString());
  kv_ = std::move(*made);
  machine_->wanted_percent = options_.wanted_percent;
  options_.sched.history_heads = 1;
  // Random weights look at everything a little.
  if (options_.reference) options_.sched.history.retention.return_weight = 0.04f;
  scheduler_ = std::make_unique<Scheduler>(options_.sched, *kv_, clock_);
}

Driver::~Driver() {
  Drain();
  scheduler_.reset();
  kv_.reset();
}

Status Driver::Add(std::uint64_t id, const Ask& ask) {
  const Status status = scheduler_->Add(
      {RequestId(id), ask.prompt, ask.max_new, ask.priority, ask.min_bits, ask.salt, ask.capacity});
  if (!status.ok()) return status;
  Client c;
  c.prompt = ask.prompt;
  c.salt = ask.salt;
  c.min_bits = ask.min_bits;
  c.floor = kv_->FloorLevel(ask.min_bits);
  c.stop_after = ask.stop_after;
  const Capacity capacity = ask.capacity.kind == Capacity::Kind::kDefault
                                ? options_.sched.history.default_capacity
                                : ask.capacity;
  c.capacity = capacity.kind != Capacity::Kind::kFull;
  std::uint64_t h = Mix(std::hash<std::string>()(ask.salt));
  for (std::int32_t t : ask.prompt) c.chain.push_back(h = Mix(h ^ static_cast<std::uint32_t>(t)));
  EXPECT_FALSE(clients_.contains(id));
  clients_[id] = std::move(c);
  if (id % 2 == 0) ForgetNext();
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

/// Checks what the plan says about one request.
Part Driver::PartOf(const StepBatch& batch, std::size_t index, const StepPlan::Entry& entry,
                    std::set<std::uint32_t>* written) {
  const SequenceSlice& slice = batch.sequences[index];
  EXPECT_EQ(slice.rows, entry.rows);
  EXPECT_EQ(slice.blocks, (slice.context + slice.rows + kBlockTokens - 1) / kBlockTokens);
  const Client& c = clients_.at(entry.request.value());
  const Level ceiling = kv_->ceiling();
  Part part{.id = entry.request.value(),
            .client = &c,
            .slice = slice,
            .blocks = batch.blocks.subspan(static_cast<std::size_t>(slice.first_block),
                                           static_cast<std::size_t>(slice.blocks)),
            .ceiling = ceiling,
            .worst = ceiling,
            .worst_read = ceiling,
            .samples = entry.samples,
            .mark = ceiling};
  if (const auto facts = scheduler_->Facts(entry.request)) part.preemptions = facts->preemptions;
  if (slice.history != nullptr) {
    part.kept = batch.blocks.subspan(static_cast<std::size_t>(slice.first_kept),
                                     static_cast<std::size_t>(slice.history->kept_blocks()));
    EXPECT_TRUE(c.capacity) << "nobody asked for a capacity";
  }
  for (const BlockView& kept : part.kept) {
    const Level level = LevelOf(kept);
    EXPECT_LE(level, c.floor) << "kept tokens stand below the request's floor";
    part.worst = std::max(part.worst, level);
    part.worst_read = std::max(part.worst_read, level);
    for (int p = 0; p < kLevels[level].k; ++p)
      EXPECT_TRUE(written->insert(kept.k[p].value()).second) << "a kept block is somebody else's";
    for (int p = 0; p < kLevels[level].v; ++p)
      EXPECT_TRUE(written->insert(kept.v[p].value()).second) << "a kept block is somebody else's";
  }
  for (std::size_t b = 0; b < part.blocks.size(); ++b) {
    if (slice.history != nullptr && static_cast<std::int32_t>(b) < slice.history->frontier()) {
      for (int p = 0; p < kPlanes; ++p) {
        EXPECT_FALSE(part.blocks[b].v[p].valid());
        EXPECT_TRUE(p == 0 || !part.blocks[b].k[p].valid()) << "more than plane 0 of K is watched";
      }
      EXPECT_LE(static_cast<std::int64_t>(b + 1) * kBlockTokens, slice.context)
          << "a block being written was dropped";
      part.worst = kSensorLevel;
      part.states = Mix(part.states ^ kSensorLevel);
      continue;
    }
    const Level level = LevelOf(part.blocks[b]);
    EXPECT_GE(level, ceiling);
    EXPECT_LE(level, c.floor) << "a block stands below the request's floor";
    part.worst = std::max(part.worst, level);
    part.worst_read = std::max(part.worst_read, level);
    part.states = Mix(part.states ^ level);
    // The sink is never demoted, not even in the prefix cache.
    if (static_cast<std::int64_t>(b) * kBlockTokens < kv_->options().sink_tokens) {
      EXPECT_EQ(level, ceiling);
    }
    if (static_cast<std::int64_t>(b + 1) * kBlockTokens <= slice.context) continue;
    EXPECT_EQ(level, ceiling) << "a block being written is not whole";
    for (int p = 0; p < kLevels[level].k; ++p) {
      EXPECT_TRUE(written->insert(part.blocks[b].k[p].value()).second);
    }
    for (int p = 0; p < kLevels[level].v; ++p) {
      EXPECT_TRUE(written->insert(part.blocks[b].v[p].value()).second);
    }
  }
  for (std::int32_t r = 0; r < slice.rows; ++r) {
    const std::int64_t position = slice.context + r;
    EXPECT_EQ(batch.positions[static_cast<std::size_t>(slice.first_row + r)], position);
    const std::int32_t token = batch.tokens[static_cast<std::size_t>(slice.first_row + r)];
    const auto at = static_cast<std::size_t>(position);
    EXPECT_EQ(token, at < c.prompt.size() ? c.prompt[at] : c.output.at(at - c.prompt.size()));
  }
  return part;
}

std::vector<SampledToken> Driver::Forward(const StepPlan& plan) {
  const StepBatch batch = plan.batch();
  EXPECT_EQ(batch.sequences.size(), plan.entries().size());
  EXPECT_LE(plan.rows(), options_.sched.max_batch_tokens);
  std::vector<Part> parts;
  std::set<std::uint32_t> written;
  std::int32_t row = 0;
  for (std::size_t i = 0; i < plan.entries().size(); ++i) {
    EXPECT_EQ(batch.sequences[i].first_row, row);
    row += batch.sequences[i].rows;
    parts.push_back(PartOf(batch, i, plan.entries()[i], &written));
  }
  const std::vector<std::int32_t> tokens = machine_->Run(plan, parts, options_.check_bytes);
  std::vector<SampledToken> sampled;
  for (const Part& part : parts) {
    Client& c = clients_.at(part.id);
    if (!c.capacity) {
      EXPECT_LE(part.mark, c.floor) << "an exact request reads content computed below its floor";
    }
    if (!part.samples) continue;
    EXPECT_EQ(part.slice.context + part.slice.rows, static_cast<std::int64_t>(c.chain.size()))
        << "sampled before the prompt's end";
    EXPECT_EQ(batch.logit_rows[sampled.size()], part.slice.first_row + part.slice.rows - 1);
    if (part.worst_read > 0) sampled_below_.push_back(part.id);
    const std::int32_t token = tokens.at(sampled.size());
    const bool finished =
        c.stop_after > 0 && static_cast<std::int64_t>(c.output.size()) + 1 >= c.stop_after;
    sampled.push_back({RequestId(part.id), token, finished});
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

/// Settles the step that has run, if one has and is not settled.
void Driver::SettleRun() {
  if (run_.empty()) return;
  // Of whoever is gone by now the scheduler counts nothing.
  for (const std::uint64_t id : std::exchange(sampled_below_, {})) {
    if (Client& c = clients_.at(id); !c.done) ++c.sampled_below;
  }
  scheduler_->Settle(std::move(run_), sampled_);
  run_ = StepPlan();
  TakeEvents();
  for (const SampledToken& s : sampled_) {
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
  const bool planned = !next_.empty();
  StepPlan plan = planned ? std::exchange(next_, StepPlan()) : scheduler_->Plan();
  if (options_.check_bytes) scheduler_->Audit();
  TakeEvents();
  if (plan.empty()) {
    EXPECT_EQ(plan.idle(), live() == 0 && !kv_->CopiesUnderWay());
    if (!plan.idle()) {
      EXPECT_GT(plan.wait(), 0);
    }
    return false;
  }
  if (options_.ahead) {
    RunAhead(std::move(plan));
    return true;
  }
  sampled_ = Forward(plan);
  run_ = std::move(plan);
  SettleRun();
  return true;
}

/// As an engine does whose device works by itself.
void Driver::RunAhead(StepPlan plan) {
  SettleRun();  // the step before: this one is under way
  scheduler_->WhileRunning();
  next_ = scheduler_->PlanNext();
  if (options_.check_bytes) scheduler_->Audit();
  TakeEvents();
  sampled_ = Forward(plan);
  run_ = std::move(plan);
  if (next_.empty()) {
    SettleRun();
    return;
  }
  ++steps_ahead_;
  next_.Fill(sampled_);
  EXPECT_FALSE(next_.lacks_tokens());
}

/// Gives up the step that was planned ahead.
void Driver::ForgetNext() {
  SettleRun();
  if (!next_.empty()) scheduler_->Abandon(std::exchange(next_, StepPlan()));
  if (options_.check_bytes) scheduler_->Audit();
}

bool Driver::AbandonStep() {
  ForgetNext();
  StepPlan plan = scheduler_->Plan();
  TakeEvents();
  if (plan.empty()) return false;
  scheduler_->Abandon(std::move(plan));
  scheduler_->Audit();
  return true;
}

void Driver::Drain() {
  SettleRun();
  if (next_.empty()) return;
  StepPlan plan = std::exchange(next_, StepPlan());
  sampled_ = Forward(plan);
  run_ = std::move(plan);
  SettleRun();
}

bool Driver::Run(int most) {
  for (int i = 0; i < most && live() > 0; ++i) Step();
  Drain();
  return live() == 0;
}

}  // namespace pliant::testing
