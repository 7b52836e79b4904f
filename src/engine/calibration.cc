#include "engine/calibration.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace pliant {
namespace {

constexpr std::size_t kMaxTokens = 512;

}  // namespace

std::string_view CalibrationText() {
  return "The harbour was quiet before sunrise. Two boats had already left, and the third was waiting for its crew. "
         "\"We said half past five,\" Maria called out, \"and it is nearly six.\" Her brother laughed; he had never been on time.\n\n"
         "# Results, 2021-2024\n| year | tonnes | price (EUR/kg) |\n|------|--------|----------------|\n| 2021 | 1,482.5 | 3.10 |\n"
         "| 2022 | 1,377.0 | 3.45 |\n| 2023 | 1,290.8 | 4.02 |\n\n"
         "def moving_average(values, window=3):\n    \"\"\"Mean of the last `window` values at each place.\"\"\"\n    total = 0.0\n"
         "    for i, value in enumerate(values):\n        total += value\n        if i >= window:\n            total -= values[i - window]\n"
         "        yield total / min(i + 1, window)\n\n"
         "Let f(x) = x^2 - 4x + 1. Its minimum is at x = 2, where f(2) = -3; so f(x) >= -3 for every real x.\n"
         "Question: If 12 nets catch 84 fish a day, how many do 30 nets catch in a week? Answer: 84 / 12 = 7, 7 * 30 * 7 = 1470.\n"
         "Die Boote kehrten am Abend zur\xC3\xBC"
         "ck. Les p\xC3\xAA"
         "cheurs \xC3\xA9taient fatigu\xC3\xA9s mais contents. El mar estaba en calma.\n"
         "{\"boat\": \"Aurora\", \"crew\": [\"Maria\", \"Jon\"], \"catch_kg\": 412.75, \"returned\": true, \"notes\": null}\n"
         "She wrote the number down twice, once in the book and once on her hand, because the book had been lost before. "
         "By the time the lighthouse went dark the whole village knew what the morning had brought, and nobody spoke of anything else.";
}

std::vector<float> ChannelScales(const KvGeometry& geometry, std::vector<float> maxima) {
  const int half = geometry.head_dim / 2;
  for (std::size_t unit = 0; unit < geometry.Units(); ++unit) {
    float* row = maxima.data() + unit * geometry.head_dim;
    for (int i = 0; i < half; ++i) {
      const float pair = std::max(row[i], row[i + half]);
      row[i] = row[i + half] = std::isfinite(pair) && pair > 1e-20f ? pair : 1.0f;
    }
  }
  return maxima;
}

Status Calibrate(Backend& backend, Model& model, const Tokenizer& tokenizer, std::uint32_t pages, int max_rows) {
  PLIANT_ASSIGN_OR_RETURN(std::vector<TokenId> tokens, tokenizer.Encode(CalibrationText(), {.add_bos = true}));
  const std::size_t fits = static_cast<std::size_t>(pages / (2 * kPlanes)) * kBlockTokens;
  tokens.resize(std::min({tokens.size(), kMaxTokens, fits, static_cast<std::size_t>(model.config().context_length)}));
  if (tokens.empty()) return Status::Ok();
  std::vector<BlockView> blocks((tokens.size() + kBlockTokens - 1) / kBlockTokens);
  std::uint32_t next = 0;
  for (BlockView& block : blocks) {
    for (PageId& page : block.k) page = PageId(next++);
    for (PageId& page : block.v) page = PageId(next++);
  }
  backend.StartKeyMaxima();
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t rows = std::min<std::size_t>(tokens.size() - done, max_rows);
    std::vector<std::int32_t> positions(rows);
    std::iota(positions.begin(), positions.end(), static_cast<std::int32_t>(done));
    const SequenceSlice slice{.first_row = 0,
                              .rows = static_cast<std::int32_t>(rows),
                              .context = static_cast<std::int32_t>(done),
                              .first_block = 0,
                              .blocks = static_cast<std::int32_t>((done + rows + kBlockTokens - 1) / kBlockTokens)};
    PLIANT_RETURN_IF_ERROR(model.Forward(
        backend, {std::span(tokens).subspan(done, rows), positions, std::span(&slice, 1), blocks, {}}));
    done += rows;
  }
  return backend.SetChannelScales(ChannelScales(model.config().Kv(), backend.TakeKeyMaxima()));
}

}  // namespace pliant
