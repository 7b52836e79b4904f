// Room: kv. The pressure ladder's rungs 2 to 5 and the way back: which blocks give planes, which
// cached blocks go, what is restored. It works on drafts: a draft is a list of measures and what
// they would free; nothing changes until it is committed, and a draft that is dropped leaves no
// trace. Owned by the engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/kv_manager.h"

namespace pliant {

struct Measure {
  Block* block = nullptr;
  Sequence* donor = nullptr;  // rungs 3 and 5
  Level to = 0;
  bool evict = false;  // rung 2, whole
  Reason reason = Reason::kDemoteBase;
  int pages = 0;  // freed
};

/// Measures planned but not taken. Only one draft is alive at a time.
class Draft {
 public:
  const std::vector<Measure>& measures() const { return measures_; }
  std::int64_t pages_freed() const { return freed_; }

 private:
  friend class Controller;
  std::uint64_t id_ = 0;
  std::vector<Measure> measures_;
  std::vector<Sequence*> touched_;
  std::int64_t freed_ = 0;
  bool cut_ = false;
};

class Controller {
 public:
  explicit Controller(KvManager& kv) : kv_(kv) {}

  /// The ladder's last rung that a draft may use.
  enum class Rung { kCache = 2, kBase = 3, kDeep = 5 };

  /// Starts an empty draft (the one memory of drafts is reused).
  Draft& NewDraft();
  /// These blocks are about to be used: the draft leaves them as they are.
  void Pin(Draft& draft, const PrefixMatch& match);
  /// Adds measures, rung by rung, until free pages + pages freed by the draft + `coming` reach
  /// `target`. True when they do; else everything that these rungs can give is in the draft.
  bool MakeRoom(Draft& draft, std::int64_t target, std::int64_t coming, Rung last);
  /// Drops the measures beyond those that reach `target`.
  void CutTo(Draft& draft, std::int64_t target);
  /// Takes the measures.
  void Commit(Draft& draft);

  /// Starts background restores, deepest levels first, as long as `keep` pages stay free. Idle
  /// cached blocks make room for them (rung 2 stands before rung 3).
  void Restore(std::int64_t keep);
  /// As if memory were short without end: everything goes as low as it may
  /// (KvOptions::always_demote).
  void DemoteAll();

 private:
  Level LevelOf(const Draft& draft, const Block& block) const {
    return block.draft == draft.id_ ? block.draft_level : block.level;
  }
  bool IsCandidate(const Draft& draft, const Sequence& sequence, const Block& block,
                   Level to) const;
  std::int32_t SearchEnd(const Sequence& sequence, Level to) const;
  Block* NextCandidate(Draft& draft, Sequence& sequence, Level to);
  void Touch(Draft& draft, Sequence& sequence);
  void Plan(Draft& draft, Block& block, Level to, Reason reason, Sequence* donor);
  void IdlePlanes(Draft& draft, std::int64_t short_by);
  void IdleWhole(Draft& draft, std::int64_t short_by);
  void Lower(Draft& draft, Level to, Reason reason, std::int64_t short_by);
  bool RestoreDown(Level above, Level to, std::int64_t keep);

  KvManager& kv_;
  Draft draft_;
  std::uint64_t drafts_ = 0;
  struct Giver {
    std::int32_t given;
    RequestId request;
    Sequence* sequence;
  };
  std::vector<Giver> heap_;
};

}  // namespace pliant
