#include "kv/kv_options.h"

#include "base/size.h"

namespace pliant {

Result<KvPolicy> ParseKvPolicy(std::string_view word) {
  for (KvPolicy policy : {KvPolicy::kFull, KvPolicy::kOffload, KvPolicy::kElastic,
                          KvPolicy::kPliant, KvPolicy::kBudget, KvPolicy::kGrowPage}) {
    if (word == KvPolicyName(policy)) return policy;
  }
  return InvalidArgument("unknown cache policy '" + std::string(word) +
                         "': expected full, offload, elastic, pliant, budget or growpage");
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
    case KvPolicy::kBudget:
      return "budget";
    case KvPolicy::kGrowPage:
      return "growpage";
  }
  return "?";
}

Result<StoreSpec> ParseStoreSpec(std::string_view text) {
  StoreSpec spec;
  if (text == "none") return spec;
  if (text.starts_with("ram:")) {
    spec.kind = StoreSpec::Kind::kRam;
    PLIANT_ASSIGN_OR_RETURN(spec.bytes, ParseSize(text.substr(4)));
    return spec;
  }
  if (text.starts_with("file:")) {
    text.remove_prefix(5);
    const std::size_t colon = text.rfind(':');
    if (colon != std::string_view::npos && colon > 0) {
      spec.kind = StoreSpec::Kind::kFile;
      spec.path = std::string(text.substr(0, colon));
      PLIANT_ASSIGN_OR_RETURN(spec.bytes, ParseSize(text.substr(colon + 1)));
      return spec;
    }
  }
  return InvalidArgument("exact store '" + std::string(text.substr(0, 200)) +
                         "': expected none, ram:BYTES or file:PATH:BYTES");
}

}  // namespace pliant
