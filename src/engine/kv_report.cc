#include "engine/kv_report.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

namespace pliant {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kDecisionsShown = 64;

std::string StateName(int k_planes, int v_planes) {
  return std::to_string(k_planes * kBitsPerPlane) + "/" + std::to_string(v_planes * kBitsPerPlane);
}

// "16/16*4 8/8*2": the blocks' states in order, run-length coded.
std::string RunLengths(const std::vector<const BlockInfo*>& blocks) {
  std::string map;
  for (std::size_t i = 0; i < blocks.size();) {
    std::size_t end = i;
    const PlaneCount planes = blocks[i]->planes;
    while (end < blocks.size() && blocks[end]->planes.k == planes.k &&
           blocks[end]->planes.v == planes.v)
      ++end;
    if (!map.empty()) map += ' ';
    map += StateName(planes.k, planes.v) + "*" + std::to_string(end - i);
    i = end;
  }
  return map;
}

Json PagesJson(const KvStats& stats) {
  return {{"bytes", stats.page_bytes},    {"total", stats.pages_total},
          {"free", stats.pages_free},     {"cached", stats.pages_cached},
          {"fenced", stats.pages_fenced}, {"copying", stats.pages_copying},
          {"kept", stats.pages_kept}};
}

Json BlocksJson(const KvStats& stats) {
  Json by_state = Json::object();
  for (int k = kPlanes; k >= 0; --k) {
    for (int v = kPlanes; v >= 0; --v) {
      if (stats.blocks_by_state[k][v] != 0) by_state[StateName(k, v)] = stats.blocks_by_state[k][v];
    }
  }
  return {{"tokens", kBlockTokens},
          {"total", stats.blocks},
          {"cached", stats.blocks_cached},
          {"by_state", std::move(by_state)},
          {"demotions", stats.demotions},
          {"restores", stats.restores},
          {"restore_seconds", static_cast<double>(stats.restore_nanoseconds) / kNanosPerSecond}};
}

/// Growth signals seen: how many up to each bound, and above the last.
Json SignalJson(const SchedStats& sched) {
  Json out = Json::array();
  for (std::size_t i = 0; i < sched.signals.size(); ++i) {
    Json one = {{"count", sched.signals[i]}};
    if (i < kSignalBounds.size()) one["up_to"] = kSignalBounds[i];
    out.push_back(std::move(one));
  }
  return out;
}

Json RequestJson(const KvReport::Request& request, const std::vector<const BlockInfo*>& blocks) {
  return {{"id", request.id.value()},
          {"state", request.state},
          {"prompt_tokens", request.prompt_tokens},
          {"produced", request.produced},
          {"cached_tokens", request.facts.cached_tokens},
          {"tokens_below_16_bits", request.facts.tokens_below_16_bits},
          {"lowest_k_bits", request.facts.lowest_k_bits},
          {"lowest_v_bits", request.facts.lowest_v_bits},
          {"preemptions", request.facts.preemptions},
          {"offloads", request.facts.offloads},
          {"demotions", request.facts.demotions},
          {"restores", request.facts.restores},
          {"capacity_blocks", request.facts.capacity_blocks},
          {"taking_part", request.facts.taking_part},
          {"dropped", request.facts.dropped},
          {"returned", request.facts.returned},
          {"lost", request.facts.lost},
          {"growths", request.facts.growths},
          {"map", RunLengths(blocks)}};
}

Json DecisionsJson(const DecisionLog& log) {
  Json decisions = Json::array();
  const std::uint64_t from = log.total() > kDecisionsShown ? log.total() - kDecisionsShown : 0;
  for (const Decision& d : log.Since(from)) {
    Json one = {{"step", d.step}, {"reason", ReasonName(d.reason)}};
    if (d.request.valid()) one["request"] = d.request.value();
    if (d.block.valid()) {
      one["block"] = d.block.value();
      one["from"] = StateName(d.from_k, d.from_v);
      one["to"] = StateName(d.to_k, d.to_v);
    }
    if (d.pages != 0) one["pages"] = d.pages;
    decisions.push_back(std::move(one));
  }
  return decisions;
}

}  // namespace

std::string KvReportJson(const KvReport& report) {
  const KvStats stats = report.kv->Stats();
  const SchedStats sched = report.scheduler->Stats();
  const std::vector<BlockInfo> map = report.kv->MemoryMap();
  std::map<RequestId, std::vector<const BlockInfo*>> by_request;
  std::vector<const BlockInfo*> cached;
  for (const BlockInfo& block : map) {
    if (block.request.valid()) {
      by_request[block.request].push_back(&block);
    } else {
      cached.push_back(&block);
    }
  }
  Json requests = Json::array();
  for (const KvReport::Request& request : report.requests) {
    std::vector<const BlockInfo*>& blocks = by_request[request.id];
    std::sort(blocks.begin(), blocks.end(),
              [](const BlockInfo* a, const BlockInfo* b) { return a->index < b->index; });
    requests.push_back(RequestJson(request, blocks));
  }
  Json reasons = Json::object();
  for (int i = 0; i < static_cast<int>(Reason::kCount); ++i) {
    const Reason reason = static_cast<Reason>(i);
    reasons[std::string(ReasonName(reason))] = report.kv->log().Count(reason);
  }
  const Json out = {{"policy", KvPolicyName(report.kv->options().policy)},
                    {"steps", sched.steps},
                    {"running", sched.running},
                    {"waiting", sched.waiting},
                    {"offloaded", sched.offloaded},
                    {"tokens_below_16_bits", sched.tokens_below_16_bits},
                    {"preemptions", sched.preemptions},
                    {"pages", PagesJson(stats)},
                    {"blocks", BlocksJson(stats)},
                    {"capacity",
                     {{"requests", sched.with_capacity},
                      {"blocks_taking_part", sched.blocks_taking_part},
                      {"blocks_dropped", sched.blocks_dropped},
                      {"retained_tokens", sched.retained_tokens},
                      {"dropped_tokens", sched.dropped_tokens},
                      {"drops", sched.drops},
                      {"returned_pages", sched.returned_pages},
                      {"lost_pages", sched.lost_pages},
                      {"growths", sched.growths},
                      {"signal", SignalJson(sched)}}},
                    {"store",
                     {{"bytes_total", stats.store_bytes_total},
                      {"bytes_used", stats.store_bytes_used},
                      {"blocks_only_in_store", stats.blocks_in_store}}},
                    {"requests", std::move(requests)},
                    {"cached_map", RunLengths(cached)},
                    {"reasons", std::move(reasons)},
                    {"decisions", DecisionsJson(report.kv->log())}};
  return out.dump();
}

}  // namespace pliant
