// Room: backend. Which of a file's Highway targets runs at a CpuLevel. Included inside HWY_ONCE,
// after the file's targets are compiled; any thread.
#pragma once

#include <hwy/highway.h>

#include "backend/cpu/cpu_level.h"

#if HWY_TARGETS & HWY_AVX3
#define PLIANT_RETURN_AVX3(level, function) \
  if ((level) >= CpuLevel::kAvx512) return N_AVX3::function()
#else
#define PLIANT_RETURN_AVX3(level, function) (void)(level)
#endif
#if HWY_TARGETS & HWY_AVX2
#define PLIANT_RETURN_AVX2(level, function) \
  if ((level) >= CpuLevel::kAvx2) return N_AVX2::function()
#else
#define PLIANT_RETURN_AVX2(level, function) (void)(level)
#endif

/// Returns, from the enclosing function, what `function()` of the widest target that `level` allows
/// returns.
#define PLIANT_RETURN_BY_LEVEL(level, function) \
  PLIANT_RETURN_AVX3(level, function);          \
  PLIANT_RETURN_AVX2(level, function);          \
  return HWY_STATIC_DISPATCH(function)()
