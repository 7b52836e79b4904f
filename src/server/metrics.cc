#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <limits>
#include <sstream>

#include "kv/history.h"

namespace pliant {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

const prometheus::Histogram::BucketBoundaries kRequestBuckets = {
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300};
const prometheus::Histogram::BucketBoundaries kFirstTokenBuckets = {
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120};
const prometheus::Histogram::BucketBoundaries kInterTokenBuckets = {
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5};

/// Families of one value each, from numbers that somebody else keeps.
class Snapshot {
 public:
  void Counter(const char* name, const char* help, double value) {
    MetricFamily& family = Add(name, help, MetricType::Counter);
    family.metric.emplace_back();
    family.metric.back().counter.value = value;
  }
  void Gauge(const char* name, const char* help, double value) {
    MetricFamily& family = Add(name, help, MetricType::Gauge);
    family.metric.emplace_back();
    family.metric.back().gauge.value = value;
  }
  MetricFamily& Add(const char* name, const char* help, MetricType type) {
    families_.push_back({std::string("pliant_") + name, help, type, {}});
    return families_.back();
  }
  std::vector<MetricFamily>& families() { return families_; }

 private:
  std::vector<MetricFamily> families_;
};

void AddEngine(const EngineStats& s, Snapshot* out) {
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  out->Gauge("requests_running", "Requests the engine is working on", number(s.running));
  out->Gauge("requests_waiting", "Requests in the engine's queue", number(s.waiting));
  out->Gauge("kv_pages", "Plane pages of the pool", number(s.pages_total));
  out->Gauge("kv_pages_free", "Plane pages that nothing holds", number(s.pages_free));
  out->Gauge("kv_pages_cached", "Plane pages held only by the prefix cache",
             number(s.pages_cached));
  out->Gauge("kv_bytes", "Bytes of the KV pool", number(s.kv_bytes_total));
  out->Gauge("kv_bytes_used", "Bytes of the KV pool in use", number(s.kv_bytes_used));
  MetricFamily& blocks =
      out->Add("kv_blocks", "KV blocks by resident bits of K and of V", MetricType::Gauge);
  for (int k = 0; k < 5; ++k) {
    for (int v = 0; v < 5; ++v) {
      if (s.blocks_by_state[k][v] == 0 && !(k == v && k > 0)) continue;
      ClientMetric metric;
      metric.label = {{"k_bits", std::to_string(4 * k)}, {"v_bits", std::to_string(4 * v)}};
      metric.gauge.value = number(s.blocks_by_state[k][v]);
      blocks.metric.push_back(std::move(metric));
    }
  }
  out->Gauge("exact_store_bytes", "Budget of the exact store", number(s.store_bytes_total));
  out->Gauge("exact_store_bytes_used", "Bytes of exact copies in the store",
             number(s.store_bytes_used));
  out->Counter("requests_admitted_total", "Requests taken from the queue",
               number(s.requests_admitted));
  out->Counter("requests_finished_total", "Requests that ended with an answer",
               number(s.requests_finished));
  out->Counter("requests_cancelled_total", "Requests whose client went away",
               number(s.requests_cancelled));
  out->Counter("requests_failed_total", "Requests that ended with an error",
               number(s.requests_failed));
  out->Counter("requests_rejected_total", "Requests refused when they arrived",
               number(s.requests_rejected));
  out->Counter("requests_nonfinite_total", "Requests ended because their logits were not finite",
               number(s.nonfinite_requests));
  out->Counter("prompt_tokens_total", "Prompt tokens of admitted requests",
               number(s.prompt_tokens));
  out->Counter("generated_tokens_total", "Tokens produced", number(s.generated_tokens));
  out->Counter("prefix_cache_lookup_tokens_total", "Prompt tokens looked up in the prefix cache",
               number(s.prefix_lookup_tokens));
  out->Counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache",
               number(s.prefix_hit_tokens));
  out->Counter("preemptions_total", "Requests stopped and computed anew", number(s.preemptions));
  out->Counter("kv_demotions_total", "Blocks that gave up low planes", number(s.demotions));
  out->Counter("kv_restores_total", "Blocks whose low planes came back", number(s.restores));
  out->Counter("kv_offloads_total", "Requests moved out whole", number(s.offloads));
  out->Counter("kv_restore_seconds_total", "From the decision to restore to the last byte",
               static_cast<double>(s.restore_nanoseconds) * 1e-9);
  out->Counter("tokens_below_16_bits_total",
               "Tokens produced while part of their context stood below 16 bits",
               number(s.tokens_below_16_bits));
  out->Gauge("kv_capacity_requests", "Requests whose history has a capacity",
             number(s.with_capacity));
  out->Gauge("kv_capacity_blocks_taking_part", "Their blocks that take part in attention",
             number(s.blocks_taking_part));
  out->Gauge("kv_capacity_blocks_dropped", "Their blocks that do not", number(s.blocks_dropped));
  out->Counter("kv_drops_total", "Blocks that left a request's attention", number(s.drops));
  out->Gauge("kv_capacity_tokens_retained",
             "Their tokens that a KV head of a layer has, in the mean", number(s.retained_tokens));
  out->Gauge("kv_capacity_tokens_dropped", "Their tokens that it does not have",
             number(s.dropped_tokens));
  out->Counter("kv_returned_pages_total",
               "Dropped pages of 16 tokens that came back to a KV head of a layer",
               number(s.returned_pages));
  out->Counter("kv_lost_pages_total", "Wanted pages whose exact copy could not be read",
               number(s.lost_pages));
  out->Counter("kv_capacity_growths_total", "Blocks by which capacities grew",
               number(s.capacity_growths));
  MetricFamily& signals =
      out->Add("kv_growth_signal", "What growing capacities saw when a block was full",
               MetricType::Histogram);
  ClientMetric signal;
  std::int64_t seen = 0;
  for (std::size_t i = 0; i < s.signals.size(); ++i) {
    seen += s.signals[i];
    signal.histogram.bucket.push_back(
        {static_cast<std::uint64_t>(seen),
         i < kSignalBounds.size() ? kSignalBounds[i] : std::numeric_limits<double>::infinity()});
  }
  signal.histogram.sample_count = static_cast<std::uint64_t>(seen);
  signal.histogram.sample_sum = s.signal_sum;
  signals.metric.push_back(std::move(signal));
  MetricFamily& decisions = out->Add(
      "decisions_total", "Decisions of scheduler and controller by reason", MetricType::Counter);
  for (int i = 0; i < static_cast<int>(Reason::kCount); ++i) {
    ClientMetric metric;
    metric.label = {{"reason", std::string(ReasonName(static_cast<Reason>(i)))}};
    metric.counter.value = number(s.decisions[i]);
    decisions.metric.push_back(std::move(metric));
  }
  out->Counter("engine_steps_total", "Steps of the engine", number(s.steps));
  out->Counter("engine_step_seconds_total", "Seconds spent in steps",
               static_cast<double>(s.step_nanoseconds) * 1e-9);
}

}  // namespace

struct ServerMetrics::Impl {
  explicit Impl(std::string model)
      : model_name(std::move(model)),
        responses(prometheus::BuildCounter()
                      .Name("pliant_http_responses_total")
                      .Help("HTTP answers; code 499: the client left first")
                      .Register(registry)),
        durations(prometheus::BuildHistogram()
                      .Name("pliant_http_request_seconds")
                      .Help("From a request read to its answer handed over")
                      .Register(registry)),
        first_token(prometheus::BuildHistogram()
                        .Name("pliant_time_to_first_token_seconds")
                        .Help("From submission to a choice's first token")
                        .Register(registry)
                        .Add({}, kFirstTokenBuckets)),
        inter_token(prometheus::BuildHistogram()
                        .Name("pliant_inter_token_seconds")
                        .Help("Between tokens of one choice")
                        .Register(registry)
                        .Add({}, kInterTokenBuckets)) {}

  std::string model_name;
  prometheus::Registry registry;
  prometheus::Family<prometheus::Counter>& responses;
  prometheus::Family<prometheus::Histogram>& durations;
  prometheus::Histogram& first_token;
  prometheus::Histogram& inter_token;
};

ServerMetrics::ServerMetrics(std::string model_name)
    : impl_(std::make_unique<Impl>(std::move(model_name))) {}

ServerMetrics::~ServerMetrics() = default;

void ServerMetrics::CountResponse(std::string_view route, int code, double seconds) {
  const std::string name(route);
  impl_->responses.Add({{"route", name}, {"code", std::to_string(code)}}).Increment();
  impl_->durations.Add({{"route", name}}, kRequestBuckets).Observe(seconds);
}

void ServerMetrics::ObserveTimeToFirstToken(double seconds) { impl_->first_token.Observe(seconds); }

void ServerMetrics::ObserveInterTokenLatency(double seconds) {
  impl_->inter_token.Observe(seconds);
}

std::string ServerMetrics::Text(const EngineStats& engine, bool ready) const {
  Snapshot snapshot;
  MetricFamily& info = snapshot.Add("info", "The model served", MetricType::Gauge);
  info.metric.emplace_back();
  info.metric.back().label = {{"model", impl_->model_name}};
  info.metric.back().gauge.value = 1;
  snapshot.Gauge("ready", "1 when requests are taken", ready ? 1 : 0);
  AddEngine(engine, &snapshot);
  const auto load = [](const std::atomic<std::int64_t>& value) {
    return static_cast<double>(value.load(std::memory_order_relaxed));
  };
  snapshot.Gauge("http_connections", "Open connections", load(open_connections));
  snapshot.Gauge("http_requests_open", "POST requests being read or worked on",
                 load(open_requests));
  snapshot.Gauge("http_streams_open", "Streams being sent", load(open_streams));
  snapshot.Gauge("http_body_bytes_held", "Bytes of request bodies held", load(body_bytes_held));
  snapshot.Counter("http_connections_refused_total", "Connections over a limit",
                   load(refused_connections));
  snapshot.Counter("http_slow_readers_total", "Streams cut because the client did not read",
                   load(slow_readers));
  snapshot.Counter("http_timeouts_total", "Connections cut by a time-out", load(timeouts));
  std::vector<MetricFamily> families = std::move(snapshot.families());
  for (MetricFamily& family : impl_->registry.Collect()) families.push_back(std::move(family));
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return std::move(out).str();
}

}  // namespace pliant
