// Room: kv. The exact store in a file. Reads and writes run on one thread of the store's own,
// checksums too; the engine thread sees their ends by polling.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "kv/exact_store.h"

namespace pliant {

/// Creates PATH (it must not exist) and removes its name at once: the space returns to the disk
/// when the process ends, however it ends. `buffers` page-sized buffers of RAM, at least 1, stage
/// what is on its way.
Result<std::unique_ptr<ExactStore>> MakeFileStore(const std::string& path, std::uint32_t slots,
                                                  std::size_t page_bytes, std::size_t part_bytes,
                                                  std::uint32_t buffers);

}  // namespace pliant
