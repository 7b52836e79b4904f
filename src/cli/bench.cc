// `pliant bench engine` and `pliant bench quality`: options in, tables and JSON out; the measuring
// is src/replay's.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/size.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "engine/calibration.h"
#include "model/growth_weights.h"
#include "replay/report.h"
#include "replay/texts.h"

namespace pliant {
namespace {

using Json = nlohmann::ordered_json;

struct EngineBenchFlags {
  ModelFlags model;
  EngineFlags engine;
  std::string workload, json;
  std::vector<std::string> synthetic;
  std::vector<std::string> policies = {"full", "offload", "elastic", "pliant"};
  WorkloadCut cut;
  std::uint64_t seed = 1;
  double cut_off = 0;
  int min_bits = 0;
};

struct QualityFlags {
  ModelFlags model;
  std::string backend = "auto", arithmetic = "auto", level = "auto";
  int threads = 0;
  std::string states = "16/16,12/12,12/8,8/8,8/4,4/4", texts, reckoner, json;
  ContextQualityOptions context;
  ReckonerOptions problems;
  std::size_t limit = 0, text_limit = 0;
  int protect = 16;
  std::string grow_weights;
  std::optional<float> grow_above;
  bool no_calibration = false;
};

Status WriteJson(const std::string& path, const Json& json) {
  if (path.empty()) return Status::Ok();
  std::ofstream out(path, std::ios::binary);
  out << json.dump(1) << "\n";
  out.close();
  return out ? Status::Ok() : IoError(path + ": cannot be written");
}

// ---- bench engine
// -----------------------------------------------------------------------------------------------------------

struct NamedWorkload {
  std::string name;
  std::vector<WorkloadRequest> requests;
};

Result<std::vector<NamedWorkload>> LoadWorkloads(const EngineBenchFlags& flags) {
  std::vector<NamedWorkload> workloads;
  for (const std::string& spec : flags.synthetic) {
    PLIANT_ASSIGN_OR_RETURN(auto requests, MakeSyntheticWorkload(spec, flags.seed));
    workloads.push_back({spec, std::move(requests)});
  }
  if (flags.synthetic.empty()) {
    if (flags.workload.empty()) {
      return InvalidArgument(
          "name a workload file, or make one up with --synthetic N:INPUT:OUTPUT:RATE");
    }
    PLIANT_ASSIGN_OR_RETURN(auto requests, ReadWorkload(flags.workload));
    workloads.push_back({flags.workload, std::move(requests)});
  }
  for (NamedWorkload& workload : workloads) CutWorkload(workload.requests, flags.cut);
  return workloads;
}

// One policy: its own engine from start to end, for all workloads one after the other. The backend
// belongs to the engine, so the weights are loaded anew.
Result<std::vector<ReplayResult>> ReplayPolicy(const EngineBenchFlags& flags,
                                               const std::string& policy,
                                               const std::vector<NamedWorkload>& workloads) {
  EngineFlags engine_flags = flags.engine;
  engine_flags.policy = policy;
  PLIANT_ASSIGN_OR_RETURN(OpenedModel opened, OpenModel(flags.model));
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, StartEngine(engine_flags, opened));
  const ReplayOptions options{.vocabulary = std::min<std::int64_t>(
                                  opened.model->config().vocab_size, opened.tokenizer->size()),
                              .min_bits = flags.min_bits,
                              .give_up_seconds = flags.cut_off};
  std::vector<ReplayResult> results;
  for (const NamedWorkload& workload : workloads) {
    Progress progress(policy);
    results.push_back(Replay(*engine, workload.requests, options, [&](const ReplayProgress& at) {
      char detail[160];
      std::snprintf(detail, sizeof detail,
                    "%lld of %lld ended, %lld running, %lld waiting, %.0f tokens/s, %.0f s",
                    static_cast<long long>(at.ended), static_cast<long long>(at.total),
                    static_cast<long long>(at.running), static_cast<long long>(at.waiting),
                    at.seconds > 0 ? static_cast<double>(at.output_tokens) / at.seconds : 0.0,
                    at.seconds);
      progress.Update(static_cast<std::uint64_t>(at.ended), static_cast<std::uint64_t>(at.total),
                      detail);
    }));
  }
  return results;
}

void PrintWorkload(const NamedWorkload& workload, const EngineBenchFlags& flags) {
  std::int64_t input = 0, output = 0;
  for (const WorkloadRequest& request : workload.requests) {
    input += request.input;
    output += request.output;
  }
  std::printf("%s: %zu requests in %.1f s, %lld tokens in, %lld out; KV memory %s, floor %d bits\n",
              workload.name.c_str(), workload.requests.size(), workload.requests.back().arrival,
              static_cast<long long>(input), static_cast<long long>(output),
              flags.engine.kv_memory.c_str(), flags.engine.kv_floor);
}

int BenchEngine(EngineBenchFlags flags) {
  // With a made-up workload the one name given is the model's.
  if (!flags.synthetic.empty()) {
    if (!flags.model.model.empty())
      return Fail(InvalidArgument("name a workload file or use --synthetic, not both"));
    std::swap(flags.model.model, flags.workload);
  }
  const Result<std::vector<NamedWorkload>> workloads = LoadWorkloads(flags);
  if (!workloads.ok()) return Fail(workloads.status());
  for (const std::string& policy : flags.policies) {
    if (const auto known = ParseKvPolicy(policy); !known.ok()) return Fail(known.status());
  }
  std::vector<std::vector<NamedReplay>> replays(workloads->size());  // [workload][policy]
  for (const std::string& policy : flags.policies) {
    Result<std::vector<ReplayResult>> results = ReplayPolicy(flags, policy, *workloads);
    if (!results.ok()) return Fail(results.status().WithContext("policy " + policy));
    for (std::size_t i = 0; i < results->size(); ++i)
      replays[i].push_back({policy, std::move((*results)[i])});
  }
  Json all = Json::array();
  for (std::size_t i = 0; i < workloads->size(); ++i) {
    PrintWorkload((*workloads)[i], flags);
    std::printf("%s", ReplayTable(replays[i]).c_str());
    Json json = {{"workload", (*workloads)[i].name},
                 {"model", flags.model.model},
                 {"kv_memory", flags.engine.kv_memory},
                 {"kv_floor", flags.engine.kv_floor},
                 {"exact_store", flags.engine.exact_store},
                 {"max_running", flags.engine.max_running},
                 {"max_batch_tokens", flags.engine.max_batch_tokens}};
    for (const NamedReplay& replay : replays[i])
      json["policies"][replay.policy] = ReplayJson(replay.result);
    all.push_back(std::move(json));
  }
  const Status written = WriteJson(flags.json, all.size() == 1 ? all.front() : all);
  return written.ok() ? 0 : Fail(written);
}

Command AddBenchEngine(CLI::App& app) {
  auto flags = std::make_shared<EngineBenchFlags>();
  flags->engine.max_waiting = 1 << 20;  // a replay wants to see the queue, not refusals
  app.add_option("WORKLOAD", flags->workload,
                 "File of requests, one JSON object a line: arrival, input, output, blocks");
  flags->model.AddTo(app);
  flags->engine.AddTo(app);
  app.remove_option(app.get_option("--policy"));
  app.add_option("--policy", flags->policies, "Policies to replay, one after the other")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::IsMember({"full", "offload", "elastic", "pliant"}));
  app.add_option("--synthetic", flags->synthetic,
                 "Instead of a file: N:INPUT:OUTPUT:RATE (Poisson; rate 0: all at once); several, "
                 "one after the other, start with the same prompts: with --no-prefix-cache")
      ->delimiter(',');
  app.add_option("--seed", flags->seed, "Of the made-up arrivals")->capture_default_str();
  app.add_option("--limit", flags->cut.limit, "Only the first N requests; 0: all")
      ->capture_default_str();
  app.add_option("--scale-time", flags->cut.scale_time,
                 "Arrivals are multiplied by this (2: half the load)")
      ->capture_default_str()
      ->check(Between(0.0, 1e6));
  app.add_option("--max-input", flags->cut.max_input,
                 "Longest prompt; longer ones are cut; 0: as they are")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--max-output", flags->cut.max_output, "Longest answer; 0: as they are")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--cut-off", flags->cut_off,
                 "Cancel what is unfinished after so many seconds; 0: never")
      ->capture_default_str()
      ->check(Between(0.0, 1e9));
  app.add_option("--min-bits", flags->min_bits,
                 "Bits every request asks for (kv.min_bits); 0: the server's floor")
      ->capture_default_str()
      ->check(CLI::IsMember({0, 4, 8, 12, 16}));
  app.add_option("--json", flags->json, "Write everything measured to this file");
  return [flags] { return BenchEngine(*flags); };
}

// ---- bench quality
// ----------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<Backend>> QualityBackend(const QualityFlags& flags, bool precise) {
  // Precise: products and attention in f32; the AMX level's attention works with 8-bit digits of q.
  return MakeNamedBackend(flags.backend,
                          {.threads = flags.threads,
                           .level = precise && flags.level == "auto" ? "avx512" : flags.level,
                           .precise = precise});
}

// A model ready to be driven directly.
struct Lab {
  OpenedModel opened;
  std::unique_ptr<Backend> backend;
};
Result<Lab> OpenLab(const QualityFlags& flags, bool precise, int max_rows, int logit_rows,
                    std::uint32_t pages) {
  Lab lab;
  PLIANT_ASSIGN_OR_RETURN(lab.opened, OpenModel(flags.model));
  PLIANT_ASSIGN_OR_RETURN(lab.backend, QualityBackend(flags, precise));
  Model& model = *lab.opened.model;
  PLIANT_RETURN_IF_ERROR(model.Load(*lab.backend, max_rows, logit_rows, {}));
  PLIANT_RETURN_IF_ERROR(lab.backend->AllocatePages(model.config().Kv(), pages));
  if (!flags.no_calibration) {
    PLIANT_RETURN_IF_ERROR(Calibrate(*lab.backend, model, *lab.opened.tokenizer, pages, max_rows));
  }
  std::printf("%s on %s, %s arithmetic\n",
              std::filesystem::path(lab.opened.path).filename().c_str(),
              lab.backend->Info().name.c_str(), precise ? "f32" : "the backend's own");
  std::fflush(stdout);
  return lab;
}

Result<std::vector<NamedText>> MeasureTexts(const QualityFlags& flags) {
  const bool precise = flags.arithmetic != "fast";
  PLIANT_ASSIGN_OR_RETURN(
      Lab lab, OpenLab(flags, precise, flags.context.max_rows, ContextLogitRows(flags.context),
                       ContextPages(flags.context)));
  const std::size_t bytes = static_cast<std::size_t>(flags.context.context) * 12;
  std::vector<SampleText> texts;
  if (flags.texts.empty() || flags.texts == "built-in") {
    texts = BuiltInTexts(bytes);
  } else {
    PLIANT_ASSIGN_OR_RETURN(texts, ReadTexts(flags.texts, bytes));
  }
  std::vector<NamedText> reports;
  for (const SampleText& text : texts) {
    if (flags.text_limit > 0 && reports.size() == flags.text_limit) break;
    PLIANT_ASSIGN_OR_RETURN(std::vector<TokenId> tokens,
                            lab.opened.tokenizer->Encode(text.text, {.add_bos = true}));
    if (static_cast<std::int64_t>(tokens.size()) <= flags.context.context) {
      std::fprintf(stderr, "pliant: %s left out: %zu tokens, more than %lld are needed\n",
                   text.name.c_str(), tokens.size(), static_cast<long long>(flags.context.context));
      continue;
    }
    Progress progress(text.name);
    Result<TextReport> report = MeasureText(
        *lab.opened.model, *lab.backend, tokens, flags.context,
        [&](double done) { progress.Update(static_cast<std::uint64_t>(done * 1000), 1000); });
    progress.Clear();
    if (!report.ok()) return report.status().WithContext(text.name);
    reports.push_back({text.name, *std::move(report)});
  }
  if (reports.empty()) return InvalidArgument("no text is long enough");
  return reports;
}

Result<std::vector<ReckonerScore>> MeasureProblems(QualityFlags& flags) {
  PLIANT_ASSIGN_OR_RETURN(std::vector<ReckonerProblem> problems,
                          ReadReckonerProblems(flags.reckoner));
  problems = LimitPerLevel(std::move(problems), flags.limit);
  const bool precise = flags.arithmetic == "precise";
  PLIANT_ASSIGN_OR_RETURN(Lab lab, OpenLab(flags, precise, flags.problems.max_rows,
                                           flags.problems.slots, ReckonerPages(flags.problems)));
  HistoryOptions& history = flags.problems.history;
  if ((history.growth == GrowthSignal::kLearned) != !flags.grow_weights.empty())
    return InvalidArgument("--grow-signal learned and --grow-weights FILE go together");
  if (!flags.grow_weights.empty()) {
    auto weights = OpenGrowthWeights(flags.grow_weights, lab.opened.model->config());
    if (!weights.ok()) return weights.status().WithContext("--grow-weights");
    history = GrowingBy(history, *std::move(weights));
  }
  if (flags.grow_above) history.grow_above = *flags.grow_above;
  const PromptEncoder encode = [&](const std::string& prompt) -> Result<std::vector<TokenId>> {
    const Json messages = Json::array({{{"role", "user"}, {"content", prompt}}});
    PLIANT_ASSIGN_OR_RETURN(const std::string text, RenderChat(lab.opened, messages.dump(), true));
    return lab.opened.tokenizer->Encode(text, {.parse_special = true});
  };
  Progress progress("reckoner");
  return MeasureReckoner(*lab.opened.model, *lab.backend, *lab.opened.tokenizer, encode, problems,
                         flags.problems, [&](std::int64_t done, std::int64_t total) {
                           progress.Update(
                               static_cast<std::uint64_t>(done), static_cast<std::uint64_t>(total),
                               std::to_string(done) + " of " + std::to_string(total) + " answers");
                         });
}

int BenchQuality(QualityFlags flags) {
  Result<std::vector<CacheState>> states = ParseCacheStates(flags.states);
  if (!states.ok()) return Fail(states.status().WithContext("--states"));
  flags.problems.states = *states;
  flags.problems.protection = {
      .sink = 0, .recent_base = flags.protect, .recent_deep = flags.protect};
  for (const CacheState& state : *states) {
    if (!state.whole()) flags.context.states.push_back(state);  // the whole cache is the reference
  }
  Json json = {{"model", flags.model.model}};
  if (flags.reckoner.empty() || !flags.texts.empty()) {
    const Result<std::vector<NamedText>> texts = MeasureTexts(flags);
    if (!texts.ok()) return Fail(texts.status());
    std::printf(
        "%zu texts, context %lld, last %lld tokens scored; whole: first %d tokens, last %d (%d "
        "below 8 bits)\n%s",
        texts->size(), static_cast<long long>(flags.context.context),
        static_cast<long long>(flags.context.scored), flags.context.protection.sink,
        flags.context.protection.recent_base, flags.context.protection.recent_deep,
        ContextTable(flags.context.states, *texts).c_str());
    json["context"] = ContextJson(flags.context.states, *texts);
  }
  if (!flags.reckoner.empty()) {
    const Result<std::vector<ReckonerScore>> scores = MeasureProblems(flags);
    if (!scores.ok()) return Fail(scores.status());
    std::printf("last %d tokens whole\n%s", flags.protect, ReckonerTable(*scores).c_str());
    json["reckoner"] = ReckonerJson(*scores);
  }
  const Status written = WriteJson(flags.json, json);
  return written.ok() ? 0 : Fail(written);
}

void AddHistoryFlags(CLI::App& app, QualityFlags& flags) {
  ReckonerOptions& problems = flags.problems;
  HistoryOptions& history = problems.history;
  RetentionOptions& retention = history.retention;
  app.add_flag("--grow", problems.grows, "The capacity grows");
  app.add_flag("--from-prompt", history.start_from_prompt,
               "--capacity counts the blocks besides the prompt's");
  const auto set_signal = [&history](const std::string& name) {
    history.growth = name == "returns"      ? GrowthSignal::kReturns
                     : name == "divergence" ? GrowthSignal::kDivergence
                                            : GrowthSignal::kLearned;
  };
  app.add_option_function<std::string>("--grow-signal", set_signal,
                                       "What makes it grow: returns (a token and KV head), "
                                       "divergence of the queries, or learned: "
                                       "what --grow-weights make of the queries")
      ->check(CLI::IsMember({"returns", "divergence", "learned"}))
      ->default_str("returns");
  app.add_option("--grow-weights", flags.grow_weights,
                 "File of weights fitted to the model (bench/fit_signal.py)");
  app.add_option("--grow-above", flags.grow_above,
                 "It grows when the signal is above this; default: 0.2, and of learned what its "
                 "file says");
  app.add_flag("--courses", problems.courses,
               "Answers and the signals that they met go into --json (bench/demand.py)");
  app.add_flag("!--no-returns", retention.returns, "Dropped tokens are gone for good");
  app.add_option("--return-weight", retention.return_weight,
                 "Attention above which a page of dropped tokens returns")
      ->capture_default_str();
  app.add_option("--most-returns", retention.most_returns, "Of one KV head for one token")
      ->capture_default_str();
  app.add_option("--redundancy", retention.redundancy,
                 "Exponent of (1 - likeness to a later key) in a token's score")
      ->capture_default_str();
  app.add_flag("--squared", retention.squared,
               "Scores add up the square of a head's attention to a token, not the attention");
  app.add_option("--keep-first", retention.sink_tokens, "First tokens, never dropped")
      ->capture_default_str();
  app.add_option("--keep-last", history.recent_blocks, "Last full blocks, never dropped")
      ->capture_default_str();
}

Command AddBenchQuality(CLI::App& app) {
  auto flags = std::make_shared<QualityFlags>();
  flags->model.AddTo(app);
  app.add_option("--backend", flags->backend, "auto, cpu, cuda or ref (the slow oracle)")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "cpu", "cuda", "ref"}));
  app.add_option("--arithmetic", flags->arithmetic,
                 "precise: f32, so that only the cache differs; fast: as served; auto: precise for "
                 "texts, fast for problems")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "precise", "fast"}));
  app.add_option("--threads", flags->threads, "Compute threads; 0: one a core")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  app.add_option("--states", flags->states, "Bits of K and V, e.g. 8/8,8/4")->capture_default_str();
  app.add_option(
      "--texts", flags->texts,
      "Folder of text files, or built-in; default: built-in, or nothing with --reckoner");
  app.add_option("--text-limit", flags->text_limit, "Only the first N texts; 0: all")
      ->capture_default_str();
  app.add_option("--context", flags->context.context, "Tokens of each text")
      ->capture_default_str()
      ->check(CLI::Range(64, 1 << 20));
  app.add_option("--scored", flags->context.scored,
                 "Last tokens of it, whose predictions are compared")
      ->capture_default_str()
      ->check(CLI::Range(32, 1 << 20));
  app.add_option("--sink", flags->context.protection.sink, "First tokens kept whole")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--recent", flags->context.protection.recent_base,
                 "Last tokens kept whole, 8 bits and more")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--recent-deep", flags->context.protection.recent_deep,
                 "Last tokens kept whole, fewer than 8 bits")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--reckoner", flags->reckoner,
                 "File of problems with answers, one JSON object a line");
  app.add_option("--limit", flags->limit, "Only the first N problems of each level; 0: all")
      ->capture_default_str();
  app.add_option("--protect", flags->protect, "Last tokens kept whole while a problem is solved")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--slots", flags->problems.slots, "Problems solved together")
      ->capture_default_str()
      ->check(CLI::Range(1, 512));
  app.add_option(
         "--capacity", flags->problems.capacity,
         "Blocks of 32 tokens of a problem's history that take part while it is solved; 0: all")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  AddHistoryFlags(app, *flags);
  app.add_flag("--no-calibration", flags->no_calibration,
               "The channels of K and V are not measured: scale 1, center 0");
  app.add_option("--json", flags->json, "Write everything measured to this file");
  return [flags] { return BenchQuality(*flags); };
}

}  // namespace

Command AddBench(CLI::App& app) {
  app.require_subcommand(1);
  CLI::App* engine = app.add_subcommand(
      "engine", "Replay a workload under several policies: waiting, speed, states");
  CLI::App* quality = app.add_subcommand(
      "quality", "What states below 16 bits do to predictions and to right answers");
  const Command run_engine = AddBenchEngine(*engine);
  const Command run_quality = AddBenchQuality(*quality);
  return [=] { return engine->parsed() ? run_engine() : run_quality(); };
}

}  // namespace pliant
