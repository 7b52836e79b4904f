// Room: model. Checks of a configuration and RoPE frequencies.
#include "model/config.h"

#include <cmath>
#include <cstdio>
#include <numbers>

#include "model/config_reader.h"

namespace pliant {
namespace {

struct Bound {
  const char* name;
  std::int64_t value;
  std::int64_t limit;
};

/// Six digits; std::to_string would write a wrong 1e300 out in full.
std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

std::string_view ArchitectureName(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlama:
      return "llama";
    case Architecture::kQwen2:
      return "qwen2";
    case Architecture::kQwen3:
      return "qwen3";
  }
  return "?";
}

Result<Architecture> ParseArchitecture(std::string_view name) {
  for (const Architecture a : {Architecture::kLlama, Architecture::kQwen2, Architecture::kQwen3}) {
    if (name == ArchitectureName(a)) return a;
  }
  return Unimplemented("architecture '" + std::string(name.substr(0, 40)) +
                       "' is not supported (llama, qwen2 and qwen3 are)");
}

std::vector<float> ModelConfig::InverseFrequencies() const {
  const int pairs = head_dim / 2;
  std::vector<float> inv_freq(static_cast<std::size_t>(pairs));
  for (int i = 0; i < pairs; ++i) {
    double freq = std::pow(rope_theta, -2.0 * i / head_dim);
    if (!rope_scaling.freq_factors.empty()) {
      freq /= rope_scaling.freq_factors[static_cast<std::size_t>(i)];
    } else if (rope_scaling.kind == RopeScaling::Kind::kLinear) {
      freq /= rope_scaling.factor;
    } else if (rope_scaling.kind == RopeScaling::Kind::kLlama3) {
      // Llama 3.1: wavelengths beyond original / low_freq_factor are stretched by `factor`, those
      // below original / high_freq_factor are kept, and between the two the inverse frequency is
      // blended linearly in original / wavelength.
      const double wavelength = 2 * std::numbers::pi / freq;
      const double turns = static_cast<double>(rope_scaling.original_context) / wavelength;
      if (turns < rope_scaling.low_freq_factor) {
        freq /= rope_scaling.factor;
      } else if (turns <= rope_scaling.high_freq_factor) {
        const double kept = (turns - rope_scaling.low_freq_factor) /
                            (rope_scaling.high_freq_factor - rope_scaling.low_freq_factor);
        freq = (1 - kept) * freq / rope_scaling.factor + kept * freq;
      }
    }
    inv_freq[static_cast<std::size_t>(i)] = static_cast<float>(freq);
  }
  return inv_freq;
}

Status ModelConfig::Validate() const {
  const Bound bounds[] = {
      {"vocabulary size", vocab_size, 1 << 24},
      {"hidden size", hidden_size, 1 << 17},
      {"feed-forward size", intermediate_size, 1 << 20},
      {"context length", context_length, std::int64_t{1} << 30},
      {"number of layers", layers, 1024},
      {"number of heads", heads, 1024},
      {"number of KV heads", kv_heads, 1024},
      {"head dimension", head_dim, 1024},
  };
  for (const Bound& bound : bounds) {
    if (bound.value < 1 || bound.value > bound.limit) {
      return InvalidArgument(std::string(bound.name) + " is " + std::to_string(bound.value) +
                             "; it must be from 1 to " + std::to_string(bound.limit));
    }
  }
  if (heads % kv_heads != 0) {
    return InvalidArgument("number of heads " + std::to_string(heads) +
                           " is not a multiple of the number of KV heads " +
                           std::to_string(kv_heads));
  }
  if (head_dim % 32 != 0) {
    return Unimplemented("head dimension " + std::to_string(head_dim) +
                         " is not supported; it must be a multiple of 32");
  }
  if (!(norm_eps > 0) || norm_eps > 0.1f) {
    return InvalidArgument("RMSNorm epsilon is " + Number(norm_eps) +
                           "; it must be positive and at most 0.1");
  }
  if (!(rope_theta >= 1) || !(rope_theta <= 1e12)) {
    return InvalidArgument("RoPE base is " + Number(rope_theta) + "; it must be from 1 to 1e12");
  }
  const RopeScaling& scaling = rope_scaling;
  if (scaling.kind != RopeScaling::Kind::kNone &&
      (!(scaling.factor >= 1) || !(scaling.factor <= 1e6f))) {
    return InvalidArgument("RoPE scaling factor is " + Number(scaling.factor) +
                           "; it must be from 1 to 1000000");
  }
  if (scaling.kind == RopeScaling::Kind::kLlama3 &&
      (!(scaling.low_freq_factor > 0) || !(scaling.high_freq_factor > scaling.low_freq_factor) ||
       !std::isfinite(scaling.high_freq_factor) || scaling.original_context < 1)) {
    return InvalidArgument(
        "Llama 3 RoPE scaling needs 0 < low_freq_factor < high_freq_factor and a "
        "positive original context; they are " +
        std::to_string(scaling.low_freq_factor) + ", " + std::to_string(scaling.high_freq_factor) +
        " and " + std::to_string(scaling.original_context));
  }
  if (!scaling.freq_factors.empty()) {
    if (scaling.freq_factors.size() != static_cast<std::size_t>(head_dim / 2)) {
      return InvalidArgument(std::to_string(scaling.freq_factors.size()) +
                             " RoPE frequency factors; head dimension " + std::to_string(head_dim) +
                             " needs " + std::to_string(head_dim / 2));
    }
    for (const float factor : scaling.freq_factors) {
      if (!(factor > 0) || !std::isfinite(factor)) {
        return InvalidArgument("a RoPE frequency factor is " + std::to_string(factor) +
                               "; all must be positive and finite");
      }
    }
  }
  return Status::Ok();
}

}  // namespace pliant
