// Room: cli. The pliant program: picks the command and runs it.
#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "cli/commands.h"

namespace {

// Started with a standard stream closed, the program's next file would take its number: a model as
// standard input.
void OccupyStandardStreams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF)
      (void)!open("/dev/null", O_RDONLY);  // writing to it fails, as it should
  }
}

// What could not be written was not done. A reader that has gone away needs no message.
int FinishOutput(int code) {
  const bool failed_before = std::ferror(stdout) != 0;
  errno = 0;
  const bool failed_now = std::fflush(stdout) != 0;
  if (!failed_before && !failed_now) return code;
  if (code == 0 && failed_now && errno != EPIPE)
    std::fprintf(stderr, "pliant: standard output: %s\n", std::strerror(errno));
  return code == 0 ? 1 : code;
}

// One line: what was wrong, and where the options are told.
int RefuseUsage(const CLI::App& app, const CLI::Error& error) {
  const CLI::App* at = &app;
  std::string path = "pliant";
  while (!at->get_subcommands().empty()) {
    at = at->get_subcommands().front();
    path += " " + at->get_name();
  }
  std::string what = error.what();
  if (error.get_name() == "RequiredError" && at->get_require_subcommand_min() > 0 &&
      at->get_subcommands().empty()) {
    const std::vector<std::string> left = at->remaining();
    what = left.empty() ? "a command is needed"
                        : "there is no command '" + left.front().substr(0, 80) + "'";
    const char* between = ": ";
    for (const CLI::App* command : at->get_subcommands([](const CLI::App*) { return true; })) {
      what += between + command->get_name();
      between = ", ";
    }
  }
  std::fprintf(stderr, "pliant: %s (%s --help tells the options)\n", what.c_str(), path.c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  OccupyStandardStreams();
  CLI::App app("Pliant: an LLM server whose KV cache gives up bits before it makes requests wait.",
               "pliant");
  app.set_version_flag("--version", "pliant 0.1.0");
  app.require_subcommand(1);
  std::string log_level = "warn";
  app.add_option("--log", log_level, "Log level on standard error: debug, info, warn, error or off")
      ->capture_default_str();
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
  add("template", "Render a JSON list of messages with the model's chat template",
      pliant::AddTemplate);
  add("top", "Watch a server's KV cache in the terminal", pliant::AddTop);
  add("bench", "Measure: replay a workload under several policies, or the quality of cache states",
      pliant::AddBench);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) return RefuseUsage(app, error);
    return FinishOutput(app.exit(error));  // --help, --version
  }

  if (!pliant::InitLogging(log_level)) {
    std::fprintf(stderr, "pliant: --log takes debug, info, warn, error or off\n");
    return 2;
  }
  std::signal(SIGPIPE, SIG_IGN);
  for (const auto& [command, run] : commands) {
    if (command->parsed()) return FinishOutput(run());
  }
  return 2;
}
