#include "kv/block_state.h"

namespace pliant {
namespace {

using Content = TransitionRule::Content;
constexpr bool kYes = true, kNo = false;

// event, name, from device, from store, to, content, needs copy, may be read, may be held, while
// saving, while bringing
constexpr TransitionRule kTable[] = {
    {BlockEvent::kAppend, "append", kYes, kNo, Residency::kDevice, Content::kFilling, kNo, kYes,
     kYes, kNo, kNo},
    {BlockEvent::kSave, "save", kYes, kNo, Residency::kDevice, Content::kAny, kNo, kYes, kYes, kNo,
     kNo},
    {BlockEvent::kDemote, "demote", kYes, kNo, Residency::kDevice, Content::kFull, kYes, kYes, kYes,
     kNo, kYes},
    {BlockEvent::kRestore, "restore", kYes, kNo, Residency::kDevice, Content::kFull, kYes, kYes,
     kYes, kNo, kNo},
    {BlockEvent::kOffload, "offload", kYes, kNo, Residency::kStore, Content::kAny, kYes, kNo, kYes,
     kNo, kNo},
    {BlockEvent::kLoad, "load", kNo, kYes, Residency::kDevice, Content::kAny, kYes, kYes, kYes, kNo,
     kNo},
    {BlockEvent::kEvict, "evict", kYes, kYes, Residency::kDevice, Content::kAny, kNo, kNo, kNo, kNo,
     kNo},
};

}  // namespace

std::span<const TransitionRule> TransitionTable() { return kTable; }

bool IsLegal(BlockEvent event, const BlockFacts& facts) {
  const TransitionRule& rule = kTable[static_cast<int>(event)];
  if (facts.residency == Residency::kDevice ? !rule.from_device : !rule.from_store) return false;
  if (rule.content == Content::kFull && !facts.full) return false;
  if (rule.content == Content::kFilling && facts.full) return false;
  if (rule.needs_copy && !facts.copy_valid) return false;
  if (facts.read && !rule.may_be_read) return false;
  if (facts.held && !rule.may_be_held) return false;
  if (facts.copying == Copying::kSaving && !rule.while_saving) return false;
  if (facts.copying == Copying::kBringing && !rule.while_bringing) return false;
  return true;
}

}  // namespace pliant
