// Room: replay. Workloads: what arrives when. Read from JSON lines, cut down to size, or made up
// from a seed; and the token ids that a workload's prompts stand for. Plain values, any thread.
//
// A line: {"arrival": seconds after the start, "input": prompt tokens, "output": tokens to generate
// exactly, "blocks": [id of each 512-token block of the prompt]}. Equal leading ids mean an equal
// start of the prompt.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/tokenizer.h"

namespace pliant {

/// Prompt tokens that one id of WorkloadRequest::blocks stands for.
inline constexpr std::int64_t kWorkloadBlockTokens = 512;

struct WorkloadRequest {
  double arrival = 0;  // seconds after the start
  std::int64_t input = 0;
  std::int64_t output = 0;
  std::vector<std::int64_t> blocks;  // ceil(input / 512) ids
};

/// What a file may hold at most; beyond it the file is refused, with the line.
struct WorkloadLimits {
  std::size_t line_bytes = std::size_t{1} << 20;
  std::size_t requests = 1'000'000;
  std::int64_t tokens = std::int64_t{1} << 24;  // input, and output, of one request
  double seconds = 1e7;                         // latest arrival
};

/// Requests in order of arrival. InvalidArgument or TooLarge with "line N: ..." for anything that
/// is not a workload; unknown keys are ignored, empty lines skipped. A workload without a request
/// is refused.
Result<std::vector<WorkloadRequest>> ParseWorkload(std::istream& in,
                                                   const WorkloadLimits& limits = {});
/// The same from a file; messages begin with its path.
Result<std::vector<WorkloadRequest>> ReadWorkload(const std::string& path,
                                                  const WorkloadLimits& limits = {});

/// "N:INPUT:OUTPUT:RATE": N requests of INPUT and OUTPUT tokens, Poisson arrivals at RATE a second
/// (0: all at once), no shared prompts. The same text and seed give the same workload everywhere.
Result<std::vector<WorkloadRequest>> MakeSyntheticWorkload(std::string_view spec,
                                                           std::uint64_t seed);

/// How a workload is cut to fit a machine; 0 leaves a value alone.
struct WorkloadCut {
  std::size_t limit = 0;  // first requests only
  std::int64_t max_input = 0, max_output = 0;
  double scale_time = 1;  // arrivals are multiplied by it
};
void CutWorkload(std::vector<WorkloadRequest>& workload, const WorkloadCut& cut);

/// Token i of block b is 1000 + (b * 7919 + i * 104729 + 17) % 100000, its part after 1000 taken
/// modulo (vocabulary - 1000) when the vocabulary is smaller than that. Vocabularies of 2000 or
/// less have no room for the 1000 reserved ids: there it is the part modulo the vocabulary.
TokenId WorkloadToken(std::int64_t block, std::int64_t index, std::int64_t vocabulary);
std::vector<TokenId> WorkloadPrompt(const WorkloadRequest& request, std::int64_t vocabulary);

}  // namespace pliant
