// Room: backend. The memory behind the plane pages: one mapping, taken from the system as it is
// used. Owner thread only (the bytes themselves are written by whoever the ops and copies run on).
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"

namespace pliant {

class KvArena {
 public:
  KvArena() = default;
  ~KvArena();
  KvArena(const KvArena&) = delete;
  KvArena& operator=(const KvArena&) = delete;

  /// Reserves `bytes` (once), aligned to 2 MiB, huge pages asked for. OutOfMemory when the system
  /// refuses or when it is more than the machine's memory. Nothing is resident until it is written.
  Status Reserve(std::size_t bytes);
  std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::byte* mapping_ = nullptr;
  std::size_t mapping_size_ = 0;
};

}  // namespace pliant
