// Page pool, states, options, decision log, prefix cache, exact stores: each by itself.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "kv/block_state.h"
#include "kv/decision_log.h"
#include "kv/exact_store.h"
#include "kv/history.h"
#include "kv/kv_options.h"
#include "kv/page_pool.h"
#include "kv/prefix_cache.h"

namespace pliant {
namespace {

TEST(PagePool, ReservesAllOrNothing) {
  PagePool pool(10);
  {
    Result<PageReservation> r = pool.Reserve(7);
    ASSERT_TRUE(r.ok());
    EXPECT_EQ(pool.free(), 3u);
    Result<PageReservation> more = pool.Reserve(4);
    EXPECT_EQ(more.status().code(), StatusCode::kOutOfMemory);
    EXPECT_EQ(more.status().message(), "4 pages wanted, 3 of 10 free");
    EXPECT_EQ(pool.free(), 3u);
    OwnedPage page = r->Take();
    EXPECT_EQ(r->size(), 6u);
    pool.Return(std::move(page));
    EXPECT_EQ(pool.free(), 4u);
  }
  EXPECT_EQ(pool.free(), 10u);
}

TEST(PagePool, FencesPagesUntilEveryStepThatMayReadThemHasEnded) {
  PagePool pool(4);
  OwnedPage a = pool.Take(), b = pool.Take();
  pool.BeginStep(1);
  pool.Return(std::move(a));
  pool.BeginStep(2);
  pool.Return(std::move(b));
  EXPECT_EQ(pool.free(), 2u);
  EXPECT_EQ(pool.fenced(), 2u);
  EXPECT_EQ(pool.owned(), 0u);
  pool.EndStep(1);
  EXPECT_EQ(pool.free(), 3u);
  pool.EndStep(2);
  EXPECT_EQ(pool.free(), 4u);
  EXPECT_EQ(pool.fenced(), 0u);
}

TEST(PagePool, PagesThatNoStepHasReadAreFreeAtOnce) {
  PagePool pool(2);
  pool.BeginStep(1);
  pool.ReturnUnread(pool.Take());
  EXPECT_EQ(pool.free(), 2u);
  pool.EndStep(1);
}

TEST(PagePoolDeathTest, ALeakedPageStopsTheProcess) {
  EXPECT_DEATH(
      {
        PagePool pool(1);
        OwnedPage page = pool.Take();
      },
      "leaked");
}

TEST(PagePoolDeathTest, StepsEndInOrder) {
  EXPECT_DEATH(
      {
        PagePool pool(1);
        pool.BeginStep(1);
        pool.BeginStep(2);
        pool.EndStep(2);
      },
      "order");
}

TEST(BlockState, LevelsOnlyLosePages) {
  for (int level = 1; level < kLevelCount; ++level) {
    EXPECT_LT(PagesOf(static_cast<Level>(level)), PagesOf(static_cast<Level>(level - 1)));
    EXPECT_LE(kLevels[level].k, kLevels[level - 1].k);
    EXPECT_LE(kLevels[level].v, kLevels[level - 1].v);
    EXPECT_LE(kLevels[level].v, kLevels[level].k);  // K is the more sensitive half
  }
  EXPECT_EQ(LevelOfBits(16), kTargetLevel);
  EXPECT_EQ(LevelOfBits(8), kBaseLevel);
  EXPECT_EQ(LevelOfBits(4), kDeepLevel);
  EXPECT_EQ(LevelOfBits(7), kLevelCount);
}

TEST(BlockState, TheTableHoldsEveryEventOnceAndInOrder) {
  const auto table = TransitionTable();
  ASSERT_EQ(table.size(), static_cast<std::size_t>(BlockEvent::kCount));
  for (std::size_t i = 0; i < table.size(); ++i)
    EXPECT_EQ(static_cast<std::size_t>(table[i].event), i);
}

TEST(BlockState, TheDocumentPrintsTheTable) {
  std::ifstream file(PLIANT_SOURCE_DIR "/docs/kv-states.md");
  ASSERT_TRUE(file.good());
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto yes = [](bool b) { return b ? "yes" : "no"; };
  for (const TransitionRule& r : TransitionTable()) {
    const char* content = r.content == TransitionRule::Content::kAny       ? "any"
                          : r.content == TransitionRule::Content::kFilling ? "filling"
                                                                           : "full";
    const std::string where = r.from_device && r.from_store ? "device or store"
                              : r.from_device               ? "device"
                                                            : "store";
    const std::string to = r.event == BlockEvent::kEvict ? "gone"
                           : r.to == Residency::kDevice  ? "device"
                                                         : "store";
    const std::string row = "| " + std::string(r.name) + " | " + where + " | " + to + " | " +
                            content + " | " + yes(r.needs_copy) + " | " + yes(r.may_be_read) +
                            " | " + yes(r.may_be_held) + " | " + yes(r.while_saving) + " | " +
                            yes(r.while_bringing) + " |";
    EXPECT_NE(text.find(row), std::string::npos) << "docs/kv-states.md lacks: " << row;
  }
}

TEST(BlockState, WhatMayNotHappen) {
  const BlockFacts full{.full = true, .copy_valid = true, .read = true, .held = true};
  BlockFacts f = full;
  EXPECT_TRUE(IsLegal(BlockEvent::kDemote, f));
  f.copy_valid = false;
  EXPECT_FALSE(IsLegal(BlockEvent::kDemote, f)) << "no exact copy";
  f = full, f.full = false;
  EXPECT_FALSE(IsLegal(BlockEvent::kDemote, f)) << "still being filled";
  f = full, f.copying = Copying::kSaving;
  EXPECT_FALSE(IsLegal(BlockEvent::kDemote, f)) << "its copy is being made";
  f = full, f.copying = Copying::kBringing;
  EXPECT_TRUE(IsLegal(BlockEvent::kDemote, f)) << "a restore on its way is given up";
  EXPECT_FALSE(IsLegal(BlockEvent::kOffload, full)) << "somebody reads it";
  f = full, f.read = false;
  EXPECT_TRUE(IsLegal(BlockEvent::kOffload, f));
  EXPECT_FALSE(IsLegal(BlockEvent::kEvict, f)) << "somebody holds it";
  EXPECT_FALSE(IsLegal(BlockEvent::kAppend, full)) << "a full block is never written to";
  f = full, f.residency = Residency::kStore;
  EXPECT_FALSE(IsLegal(BlockEvent::kRestore, f)) << "it must be loaded";
  EXPECT_TRUE(IsLegal(BlockEvent::kLoad, f));
}

TEST(KvOptions, ParsesStoresAndPolicies) {
  EXPECT_EQ(ParseStoreSpec("none")->kind, StoreSpec::Kind::kNone);
  const StoreSpec ram = *ParseStoreSpec("ram:4GiB");
  EXPECT_EQ(ram.kind, StoreSpec::Kind::kRam);
  EXPECT_EQ(ram.bytes, 4ull << 30);
  const StoreSpec file = *ParseStoreSpec("file:/a:b/c:16MiB");
  EXPECT_EQ(file.path, "/a:b/c");
  EXPECT_EQ(file.bytes, 16u << 20);
  for (const char* bad :
       {"", "ram", "ram:", "file:", "file:x", "file::1GiB", "disk:1GiB", "ram:1GiBB"}) {
    EXPECT_FALSE(ParseStoreSpec(bad).ok()) << bad;
  }
  for (KvPolicy p : {KvPolicy::kFull, KvPolicy::kOffload, KvPolicy::kElastic, KvPolicy::kPliant}) {
    EXPECT_EQ(*ParseKvPolicy(KvPolicyName(p)), p);
  }
  EXPECT_FALSE(ParseKvPolicy("Full").ok());
}

TEST(DecisionLog, KeepsTheLastAndCountsAll) {
  DecisionLog log(4);
  for (std::uint64_t i = 0; i < 10; ++i)
    log.Add({.step = i, .reason = i % 2 == 0 ? Reason::kAdmit : Reason::kFinish});
  EXPECT_EQ(log.total(), 10u);
  EXPECT_EQ(log.Count(Reason::kAdmit), 5u);
  const auto all = log.Since(0);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all.front().step, 6u);
  EXPECT_EQ(log.Since(9).size(), 1u);
  EXPECT_TRUE(log.Since(10).empty());
  for (int r = 0; r < static_cast<int>(Reason::kCount); ++r)
    EXPECT_NE(ReasonName(static_cast<Reason>(r)), "?") << r;
}

// ---- prefix cache
// ---------------------------------------------------------------------------------------------------------------

struct Cached {
  Block block;
  Cached(PrefixCache& cache, const Block* parent, std::int32_t token, Level mark = 0,
         std::string salt = "") {
    block.full = true;
    block.index = parent != nullptr ? parent->index + 1 : 0;
    block.tokens.fill(token);
    block.mark = mark;
    block.salt = salt;
    block.parent = parent != nullptr ? parent->content : 0;
    block.key =
        cache.Key(parent != nullptr ? parent->key : cache.RootKey(salt), block.tokens, mark);
    cache.Insert(block);
  }
};

TEST(PrefixCache, ComparesWhatTheHashOnlyHints) {
  for (const PrefixHash& hash :
       {PrefixHash(DefaultPrefixHash),
        PrefixHash([](std::uint64_t, std::span<const std::int32_t>) { return 1ull; })}) {
    PrefixCache cache(hash);
    Cached a(cache, nullptr, 1), b(cache, nullptr, 2), a2(cache, &a.block, 5),
        b2(cache, &b.block, 5);
    Cached low(cache, nullptr, 1, kBaseLevel), salted(cache, nullptr, 1, 0, "s");
    const auto find = [&](const Block& like, ContentId parent, std::string_view salt) {
      return cache.Find(like.key, parent, like.tokens, like.mark, like.index, salt);
    };
    EXPECT_EQ(find(a.block, 0, ""), &a.block);
    EXPECT_EQ(find(a2.block, a.block.content, ""), &a2.block);
    EXPECT_EQ(find(b2.block, b.block.content, ""), &b2.block);
    EXPECT_NE(a2.block.content, b2.block.content);
    EXPECT_EQ(find(low.block, 0, ""), &low.block);
    EXPECT_EQ(find(salted.block, 0, "s"), &salted.block);
    EXPECT_EQ(find(salted.block, 0, "t"), nullptr);
    EXPECT_EQ(find(a2.block, 12345, ""), nullptr);
    cache.Erase(a.block);
    EXPECT_EQ(find(a.block, 0, ""), nullptr);
    EXPECT_EQ(cache.size(), 5u);
  }
}

TEST(PrefixCache, IdleListsKeepTheirOrder) {
  PrefixCache cache;
  Block blocks[4];
  for (Block& b : blocks) cache.PushIdle(b, IdleList::kCanGive);
  cache.RemoveIdle(blocks[1]);
  cache.RemoveIdle(blocks[1]);  // not idle: nothing happens
  cache.PushIdle(blocks[1], IdleList::kStoreOnly);
  EXPECT_EQ(cache.IdleCount(IdleList::kCanGive), 3);
  EXPECT_EQ(cache.Oldest(IdleList::kCanGive), &blocks[0]);
  EXPECT_EQ(blocks[0].idle_next, &blocks[2]);
  cache.RemoveIdle(blocks[0]);
  EXPECT_EQ(cache.Oldest(IdleList::kCanGive), &blocks[2]);
  cache.RemoveIdle(blocks[3]);
  cache.RemoveIdle(blocks[2]);
  EXPECT_EQ(cache.Oldest(IdleList::kCanGive), nullptr);
  EXPECT_EQ(cache.Oldest(IdleList::kStoreOnly), &blocks[1]);
}

// ---- exact stores
// ---------------------------------------------------------------------------------------------------------------

TEST(StoreChecksum, SeesEveryBitAndTheLength) {
  std::vector<std::byte> bytes(133);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 37);
  const std::uint64_t sum = StoreChecksum(bytes);
  EXPECT_EQ(StoreChecksum(bytes), sum);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_NE(StoreChecksum(bytes), sum) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
  bytes.push_back(std::byte{0});
  EXPECT_NE(StoreChecksum(bytes), sum);
}

enum class StoreHome { kRam, kFile, kDevicesHostMemory };

class StoreTest : public ::testing::TestWithParam<StoreHome> {
 protected:
  static constexpr std::size_t kPage = 576, kPart = 128;  // the last part is a short one
  std::string path_ = ::testing::TempDir() + "pliant_store_" + std::to_string(getpid());
  std::unique_ptr<ExactStore> Make(std::uint32_t pages, std::uint32_t buffers = 4) {
    StoreSpec spec{GetParam() == StoreHome::kFile ? StoreSpec::Kind::kFile : StoreSpec::Kind::kRam,
                   path_, pages * kPage + kPage - 1};
    HostMemory memory(nullptr, nullptr);
    if (GetParam() == StoreHome::kDevicesHostMemory) {
      memory = HostMemory(new std::byte[spec.bytes], [](std::byte* bytes) { delete[] bytes; });
    }
    auto store = MakeExactStore(spec, kPage, kPart, buffers, std::move(memory));
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return std::move(*store);
  }
  static IoState Wait(ExactStore& store, SlotId slot) {
    store.Flush();
    while (store.Poll(slot) == IoState::kPending) std::this_thread::yield();
    return store.Poll(slot);
  }
  static void Save(ExactStore& store, SlotId slot, int what) {
    std::memset(store.Map(slot), what, kPage);
    store.StartSave(slot);
    EXPECT_EQ(Wait(store, slot), IoState::kDone);
    store.Unmap(slot);
  }
};

TEST_P(StoreTest, GivesBackWhatItWasGiven) {
  auto store = Make(8);
  std::vector<SlotId> slots;
  for (int i = 0; i < 8; ++i) {
    slots.push_back(store->Take());
    Save(*store, slots.back(), i + 1);
  }
  for (int i = 0; i < 8; ++i) {
    std::byte* page = store->Map(slots[static_cast<std::size_t>(i)]);
    store->StartFetch(slots[static_cast<std::size_t>(i)]);
    EXPECT_EQ(Wait(*store, slots[static_cast<std::size_t>(i)]), IoState::kDone);
    for (std::size_t b = 0; b < kPage; ++b) ASSERT_EQ(page[b], static_cast<std::byte>(i + 1));
    store->Unmap(slots[static_cast<std::size_t>(i)]);
  }
}

TEST_P(StoreTest, NeverPassesItsBudget) {
  auto store = Make(3);
  EXPECT_EQ(store->slots(), 3u);  // what is left over of a page does not count
  const SlotId a = store->Take();
  store->Take();
  store->Take();
  EXPECT_FALSE(store->Take().valid());
  EXPECT_EQ(store->bytes_total(), 3 * kPage);
  store->Give(a);
  EXPECT_TRUE(store->Take().valid());
}

TEST_P(StoreTest, AChangedPageIsFoundOut) {
  auto store = Make(2);
  const SlotId slot = store->Take();
  Save(*store, slot, 7);
  store->CorruptForTest(slot);
  ASSERT_NE(store->Map(slot), nullptr);
  store->StartFetch(slot);
  EXPECT_EQ(Wait(*store, slot), IoState::kCorrupt);
}

TEST_P(StoreTest, PartsAreReadAloneAndOnlyTheyMustBeRight) {
  auto store = Make(2);
  const SlotId other = store->Take(), slot = store->Take();
  Save(*store, other, 1);
  std::byte* page = store->Map(slot);
  for (std::size_t i = 0; i < kPage; ++i) page[i] = static_cast<std::byte>(i * 7);
  store->StartSave(slot);
  ASSERT_EQ(Wait(*store, slot), IoState::kDone);
  store->Unmap(slot);
  const auto read = [&](std::vector<ByteRange> ranges) {
    std::vector<std::byte> buffer(kPage);
    const std::byte* found = store->Peek(slot, ranges, buffer);
    for (const ByteRange& range : ranges) {
      for (std::size_t i = range.first; found != nullptr && i < range.end; ++i)
        EXPECT_EQ(found[i], static_cast<std::byte>(i * 7));
    }
    return found != nullptr;
  };
  EXPECT_TRUE(read({{0, kPage}}));
  store->CorruptForTest(slot);  // byte 288, in part 2 of 0 .. 4
  EXPECT_FALSE(read({{0, kPage}}));
  EXPECT_FALSE(read({{256, 257}}));
  EXPECT_FALSE(read({{0, 1}, {383, 384}}));
  EXPECT_FALSE(read({{200, 300}}));
  EXPECT_TRUE(read({{100, 256}, {384, kPage}}));
  EXPECT_TRUE(read({{kPage - 1, kPage}}));
}

std::string HomeName(const ::testing::TestParamInfo<StoreHome>& info) {
  switch (info.param) {
    case StoreHome::kRam:
      return "Ram";
    case StoreHome::kFile:
      return "File";
    case StoreHome::kDevicesHostMemory:
      return "DevicesHostMemory";
  }
  return "?";
}

INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest,
                         ::testing::Values(StoreHome::kRam, StoreHome::kFile,
                                           StoreHome::kDevicesHostMemory),
                         HomeName);

TEST(FileStore, StagesThroughFewBuffersAndLeavesNoFile) {
  const std::string path = ::testing::TempDir() + "pliant_store_b" + std::to_string(getpid());
  auto made = MakeExactStore({StoreSpec::Kind::kFile, path, 10 * 64}, 64, 64, 2);
  ASSERT_TRUE(made.ok());
  ExactStore& store = **made;
  EXPECT_FALSE(std::filesystem::exists(path));
  const SlotId a = store.Take(), b = store.Take(), c = store.Take();
  EXPECT_NE(store.Map(a), nullptr);
  EXPECT_EQ(store.Map(a), store.Map(a));
  EXPECT_NE(store.Map(b), nullptr);
  EXPECT_EQ(store.Map(c), nullptr);  // later
  store.Unmap(a);
  EXPECT_NE(store.Map(c), nullptr);
}

TEST(FileStore, RefusesAFileThatIsThere) {
  const std::string path = ::testing::TempDir() + "pliant_store_c" + std::to_string(getpid());
  std::ofstream(path) << "mine";
  const auto made = MakeExactStore({StoreSpec::Kind::kFile, path, 640}, 64, 64, 2);
  EXPECT_EQ(made.status().code(), StatusCode::kIo);
  EXPECT_NE(made.status().message().find(path), std::string::npos);
  std::filesystem::remove(path);
  EXPECT_EQ(
      MakeExactStore({StoreSpec::Kind::kFile, "/nowhere/at/all", 640}, 64, 64, 2).status().code(),
      StatusCode::kIo);
}

TEST(ExactStore, NoneIsNoStoreAndTooSmallIsRefused) {
  EXPECT_EQ(*MakeExactStore({}, 64, 64), nullptr);
  EXPECT_EQ(MakeExactStore({StoreSpec::Kind::kRam, "", 63}, 64, 64).status().code(),
            StatusCode::kInvalidArgument);
}

class NoSource final : public RowSource {
 public:
  PlanePlace Find(std::int32_t, bool, int, int, std::span<std::byte>) override { return {}; }
};

TEST(History, GrowsOnlyWhenItIsShortAndAsked) {
  using Growth = History::Growth;
  RetainedHistory retained({.layers = 1, .kv_heads = 1, .head_dim = 32}, 1, {.query_means = true},
                           std::make_shared<NoSource>());
  HistoryOptions options;
  options.growth = GrowthSignal::kDivergence;
  options.grow_above = 0.1f;
  History fixed(options, 3, false), growing(options, 3, true);
  // Queries that turn: the divergence is far above 0.1.
  std::vector<float> query(32);
  for (int i = 0; i < 60; ++i) {
    std::fill(query.begin(), query.end(), 0.0f);
    query[i < 50 ? 0 : 1] = 1;
    retained.NoteQuery(0, 0, query.data());
  }
  ASSERT_GT(retained.QuerySignal(), 0.1);
  EXPECT_EQ(fixed.Extend(96, retained), Growth::kNotAsked);
  EXPECT_EQ(growing.Extend(80, retained), Growth::kStayed) << "there is room";
  EXPECT_EQ(growing.signal(), retained.QuerySignal());
  EXPECT_EQ(growing.Extend(80, retained), Growth::kNotAsked) << "nothing was filled";
  EXPECT_EQ(growing.Extend(95, retained), Growth::kNotAsked);
  // Short of a block from here on. Each half that asks for more counts half a block.
  EXPECT_EQ(growing.Extend(96, retained), Growth::kStayed);
  retained.Reserve(256);
  std::vector<RetainedHistory::Move> moves;
  const auto drop = [&](std::int32_t blocks) {
    while (growing.MustDrop(blocks, retained)) {
      if (growing.MayAddKept(retained)) {
        retained.DropIntoNewBlock(0, moves);
        retained.EndDropIntoNewBlock();
      } else {
        retained.Drop(0, moves);
        retained.EndDrop();
      }
    }
    EXPECT_EQ(retained.TakingPart(blocks), growing.capacity());
  };
  drop(4);
  EXPECT_EQ(growing.Extend(112, retained), Growth::kStayed);
  EXPECT_EQ(growing.Extend(127, retained), Growth::kNotAsked);
  EXPECT_EQ(growing.Extend(128, retained), Growth::kGrew);
  EXPECT_EQ(growing.capacity(), 4);
  drop(5);
  for (int i = 0; i < 500; ++i) retained.NoteQuery(0, 0, query.data());
  EXPECT_EQ(growing.Extend(144, retained), Growth::kStayed) << "queries stay where they are";
  EXPECT_EQ(growing.Extend(160, retained), Growth::kStayed);
  EXPECT_EQ(growing.capacity(), 4);
  EXPECT_TRUE(growing.MustDrop(6, retained));
  EXPECT_EQ(fixed.capacity(), 3);
}

TEST(History, FittedWeightsDecideInsteadOfTheDivergence) {
  using Growth = History::Growth;
  const auto weights = [](float along) {
    GrowthWeights made{.layers = 1, .heads = 1, .head_dim = 32, .above = 0.6f};
    made.short_mean.resize(32);
    made.long_mean.resize(32);
    made.short_mean[0] = along;
    return std::make_shared<const GrowthWeights>(made);
  };
  // Queries that never turn: by divergence nothing would ever grow.
  std::vector<float> query(32);
  query[0] = 2;
  for (const float along : {1.0f, 0.2f, -1.0f}) {
    SCOPED_TRACE(along);
    const HistoryOptions options = GrowingBy(DroppingForGood({}), weights(along));
    EXPECT_EQ(options.grow_above, 0.6f);
    EXPECT_EQ(options.RetentionOf(false).growth_weights, nullptr) << "nobody asks";
    RetainedHistory retained({.layers = 1, .kv_heads = 1, .head_dim = 32}, 1,
                             options.RetentionOf(true), std::make_shared<NoSource>());
    for (int i = 0; i < 20; ++i) retained.NoteQuery(0, 0, query.data());
    const double chance = 1 / (1 + std::exp(-double{along}));
    EXPECT_NEAR(retained.QuerySignal(), chance, 1e-6);
    History growing(options, 4, true);
    EXPECT_EQ(growing.Extend(144, retained), Growth::kStayed);  // five blocks, four may be
    EXPECT_EQ(growing.Extend(160, retained), along > 0.5f ? Growth::kGrew : Growth::kStayed);
    EXPECT_NEAR(growing.signal(), chance, 1e-6);
  }
}

}  // namespace
}  // namespace pliant
