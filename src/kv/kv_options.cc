#include "kv/kv_options.h"

#include <charconv>
#include <limits>

namespace pliant {

Result<KvPolicy> ParseKvPolicy(std::string_view word) {
  for (KvPolicy policy :
       {KvPolicy::kFull, KvPolicy::kOffload, KvPolicy::kElastic, KvPolicy::kPliant}) {
    if (word == KvPolicyName(policy)) return policy;
  }
  return InvalidArgument("unknown cache policy '" + std::string(word) +
                         "': expected full, offload, elastic or pliant");
}

std::string_view KvPolicyName(KvPolicy policy) {
  switch (policy) {
    case KvPolicy::kFull:
      return "full";
    case KvPolicy::kOffload:
      return "offload";
    case KvPolicy::kElastic:
      return "elastic";
    case KvPolicy::kPliant:
      return "pliant";
  }
  return "?";
}

Result<std::uint64_t> ParseByteSize(std::string_view text) {
  const auto refuse = [&](const char* why) {
    return InvalidArgument(
        "byte size '" + std::string(text.substr(0, 64)) + "' " + why +
        ": expected a whole number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB");
  };
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc::result_out_of_range) return refuse("is too large");
  if (error != std::errc()) return refuse("is not a number");
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  static constexpr struct {
    std::string_view name;
    std::uint64_t factor;
  } kUnits[] = {{"", 1},
                {"B", 1},
                {"KiB", 1ull << 10},
                {"MiB", 1ull << 20},
                {"GiB", 1ull << 30},
                {"TiB", 1ull << 40},
                {"KB", 1'000},
                {"MB", 1'000'000},
                {"GB", 1'000'000'000},
                {"TB", 1'000'000'000'000}};
  for (const auto& u : kUnits) {
    if (unit != u.name) continue;
    if (number > std::numeric_limits<std::uint64_t>::max() / u.factor)
      return refuse("is too large");
    return number * u.factor;
  }
  return refuse("has an unknown unit");
}

Result<StoreSpec> ParseStoreSpec(std::string_view text) {
  StoreSpec spec;
  if (text == "none") return spec;
  if (text.starts_with("ram:")) {
    spec.kind = StoreSpec::Kind::kRam;
    PLIANT_ASSIGN_OR_RETURN(spec.bytes, ParseByteSize(text.substr(4)));
    return spec;
  }
  if (text.starts_with("file:")) {
    text.remove_prefix(5);
    const std::size_t colon = text.rfind(':');
    if (colon != std::string_view::npos && colon > 0) {
      spec.kind = StoreSpec::Kind::kFile;
      spec.path = std::string(text.substr(0, colon));
      PLIANT_ASSIGN_OR_RETURN(spec.bytes, ParseByteSize(text.substr(colon + 1)));
      return spec;
    }
  }
  return InvalidArgument("exact store '" + std::string(text.substr(0, 200)) +
                         "': expected none, ram:BYTES or file:PATH:BYTES");
}

}  // namespace pliant
