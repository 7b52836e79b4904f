#include "engine/calibration.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace pliant {
namespace {

// All of the text for a model that reads bytes.
constexpr std::size_t kMaxTokens = 2048;
// A channel that the text's queries hardly use is still used by others.
constexpr double kLeastUse = 1e-4;
constexpr double kLeastScale = 1e-12;

/// Runs `tokens` as a sequence of their own whose first stands at position `first`.
Status Read(Backend& backend, Model& model, std::span<const TokenId> tokens, std::int32_t first,
            std::span<const BlockView> blocks, int max_rows) {
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t rows = std::min<std::size_t>(tokens.size() - done, max_rows);
    std::vector<std::int32_t> positions(rows);
    std::iota(positions.begin(), positions.end(), first + static_cast<std::int32_t>(done));
    const SequenceSlice slice{
        .first_row = 0,
        .rows = static_cast<std::int32_t>(rows),
        .context = static_cast<std::int32_t>(done),
        .first_block = 0,
        .blocks = static_cast<std::int32_t>((done + rows + kBlockTokens - 1) / kBlockTokens)};
    PLIANT_RETURN_IF_ERROR(model.Forward(
        backend, {tokens.subspan(done, rows), positions, std::span(&slice, 1), blocks, {}}));
    done += rows;
  }
  return Status::Ok();
}

}  // namespace

std::string_view CalibrationText() {
  return "The harbour was quiet before sunrise. Two boats had already left, and the third was "
         "waiting for its crew. "
         "\"We said half past five,\" Maria called out, \"and it is nearly six.\" Her brother "
         "laughed; he had never been on time.\n\n"
         "# Results, 2021-2024\n| year | tonnes | price (EUR/kg) "
         "|\n|------|--------|----------------|\n| 2021 | 1,482.5 | 3.10 |\n"
         "| 2022 | 1,377.0 | 3.45 |\n| 2023 | 1,290.8 | 4.02 |\n\n"
         "def moving_average(values, window=3):\n    \"\"\"Mean of the last `window` values at "
         "each place.\"\"\"\n    total = 0.0\n"
         "    for i, value in enumerate(values):\n        total += value\n        if i >= "
         "window:\n            total -= values[i - window]\n"
         "        yield total / min(i + 1, window)\n\n"
         "Let f(x) = x^2 - 4x + 1. Its minimum is at x = 2, where f(2) = -3; so f(x) >= -3 for "
         "every real x.\n"
         "Question: If 12 nets catch 84 fish a day, how many do 30 nets catch in a week? Answer: "
         "84 / 12 = 7, 7 * 30 * 7 = 1470.\n"
         "Die Boote kehrten am Abend zur\xC3\xBC"
         "ck. Les p\xC3\xAA"
         "cheurs \xC3\xA9taient fatigu\xC3\xA9s mais contents. El mar estaba en calma.\n"
         "{\"boat\": \"Aurora\", \"crew\": [\"Maria\", \"Jon\"], \"catch_kg\": 412.75, "
         "\"returned\": true, \"notes\": null}\n"
         "She wrote the number down twice, once in the book and once on her hand, because the book "
         "had been lost before. "
         "By the time the lighthouse went dark the whole village knew what the morning had "
         "brought, and nobody spoke of anything else.";
}

ChannelCode KeyCodeFor(const KvGeometry& geometry, const ChannelStatistics& statistics) {
  const std::size_t dim = geometry.head_dim, half = dim / 2;
  ChannelCode code{std::vector<float>(geometry.Units() * dim, 1.0f),
                   std::vector<float>(geometry.Units() * dim, 0.0f)};
  std::vector<double> scales(half);
  for (std::size_t first = 0; first < code.scale.size(); first += dim) {
    const float* least = statistics.key_min.data() + first;
    const float* most = statistics.key_max.data() + first;
    const double* energy = statistics.query_energy.data() + first;
    const double mean_energy =
        std::accumulate(energy, energy + dim, 0.0) / static_cast<double>(dim);
    double largest = 0;
    for (std::size_t i = 0; i < half; ++i) {
      const double range =
          std::max(double{most[i]} - least[i], double{most[i + half]} - least[i + half]);
      const double use = std::max((energy[i] + energy[i + half]) / (2 * mean_energy), kLeastUse);
      scales[i] = std::sqrt(range / 2) * std::pow(use, -1.0 / 4);
      if (std::isfinite(scales[i])) largest = std::max(largest, scales[i]);
    }
    for (std::size_t i = 0; i < half; ++i) {
      const double relative = scales[i] / largest;
      if (!std::isfinite(relative) || relative < kLeastScale) continue;
      for (const std::size_t c : {i, i + half}) {
        code.scale[first + c] = static_cast<float>(relative);
        const float center = least[c] / 2 + most[c] / 2;
        code.center[first + c] = std::isfinite(center) ? center : 0.0f;
      }
    }
  }
  return code;
}

ChannelCode ValueCodeFor(const KvGeometry& geometry, const ChannelStatistics& statistics) {
  const std::size_t dim = geometry.head_dim;
  ChannelCode code{std::vector<float>(geometry.Units() * dim, 1.0f),
                   std::vector<float>(geometry.Units() * dim, 0.0f)};
  for (std::size_t first = 0; first < code.scale.size(); first += dim) {
    const std::span<const double> energy = std::span(statistics.value_energy).subspan(first, dim);
    double largest = 0;
    for (const double e : energy) {
      if (std::isfinite(e)) largest = std::max(largest, e);
    }
    if (largest == 0) continue;
    for (std::size_t c = 0; c < dim; ++c) {
      if (!std::isfinite(energy[c])) continue;
      code.scale[first + c] =
          std::max(static_cast<float>(std::sqrt(energy[c] / largest)), kLeastValueScale);
    }
  }
  return code;
}

Status Calibrate(Backend& backend, Model& model, const Tokenizer& tokenizer, std::uint32_t pages,
                 int max_rows) {
  PLIANT_ASSIGN_OR_RETURN(std::vector<TokenId> tokens,
                          tokenizer.Encode(CalibrationText(), {.add_bos = true}));
  const std::size_t fits = static_cast<std::size_t>(pages / (2 * kPlanes)) * kBlockTokens;
  tokens.resize(std::min(
      {tokens.size(), kMaxTokens, fits, static_cast<std::size_t>(model.config().context_length)}));
  if (tokens.empty()) return Status::Ok();
  std::vector<BlockView> blocks((tokens.size() + kBlockTokens - 1) / kBlockTokens);
  std::uint32_t next = 0;
  for (BlockView& block : blocks) {
    for (PageId& page : block.k) page = PageId(next++);
    for (PageId& page : block.v) page = PageId(next++);
  }
  backend.StartChannelStatistics();
  const auto length = static_cast<std::int32_t>(tokens.size());
  const std::int32_t last =
      std::min(static_cast<std::int32_t>(model.config().context_length), kCalibrationContext) -
      length;
  for (int place = 0; place < kCalibrationPlaces; ++place) {
    PLIANT_RETURN_IF_ERROR(
        Read(backend, model, tokens, last * place / (kCalibrationPlaces - 1), blocks, max_rows));
  }
  const ChannelStatistics statistics = backend.TakeChannelStatistics();
  const KvGeometry geometry = model.config().Kv();
  return backend.SetKvCode({KeyCodeFor(geometry, statistics), ValueCodeFor(geometry, statistics)});
}

}  // namespace pliant
