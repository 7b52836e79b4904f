// What scheduler and controller cost a step: Plan + Settle with N running requests, memory ample,
// and with the ladder active (every new block is paid for by demotions). No model, no device: the
// fake backend of the tests, whose copies end at once.
//
//   controller_bench --benchmark_filter=Ladder
#include <benchmark/benchmark.h>

#include "kv/kv_manager.h"
#include "sched/scheduler.h"
#include "sched/support/fake_backend.h"

namespace pliant {
namespace {

struct Bench {
  testing::FakeBackend backend;
  ManualClock clock;
  std::unique_ptr<KvManager> kv;
  std::unique_ptr<Scheduler> scheduler;
  std::vector<SampledToken> sampled;
  std::uint64_t next_id = 1;
  std::int64_t context, output;

  Bench(std::int64_t running, std::int64_t context_tokens, double pool_share, bool stagger)
      : context(context_tokens), output(context_tokens + 1024) {
    const std::size_t page = testing::kTinyGeometry.PageBytes();
    const std::int64_t blocks = running * ((context + output) / kBlockTokens + 1);
    KvOptions o;
    o.policy = KvPolicy::kPliant;
    o.floor_bits = 4;
    o.memory_bytes =
        static_cast<std::uint64_t>(pool_share * static_cast<double>(blocks * 8)) * page;
    o.store.kind = StoreSpec::Kind::kRam;
    o.store.bytes = static_cast<std::uint64_t>(blocks) * 8 * page;
    kv = std::move(*KvManager::Create(backend, testing::kTinyGeometry, o, clock));
    scheduler = std::make_unique<Scheduler>(
        SchedulerOptions{.max_batch_tokens = static_cast<std::int32_t>(running + 8192),
                         .max_running = static_cast<std::int32_t>(running),
                         .max_waiting = 1 << 20,
                         .max_context = 1 << 20},
        *kv, clock);
    for (std::int64_t i = 0; i < running; ++i) Add(stagger ? i % kBlockTokens : 0);
  }
  void Add(std::int64_t more) {
    SchedRequest r{.id = RequestId(next_id), .max_new_tokens = output};
    for (std::int64_t i = 0; i < context + more; ++i)
      r.prompt.push_back(static_cast<std::int32_t>(next_id * 31 + i));
    ++next_id;
    PLIANT_CHECK(scheduler->Add(std::move(r)).ok(), "bench request refused");
  }
  std::int64_t Step() {
    clock.Advance(1'000'000);
    StepPlan plan = scheduler->Plan();
    if (plan.empty()) return 0;
    sampled.clear();
    for (RequestId id : plan.samplers()) sampled.push_back({id, 7, false});
    const std::int64_t rows = plan.rows();
    scheduler->Settle(std::move(plan), sampled);
    for (const SchedEvent& e : scheduler->TakeEvents()) {
      benchmark::DoNotOptimize(e);
      Add(0);
    }
    return rows;
  }
};

void Run(benchmark::State& state, double pool_share) {
  Bench bench(state.range(0), state.range(1), pool_share, true);
  // Until all decode.
  for (int i = 0; i < 100'000; ++i) {
    if (bench.Step() <= state.range(0) && bench.scheduler->Stats().waiting == 0 && i > 16) break;
  }
  std::int64_t rows = 0;
  const auto before = bench.kv->Stats().demotions;
  for (auto _ : state) rows += bench.Step();
  state.counters["rows"] =
      benchmark::Counter(static_cast<double>(rows), benchmark::Counter::kAvgIterations);
  state.counters["demotions"] =
      benchmark::Counter(static_cast<double>(bench.kv->Stats().demotions - before),
                         benchmark::Counter::kAvgIterations);
  state.counters["running"] = static_cast<double>(bench.scheduler->Stats().running);
  state.counters["preempted"] =
      static_cast<double>(bench.scheduler->Stats().preemptions + bench.scheduler->Stats().offloads);
}

void Ample(benchmark::State& state) { Run(state, 1.0); }
// Twenty-two blocks a request, sixteen of them for its prompt: what is decoded is paid for by demotions.
void Ladder(benchmark::State& state) { Run(state, 0.35); }

BENCHMARK(Ample)
    ->Args({256, 512})
    ->Args({2048, 512})
    ->Unit(benchmark::kMicrosecond)
    ->Iterations(400);
BENCHMARK(Ladder)
    ->Args({256, 512})
    ->Args({2048, 512})
    ->Unit(benchmark::kMicrosecond)
    ->Iterations(400);

}  // namespace
}  // namespace pliant

BENCHMARK_MAIN();
