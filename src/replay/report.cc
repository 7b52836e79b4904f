#include "replay/report.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <functional>
#include <map>

namespace pliant {
namespace {

using Json = nlohmann::ordered_json;

__attribute__((format(printf, 1, 2))) std::string Format(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

Json DistributionJson(const Distribution& d) {
  return {{"mean", d.mean}, {"p50", d.p50}, {"p90", d.p90}, {"p99", d.p99}, {"max", d.max}};
}

std::string BlockStateName(int k, int v) {
  return std::to_string(k * kBitsPerPlane) + "/" + std::to_string(v * kBitsPerPlane);
}

// Share of the device's blocks in each state at one moment; blocks without a page there are left
// out.
std::map<std::string, double> StateShares(const ReplaySample& sample) {
  std::map<std::string, double> shares;
  double total = 0;
  for (int k = 0; k <= kPlanes; ++k) {
    for (int v = 0; v <= kPlanes; ++v) {
      if (k + v == 0 || sample.blocks[k][v] == 0) continue;
      shares[BlockStateName(k, v)] += static_cast<double>(sample.blocks[k][v]);
      total += static_cast<double>(sample.blocks[k][v]);
    }
  }
  for (auto& [name, share] : shares) share /= total;
  return shares;
}

struct StateSummary {
  double mean = 0, peak = 0;
};
// Mean over the samples that had blocks at all, and peak.
std::map<std::string, StateSummary> SummariseStates(const ReplayResult& result) {
  std::map<std::string, StateSummary> summary;
  std::size_t busy = 0;
  for (const ReplaySample& sample : result.samples) {
    const std::map<std::string, double> shares = StateShares(sample);
    busy += shares.empty() ? 0 : 1;
    for (const auto& [name, share] : shares) {
      summary[name].mean += share;
      summary[name].peak = std::max(summary[name].peak, share);
    }
  }
  for (auto& [name, one] : summary) one.mean /= static_cast<double>(busy);
  return summary;
}

struct Line {
  const char* label;
  std::function<std::string(const ReplayResult&)> value;
};

std::vector<Line> ReplayLines() {
  const auto count = [](std::int64_t ReplayResult::*field) {
    return
        [field](const ReplayResult& r) { return Format("%lld", static_cast<long long>(r.*field)); };
  };
  const auto time = [](Distribution ReplayResult::*field, double Distribution::*part, double factor,
                       const char* format) {
    return [=](const ReplayResult& r) { return Format(format, r.*field.*part * factor); };
  };
  const auto per_step = [](double ReplayResult::*field, const char* format) {
    return [=](const ReplayResult& r) {
      return Format(format, r.steps > 0 ? r.*field * 1e3 / static_cast<double>(r.steps) : 0.0);
    };
  };
  using R = ReplayResult;
  using D = Distribution;
  return {
      {"requests", count(&R::requests)},
      {"finished", count(&R::finished)},
      {"refused", count(&R::refused)},
      {"failed", count(&R::failed)},
      {"cut off", count(&R::cancelled)},
      {"seconds", [](const R& r) { return Format("%.1f", r.seconds); }},
      {"TTFT mean s", time(&R::ttft, &D::mean, 1, "%.3f")},
      {"TTFT P50 s", time(&R::ttft, &D::p50, 1, "%.3f")},
      {"TTFT P90 s", time(&R::ttft, &D::p90, 1, "%.3f")},
      {"TTFT P99 s", time(&R::ttft, &D::p99, 1, "%.3f")},
      {"ITL mean ms", time(&R::itl, &D::mean, 1e3, "%.1f")},
      {"ITL P50 ms", time(&R::itl, &D::p50, 1e3, "%.1f")},
      {"ITL P99 ms", time(&R::itl, &D::p99, 1e3, "%.1f")},
      {"latency mean s", time(&R::latency, &D::mean, 1, "%.2f")},
      {"output tokens/s", [](const R& r) { return Format("%.1f", r.output_tokens_per_second()); }},
      {"prompt tokens", count(&R::prompt_tokens)},
      {"  from the prefix cache", count(&R::cached_tokens)},
      {"output tokens", count(&R::output_tokens)},
      {"  below 16 bits", count(&R::tokens_below_16_bits)},
      {"lowest state",
       [](const R& r) { return Format("%d/%d", r.lowest_k_bits, r.lowest_v_bits); }},
      {"preemptions", count(&R::preemptions)},
      {"demotions", count(&R::demotions)},
      {"restores", count(&R::restores)},
      {"offloads", count(&R::offloads)},
      {"steps", count(&R::steps)},
      {"  mean ms", per_step(&R::step_seconds, "%.2f")},
      {"  planned before it, mean ms", per_step(&R::plan_seconds, "%.3f")},
      {"  settled after it, mean ms", per_step(&R::settle_seconds, "%.3f")},
      {"  done while it ran, mean ms", per_step(&R::hidden_seconds, "%.3f")},
      {"device waits before decodes, P50 ms",
       [](const R& r) { return Format("%.3f", r.idle_p50 * 1e3); }},
      {"peak running", count(&R::peak_running)},
      {"peak queue", count(&R::peak_waiting)},
      {"peak pages used",
       [](const R& r) {
         double peak = 0;
         for (const ReplaySample& sample : r.samples) peak = std::max(peak, sample.pages_used);
         return Format("%.0f %%", peak * 100);
       }},
  };
}

struct StateMeans {
  double kl = 0, kl_p99 = 0, kl_max = 0, top1 = 0, nll = 0, degraded = 0;
};
StateMeans MeansOver(const std::vector<NamedText>& texts, std::size_t state) {
  StateMeans means;
  for (const NamedText& text : texts) {
    const TextQuality& quality = text.report.states[state];
    const auto n = static_cast<double>(texts.size());
    means.kl += quality.kl.mean / n;
    means.kl_p99 += quality.kl.p99 / n;
    means.kl_max = std::max(means.kl_max, quality.kl.max);
    means.top1 += quality.top1 / n;
    means.nll += std::log(quality.perplexity) / n;
    means.degraded += quality.degraded / n;
  }
  return means;
}

}  // namespace

std::string ReplayTable(const std::vector<NamedReplay>& replays) {
  std::string out = Format("%-28s", "policy");
  for (const NamedReplay& replay : replays) out += Format("%12s", replay.policy.c_str());
  out += "\n";
  for (const Line& line : ReplayLines()) {
    out += Format("%-28s", line.label);
    for (const NamedReplay& replay : replays) {
      out += Format("%12s", line.value(replay.result).c_str());
    }
    out += "\n";
  }
  std::map<std::string, std::vector<StateSummary>> states;
  for (std::size_t i = 0; i < replays.size(); ++i) {
    for (const auto& [name, summary] : SummariseStates(replays[i].result)) {
      states[name].resize(replays.size());
      states[name][i] = summary;
    }
  }
  out += "share of blocks, mean (peak)\n";
  for (const auto& [name, summaries] : states) {
    out += Format("  %-26s", name.c_str());
    for (const StateSummary& one : summaries) {
      out += Format("%12s", Format("%.0f (%.0f) %%", one.mean * 100, one.peak * 100).c_str());
    }
    out += "\n";
  }
  for (const NamedReplay& replay : replays) {
    if (replay.result.first_error.empty()) continue;
    out += replay.policy + ": first refusal or failure: " + replay.result.first_error + "\n";
  }
  return out;
}

Json ReplayJson(const ReplayResult& r, std::size_t max_samples) {
  Json out = {{"requests", r.requests},
              {"finished", r.finished},
              {"refused", r.refused},
              {"failed", r.failed},
              {"cut_off", r.cancelled},
              {"first_error", r.first_error},
              {"seconds", r.seconds},
              {"ttft_seconds", DistributionJson(r.ttft)},
              {"itl_seconds", DistributionJson(r.itl)},
              {"latency_seconds", DistributionJson(r.latency)},
              {"output_tokens_per_second", r.output_tokens_per_second()},
              {"prompt_tokens", r.prompt_tokens},
              {"cached_tokens", r.cached_tokens},
              {"output_tokens", r.output_tokens},
              {"tokens_below_16_bits", r.tokens_below_16_bits},
              {"lowest_state",
               BlockStateName(r.lowest_k_bits / kBitsPerPlane, r.lowest_v_bits / kBitsPerPlane)},
              {"preemptions", r.preemptions},
              {"demotions", r.demotions},
              {"restores", r.restores},
              {"offloads", r.offloads},
              {"steps", r.steps},
              {"step_seconds", r.step_seconds},
              {"plan_seconds", r.plan_seconds},
              {"settle_seconds", r.settle_seconds},
              {"hidden_seconds", r.hidden_seconds},
              {"idle_p50", r.idle_p50},
              {"steps_ahead", r.steps_ahead},
              {"peak_running", r.peak_running},
              {"peak_queue", r.peak_waiting}};
  Json states = Json::object();
  for (const auto& [name, summary] : SummariseStates(r)) {
    states[name] = {{"mean_share", summary.mean}, {"peak_share", summary.peak}};
  }
  out["states"] = std::move(states);
  Json samples = Json::array();
  const std::size_t every =
      std::max<std::size_t>((r.samples.size() + max_samples - 1) / max_samples, 1);
  for (std::size_t i = 0; i < r.samples.size(); i += every) {
    const ReplaySample& sample = r.samples[i];
    samples.push_back({{"seconds", sample.seconds},
                       {"running", sample.running},
                       {"waiting", sample.waiting},
                       {"pages_used", sample.pages_used},
                       {"states", StateShares(sample)}});
  }
  out["samples"] = std::move(samples);
  return out;
}

std::string ContextTable(const std::vector<CacheState>& states,
                         const std::vector<NamedText>& texts) {
  std::string out = Format("%-8s%12s%12s%12s%9s%12s%10s\n", "state", "KL mean", "KL P99", "KL max",
                           "top-1", "perplexity", "degraded");
  double reference = 0;
  for (const NamedText& text : texts) {
    reference += std::log(text.report.reference_perplexity) / static_cast<double>(texts.size());
  }
  out += Format("%-8s%12s%12s%12s%9s%12.5f%10s\n", "whole", "-", "-", "-", "-", std::exp(reference),
                "0 %");
  for (std::size_t s = 0; s < states.size(); ++s) {
    const StateMeans means = MeansOver(texts, s);
    out += Format("%-8s%12.2e%12.2e%12.2e%7.2f %%%12.5f%8.0f %%\n",
                  CacheStateName(states[s]).c_str(), means.kl, means.kl_p99, means.kl_max,
                  means.top1 * 100, std::exp(means.nll), means.degraded * 100);
  }
  out += Format("\nmean KL of a text %-14s", "");
  for (const CacheState& state : states) out += Format("%10s", CacheStateName(state).c_str());
  out += "\n";
  for (const NamedText& text : texts) {
    out += Format("%-32s", text.name.substr(0, 31).c_str());
    for (const TextQuality& quality : text.report.states) out += Format("%10.1e", quality.kl.mean);
    out += "\n";
  }
  return out;
}

Json ContextJson(const std::vector<CacheState>& states, const std::vector<NamedText>& texts) {
  Json out;
  for (std::size_t s = 0; s < states.size(); ++s) {
    const StateMeans means = MeansOver(texts, s);
    out["states"][CacheStateName(states[s])] = {{"kl_mean", means.kl},
                                                {"kl_p99", means.kl_p99},
                                                {"kl_max", means.kl_max},
                                                {"top1", means.top1},
                                                {"perplexity", std::exp(means.nll)},
                                                {"degraded_share", means.degraded}};
  }
  for (const NamedText& text : texts) {
    Json one = {{"name", text.name}, {"perplexity", text.report.reference_perplexity}};
    for (std::size_t s = 0; s < states.size(); ++s) {
      const TextQuality& quality = text.report.states[s];
      one["states"][CacheStateName(states[s])] = {{"kl", DistributionJson(quality.kl)},
                                                  {"top1", quality.top1},
                                                  {"perplexity", quality.perplexity}};
    }
    out["texts"].push_back(std::move(one));
  }
  return out;
}

std::string ReckonerTable(const std::vector<ReckonerScore>& scores) {
  std::string out =
      Format("%-8s%-10s%16s%14s%16s%12s%12s%12s%12s%12s\n", "state", "level", "right", "unfinished",
             "mean tokens", "mean bytes", "peak bytes", "drops", "growths", "returned");
  for (const ReckonerScore& score : scores) {
    const auto share = [](std::int64_t part, std::int64_t whole) {
      return Format("%.1f %%", whole > 0
                                   ? 100.0 * static_cast<double>(part) / static_cast<double>(whole)
                                   : 100.0);
    };
    const double each = score.problems > 0 ? 1.0 / score.problems : 0.0;
    out += Format(
        "%-8s%-10s%16s%14d%16.1f%12s%12s%12.1f%12.1f%12.1f\n", CacheStateName(score.state).c_str(),
        score.level.substr(0, 9).c_str(), Format("%d of %d", score.right, score.problems).c_str(),
        score.unfinished, each * static_cast<double>(score.tokens),
        share(score.held_pages, score.whole_pages).c_str(),
        share(score.peak_pages, score.whole_peak_pages).c_str(),
        each * static_cast<double>(score.drops), each * static_cast<double>(score.growths),
        each * static_cast<double>(score.returned_tokens) / score.units);
  }
  return out;
}

Json ReckonerJson(const std::vector<ReckonerScore>& scores) {
  Json out = Json::array();
  for (const ReckonerScore& score : scores) {
    out.push_back({{"state", CacheStateName(score.state)},
                   {"level", score.level},
                   {"problems", score.problems},
                   {"right", score.right},
                   {"unfinished", score.unfinished},
                   {"tokens", score.tokens},
                   {"held_pages", score.held_pages},
                   {"whole_pages", score.whole_pages},
                   {"peak_pages", score.peak_pages},
                   {"whole_peak_pages", score.whole_peak_pages},
                   {"drops", score.drops},
                   {"growths", score.growths},
                   {"returned_pages", score.returned_pages},
                   {"returned_tokens", score.returned_tokens},
                   {"units", score.units},
                   {"operations",
                    {{"model", score.operations.model},
                     {"scoring", score.operations.scoring},
                     {"watching", score.operations.watching}}},
                   {"wrong", score.wrong}});
    for (const ReckonerCourse& course : score.courses) {
      Json signals = Json::array();
      for (const ReckonerCourse::Signal& signal : course.signals)
        signals.push_back({signal.tokens, signal.value, signal.grew});
      out.back()["courses"].push_back({{"id", course.id},
                                       {"right", course.right},
                                       {"prompt_tokens", course.prompt_tokens},
                                       {"answer", course.answer},
                                       {"signals", std::move(signals)}});
    }
  }
  return out;
}

}  // namespace pliant
