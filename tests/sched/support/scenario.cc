#include "sched/support/scenario.h"

#include <gtest/gtest.h>

#include <charconv>
#include <fstream>
#include <sstream>

namespace pliant::testing {
namespace {

std::int64_t Number(const std::string& word) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size())
    ADD_FAILURE() << "not a number: " << word;
  return value;
}

bool Compare(std::int64_t a, const std::string& op, std::int64_t b) {
  if (op == "==") return a == b;
  if (op == "!=") return a != b;
  if (op == "<") return a < b;
  if (op == "<=") return a <= b;
  if (op == ">") return a > b;
  if (op == ">=") return a >= b;
  ADD_FAILURE() << "unknown comparison " << op;
  return false;
}

}  // namespace

const std::vector<Hostile>& HostileSettings() {
  static const std::vector<Hostile> settings = {
    {"as_written", {}},
    {"tiny_pool", [](DriverOptions& o) { o.pages = std::max<std::int64_t>(32, o.pages / 3); }},
    {"always_demote", [](DriverOptions& o) { o.kv.always_demote = true; }},
    {"no_store", [](DriverOptions& o) { o.store_pages = 0; }},
    {"tiny_store",
     [](DriverOptions& o) { o.store_pages = std::min<std::int64_t>(o.store_pages, 9); }},
    {"slow_copies", [](DriverOptions& o) { o.faults.delay_polls = 7; }},
    {"failing_copies",
     [](DriverOptions& o) { o.faults.fail_every_out = 2, o.faults.fail_every_in = 2; }},
    {"all_copies_fail",
     [](DriverOptions& o) { o.faults.fail_every_out = 1, o.faults.fail_every_in = 1; }},
    {"ahead", [](DriverOptions& o) { o.ahead = true, o.faults.delay_polls += 2; }},
#if !defined(__SANITIZE_THREAD__)  // it has one thread, and takes long
    // A real model on the reference backend: as written, and with much of the above at once.
    {"reference", {}, true},
    {"reference_hostile",
     [](DriverOptions& o) {
       o.pages = std::max<std::int64_t>(32, o.pages / 2);
       o.ahead = true;
       o.faults = {.delay_polls = 3, .fail_every_out = 5, .fail_every_in = 3};
     },
     true},
#endif
  };
  return settings;
}

Driver& Scenario::driver() {
  if (driver_ == nullptr) {
    if (hostile_.change) hostile_.change(options_);
    options_.reference = hostile_.reference;
    driver_ = std::make_unique<Driver>(options_);
  }
  return *driver_;
}

void Scenario::Run() {
  std::ifstream file(path_);
  ASSERT_TRUE(file.good()) << path_;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (const std::size_t hash = line.find('#'); hash != std::string::npos) line.resize(hash);
    std::istringstream stream(line);
    Words words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (words.empty()) continue;
    SCOPED_TRACE(path_ + ":" + std::to_string(number) + ": " + line);
    Command(words);
    if (::testing::Test::HasFailure()) return;
  }
  Finish();
}

/// Whatever happened before: all ends, exact requests got exact tokens, and the pool is whole
/// again.
void Scenario::Finish() {
  SCOPED_TRACE(path_ + ": at the end");
  Driver& d = driver();
  d.kv().Withhold(0);
  ASSERT_TRUE(d.Run(100'000)) << d.live() << " requests never end";
  for (const auto& [name, id] : names_) {
    const Driver::Client& c = d.client(id);
    if (c.floor == d.kv().ceiling() && !c.capacity) {
      EXPECT_TRUE(Exact(name)) << name << ": an exact request got other tokens";
    }
    if (!c.error.ok()) {
      EXPECT_EQ(c.error.code(), StatusCode::kOutOfMemory) << name;
    }
  }
  for (int i = 0; i < 300; ++i) d.Step();
  const KvStats s = d.kv().Stats();
  EXPECT_EQ(s.pages_free + s.pages_cached, s.pages_total);
  EXPECT_EQ(s.blocks, s.blocks_cached);
  EXPECT_LE(s.store_bytes_used, s.store_bytes_total);
}

void Scenario::Command(const Words& w) {
  const std::string& c = w[0];
  const auto count = [&](std::size_t i, std::int64_t otherwise) {
    return w.size() > i ? Number(w[i]) : otherwise;
  };
  const auto need = [&](std::size_t n) {
    if (w.size() < n) ADD_FAILURE() << "too few words";
    return w.size() >= n;
  };
  if (c == "pool" || c == "store" || c == "policy" || c == "set" || c == "ahead" ||
      (c == "fault" && driver_ == nullptr)) {
    EXPECT_EQ(driver_, nullptr) << "settings come first";
    if (c == "ahead" || need(2)) Settings(w);
  } else if (c == "fault") {
    if (hostile_.change) return;  // hostile settings bring their own
    for (std::size_t i = 1; i + 1 < w.size(); i += 2) {
      Faults& f = driver().backend().faults;
      (w[i] == "delay" ? f.delay_polls
       : w[i] == "out" ? f.fail_every_out
                       : f.fail_every_in) = static_cast<int>(Number(w[i + 1]));
    }
  } else if (c == "admit" || c == "refuse") {
    if (need(3)) Admit(w, c == "refuse");
  } else if (c == "step") {
    for (std::int64_t i = count(1, 1); i > 0; --i) driver().Step();
  } else if (c == "run") {
    EXPECT_TRUE(driver().Run(static_cast<int>(count(1, 100'000)))) << "requests never end";
  } else if (c == "until") {
    if (!need(3)) return;
    std::string seen;
    std::int64_t left = count(3, 2000);
    const Words condition(w.begin() + 1, w.begin() + 3);
    while (!refused_[w[1]] && !Holds(condition, &seen) && left-- > 0 &&
           !driver().client(names_.at(w[1])).done)
      driver().Step();
    if (!hostile_.change) {
      EXPECT_TRUE(Holds(condition, &seen)) << "it is " << seen;
    }
  } else if (c == "cancel") {
    if (need(2) && !refused_[w[1]]) driver().Cancel(names_.at(w[1]));
  } else if (c == "pressure") {
    const std::int64_t n =
        count(1, 0) * (w.size() > 2 && w[2] == "blocks" ? driver().kv().pages_per_block() : 1);
    driver().kv().Withhold(static_cast<std::uint32_t>(n));
  } else if (c == "corrupt") {
    driver().kv().CorruptStoreForTest();
  } else if (c == "expect" || c == "expect!") {
    if (!need(2) || (c == "expect" && hostile_.change)) return;
    Expect(w);
  } else {
    ADD_FAILURE() << "unknown command " << c;
  }
}

void Scenario::Settings(const Words& w) {
  KvOptions& kv = options_.kv;
  SchedulerOptions& sched = options_.sched;
  if (w[0] == "pool") {
    options_.pages = Number(w[1]) * (w.size() > 2 && w[2] == "pages" ? 1 : 2 * kPlanes);
  } else if (w[0] == "store") {
    options_.store_pages = Number(w[1]) * (w.size() > 2 && w[2] == "pages" ? 1 : 2 * kPlanes);
  } else if (w[0] == "policy") {
    auto policy = ParseKvPolicy(w[1]);
    ASSERT_TRUE(policy.ok()) << policy.status().ToString();
    kv.policy = *policy;
  } else if (w[0] == "ahead") {
    options_.ahead = true;
  } else {
    ASSERT_EQ(w.size() % 2, 1u) << "keys and values come in pairs";
    for (std::size_t i = 1; i + 1 < w.size(); i += 2) {
      const std::string& key = w[i];
      if (key == "low" || key == "high") {
        (key == "low" ? kv.low_watermark : kv.high_watermark) = std::stod(w[i + 1]);
        continue;
      }
      const std::int64_t n = Number(w[i + 1]);
      const int small = static_cast<int>(n);
      if (key == "ceiling")
        kv.ceiling_bits = small;
      else if (key == "floor")
        kv.floor_bits = small;
      else if (key == "sink")
        kv.sink_tokens = small;
      else if (key == "recent_base")
        kv.recent_tokens_base = small;
      else if (key == "recent_deep")
        kv.recent_tokens_deep = small;
      else if (key == "horizon")
        kv.horizon_steps = small;
      else if (key == "dwell")
        kv.dwell_steps = small;
      else if (key == "restore_rate")
        kv.restore_bytes_per_second = static_cast<std::uint64_t>(n);
      else if (key == "batch")
        sched.max_batch_tokens = small;
      else if (key == "running")
        sched.max_running = small;
      else if (key == "waiting")
        sched.max_waiting = small;
      else if (key == "context")
        sched.max_context = n;
      else if (key == "cache")
        kv.prefix_cache = n != 0;
      else if (key == "always")
        kv.always_demote = n != 0;
      else if (key == "collide")
        options_.constant_hash = n != 0;
      else if (key == "wanted")
        options_.wanted_percent = small;
      else if (key == "returns")
        sched.history.retention.returns = n != 0;
      else if (key == "most_returns")
        sched.history.retention.most_returns = small;
      else if (key == "kept_bits")
        sched.history.kept_level = small == 8 ? kBaseLevel : kTargetLevel;
      else if (key == "grow_above")
        sched.history.grow_above = static_cast<float>(n) / 1000;
      else if (key == "start")
        sched.history.start_blocks = small;
      else if (key == "keep_last")
        sched.history.recent_blocks = small;
      else if (key == "step_us")
        options_.step_time = n * 1000;
      else if (key == "delay")
        options_.faults.delay_polls = small;
      else if (key == "out")
        options_.faults.fail_every_out = small;
      else if (key == "in")
        options_.faults.fail_every_in = small;
      else
        ADD_FAILURE() << "unknown key " << key;
    }
  }
}

void Scenario::Admit(const Words& w, bool refuse) {
  Driver::Ask ask;
  std::int64_t prompt = 1, share = 0;
  std::uint64_t seed = 1000 + std::hash<std::string>()(w[1]) % 1'000'000;
  for (std::size_t i = refuse ? 3 : 2; i < w.size(); ++i) {
    const std::size_t eq = w[i].find('=');
    ASSERT_NE(eq, std::string::npos) << w[i];
    const std::string key = w[i].substr(0, eq), value = w[i].substr(eq + 1);
    if (key == "salt")
      ask.salt = value;
    else if (key == "capacity") {
      auto capacity = ParseCapacity(value);
      ASSERT_TRUE(capacity.ok()) << capacity.status().ToString();
      ask.capacity = *capacity;
    } else if (key == "prompt")
      prompt = Number(value);
    else if (key == "seed")
      seed = static_cast<std::uint64_t>(Number(value));
    else if (key == "max")
      ask.max_new = Number(value);
    else if (key == "bits")
      ask.min_bits = static_cast<int>(Number(value));
    else if (key == "priority")
      ask.priority = static_cast<int>(Number(value));
    else if (key == "stop")
      ask.stop_after = Number(value);
    else if (key == "share")
      share = Number(value);
    else
      ADD_FAILURE() << "unknown key " << key;
  }
  ask.prompt = Tokens(std::min(share, prompt), 0);
  for (std::int32_t t : Tokens(prompt - std::min(share, prompt), seed)) ask.prompt.push_back(t);
  const std::uint64_t id = names_.size() + refused_.size() + 1;
  const Status status = driver().Add(id, ask);
  if (refuse) {
    if (!hostile_.change) {
      EXPECT_EQ(StatusCodeName(status.code()), w[2]) << status.ToString();
    }
    if (!status.ok()) return;
  } else if (!status.ok()) {
    // A hostile setting may make it too large, or the queue too long.
    if (!hostile_.change) ADD_FAILURE() << status.ToString();
    refused_[w[1]] = true;
    return;
  }
  names_[w[1]] = id;
}

bool Scenario::Exact(const std::string& name) { return driver().Exact(names_.at(name)); }

std::string Scenario::StateOf(const std::string& name) {
  if (refused_[name]) return "refused";
  const std::uint64_t id = names_.at(name);
  const Driver::Client& c = driver().client(id);
  if (c.cancelled) return "cancelled";
  if (!c.error.ok()) return "failed";
  if (c.done) return "done";
  return std::string(driver().scheduler().StateOf(RequestId(id)));
}

bool Scenario::Holds(const Words& w, std::string* seen) {
  if (refused_.contains(w[0]) && refused_[w[0]]) return true;
  if (names_.contains(w[0])) {
    if (w[1] == "exact") {
      *seen = "inexact";
      return Exact(w[0]);
    }
    *seen = StateOf(w[0]);
    // Under a hostile setting a request may also end because memory runs out for it alone.
    return *seen == w[1] || (hostile_.change && w[1] == "done" && *seen == "failed");
  }
  if (w[0] == "lowest") {
    if (refused_[w[1]]) return true;
    const std::uint64_t id = names_.at(w[1]);
    const Driver::Client& c = driver().client(id);
    const RequestKvFacts f = c.facts ? *c.facts : *driver().scheduler().Facts(RequestId(id));
    *seen = std::to_string(f.lowest_k_bits) + "/" + std::to_string(f.lowest_v_bits);
    return Compare(*seen == w.at(3), w.at(2), 1);
  }
  std::size_t used = 0;
  const std::int64_t value = Value(w, &used);
  *seen = std::to_string(value);
  if (w.size() != used + 2) {
    ADD_FAILURE() << "expected a comparison and a number";
    return false;
  }
  return Compare(value, w[used], Number(w[used + 1]));
}

void Scenario::Expect(const Words& w) {
  std::string seen;
  EXPECT_TRUE(Holds(Words(w.begin() + 1, w.end()), &seen)) << "it is " << seen;
}

std::int64_t Scenario::Value(const Words& w, std::size_t* used) {
  Driver& d = driver();
  const KvStats kv = d.kv().Stats();
  const SchedStats s = d.scheduler().Stats();
  *used = 1;
  if (w[0] == "running") return s.running;
  if (w[0] == "waiting") return s.waiting;
  if (w[0] == "offloaded") return s.offloaded;
  if (w[0] == "steps") return d.steps_run();
  if (w[0] == "lowered") return d.kv().lowered_blocks();
  *used = 2;
  const std::string& what = w.at(1);
  if (w[0] == "events") {
    for (int r = 0; r < static_cast<int>(Reason::kCount); ++r) {
      if (ReasonName(static_cast<Reason>(r)) == what)
        return static_cast<std::int64_t>(d.Count(static_cast<Reason>(r)));
    }
  } else if (w[0] == "pages") {
    if (what == "free") return kv.pages_free;
    if (what == "cached") return kv.pages_cached;
    if (what == "fenced") return kv.pages_fenced;
    if (what == "used") return kv.pages_total - kv.pages_free - kv.pages_fenced - kv.pages_withheld;
  } else if (w[0] == "bytes") {
    // A page counts as one of the fake machine's, so that the numbers hold for any model.
    const auto page = static_cast<std::int64_t>(kTinyGeometry.PageBytes());
    if (what == "store") return kv.store_bytes_used / kv.page_bytes * page;
    if (what == "kv") return (kv.pages_total - kv.pages_free) * page;
  } else if (w[0] == "blocks") {
    if (what == "stored") return kv.blocks_in_store;
    if (what == "cached") return kv.blocks_cached;
    const std::size_t slash = what.find('/');
    if (slash != std::string::npos) {
      return kv
          .blocks_by_state[Number(what.substr(0, slash)) / 4][Number(what.substr(slash + 1)) / 4];
    }
  } else if (names_.contains(what)) {
    const std::uint64_t id = names_.at(what);
    const Driver::Client& c = d.client(id);
    if (w[0] == "tokens") return static_cast<std::int64_t>(c.output.size());
    const RequestKvFacts f = c.facts ? *c.facts : *d.scheduler().Facts(RequestId(id));
    if (w[0] == "cached") return f.cached_tokens;
    if (w[0] == "below") return f.tokens_below_16_bits;
    if (w[0] == "preemptions") return f.preemptions;
    if (w[0] == "offloads") return f.offloads;
    if (w[0] == "demotions") return f.demotions;
    if (w[0] == "restores") return f.restores;
    if (w[0] == "dropped") return f.dropped;
    if (w[0] == "returned") return f.returned;
    if (w[0] == "lost") return f.lost;
    if (w[0] == "growths") return f.growths;
    if (w[0] == "taking") return f.taking_part;
  }
  ADD_FAILURE() << "nothing is called " << w[0] << " " << what;
  return 0;
}

}  // namespace pliant::testing
