#include "cli/options.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/host_memory.h"
#include "base/size.h"
#include "cli/progress.h"
#include "model/growth_weights.h"
#include "server/json.h"

#if defined(PLIANT_CUDA)
#include "backend/cuda/cuda_backend.h"
#endif

namespace pliant {
namespace {

constexpr const char* kDefaultModel = "SmolLM2-135M-Instruct.Q4_1.gguf";

Result<KvOptions> MakeKvOptions(const EngineFlags& flags, const Backend& backend) {
  KvOptions kv;
  const std::optional<std::uint64_t> available = AvailableHostMemory();
  constexpr std::uint64_t kWhenUnknown = std::uint64_t{4} << 30;
  const std::uint64_t free = available.value_or(kWhenUnknown);
  if (flags.kv_memory == "auto") {
    // A quarter of what is free now, at most 1 GiB on a CPU; on a device most of what the weights
    // left.
    const DeviceInfo info = backend.Info();
    kv.memory_bytes = backend.Name() == "cuda"
                          ? static_cast<std::uint64_t>(static_cast<double>(info.memory_free) * 0.85)
                          : std::min<std::uint64_t>(std::uint64_t{1} << 30, free / 4);
  } else {
    const Result<std::uint64_t> bytes = ParseSize(flags.kv_memory);
    if (!bytes.ok()) return bytes.status().WithContext("--kv-memory");
    kv.memory_bytes = *bytes;
  }
  const std::uint64_t pool = backend.Name() == "cuda" ? 0 : kv.memory_bytes;  // of host memory
  PLIANT_ASSIGN_OR_RETURN(kv.policy, ParseKvPolicy(flags.policy));
  if (flags.exact_store == "auto") {
    // Enough for the low planes of a cache that is full at its floor (floor 4: three times the KV
    // memory), out of host memory that is free.
    const auto floor = static_cast<std::uint64_t>(flags.kv_floor);
    const std::uint64_t wanted = kv.memory_bytes * std::max<std::uint64_t>(1, (16 - floor) / floor);
    const std::uint64_t bytes = std::min({wanted, free / 4, free - std::min(pool, free)});
    constexpr std::uint64_t kLeast = 1 << 20;  // less is of no use
    if (KeepsExactCopies(kv.policy) && bytes >= kLeast) {
      kv.store = {.kind = StoreSpec::Kind::kRam, .path = "", .bytes = bytes};
    }
  } else {
    Result<StoreSpec> store = ParseStoreSpec(flags.exact_store);
    if (!store.ok()) return store.status().WithContext("--exact-store");
    kv.store = *std::move(store);
  }
  // Both fill up as requests come: what could not be held then is refused now. (A GPU judges its
  // own memory.)
  const std::uint64_t store = kv.store.kind == StoreSpec::Kind::kRam ? kv.store.bytes : 0;
  if (available && (pool > *available || store > *available - pool)) {
    return OutOfMemory("KV memory of " + FormatSize(pool) + " and an exact store of " +
                       FormatSize(store) + " pass the " + FormatSize(*available) +
                       " of memory available: lower --kv-memory or --exact-store");
  }
  kv.ceiling_bits = flags.kv_bits;
  kv.floor_bits = std::min(flags.kv_floor, flags.kv_bits);
  kv.prefix_cache = !flags.no_prefix_cache;
  return kv;
}

}  // namespace

Result<std::unique_ptr<Backend>> MakeNamedBackend(const std::string& name, const CpuOptions& cpu,
                                                  [[maybe_unused]] bool cuda_graphs) {
#if defined(PLIANT_CUDA)
  if (name == "auto" || name == "cuda") {
    Result<std::unique_ptr<Backend>> cuda = MakeCudaBackend({.graphs = cuda_graphs});
    if (cuda.ok() || name == "cuda") return cuda;
    std::fprintf(stderr, "pliant: no GPU (%s); using the CPU\n", cuda.status().message().c_str());
  }
#else
  if (name == "cuda")
    return Unimplemented("this binary was built without CUDA (cmake --preset cuda)");
#endif
  if (name == "ref") return MakeReferenceBackend();
  return MakeCpuBackend(cpu);
}

CLI::Validator Between(double low, double high) {
  char range[80];
  std::snprintf(range, sizeof range, "[%g - %g]", low, high);
  return CLI::Validator(
      [low, high, text = std::string(range)](std::string& word) -> std::string {
        double value = 0;
        if (CLI::detail::lexical_cast(word, value) && value >= low && value <= high) return {};
        return "Value " + word + " not in range " + text;
      },
      "in " + std::string(range));
}

Result<std::string> ReadText(const std::string& path, std::size_t limit) {
  const std::string name = path == "-" ? "standard input" : path;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> opened(
      path == "-" ? nullptr : std::fopen(path.c_str(), "rb"),
      [](std::FILE* file) { return file ? std::fclose(file) : 0; });
  if (path != "-" && !opened) return NotFound(name + ": " + std::strerror(errno));
  std::FILE* in = path == "-" ? stdin : opened.get();
  std::string text;
  char buffer[1 << 16];
  errno = 0;
  for (std::size_t got; (got = std::fread(buffer, 1, sizeof buffer, in)) > 0;) {
    text.append(buffer, got);
    if (text.size() > limit) return TooLarge(name + ": more than " + FormatSize(limit));
  }
  if (std::ferror(in) != 0) return IoError(name + ": " + std::strerror(errno));
  return text;
}

void ModelFlags::AddTo(CLI::App& app) {
  app.add_option(
      "MODEL", model,
      "GGUF file or Hugging Face folder (default: SmolLM2-135M-Instruct, fetched by ./dev model)");
  app.add_option("--chat-template", chat_template,
                 "Jinja file that replaces the model's own chat template");
  app.add_flag("--random-weights", random_weights,
               "Run a folder's config.json with made-up weights (for speed work)");
}

void EngineFlags::AddTo(CLI::App& app) {
  app.add_option("--backend", backend, "auto, cpu, cuda or ref (the slow oracle)")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "cpu", "cuda", "ref"}));
  app.add_option("--threads", threads, "Compute threads; 0: one a core")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  app.add_option("--kv-memory", kv_memory,
                 "Bytes for the KV cache, e.g. 512MiB; auto: a quarter of free memory, at most "
                 "1GiB (CPU), or 85 % of what the weights leave (GPU)")
      ->capture_default_str();
  app.add_option("--kv-bits", kv_bits, "Bits a KV element is stored with when memory is ample")
      ->capture_default_str()
      ->check(CLI::IsMember({16, 12, 8}));
  app.add_option("--kv-floor", kv_floor,
                 "Bits below which pressure never pushes a block, unless a request asks for more")
      ->capture_default_str()
      ->check(CLI::IsMember({16, 12, 8, 4}));
  app.add_option("--policy", policy,
                 "What happens when KV memory runs short: full, offload, elastic or pliant; "
                 "growpage and budget: "
                 "histories are cut for good")
      ->capture_default_str()
      ->check(CLI::IsMember({"full", "offload", "elastic", "pliant", "growpage", "budget"}));
  app.add_option("--kv-capacity", kv_capacity,
                 "How much of its history a request attends to unless it says otherwise: full, "
                 "grow, or tokens; "
                 "auto: full, with --policy growpage grow, with budget 1024")
      ->capture_default_str();
  app.add_option(
         "--kv-kept-bits", kv_kept_bits,
         "Bits of tokens that are kept out of dropped blocks (8/4: 8 of K, 4 of V), but not "
         "fewer than the floor; auto: 8/4 if they can come back whole, else 16")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "16", "12", "8", "8/4", "4"}));
  app.add_flag("--no-kv-returns", no_kv_returns,
               "What leaves a request's attention for its capacity does not come back");
  app.add_option("--kv-grow-weights", kv_grow_weights,
                 "Where histories are cut for good: file of weights fitted to the model "
                 "(bench/fit_signal.py) that tell when a growing capacity grows; without: the "
                 "divergence of the queries");
  app.add_option("--exact-store", exact_store,
                 "Where exact copies of cache blocks go: none, ram:SIZE, file:PATH:SIZE; auto: "
                 "RAM, as large as the KV memory, or three times that with a floor of 4 bits")
      ->capture_default_str();
  app.add_flag("--no-prefix-cache", no_prefix_cache,
               "Do not share KV blocks between prompts that start alike");
  app.add_flag("--no-calibration", no_calibration,
               "Skip measuring the channels of K and V at start (less exact below 16 bits)");
  app.add_option("--context", context, "Longest prompt + answer in tokens; 0: the model's own")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 24));
  app.add_option("--max-batch-tokens", max_batch_tokens,
                 "Tokens of one step; prompts are cut into chunks of this size; 0: 512 on a CPU, "
                 "2048 on a GPU")
      ->capture_default_str()
      ->check(CLI::Range(16, 16384) | CLI::IsMember({0}));
  app.add_option("--max-running", max_running,
                 "Requests decoded at once; 0: 64 on a CPU, 256 on a GPU")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096));
#if defined(PLIANT_CUDA)
  app.add_flag("--no-cuda-graphs", no_cuda_graphs, "Launch every step's kernels one by one");
  app.add_flag("--no-steps-ahead", no_steps_ahead,
               "Plan each step when the one before has ended, not while it runs");
#endif
  app.add_option("--max-queue", max_waiting, "Requests that may wait; beyond it clients get 429")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 20));
}

std::string DefaultModelPath() {
  namespace fs = std::filesystem;
  std::vector<fs::path> folders;
  if (const char* dir = std::getenv("PLIANT_MODEL_DIR")) folders.emplace_back(dir);
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (!error)
    folders.push_back(self.parent_path().parent_path().parent_path() / ".cache" / "models");
  if (const char* home = std::getenv("HOME"))
    folders.push_back(fs::path(home) / ".cache" / "pliant" / "models");
  for (const fs::path& folder : folders) {
    if (fs::exists(folder / kDefaultModel, error)) return (folder / kDefaultModel).string();
  }
  return "";
}

Result<OpenedModel> OpenModel(const ModelFlags& flags) {
  OpenedModel opened;
  opened.path = flags.model.empty() ? DefaultModelPath() : flags.model;
  if (opened.path.empty())
    return NotFound("the default model is not here: run ./dev model, or name a model");
  PLIANT_ASSIGN_OR_RETURN(opened.model,
                          Model::Open(opened.path, {.random_weights = flags.random_weights}));
  PLIANT_ASSIGN_OR_RETURN(Vocabulary vocabulary, opened.model->ReadVocabulary());
  PLIANT_ASSIGN_OR_RETURN(opened.tokenizer, Tokenizer::Create(std::move(vocabulary)));
  std::string source = opened.model->chat_template();
  if (!flags.chat_template.empty()) {
    PLIANT_ASSIGN_OR_RETURN(source,
                            ReadText(flags.chat_template, TemplateLimits{}.max_source_bytes));
    if (source.empty())
      return InvalidArgument(flags.chat_template + ": the chat template is empty");
  }
  if (!source.empty()) {
    Result<std::unique_ptr<ChatTemplate>> parsed = ChatTemplate::Parse(source);
    if (parsed.ok()) {
      opened.chat_template = *std::move(parsed);
    } else if (!flags.chat_template.empty()) {
      return parsed.status().WithContext(flags.chat_template);
    } else {
      std::fprintf(
          stderr,
          "pliant: the model's chat template is not usable (%s); chat needs --chat-template\n",
          parsed.status().message().c_str());
    }
  }
  return opened;
}

namespace {

Status SetHistory(const EngineFlags& flags, const ModelConfig& config, HistoryOptions* history) {
  const std::string capacity = flags.kv_capacity != "auto"  ? flags.kv_capacity
                               : flags.policy == "growpage" ? "grow"
                               : flags.policy == "budget"   ? "1024"
                                                            : "full";
  Result<Capacity> parsed = ParseCapacity(capacity);
  if (!parsed.ok()) return parsed.status().WithContext("--kv-capacity");
  history->default_capacity = *parsed;
  PLIANT_ASSIGN_OR_RETURN(const KvPolicy policy, ParseKvPolicy(flags.policy));
  const bool copies = KeepsExactCopies(policy) && flags.exact_store != "none";
  // Without exact copies nothing can return.
  if (flags.no_kv_returns || !copies || flags.policy == "growpage" || flags.policy == "budget") {
    *history = DroppingForGood(*history);
  }
  if (!flags.kv_grow_weights.empty()) {
    if (history->retention.returns) {
      return InvalidArgument(
          "--kv-grow-weights: what is dropped can return here, and then returns tell when to grow; "
          "add --no-kv-returns or --policy growpage");
    }
    auto weights = OpenGrowthWeights(flags.kv_grow_weights, config);
    if (!weights.ok()) return weights.status().WithContext("--kv-grow-weights");
    *history = GrowingBy(*history, *std::move(weights));
  }
  const std::string kept = flags.kv_kept_bits != "auto" ? flags.kv_kept_bits
                           : history->retention.returns ? "8/4"
                                                        : "16";
  const int k_bits = std::atoi(kept.c_str());
  const int v_bits = kept == "8/4" ? 4 : k_bits;
  for (Level level = 0; level < kLevelCount; ++level) {
    const PlaneCount planes = kLevels[level];
    if (planes.k * kBitsPerPlane == k_bits && planes.v * kBitsPerPlane == v_bits)
      history->kept_level = level;
  }
  return Status::Ok();
}

}  // namespace

Result<std::unique_ptr<Engine>> StartEngine(const EngineFlags& flags, OpenedModel& opened) {
  PLIANT_ASSIGN_OR_RETURN(
      std::unique_ptr<Backend> backend,
      MakeNamedBackend(flags.backend, {.threads = flags.threads}, !flags.no_cuda_graphs));
  const bool gpu = backend->Name() == "cuda";
  EngineOptions options;
  options.sched.max_batch_tokens = flags.max_batch_tokens != 0 ? flags.max_batch_tokens
                                   : gpu                       ? 2048
                                                               : 512;
  options.sched.max_running = flags.max_running != 0 ? flags.max_running : gpu ? 256 : 64;
  options.sched.max_running = std::min(options.sched.max_running, options.sched.max_batch_tokens);
  options.sched.max_waiting = flags.max_waiting;
  options.sched.max_context = flags.context == 0
                                  ? opened.model->config().context_length
                                  : std::min(flags.context, opened.model->config().context_length);
  PLIANT_RETURN_IF_ERROR(SetHistory(flags, opened.model->config(), &options.sched.history));
  options.calibrate = !flags.no_calibration;
  options.steps_ahead = !flags.no_steps_ahead;
  {
    Progress progress("loading " + std::filesystem::path(opened.path).filename().string());
    PLIANT_RETURN_IF_ERROR(opened.model->Load(
        *backend, options.sched.max_batch_tokens, options.sched.max_running,
        [&](std::uint64_t done, std::uint64_t total) {
          progress.Update(done, total, FormatSize(done) + " of " + FormatSize(total));
        }));
  }
  PLIANT_ASSIGN_OR_RETURN(options.kv, MakeKvOptions(flags, *backend));
  return MakeEngine(options, std::move(backend), opened.model.get(), opened.tokenizer.get());
}

Result<std::string> RenderChat(const OpenedModel& opened, const std::string& messages_json,
                               bool add_generation_prompt) {
  if (opened.chat_template == nullptr)
    return Unimplemented("this model has no chat template: give one with --chat-template");
  Json context, input;
  if (const auto error = ParseBoundedJson(messages_json, {}, &input))
    return InvalidArgument("messages: " + error->message);
  if (input.is_object()) {
    context = std::move(input);
  } else {
    context["messages"] = std::move(input);
  }
  if (!context.contains("messages") || !context["messages"].is_array()) {
    return InvalidArgument(
        "a JSON list of messages is needed, or an object with one under \"messages\"");
  }
  if (!context.contains("add_generation_prompt"))
    context["add_generation_prompt"] = add_generation_prompt;
  const Vocabulary& vocabulary = opened.tokenizer->vocabulary();
  const auto name = [&](const char* key, const std::optional<TokenId>& id) {
    if (!context.contains(key))
      context[key] = id ? std::string(opened.tokenizer->TokenBytes(*id, true)) : std::string();
  };
  name("bos_token", vocabulary.bos);
  name("eos_token", vocabulary.eos);
  return opened.chat_template->Render(context);
}

int Fail(const Status& status) {
  // Names of files and messages of templates may hold anything.
  std::string line = Excerpt(status.message(), 2000);
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  std::fprintf(stderr, "pliant: %s\n", line.c_str());
  return 1;
}

}  // namespace pliant
