// Room: cli. What the commands share: options with their defaults, and the parts of a model opened
// by them. Main thread.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "base/status.h"
#include "engine/engine_factory.h"
#include "model/model.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace pliant {

struct ModelFlags {
  std::string model;          // path; empty: the default model
  std::string chat_template;  // path of a file that replaces the model's own
  bool random_weights = false;
  void AddTo(CLI::App& app);
};

struct EngineFlags {
  std::string backend = "auto";
  int threads = 0;
  std::string kv_memory = "auto";
  int kv_bits = 16;
  int kv_floor = 8;
  std::string policy = "pliant";
  std::string exact_store = "auto";
  std::string kv_capacity = "auto";
  bool no_kv_returns = false;
  std::string kv_kept_bits = "auto";
  std::string kv_grow_weights;
  bool no_prefix_cache = false;
  bool no_calibration = false;
  std::int64_t context = 0;
  int max_batch_tokens = 0;  // 0: by the backend
  int max_running = 0;       // 0: by the backend
  int max_waiting = 256;
  bool no_cuda_graphs = false, no_steps_ahead = false;
  void AddTo(CLI::App& app);
};

/// A model file or folder with its text side; weights are still on disk.
struct OpenedModel {
  std::unique_ptr<Model> model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat_template;  // null when the model has none
  std::string path;
};

/// Where the default model lies ("" when it is nowhere): $PLIANT_MODEL_DIR, the checkout's
/// .cache/models, ~/.cache/pliant/models.
std::string DefaultModelPath();

Result<OpenedModel> OpenModel(const ModelFlags& flags);

/// Loads the weights with progress and starts the engine.
Result<std::unique_ptr<Engine>> StartEngine(const EngineFlags& flags, OpenedModel& opened);

/// "cpu", "cuda", "ref", or "auto": the GPU if there is a usable one, else the CPU, and standard
/// error says so in one line.
Result<std::unique_ptr<Backend>> MakeNamedBackend(const std::string& name, const CpuOptions& cpu,
                                                  bool cuda_graphs = true);

/// A check for options: a number from `low` to `high`. Unlike CLI::Range it does not let "nan"
/// through.
CLI::Validator Between(double low, double high);

/// A whole file, or standard input for "-"; TooLarge past `limit` bytes, IoError for what cannot be
/// read (a folder, ...).
Result<std::string> ReadText(const std::string& path, std::size_t limit);

/// `messages_json`: a list of messages, or an object with one under "messages", bounded as the
/// server bounds its bodies. The template also gets bos_token, eos_token and add_generation_prompt
/// unless the object has them.
Result<std::string> RenderChat(const OpenedModel& opened, const std::string& messages_json,
                               bool add_generation_prompt);

/// Prints "pliant: message" as one line on standard error; returns the exit code.
int Fail(const Status& status);

}  // namespace pliant
