// Room: kv. Where exact copies live: page-sized slots in host RAM or in a file, under a hard byte
// budget, with a checksum of each part of a page, so that a part can be read alone. The engine
// thread owns a store; a file store does its input and output on a thread of its own, which it
// talks to by a queue.
//
// Saving a page:   Take -> Map -> (bytes arrive in the buffer) -> StartSave -> Poll until done ->
// Unmap Fetching a page:         Map -> StartFetch -> Poll until done -> (bytes leave the buffer)
// -> Unmap
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/ids.h"
#include "base/status.h"
#include "kv/kv_options.h"

namespace pliant {

using SlotId = StrongId<struct SlotIdTag>;

enum class IoState : std::uint8_t { kPending, kDone, kFailed, kCorrupt };

/// Bytes [first, end) of a page.
struct ByteRange {
  std::size_t first = 0, end = 0;
};

/// A checksum of our own, 64 bits: four multiply-rotate lanes over 8-byte words. Any change of a
/// single word changes it.
std::uint64_t StoreChecksum(std::span<const std::byte> bytes);

class ExactStore {
 public:
  virtual ~ExactStore() = default;

  std::uint32_t slots() const { return slots_; }
  std::uint32_t free() const { return static_cast<std::uint32_t>(free_.size()); }
  std::uint32_t used() const { return slots_ - free(); }
  std::size_t page_bytes() const { return page_bytes_; }
  std::uint64_t bytes_total() const { return std::uint64_t{slots_} * page_bytes_; }

  /// An invalid id when the budget is used up. Nothing is ever stored beyond it.
  SlotId Take();
  /// The slot's content is forgotten. No save or fetch of it may be pending, and it must not be
  /// mapped.
  void Give(SlotId slot);

  /// Host memory of one page for this slot, or null when no buffer is free just now (try again
  /// later). Mapping is not counted.
  virtual std::byte* Map(SlotId slot) = 0;
  virtual void Unmap(SlotId slot) = 0;
  /// The buffer holds the page's bytes: checksum them and keep them.
  virtual void StartSave(SlotId slot) = 0;
  /// Bring the bytes into the buffer and verify them.
  virtual void StartFetch(SlotId slot) = 0;
  virtual IoState Poll(SlotId slot) = 0;
  /// What StartSave and StartFetch asked for may wait for this call, so that a store with a thread
  /// of its own wakes it once for many slots.
  virtual void Flush() {}

  /// The page that was saved into `slot` (Poll has said kDone), of which `ranges` are verified and
  /// there to be read; null when they are spoiled or cannot be read. `buffer`: a page that the
  /// answer may lie in. Any thread, while the owner makes no call.
  const std::byte* Peek(SlotId slot, std::span<const ByteRange> ranges,
                        std::span<std::byte> buffer) const;

  /// Where the page that was saved into `slot` lies, for a device that reads it by itself, not
  /// verified; null where the store's memory is not the device's own (Backend::AllocateHost).
  virtual const std::byte* Address(SlotId /*slot*/) const { return nullptr; }

  /// For tests: spoils what is kept for `slot`, as a broken disk or memory would.
  virtual void CorruptForTest(SlotId slot) = 0;

 protected:
  ExactStore(std::uint32_t slots, std::size_t page_bytes, std::size_t part_bytes);
  /// Checksums of what `page` holds become those of the slot; whether they are. Any thread, while
  /// no other does something with the slot.
  void Sum(SlotId slot, const std::byte* page);
  bool IsRight(SlotId slot, const std::byte* page) const {
    return IsRight(slot, page, {0, page_bytes_});
  }
  /// For Peek: the page, with whole parts [range) there to be read. Null: they cannot be.
  virtual const std::byte* Read(SlotId slot, ByteRange range, std::byte* buffer) const = 0;

  std::uint32_t slots_;
  std::size_t page_bytes_;

 private:
  ByteRange WholeParts(ByteRange range) const;
  bool IsRight(SlotId slot, const std::byte* page, ByteRange whole_parts) const;

  struct Free {
    void operator()(std::uint64_t* p) const { std::free(p); }
  };
  std::size_t part_bytes_, parts_;  // of a page
  std::vector<SlotId> free_;
  std::vector<bool> taken_;
  // [slots][parts]. Memory that the system gives when it is first used, as the slots are.
  std::unique_ptr<std::uint64_t[], Free> checksums_;
};

/// Null for StoreSpec::Kind::kNone. InvalidArgument when the budget does not hold one page; IoError
/// or OutOfMemory when the memory or the file is not to be had; a file that exists already is
/// refused.
/// `part_bytes`: what a checksum is of, 8 bytes each (that memory is not counted). `buffers` is the
/// number of pages a file store stages in RAM. `memory`: what a RAM store lies in, at least
/// spec.bytes; null: ordinary memory that it reserves itself.
Result<std::unique_ptr<ExactStore>> MakeExactStore(
    const StoreSpec& spec, std::size_t page_bytes, std::size_t part_bytes,
    std::uint32_t buffers = 64, HostMemory memory = HostMemory(nullptr, nullptr));

}  // namespace pliant
