#include "kv/exact_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>

#include "base/size.h"
#include "kv/device_host_store.h"
#include "kv/file_store.h"

namespace pliant {

std::uint64_t StoreChecksum(std::span<const std::byte> bytes) {
  constexpr std::uint64_t kOdd[4] = {0x9e3779b97f4a7c15ull, 0xc2b2ae3d27d4eb4full,
                                     0x165667b19e3779f9ull, 0xd6e8feb86659fd93ull};
  std::uint64_t lane[4] = {1, 2, 3, 4};
  const std::byte* p = bytes.data();
  std::size_t left = bytes.size();
  const auto absorb = [&](int i, std::uint64_t word) {
    lane[i] = std::rotl((lane[i] ^ word) * kOdd[i], 29);
  };
  for (; left >= 32; left -= 32, p += 32) {
    std::uint64_t words[4];
    std::memcpy(words, p, 32);
    for (int i = 0; i < 4; ++i) absorb(i, words[i]);
  }
  for (int i = 0; left > 0; ++i) {
    std::uint64_t word = 0;
    const std::size_t n = std::min<std::size_t>(left, 8);
    std::memcpy(&word, p, n);
    absorb(i & 3, word);
    left -= n;
    p += n;
  }
  std::uint64_t sum = bytes.size();
  for (int i = 0; i < 4; ++i) {
    sum = (std::rotl(sum, 23) ^ lane[i]) * kOdd[3 - i];
    sum ^= sum >> 31;
  }
  return sum;
}

ExactStore::ExactStore(std::uint32_t slots, std::size_t page_bytes, std::size_t part_bytes)
    : slots_(slots),
      page_bytes_(page_bytes),
      part_bytes_(part_bytes),
      parts_((page_bytes + part_bytes - 1) / part_bytes),
      taken_(slots),
      checksums_(static_cast<std::uint64_t*>(
          std::calloc(std::max<std::size_t>(slots, 1), parts_ * sizeof(std::uint64_t)))) {
  if (checksums_ == nullptr) throw std::bad_alloc();
  free_.reserve(slots);
  for (std::uint32_t i = slots; i-- > 0;) free_.push_back(SlotId(i));
}

SlotId ExactStore::Take() {
  if (free_.empty()) return {};
  const SlotId slot = free_.back();
  free_.pop_back();
  taken_[slot.value()] = true;
  return slot;
}

void ExactStore::Give(SlotId slot) {
  PLIANT_CHECK(slot.valid() && taken_[slot.value()], "slot given back twice");
  taken_[slot.value()] = false;
  free_.push_back(slot);
}

void ExactStore::Sum(SlotId slot, const std::byte* page) {
  std::uint64_t* sums = checksums_.get() + slot.value() * parts_;
  for (std::size_t at = 0; at < page_bytes_; at += part_bytes_)
    *sums++ = StoreChecksum({page + at, std::min(part_bytes_, page_bytes_ - at)});
}

ByteRange ExactStore::WholeParts(ByteRange range) const {
  return {range.first / part_bytes_ * part_bytes_,
          std::min((range.end + part_bytes_ - 1) / part_bytes_ * part_bytes_, page_bytes_)};
}

bool ExactStore::IsRight(SlotId slot, const std::byte* page, ByteRange range) const {
  const std::uint64_t* sums = checksums_.get() + slot.value() * parts_ + range.first / part_bytes_;
  for (std::size_t at = range.first; at < range.end; at += part_bytes_) {
    if (StoreChecksum({page + at, std::min(part_bytes_, page_bytes_ - at)}) != *sums++)
      return false;
  }
  return true;
}

const std::byte* ExactStore::Peek(SlotId slot, std::span<const ByteRange> ranges,
                                  std::span<std::byte> buffer) const {
  const std::byte* page = nullptr;
  for (const ByteRange& range : ranges) {
    const ByteRange parts = WholeParts(range);
    page = Read(slot, parts, buffer.data());
    if (page == nullptr || !IsRight(slot, page, parts)) return nullptr;
  }
  return page;
}

namespace {

/// Slots are the memory itself; pages of the arena are touched (and so become resident) only when
/// first used.
class RamStore final : public ExactStore {
 public:
  RamStore(std::byte* arena, std::uint32_t slots, std::size_t page_bytes, std::size_t part_bytes)
      : ExactStore(slots, page_bytes, part_bytes), arena_(arena), state_(slots, IoState::kDone) {}
  ~RamStore() override { munmap(arena_, static_cast<std::size_t>(slots_) * page_bytes_); }

  std::byte* Map(SlotId slot) override { return arena_ + slot.value() * page_bytes_; }
  void Unmap(SlotId) override {}
  void StartSave(SlotId slot) override {
    Sum(slot, Map(slot));
    state_[slot.value()] = IoState::kDone;
  }
  void StartFetch(SlotId slot) override {
    state_[slot.value()] = IsRight(slot, Map(slot)) ? IoState::kDone : IoState::kCorrupt;
  }
  IoState Poll(SlotId slot) override { return state_[slot.value()]; }
  void CorruptForTest(SlotId slot) override { Map(slot)[page_bytes_ / 2] ^= std::byte{4}; }

 private:
  const std::byte* Read(SlotId slot, ByteRange, std::byte*) const override {
    return arena_ + slot.value() * page_bytes_;
  }

  std::byte* arena_;
  std::vector<IoState> state_;
};

}  // namespace

Result<std::unique_ptr<ExactStore>> MakeExactStore(const StoreSpec& spec, std::size_t page_bytes,
                                                   std::size_t part_bytes, std::uint32_t buffers,
                                                   HostMemory memory) {
  if (spec.kind == StoreSpec::Kind::kNone) return std::unique_ptr<ExactStore>();
  const std::uint64_t count = std::min<std::uint64_t>(
      spec.bytes / page_bytes, std::numeric_limits<std::uint32_t>::max() - 1);
  if (count == 0) {
    return InvalidArgument("an exact store of " + FormatSize(spec.bytes) +
                           " holds no page of this model: " + FormatSize(page_bytes) + " each");
  }
  const auto slots = static_cast<std::uint32_t>(count);
  if (spec.kind == StoreSpec::Kind::kFile) {
    return MakeFileStore(spec.path, slots, page_bytes, part_bytes, buffers);
  }
  if (memory != nullptr)
    return MakeDeviceHostStore(std::move(memory), slots, page_bytes, part_bytes);
  void* arena = mmap(nullptr, static_cast<std::size_t>(slots) * page_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) {
    return OutOfMemory("exact store of " + std::to_string(spec.bytes) +
                       " bytes in RAM: " + std::strerror(errno));
  }
  return std::unique_ptr<ExactStore>(
      std::make_unique<RamStore>(static_cast<std::byte*>(arena), slots, page_bytes, part_bytes));
}

}  // namespace pliant
