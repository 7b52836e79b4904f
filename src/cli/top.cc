#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "base/size.h"
#include "cli/commands.h"
#include "cli/http_get.h"
#include "cli/options.h"

namespace pliant {
namespace {

using Json = nlohmann::json;

struct TopFlags {
  std::string host = "127.0.0.1", api_key;
  int port = 8080;
  double seconds = 1;
  bool once = false;
};

// One character a block, from whole to gone.
char Glyph(const std::string& state) {
  if (state == "16/16") return '#';
  if (state == "12/12" || state == "12/8") return '+';
  if (state == "8/8") return '=';
  if (state == "0/0") return '.';
  return '-';
}

// "16/16*4 8/8*2" to "####==", scaled to at most `width` characters.
std::string DrawMap(const std::string& runs, std::size_t width) {
  std::string blocks;
  for (std::size_t at = 0; at < runs.size();) {
    const std::size_t end = std::min(runs.find(' ', at), runs.size());
    const std::size_t star = runs.find('*', at);
    if (star >= end) break;
    const long count = std::strtol(runs.c_str() + star + 1, nullptr, 10);
    blocks.append(static_cast<std::size_t>(std::clamp(count, 0L, 1000000L)),
                  Glyph(runs.substr(at, star - at)));
    at = end + 1;
  }
  if (blocks.size() <= width) return blocks;
  std::string scaled;
  for (std::size_t i = 0; i < width; ++i) scaled += blocks[i * blocks.size() / width];
  return scaled;
}

std::string Bar(double share, int width) {
  const int filled = static_cast<int>(std::clamp(share, 0.0, 1.0) * width + 0.5);
  return std::string(filled, '#') + std::string(width - filled, ' ');
}

std::string Draw(const Json& kv) {
  std::string out;
  char line[256];
  const auto add = [&](auto... values) {
    std::snprintf(line, sizeof(line), values...);
    out += line;
  };
  const Json& pages = kv.at("pages");
  const double total = std::max<double>(1, pages.at("total"));
  const double cached = pages.at("cached").get<double>() / total;
  const double used = 1 - pages.at("free").get<double>() / total - cached;
  add("pages   [%s] %3.0f %% used, %3.0f %% cache, of %s\n", Bar(used, 40).c_str(), used * 100,
      cached * 100,
      FormatSize(pages.at("total").get<std::uint64_t>() * pages.at("bytes").get<std::uint64_t>())
          .c_str());
  add("running %lld   waiting %lld   offloaded %lld   preempted %lld   policy %s\n",
      kv.at("running").get<long long>(), kv.at("waiting").get<long long>(),
      kv.at("offloaded").get<long long>(), kv.at("preemptions").get<long long>(),
      kv.at("policy").get<std::string>().c_str());
  out += "blocks ";
  for (const auto& [state, count] : kv.at("blocks").at("by_state").items())
    out += " " + state + ": " + count.dump();
  add("   demoted %lld, restored %lld\n", kv.at("blocks").at("demotions").get<long long>(),
      kv.at("blocks").at("restores").get<long long>());
  add("store   %s of %s\n\n",
      FormatSize(kv.at("store").at("bytes_used").get<std::uint64_t>()).c_str(),
      FormatSize(kv.at("store").at("bytes_total").get<std::uint64_t>()).c_str());
  out +=
      "request    state       prompt  output  blocks (# 16 bits, + 12, = 8, - below, . in the "
      "store)\n";
  int shown = 0;
  for (const Json& request : kv.at("requests")) {
    if (++shown > 30) break;
    add("%-10lld %-10s %7lld %7lld  ", request.at("id").get<long long>(),
        request.at("state").get<std::string>().c_str(),
        request.at("prompt_tokens").get<long long>(), request.at("produced").get<long long>());
    out += DrawMap(request.at("map"), 60) + "\n";
  }
  if (kv.at("requests").size() > 30) add("... and %zu more\n", kv.at("requests").size() - 30);
  if (!kv.at("cached_map").get<std::string>().empty())
    out += "prefix cache: " + DrawMap(kv.at("cached_map"), 60) + "\n";
  return out;
}

int Top(const TopFlags& flags) {
  const bool live = !flags.once && isatty(STDOUT_FILENO) != 0;
  while (true) {
    Result<std::string> body = HttpGet(flags.host, flags.port, "/v1/kv", flags.api_key);
    if (!body.ok()) return Fail(body.status());
    std::string text;
    try {
      text = Draw(Json::parse(*body));
    } catch (const nlohmann::json::exception&) {
      return Fail(DataLoss(flags.host + ":" + std::to_string(flags.port) +
                           "/v1/kv is not what this program knows"));
    }
    if (live) std::printf("\033[H\033[2J");
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    if (!live) return 0;
    std::this_thread::sleep_for(std::chrono::duration<double>(flags.seconds));
  }
}

}  // namespace

Command AddTop(CLI::App& app) {
  auto flags = std::make_shared<TopFlags>();
  app.add_option("--host", flags->host, "Where the server listens")->capture_default_str();
  app.add_option("--port", flags->port, "Its port")
      ->capture_default_str()
      ->check(CLI::Range(1, 65535));
  app.add_option("--api-key", flags->api_key, "Its API key, if it asks for one");
  app.add_option("--every", flags->seconds, "Seconds between pictures")
      ->capture_default_str()
      ->check(Between(0.1, 3600.0));
  app.add_flag("--once", flags->once, "Print one picture and end");
  return [flags] { return Top(*flags); };
}

}  // namespace pliant
