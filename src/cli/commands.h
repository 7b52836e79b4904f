// Room: cli. One function a command; each adds its options to the app and returns what to run. Main thread.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>

namespace pliant {

using Command = std::function<int()>;

Command AddServe(CLI::App& app);
Command AddRun(CLI::App& app);
Command AddInspect(CLI::App& app);
Command AddTokenize(CLI::App& app);
Command AddTemplate(CLI::App& app);
Command AddTop(CLI::App& app);
Command AddBench(CLI::App& app);

}  // namespace pliant
