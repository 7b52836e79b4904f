// Room: cli. The pliant program: picks the command and runs it.
#include <CLI/CLI.hpp>

#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app("Pliant: an LLM server whose KV cache gives up bits before it makes requests wait.", "pliant");
  app.set_version_flag("--version", "pliant 0.1.0");
  app.require_subcommand(1);
  std::string log_level = "warn";
  app.add_option("--log", log_level, "Log level on standard error: debug, info, warn, error or off")->capture_default_str();
  app.fallthrough();

  std::vector<std::pair<CLI::App*, pliant::Command>> commands;
  const auto add = [&](const char* name, const char* about, pliant::Command (*setup)(CLI::App&)) {
    CLI::App* command = app.add_subcommand(name, about);
    commands.emplace_back(command, setup(*command));
  };
  add("serve", "Serve a model over the OpenAI API", pliant::AddServe);
  add("run", "Answer one prompt, or chat in the terminal", pliant::AddRun);
  add("inspect", "Print what a model is: sizes, types, bytes of KV per token", pliant::AddInspect);
  add("tokenize", "Text on standard input to token ids, or back", pliant::AddTokenize);
  add("template", "Render a JSON list of messages with the model's chat template", pliant::AddTemplate);
  add("top", "Watch a server's KV cache in the terminal", pliant::AddTop);
  add("bench", "Measure: replay a workload under several policies, or the quality of cache states", pliant::AddBench);
  CLI11_PARSE(app, argc, argv);

  if (!pliant::InitLogging(log_level)) {
    std::fprintf(stderr, "pliant: --log takes debug, info, warn, error or off\n");
    return 2;
  }
  std::signal(SIGPIPE, SIG_IGN);
  for (const auto& [command, run] : commands) {
    if (command->parsed()) return run();
  }
  return 2;
}
