#include "backend/cpu/arena.h"

#include <sys/mman.h>

#include <cstdint>
#include <string>

namespace pliant {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunk = std::size_t{64} << 20;
constexpr std::size_t kAlign = 64;
constexpr std::size_t kMost = std::size_t{1} << 46;  // beyond any machine; keeps sums from wrapping

std::size_t RoundUp(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

}  // namespace

Arena::~Arena() {
  for (const Mapping& mapping : mappings_) munmap(mapping.base, mapping.bytes);
}

Result<std::byte*> Arena::Allocate(std::size_t bytes) {
  if (bytes > kMost) {
    return OutOfMemory(std::to_string(bytes) + " bytes do not fit any memory");
  }
  const std::size_t need = RoundUp(bytes, kAlign);
  if (need > left_) {
    // One huge page more, so that the chunk can start on a huge-page border.
    const std::size_t size = RoundUp(need > kChunk ? need : kChunk, kHugePage) + kHugePage;
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
      return OutOfMemory("the system has no memory for " + std::to_string(need) + " bytes");
    }
    madvise(base, size, MADV_HUGEPAGE);  // a wish; without it only speed is lost
    mappings_.push_back({base, size});
    const auto address = reinterpret_cast<std::uintptr_t>(base);
    const std::size_t skip = RoundUp(address, kHugePage) - address;
    next_ = static_cast<std::byte*>(base) + skip;
    left_ = size - skip;
  }
  std::byte* result = next_;
  next_ += need;
  left_ -= need;
  used_ += need;
  return result;
}

}  // namespace pliant
