// Room: kv. The exact store in host memory that a device copies to and from by itself (pinned). The
// device writes such memory behind the processor's back, so its bytes are in no cache and a
// checksum runs at the speed of memory: a thread of the store's own works them, and the engine
// thread never waits. Owned by the engine thread.
#pragma once

#include <memory>

#include "kv/exact_store.h"

namespace pliant {

/// `memory` holds at least slots * page_bytes bytes.
Result<std::unique_ptr<ExactStore>> MakeDeviceHostStore(HostMemory memory, std::uint32_t slots,
                                                        std::size_t page_bytes,
                                                        std::size_t part_bytes);

}  // namespace pliant
