// What the machine can do at best, for comparison with what kernels reach in the same run.
#pragma once

#include "backend/cpu/cpu_level.h"
#include "base/thread_pool.h"

namespace pliant {

/// Bytes a second that all threads of `pool` read together from memory, streaming.
double MeasureReadBytes(ThreadPool& pool);

/// Floating-point operations a second from registers: AMX bf16 tiles, VDPBF16PS, or f32 FMA.
double MeasureFlops(ThreadPool& pool, CpuLevel level);

}  // namespace pliant
