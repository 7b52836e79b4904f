// Room: backend. Which instruction sets the CPU kernels may use. Any thread.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace pliant {

/// Ordered: a level includes those before it. kPlain is the build's baseline (x86-64-v2).
enum class CpuLevel { kPlain, kAvx2, kAvx512, kAmx };

std::string_view CpuLevelName(CpuLevel level);

/// What this machine can run, and what the operating system lets this process use: kAmx needs the
/// kernel's permission for tile state, asked for once a process (arch_prctl). kAvx512 means
/// AVX-512 F, BW, DQ, VL, VBMI, BF16, VNNI and VPOPCNTDQ (Zen 4, Sapphire Rapids and later); with
/// less it is kAvx2.
CpuLevel MachineLevel();

/// The level to run at for CpuOptions.level: MachineLevel() for "auto", else the word's level
/// capped by the machine. InvalidArgument for an unknown word.
Result<CpuLevel> ChooseCpuLevel(std::string_view word);

}  // namespace pliant
