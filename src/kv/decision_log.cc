#include "kv/decision_log.h"

#include <algorithm>

namespace pliant {

std::string_view ReasonName(Reason reason) {
  switch (reason) {
    case Reason::kAdmit:
      return "admit";
    case Reason::kAdmitCached:
      return "admit_cached";
    case Reason::kCachePlanes:
      return "cache_planes";
    case Reason::kCacheEvict:
      return "cache_evict";
    case Reason::kCacheToStore:
      return "cache_to_store";
    case Reason::kDemoteBase:
      return "demote_base";
    case Reason::kDrop:
      return "drop";
    case Reason::kDemoteSensor:
      return "demote_sensor";
    case Reason::kForget:
      return "forget";
    case Reason::kGrow:
      return "grow";
    case Reason::kDemoteDeep:
      return "demote_deep";
    case Reason::kHoldAdmission:
      return "hold_admission";
    case Reason::kOffload:
      return "offload";
    case Reason::kPreempt:
      return "preempt";
    case Reason::kPreemptNoProgress:
      return "preempt_no_progress";
    case Reason::kResume:
      return "resume";
    case Reason::kRestore:
      return "restore";
    case Reason::kRestoreFailed:
      return "restore_failed";
    case Reason::kWriteAheadFailed:
      return "write_ahead_failed";
    case Reason::kStoreFull:
      return "store_full";
    case Reason::kLostBlock:
      return "lost_block";
    case Reason::kFinish:
      return "finish";
    case Reason::kCancel:
      return "cancel";
    case Reason::kFail:
      return "fail";
    case Reason::kCount:
      break;
  }
  return "?";
}

void DecisionLog::Add(const Decision& decision) {
  ++counts_[static_cast<std::size_t>(decision.reason)];
  if (!ring_.empty()) ring_[total_ % ring_.size()] = decision;
  ++total_;
}

std::vector<Decision> DecisionLog::Since(std::uint64_t from) const {
  const std::uint64_t oldest = total_ > ring_.size() ? total_ - ring_.size() : 0;
  std::vector<Decision> out;
  for (std::uint64_t i = std::max(from, oldest); i < total_; ++i) {
    out.push_back(ring_[i % ring_.size()]);
  }
  return out;
}

}  // namespace pliant
