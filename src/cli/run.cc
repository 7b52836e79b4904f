#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "server/chat_prompt.h"

namespace pliant {
namespace {

struct RunFlags {
  ModelFlags model;
  EngineFlags engine;
  std::string prompt, system;
  bool raw = false;
  SamplingParams sampling{.temperature = 0.7f, .top_p = 0.95f};
  std::int64_t seed = -1;
  std::int64_t max_tokens = 0;
};

std::atomic<bool> interrupted{false};

// Streams one answer to the terminal. Returns its text, or why there is none. Ctrl-C ends the
// answer, and so does an output that takes nothing more.
Result<std::string> Answer(const RunFlags& flags, Engine& engine, std::vector<TokenId> prompt) {
  GenerateRequest request;
  const std::int64_t room = engine.MaxContext() - static_cast<std::int64_t>(prompt.size());
  if (room < 1) {
    return TooLarge("the conversation has " + std::to_string(prompt.size()) +
                    " tokens, but the context is " + std::to_string(engine.MaxContext()));
  }
  const std::uint64_t prompt_size = prompt.size();
  request.prompt = std::move(prompt);
  request.sampling = flags.sampling;
  if (flags.seed >= 0) request.sampling.seed = static_cast<std::uint64_t>(flags.seed);
  request.stop.max_tokens = flags.max_tokens > 0 ? std::min(flags.max_tokens, room) : room;
  request.report_prefill = true;

  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  int write_error = 0;  // errno of the engine's thread
  std::string text;
  FinishReason finish = FinishReason::kStop;
  Status error;
  Progress progress("reading the prompt");
  interrupted = false;
  PLIANT_ASSIGN_OR_RETURN(
      const RequestId id, engine.Submit(std::move(request), [&](RequestId, TokenEvent event) {
        const std::lock_guard lock(mutex);
        if (event.prompt_done > 0)
          progress.Update(static_cast<std::uint64_t>(event.prompt_done), prompt_size, "");
        if (!event.text.empty() || event.finish) progress.Clear();
        std::fwrite(event.text.data(), 1, event.text.size(), stdout);
        if (write_error == 0 && std::fflush(stdout) != 0) write_error = errno;
        text += event.text;
        if (event.finish) {
          done = true;
          finish = *event.finish;
          error = event.error;
          changed.notify_all();
        }
      }));
  std::unique_lock lock(mutex);
  bool cancelled = false;
  while (!done) {
    changed.wait_for(lock, std::chrono::milliseconds(50));
    if ((interrupted || write_error != 0) && !cancelled) {
      cancelled = true;
      engine.Cancel(id);
    }
  }
  if (write_error != 0 && write_error != EPIPE)
    return IoError(std::string("standard output: ") + std::strerror(write_error));
  if (!error.ok()) return error;
  if (finish == FinishReason::kLength && (flags.max_tokens == 0 || flags.max_tokens > room)) {
    std::fprintf(stderr, "\npliant: the answer ends here: prompt and answer may have %lld tokens",
                 static_cast<long long>(engine.MaxContext()));
  }
  return text;
}

// The prompt of a conversation. What the user typed stays ordinary text, markers in it included
// (server/chat_prompt.h).
Result<std::vector<TokenId>> EncodeChat(const OpenedModel& opened,
                                        const nlohmann::ordered_json& messages) {
  const Tokenizer& tokenizer = *opened.tokenizer;
  const auto name = [&](const std::optional<TokenId>& id) {
    return id ? std::string(tokenizer.TokenBytes(*id, true)) : std::string();
  };
  const ChatPrompter prompter(
      &tokenizer, [&](const Json& context) { return opened.chat_template->Render(context); },
      name(tokenizer.vocabulary().bos), name(tokenizer.vocabulary().eos));
  ChatInput input;
  input.messages = messages;
  return prompter.Encode(input);
}

constexpr int kInterruptedCode = 130;  // as shells report an end by Ctrl-C

// Without SA_RESTART, so that Ctrl-C also ends the wait for a line.
void CatchInterrupt() {
  struct sigaction action {};
  action.sa_handler = [](int) { interrupted = true; };
  sigaction(SIGINT, &action, nullptr);
}

int Run(const RunFlags& flags) {
  Result<OpenedModel> opened = OpenModel(flags.model);
  if (!opened.ok()) return Fail(opened.status());
  const bool raw = flags.raw || opened->chat_template == nullptr;
  if (raw && flags.prompt.empty())
    return Fail(InvalidArgument("this needs a prompt: pliant run MODEL \"prompt\""));
  Result<std::unique_ptr<Engine>> engine = StartEngine(flags.engine, *opened);
  if (!engine.ok()) return Fail(engine.status());
  CatchInterrupt();

  if (raw) {
    Result<std::vector<TokenId>> prompt =
        opened->tokenizer->Encode(flags.prompt, {.parse_special = true, .add_bos = true});
    if (!prompt.ok()) return Fail(prompt.status());
    Result<std::string> answer = Answer(flags, **engine, *std::move(prompt));
    if (!answer.ok()) return Fail(answer.status());
    std::printf("\n");
    return interrupted ? kInterruptedCode : 0;
  }
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  if (!flags.system.empty()) messages.push_back({{"role", "system"}, {"content", flags.system}});
  const bool loop = flags.prompt.empty();
  const bool terminal = isatty(STDIN_FILENO) != 0;
  if (loop && terminal)
    std::fprintf(
        stderr,
        "Chat with %s. An empty line, Ctrl-D or Ctrl-C ends it; Ctrl-C in an answer stops that.\n",
        opened->model->config().name.c_str());
  std::string line = flags.prompt;
  while (true) {
    if (loop) {
      interrupted = false;
      if (terminal) std::fprintf(stderr, "> ");
      if (!std::getline(std::cin, line) || line.empty()) {
        if (terminal && interrupted) std::fprintf(stderr, "\n");
        break;
      }
    }
    messages.push_back({{"role", "user"}, {"content", line}});
    Result<std::vector<TokenId>> prompt = EncodeChat(*opened, messages);
    if (!prompt.ok()) return Fail(prompt.status());
    Result<std::string> answer = Answer(flags, **engine, *std::move(prompt));
    if (!answer.ok()) return Fail(answer.status());
    std::printf("\n");
    if (!loop) return interrupted ? kInterruptedCode : 0;
    messages.push_back({{"role", "assistant"}, {"content", *answer}});
  }
  return 0;
}

}  // namespace

Command AddRun(CLI::App& app) {
  auto flags = std::make_shared<RunFlags>();
  flags->model.AddTo(app);
  app.add_option("PROMPT", flags->prompt, "What to answer; without it, a chat in the terminal");
  app.add_option("--system", flags->system, "System message");
  app.add_flag("--raw", flags->raw, "Continue the prompt as plain text, without the chat template");
  app.add_option("--max-tokens", flags->max_tokens,
                 "Longest answer in tokens; 0: what the context leaves")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30));
  app.add_option("--temperature", flags->sampling.temperature, "0 is greedy")
      ->capture_default_str()
      ->check(Between(0.0, 100.0));
  app.add_option("--top-p", flags->sampling.top_p, "Keep the most likely tokens up to this mass")
      ->capture_default_str()
      ->check(Between(0.0, 1.0));
  app.add_option("--top-k", flags->sampling.top_k, "Keep the k most likely tokens; 0: all")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30));
  app.add_option("--min-p", flags->sampling.min_p, "Drop tokens below this share of the likeliest")
      ->capture_default_str()
      ->check(Between(0.0, 1.0));
  app.add_option("--seed", flags->seed, "Same seed, same answer; -1: a new one each time")
      ->capture_default_str();
  flags->engine.AddTo(app);
  return [flags] {
    // `pliant run "a prompt"`: what is no file and has a blank is the prompt of the default model.
    RunFlags fixed = *flags;
    std::string& model = fixed.model.model;
    if (fixed.prompt.empty() && !model.empty() && access(model.c_str(), F_OK) != 0) {
      if (model.find_first_of(" \n") == std::string::npos) {
        return Fail(NotFound(model + ": there is no such file or folder (a prompt of one word "
                                     "needs a model's name before it)"));
      }
      fixed.prompt = std::exchange(model, "");
    }
    return Run(fixed);
  };
}

}  // namespace pliant
