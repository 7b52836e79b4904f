// Room: backend. Memory for packed weights and activations: large anonymous mappings, asked to use
// huge pages (a decode step streams all weights; with 4 KiB pages the TLB walks cost). One owner
// thread allocates, any thread uses the memory.
#pragma once

#include <cstddef>
#include <vector>

#include "base/status.h"

namespace pliant {

/// Bump allocator; memory is given back when the arena dies. Untouched memory costs nothing.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// `bytes` of zeroed memory at a multiple of 64. OutOfMemory when the system has none; nothing is
  /// changed then.
  Result<std::byte*> Allocate(std::size_t bytes);

  /// Sum of all Allocate calls, each rounded up to 64.
  std::size_t used() const { return used_; }

 private:
  struct Mapping {
    void* base;
    std::size_t bytes;
  };
  std::vector<Mapping> mappings_;
  std::byte* next_ = nullptr;
  std::size_t left_ = 0;
  std::size_t used_ = 0;
};

}  // namespace pliant
