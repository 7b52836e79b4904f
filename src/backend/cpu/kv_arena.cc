#include "backend/cpu/kv_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "base/check.h"

namespace pliant {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t PhysicalMemory() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long bytes = sysconf(_SC_PAGESIZE);
  return pages > 0 && bytes > 0 ? static_cast<std::size_t>(pages) * bytes : SIZE_MAX;
}

}  // namespace

KvArena::~KvArena() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_size_);
}

Status KvArena::Reserve(std::size_t bytes) {
  PLIANT_CHECK(mapping_ == nullptr && bytes > 0, "the arena is reserved once");
  const std::string what = "KV pages: " + std::to_string(bytes) + " bytes ";
  // The system would promise more than there is and kill the process when the pages are used.
  if (bytes > PhysicalMemory()) {
    return OutOfMemory(what + "are more than this machine's " + std::to_string(PhysicalMemory()));
  }
  const std::size_t mapping_size = bytes + kHugePage;
  void* mapping =
      mmap(nullptr, mapping_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return OutOfMemory(what + "were refused by the system");
  mapping_ = static_cast<std::byte*>(mapping);
  mapping_size_ = mapping_size;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(mapping);
  const std::uintptr_t aligned = (address + kHugePage - 1) / kHugePage * kHugePage;
  data_ = mapping_ + (aligned - address);
  size_ = bytes;
  // A block's planes lie in several pages: with 4 KiB pages every one of them would cost a TLB
  // miss. Refusal only costs speed.
  (void)madvise(data_, size_, MADV_HUGEPAGE);
  return {};
}

}  // namespace pliant
