#include "replay/workload.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "replay/line_reader.h"

namespace pliant {
namespace {

constexpr std::int64_t kMaxBlockId = std::int64_t{1}
                                     << 40;  // its product in WorkloadToken stays in 64 bits

Result<std::int64_t> Integer(const nlohmann::json& object, const char* key, std::int64_t low,
                             std::int64_t high) {
  const auto found = object.find(key);
  if (found == object.end()) return InvalidArgument(std::string("\"") + key + "\" is missing");
  const bool fits = found->is_number_unsigned()
                        ? found->get<std::uint64_t>() <= static_cast<std::uint64_t>(high)
                        : found->is_number_integer() && found->get<std::int64_t>() <= high;
  if (!fits || found->get<std::int64_t>() < low) {
    return InvalidArgument(std::string("\"") + key + "\" must be a whole number from " +
                           std::to_string(low) + " to " + std::to_string(high));
  }
  return found->get<std::int64_t>();
}

Result<WorkloadRequest> ParseLine(const std::string& line, const WorkloadLimits& limits) {
  const nlohmann::json object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return InvalidArgument("not a JSON object");
  WorkloadRequest request;
  const auto arrival = object.find("arrival");
  if (arrival == object.end()) return InvalidArgument("\"arrival\" is missing");
  request.arrival = arrival->is_number() ? arrival->get<double>() : -1;
  if (!std::isfinite(request.arrival) || request.arrival < 0 || request.arrival > limits.seconds) {
    return InvalidArgument("\"arrival\" must be a number of seconds from 0 to " +
                           std::to_string(static_cast<std::int64_t>(limits.seconds)));
  }
  PLIANT_ASSIGN_OR_RETURN(request.input, Integer(object, "input", 1, limits.tokens));
  PLIANT_ASSIGN_OR_RETURN(request.output, Integer(object, "output", 1, limits.tokens));
  const auto blocks = object.find("blocks");
  if (blocks == object.end() || !blocks->is_array()) {
    return InvalidArgument("\"blocks\" must be a list of block ids");
  }
  const auto needed =
      static_cast<std::size_t>((request.input + kWorkloadBlockTokens - 1) / kWorkloadBlockTokens);
  if (blocks->size() != needed) {
    return InvalidArgument("\"blocks\" has " + std::to_string(blocks->size()) + " ids, but " +
                           std::to_string(request.input) + " tokens are " + std::to_string(needed) +
                           " blocks");
  }
  for (const nlohmann::json& block : *blocks) {
    if (!block.is_number_integer()) return InvalidArgument("a block id is not a whole number");
    const bool fits = block.is_number_unsigned()
                          ? block.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMaxBlockId)
                          : block.get<std::int64_t>() >= 0;
    if (!fits) return InvalidArgument("a block id is not from 0 to " + std::to_string(kMaxBlockId));
    request.blocks.push_back(block.get<std::int64_t>());
  }
  return request;
}

// The next number of a colon-separated list, which it is removed from.
template <typename T>
bool TakeNumber(std::string_view& text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  if (!text.empty()) {
    if (text.front() != ':' || text.size() == 1) return false;
    text.remove_prefix(1);
  }
  return true;
}

}  // namespace

Result<std::vector<WorkloadRequest>> ParseWorkload(std::istream& in, const WorkloadLimits& limits) {
  std::vector<WorkloadRequest> workload;
  std::string line;
  for (std::int64_t number = 1; ReadLine(in, line, limits.line_bytes); ++number) {
    const std::string place = "line " + std::to_string(number);
    if (line.size() > limits.line_bytes) {
      return TooLarge(place + ": longer than " + std::to_string(limits.line_bytes) + " bytes");
    }
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (workload.size() == limits.requests) {
      return TooLarge(place + ": more than " + std::to_string(limits.requests) + " requests");
    }
    Result<WorkloadRequest> request = ParseLine(line, limits);
    if (!request.ok()) return request.status().WithContext(place);
    workload.push_back(*std::move(request));
  }
  if (workload.empty()) return InvalidArgument("no requests");
  std::stable_sort(
      workload.begin(), workload.end(),
      [](const WorkloadRequest& a, const WorkloadRequest& b) { return a.arrival < b.arrival; });
  return workload;
}

Result<std::vector<WorkloadRequest>> ReadWorkload(const std::string& path,
                                                  const WorkloadLimits& limits) {
  std::ifstream in(path, std::ios::binary);
  if (!in || in.peek() == std::ifstream::traits_type::eof()) {
    return NotFound(path + ": cannot be read, or is empty");
  }
  Result<std::vector<WorkloadRequest>> workload = ParseWorkload(in, limits);
  if (!workload.ok()) return workload.status().WithContext(path);
  return workload;
}

Result<std::vector<WorkloadRequest>> MakeSyntheticWorkload(std::string_view spec,
                                                           std::uint64_t seed) {
  const WorkloadLimits limits;
  std::string_view rest = spec;
  std::int64_t count = 0, input = 0, output = 0;
  double rate = -1;
  if (!TakeNumber(rest, count) || !TakeNumber(rest, input) || !TakeNumber(rest, output) ||
      !TakeNumber(rest, rate) || !rest.empty()) {
    return InvalidArgument("\"" + std::string(spec) +
                           "\" is not N:INPUT:OUTPUT:RATE, e.g. 64:512:128:4");
  }
  if (count < 1 || count > static_cast<std::int64_t>(limits.requests) || input < 1 ||
      input > limits.tokens || output < 1 || output > limits.tokens || !(rate >= 0) || rate > 1e6) {
    return InvalidArgument("\"" + std::string(spec) + "\": N from 1 to " +
                           std::to_string(limits.requests) + ", INPUT and OUTPUT from 1 to " +
                           std::to_string(limits.tokens) + ", RATE from 0 to 1000000 a second");
  }
  std::mt19937_64 random(seed);
  std::vector<WorkloadRequest> workload(static_cast<std::size_t>(count));
  const std::int64_t blocks = (input + kWorkloadBlockTokens - 1) / kWorkloadBlockTokens;
  double now = 0;
  std::int64_t next_block = 0;
  for (WorkloadRequest& request : workload) {
    request.arrival = now;
    request.input = input;
    request.output = output;
    for (std::int64_t b = 0; b < blocks; ++b) request.blocks.push_back(next_block++);
    // Not std::exponential_distribution, whose numbers differ from one library to the next.
    const double unit = static_cast<double>(random() >> 11) * 0x1p-53;
    if (rate > 0) now -= std::log1p(-unit) / rate;
  }
  return workload;
}

void CutWorkload(std::vector<WorkloadRequest>& workload, const WorkloadCut& cut) {
  if (cut.limit > 0 && workload.size() > cut.limit) workload.resize(cut.limit);
  for (WorkloadRequest& request : workload) {
    request.arrival *= cut.scale_time;
    if (cut.max_output > 0) request.output = std::min(request.output, cut.max_output);
    if (cut.max_input > 0 && request.input > cut.max_input) {
      request.input = cut.max_input;
      request.blocks.resize(static_cast<std::size_t>((request.input + kWorkloadBlockTokens - 1) /
                                                     kWorkloadBlockTokens));
    }
  }
}

TokenId WorkloadToken(std::int64_t block, std::int64_t index, std::int64_t vocabulary) {
  constexpr std::int64_t kReserved = 1000, kSpread = 100'000;
  const std::int64_t spread = (block * 7919 + index * 104'729 + 17) % kSpread;
  if (vocabulary >= kReserved + kSpread) return static_cast<TokenId>(kReserved + spread);
  if (vocabulary <= 2 * kReserved) return static_cast<TokenId>(spread % vocabulary);
  return static_cast<TokenId>(kReserved + spread % (vocabulary - kReserved));
}

std::vector<TokenId> WorkloadPrompt(const WorkloadRequest& request, std::int64_t vocabulary) {
  std::vector<TokenId> prompt;
  prompt.reserve(static_cast<std::size_t>(request.input));
  for (std::int64_t i = 0; i < request.input; ++i) {
    prompt.push_back(
        WorkloadToken(request.blocks[static_cast<std::size_t>(i / kWorkloadBlockTokens)],
                      i % kWorkloadBlockTokens, vocabulary));
  }
  return prompt;
}

}  // namespace pliant
