// Room: backend. Likeness between keys (history_keys.h) in vectors. Pure, any thread.
#pragma once

#include "backend/cpu/cpu_level.h"
#include "backend/history_keys.h"

namespace pliant {

/// Bit for bit as the scalar kernel, but for roundings of `decode`.
const KeyKernel& ChooseKeyKernel(CpuLevel level);

}  // namespace pliant
