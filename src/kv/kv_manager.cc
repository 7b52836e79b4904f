#include "kv/kv_manager.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/log.h"

namespace pliant {
namespace {

constexpr std::uint32_t kLeastBlocks = 4;

Status CheckOptions(const KvOptions& o) {
  if (o.ceiling_bits != 16 && o.ceiling_bits != 12 && o.ceiling_bits != 8) {
    return InvalidArgument("cache ceiling of " + std::to_string(o.ceiling_bits) +
                           " bits: expected 16, 12 or 8");
  }
  if (LevelOfBits(o.floor_bits) == kLevelCount) {
    return InvalidArgument("cache floor of " + std::to_string(o.floor_bits) +
                           " bits: expected 16, 12, 8 or 4");
  }
  if (!(o.low_watermark >= 0 && o.low_watermark <= o.high_watermark && o.high_watermark < 1)) {
    return InvalidArgument("cache watermarks: expected 0 <= low <= high < 1");
  }
  if (o.sink_tokens < 0 || o.recent_tokens_base < 0 ||
      o.recent_tokens_deep < o.recent_tokens_base || o.horizon_steps < 0 || o.dwell_steps < 0) {
    return InvalidArgument(
        "cache protection, horizon and dwell must not be negative, nor less be protected from 4 "
        "bits than from 8");
  }
  return Status::Ok();
}

Result<std::unique_ptr<ExactStore>> MakeStore(Backend& backend, const KvOptions& options,
                                              std::size_t page_bytes, std::size_t part_bytes) {
  if (!KeepsExactCopies(options.policy)) return std::unique_ptr<ExactStore>();
  HostMemory memory(nullptr, nullptr);
  if (options.store.kind == StoreSpec::Kind::kRam && options.store.bytes >= page_bytes) {
    Result<HostMemory> best = backend.AllocateHost(options.store.bytes);
    if (best.ok()) {
      memory = std::move(best).value();
    } else {
      spdlog::warn("{}; the exact store lies in ordinary memory instead, and its copies are slower",
                   best.status().message());
    }
  }
  return MakeExactStore(options.store, page_bytes, part_bytes, 64, std::move(memory));
}

int Blocks(std::int64_t tokens) {
  return static_cast<int>((tokens + kBlockTokens - 1) / kBlockTokens);
}

}  // namespace

Result<std::unique_ptr<KvManager>> KvManager::Create(Backend& backend, const KvGeometry& geometry,
                                                     const KvOptions& options, const Clock& clock,
                                                     PrefixHash hash) {
  PLIANT_RETURN_IF_ERROR(CheckOptions(options));
  const std::size_t page_bytes = backend.PageBytes(geometry);
  PLIANT_CHECK(page_bytes >= geometry.PageBytes(), "page bytes below the geometry's");
  const int per_block = PagesOf(LevelOfBits(options.ceiling_bits));
  const std::uint64_t pages = std::min<std::uint64_t>(options.memory_bytes / page_bytes,
                                                      std::numeric_limits<std::int32_t>::max());
  if (pages < kLeastBlocks * per_block) {
    return OutOfMemory("KV memory of " + std::to_string(options.memory_bytes) +
                       " bytes is too small: " + std::to_string(kLeastBlocks) +
                       " blocks of 32 tokens need " +
                       std::to_string(kLeastBlocks * per_block * page_bytes) + " bytes");
  }
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<ExactStore> store,
                          MakeStore(backend, options, page_bytes, geometry.UnitBytes()));
  PLIANT_RETURN_IF_ERROR(
      backend.AllocatePages(geometry, static_cast<std::uint32_t>(pages)).WithContext("KV memory"));
  return std::unique_ptr<KvManager>(
      new KvManager(backend, geometry, options, clock, std::move(hash),
                    static_cast<std::uint32_t>(pages), std::move(store)));
}

KvManager::KvManager(Backend& backend, const KvGeometry& geometry, const KvOptions& options,
                     const Clock& clock, PrefixHash hash, std::uint32_t pages,
                     std::unique_ptr<ExactStore> store)
    : backend_(backend),
      geometry_(geometry),
      options_(options),
      clock_(clock),
      page_bytes_(backend.PageBytes(geometry)),
      pool_(pages),
      store_(std::move(store)),
      copies_(backend, store_.get(), options.copy_bytes_in_flight),
      prefix_(std::move(hash)) {
  ceiling_ = LevelOfBits(options.ceiling_bits);
  const bool elastic = options.policy == KvPolicy::kElastic || options.policy == KvPolicy::kPliant;
  floor_ = elastic ? std::max(ceiling_, LevelOfBits(options.floor_bits)) : ceiling_;
  idle_floor_ = floor_;
  sink_blocks_ = Blocks(options_.sink_tokens);
  bends_ = store_ != nullptr && floor_ > ceiling_;
  can_offload_ = store_ != nullptr;
  restore_allowance_at_ = now_ = clock.Now();
  step_ = 1;
}

KvManager::~KvManager() {
  PLIANT_CHECK(sequences_.size() == free_sequences_.size(), "a sequence outlives its KvManager");
  // Cached blocks go; copies under way must end before their pages and buffers do.
  copies_.Finish(ended_);
  for (CopyJob& job : ended_) {
    if (job.kind == CopyJob::Kind::kSave) {
      SaveEnded(job);
    } else {
      BringEnded(job);
    }
  }
  ended_.clear();
  for (IdleList list : {IdleList::kCanGive, IdleList::kCannotGive, IdleList::kStoreOnly}) {
    while (Block* block = prefix_.Oldest(list)) {
      Mutate(*block, [&] { prefix_.RemoveIdle(*block); });
      FreeBlock(*block);
    }
  }
  Withhold(0);
  PLIANT_CHECK(live_blocks_ == 0, "blocks left over");
}

Level KvManager::FloorLevel(int min_bits) const {
  if (min_bits == 0) return floor_;
  const Level level = LevelOfBits(min_bits);
  if (level == kLevelCount) return kLevelCount;
  return std::max(ceiling_, std::min(level, floor_));
}

std::int64_t KvManager::MaxTokens(Level floor) const {
  const std::int64_t total = pool_.total(), per_block = pages_per_block();
  std::int64_t blocks = total / per_block;
  if (bends_ && floor > ceiling_) {
    const int recent =
        floor > kBaseLevel ? options_.recent_tokens_deep : options_.recent_tokens_base;
    const std::int64_t kept =
        sink_blocks_ + Blocks(recent) + 2;  // + the one being filled and one of slack
    const std::int64_t slots_each = per_block - 2 * FirstAbsentPlane(floor);
    if (blocks > kept) {
      const std::int64_t lowered = std::min<std::int64_t>(
          (total - kept * per_block) / PagesOf(floor), store_->slots() / slots_each);
      const std::int64_t rest = (total - kept * per_block - lowered * PagesOf(floor)) / per_block;
      blocks = kept + lowered + rest;
    }
  }
  return blocks * kBlockTokens;
}

Sequence* KvManager::Open(RequestId request, Level floor, std::string salt) {
  PLIANT_CHECK(floor >= ceiling_ && floor < kLevelCount, "floor outside of the server's limits");
  Sequence* sequence;
  if (free_sequences_.empty()) {
    sequence = &sequences_.emplace_back();
  } else {
    sequence = free_sequences_.back();
    free_sequences_.pop_back();
  }
  sequence->open = true;
  sequence->request = request;
  sequence->floor = floor;
  sequence->chain_key = options_.prefix_cache ? prefix_.RootKey(salt) : 0;
  sequence->salt = std::move(salt);
  sequence->mark = ceiling_;
  sequence->demote_from.fill(sink_blocks_);
  if (bends_ && floor > ceiling_) {
    sequence->save_from = static_cast<std::uint8_t>(FirstAbsentPlane(floor));
  }
  sequence->active_slot = active_.size();
  active_.push_back(sequence);
  return sequence;
}

void KvManager::Release(Sequence* sequence) {
  Sequence& s = *sequence;
  EndHistory(s);
  // Deepest block first, so that of a cached prefix the end goes before the start.
  while (!s.blocks.empty()) {
    if (s.blocks.back() != nullptr) RemoveHolder(*s.blocks.back(), s);
    s.blocks.pop_back();
    s.views.pop_back();
    s.dropped.pop_back();
  }
  if (s.active) {
    active_[s.active_slot] = active_.back();
    active_[s.active_slot]->active_slot = s.active_slot;
    active_.pop_back();
  }
  // Keep the vectors' memory.
  std::vector<Block*> blocks = std::move(s.blocks);
  std::vector<BlockView> views = std::move(s.views);
  std::vector<std::int32_t> changes = std::move(s.view_changes);
  changes.clear();
  s = Sequence();
  s.blocks = std::move(blocks);
  s.views = std::move(views);
  s.view_changes = std::move(changes);
  free_sequences_.push_back(sequence);
}

PrefixMatch KvManager::Match(Level floor, std::string_view salt,
                             std::span<const std::int32_t> tokens) const {
  PrefixMatch match;
  if (!options_.prefix_cache || tokens.empty()) return match;
  const std::size_t most = (tokens.size() - 1) / kBlockTokens;
  std::uint64_t key = prefix_.RootKey(salt);
  ContentId parent = 0;
  Level mark = ceiling_;
  for (std::size_t i = 0; i < most; ++i) {
    const auto part = tokens.subspan(i * kBlockTokens, kBlockTokens);
    const std::uint64_t hash = prefix_.Hash(key, part);
    Block* found = nullptr;
    for (Level m = mark; m <= floor && found == nullptr; ++m) {
      found =
          prefix_.Find(PrefixCache::WithMark(hash, m), parent, part, m, static_cast<int>(i), salt);
    }
    if (found == nullptr || found->bring_failures > 0) break;
    match.blocks.push_back(found);
    key = found->key;
    parent = found->content;
    mark = found->mark;
  }
  return match;
}

void KvManager::Attach(Sequence& sequence, const PrefixMatch& match) {
  PLIANT_CHECK(sequence.blocks.empty(), "a prefix is attached to an empty sequence only");
  if (match.blocks.empty()) return;
  for (Block* block : match.blocks) {
    AddHolder(*block, sequence);
    // A draft may have passed over it because it was pinned for this sequence.
    if (block->draft_pin != 0 && bends_) ReopenSearch(*block);
    if (block->residency == Residency::kDevice) QueueSave(*block, sequence.save_from);
  }
  const Block& last = *match.blocks.back();
  sequence.computed = match.tokens();
  sequence.chain_key = last.key;
  sequence.chain_content = last.content;
  sequence.mark = last.mark;
}

void KvManager::Extend(Sequence& sequence, std::int64_t rows) {
  const int want = Blocks(sequence.computed + rows);
  PLIANT_CHECK(static_cast<int>(pool_.free()) >= PagesToExtend(sequence, rows),
               "extend without free pages");
  while (static_cast<int>(sequence.blocks.size()) < want) {
    AddHolder(NewBlock(static_cast<int>(sequence.blocks.size())), sequence);
  }
}

void KvManager::Advance(Sequence& sequence, std::int64_t rows, std::span<const std::int32_t> tokens,
                        Level context) {
  const auto first = static_cast<std::size_t>(sequence.computed / kBlockTokens);
  sequence.computed += rows;
  sequence.mark = std::max(sequence.mark, context);
  const auto end = static_cast<std::size_t>(sequence.computed / kBlockTokens);
  for (std::size_t i = first; i < end; ++i) {
    Block& block = *sequence.blocks[i];
    PLIANT_CHECK(IsLegal(BlockEvent::kAppend, FactsOf(block, true)), "illegal transition: append");
    block.full = true;
    Publish(sequence, block, tokens.subspan(i * kBlockTokens, kBlockTokens));
    QueueSave(block, sequence.save_from);
  }
}

void KvManager::CopyViews(Sequence& sequence, BlockView* to, std::uint64_t& mark) {
  const bool listed = mark != 0 && mark == sequence.views_mark &&
                      sequence.view_changes.size() <= Sequence::kMostViewChanges;
  if (listed) {
    for (const std::int32_t index : sequence.view_changes) to[index] = sequence.views[index];
  } else {
    std::copy(sequence.views.begin(), sequence.views.end(), to);
  }
  sequence.view_changes.clear();
  mark = sequence.views_mark = ++view_marks_;
}

void KvManager::BeginStep(std::uint64_t step) {
  pool_.BeginStep(step);
  step_ = step + 1;
}

void KvManager::Withhold(std::uint32_t pages) {
  withhold_target_ = pages;
  while (withheld_.size() > pages) {
    pool_.ReturnUnread(std::move(withheld_.back()));
    withheld_.pop_back();
  }
  TakeWithheld();
}

void KvManager::TakeWithheld() {
  while (withheld_.size() < withhold_target_ && pool_.free() > 0) withheld_.push_back(pool_.Take());
}

KvStats KvManager::Stats() const {
  KvStats stats = counters_;
  stats.page_bytes = static_cast<std::int64_t>(page_bytes_);
  stats.pages_total = pool_.total();
  stats.pages_free = pool_.free();
  stats.pages_fenced = pool_.fenced();
  stats.pages_cached = idle_pages_;
  stats.pages_withheld = static_cast<std::int64_t>(withheld_.size());
  stats.pages_copying = copies_.arriving_pages();
  stats.pages_kept = kept_pages_;
  stats.blocks = live_blocks_;
  stats.blocks_cached = prefix_.IdleCount(IdleList::kCanGive) +
                        prefix_.IdleCount(IdleList::kCannotGive) +
                        prefix_.IdleCount(IdleList::kStoreOnly);
  stats.blocks_in_store = store_blocks_;
  for (int level = 0; level < kLevelCount; ++level) {
    stats.blocks_by_state[kLevels[level].k][kLevels[level].v] = level_blocks_[level];
  }
  stats.blocks_by_state[0][0] = store_blocks_;
  if (store_ != nullptr) {
    stats.store_bytes_total = static_cast<std::int64_t>(store_->bytes_total());
    stats.store_bytes_used = static_cast<std::int64_t>(store_->used() * page_bytes_);
  }
  return stats;
}

std::vector<BlockInfo> KvManager::MemoryMap() const {
  std::vector<BlockInfo> map;
  map.reserve(static_cast<std::size_t>(live_blocks_));
  for (const Block& b : blocks_) {
    if (!b.live) continue;
    map.push_back({b.id, b.holders.empty() ? RequestId() : b.holders.front()->request, b.index,
                   static_cast<std::int32_t>(b.holders.size()),
                   b.residency == Residency::kDevice ? kLevels[b.level] : PlaneCount{}, b.full,
                   b.published, b.saved_from < kLevels[ceiling_].k && !b.copy_bad,
                   b.copying != Copying::kNone});
  }
  return map;
}

}  // namespace pliant
