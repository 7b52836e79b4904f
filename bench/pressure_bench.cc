// Replays a workload against the real engine, scheduler, ladder and exact store over a device that
// only takes time: a model of a step's and a copy's duration, no arithmetic, no pages. It shows
// what the control does under pressure at the true size of cache, queue and batch, before a GPU's
// minutes are spent; its times are the model's, not measurements.
//
//   pliant_pressure_bench WORKLOAD --policy full,pliant --kv-memory 8GiB
//
// The default model of time is Llama-3.1-8B on one H200, from docs/gpu.md.
#include <sys/mman.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <thread>

#include "base/size.h"
#include "engine/engine_factory.h"
#include "kv/kv_options.h"
#include "replay/report.h"

namespace pliant {
namespace {

/// Seconds and bytes of the device that is made up.
struct DeviceModel {
  double step = 5.0e-3;             // a step with few rows: the weights, the launches
  double row = 7.2e-6;              // more for each row
  double busy_row = 26e-6;          // the least a row takes in a large step
  double attention_bytes = 4.0e12;  // a second, read by decode attention
  double prefill_flops = 250e12;    // a second, of prefill attention
  double copy_bytes = 20e9;         // a second, each way
  double copy_latency = 60e-6;      // of one ticket
};

class TimedDevice final : public Backend {
 public:
  TimedDevice(const DeviceModel& model, const KvGeometry& like) : model_(model), like_(like) {}

  std::string Name() const override { return "timed"; }
  DeviceInfo Info() const override { return {"a device made of time", 1ull << 37, 1ull << 37}; }
  Result<MatrixId> AddMatrix(std::span<const HostMatrix>) override { return MatrixId(0); }
  Result<VectorId> AddVector(std::span<const float>) override { return VectorId(0); }
  std::size_t WeightBytes() const override { return 0; }
  Result<TensorId> AddTensor(std::int64_t, std::int64_t) override { return TensorId(0); }
  /// The model is a small one; its pages count as those of the model that is played.
  std::size_t PageBytes(const KvGeometry&) const override { return like_.PageBytes(); }
  Status AllocatePages(const KvGeometry&, std::uint32_t) override { return Status::Ok(); }
  Status SetKvCode(const KvCode&) override { return Status::Ok(); }
  void StartChannelStatistics() override {}
  ChannelStatistics TakeChannelStatistics() override { return {}; }

  Status BeginStep(const StepBatch& batch) override {
    const auto rows = static_cast<double>(batch.tokens.size());
    double pages = 0, products = 0;
    for (const SequenceSlice& slice : batch.sequences) {
      if (slice.rows > 4) {
        products += static_cast<double>(slice.rows) * (slice.context + slice.rows / 2);
        continue;
      }
      for (int b = 0; b < slice.blocks; ++b) {
        const BlockView& view = batch.blocks[static_cast<std::size_t>(slice.first_block + b)];
        for (int p = 0; p < kPlanes; ++p) pages += view.k[p].valid() + view.v[p].valid();
      }
    }
    constexpr double kHeads = 32, kFlopsAPair = 4;
    const double flops = products * kFlopsAPair * kHeads * like_.head_dim * like_.layers;
    const double seconds = std::max(model_.step + rows * model_.row, rows * model_.busy_row) +
                           pages * static_cast<double>(like_.PageBytes()) / model_.attention_bytes +
                           flops / model_.prefill_flops;
    end_ = Now() + seconds;
    tokens_.assign(batch.logit_rows.size(), 1);
    return Status::Ok();
  }
  void Embed(MatrixId, TensorId) override {}
  void RmsNorm(TensorId, VectorId, float, TensorId) override {}
  void MatMul(TensorId, MatrixId, VectorId, TensorId, bool) override {}
  void QkvToCache(const QkvParams&, const RopeTable&, TensorId) override {}
  void Attention(int, int, float, TensorId, TensorId) override {}
  void SiluMul(TensorId, TensorId) override {}
  void Logits(TensorId, VectorId, float, MatrixId) override {}
  bool StartStep() override { return true; }
  Status EndStep() override {
    std::this_thread::sleep_for(std::chrono::duration<double>(std::max(0.0, end_ - Now() - 60e-6)));
    while (Now() < end_) {
    }
    return Status::Ok();
  }
  std::span<const float> LogitRows() const override { return {}; }
  bool SamplesTokens() const override { return true; }
  std::span<const std::int32_t> SampledTokens() const override { return tokens_; }

  Result<HostMemory> AllocateHost(std::size_t bytes) override {
    // Never written: reads find zeros, and no memory is used.
    void* memory =
        mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return OutOfMemory("no address space for the exact store");
    return HostMemory(static_cast<std::byte*>(memory), [](std::byte*) {});
  }
  CopyTicket CopyOut(std::span<const PageCopy> copies) override { return Copy(copies, out_); }
  CopyTicket CopyIn(std::span<const PageCopy> copies) override { return Copy(copies, in_); }
  CopyState Poll(CopyTicket ticket) override {
    return Now() >= ends_[ticket.value()] ? CopyState::kDone : CopyState::kPending;
  }
  CopyState Wait(CopyTicket ticket) override {
    while (Poll(ticket) == CopyState::kPending)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    return CopyState::kDone;
  }

 private:
  static double Now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  CopyTicket Copy(std::span<const PageCopy> copies, double& link) {
    const double bytes = static_cast<double>(copies.size() * like_.PageBytes());
    link = std::max(link, Now()) + model_.copy_latency + bytes / model_.copy_bytes;
    ends_.push_back(link);
    return CopyTicket(ends_.size() - 1);
  }

  const DeviceModel model_;
  const KvGeometry like_;
  double end_ = 0, in_ = 0, out_ = 0;
  std::vector<double> ends_;
  std::vector<std::int32_t> tokens_;
};

struct Flags {
  std::string workload, model, store = "ram:16GiB", kv_memory = "8GiB";
  std::vector<std::string> policies = {"full", "pliant"};
  int floor_bits = 8, max_batch_tokens = 2048, max_running = 256;
  double cut_off = 0;
  WorkloadCut cut;
  DeviceModel device;
};

Result<ReplayResult> Play(const Flags& flags, const std::string& policy,
                          const std::vector<WorkloadRequest>& workload) {
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<Model> model,
                          Model::Open(flags.model, {.random_weights = true}));
  PLIANT_ASSIGN_OR_RETURN(Vocabulary vocabulary, model->ReadVocabulary());
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> tokenizer,
                          Tokenizer::Create(std::move(vocabulary)));
  auto device = std::make_unique<TimedDevice>(
      flags.device, KvGeometry{.layers = 32, .kv_heads = 8, .head_dim = 128});
  EngineOptions options;
  options.calibrate = false;
  PLIANT_ASSIGN_OR_RETURN(options.kv.memory_bytes, ParseSize(flags.kv_memory));
  PLIANT_ASSIGN_OR_RETURN(options.kv.policy, ParseKvPolicy(policy));
  PLIANT_ASSIGN_OR_RETURN(options.kv.store, ParseStoreSpec(flags.store));
  options.kv.floor_bits = flags.floor_bits;
  options.sched.max_batch_tokens = flags.max_batch_tokens;
  options.sched.max_running = flags.max_running;
  options.sched.max_waiting = 1 << 20;
  options.sched.max_context = 131072;
  PLIANT_RETURN_IF_ERROR(model->Load(*device, flags.max_batch_tokens, flags.max_running, {}));
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                          MakeEngine(options, std::move(device), model.get(), tokenizer.get()));
  return Replay(*engine, workload,
                {.vocabulary = model->config().vocab_size, .give_up_seconds = flags.cut_off}, {});
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Replays a workload over a device that only takes time.");
  app.add_option("WORKLOAD", flags.workload)->required();
  app.add_option("--model", flags.model, "A small config.json; only its vocabulary matters")
      ->required();
  app.add_option("--policy", flags.policies)->delimiter(',');
  app.add_option("--kv-memory", flags.kv_memory);
  app.add_option("--exact-store", flags.store);
  app.add_option("--kv-floor", flags.floor_bits);
  app.add_option("--max-batch-tokens", flags.max_batch_tokens);
  app.add_option("--max-running", flags.max_running);
  app.add_option("--limit", flags.cut.limit);
  app.add_option("--cut-off", flags.cut_off);
  app.add_option("--step-ms", [&](const std::vector<std::string>& v) {
    flags.device.step = std::stod(v[0]) * 1e-3;
    return true;
  });
  app.add_option("--copy-gb", [&](const std::vector<std::string>& v) {
    flags.device.copy_bytes = std::stod(v[0]) * 1e9;
    return true;
  });
  CLI11_PARSE(app, argc, argv);
  Result<std::vector<WorkloadRequest>> workload = ReadWorkload(flags.workload);
  if (!workload.ok()) return std::fprintf(stderr, "%s\n", workload.status().message().c_str()), 1;
  CutWorkload(*workload, flags.cut);
  std::vector<NamedReplay> replays;
  for (const std::string& policy : flags.policies) {
    Result<ReplayResult> result = Play(flags, policy, *workload);
    if (!result.ok()) return std::fprintf(stderr, "%s\n", result.status().message().c_str()), 1;
    replays.push_back({policy, *std::move(result)});
  }
  std::printf("%s", ReplayTable(replays).c_str());
  return 0;
}

}  // namespace
}  // namespace pliant

int main(int argc, char** argv) { return pliant::Main(argc, argv); }
