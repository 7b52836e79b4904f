#include "backend/cpu/cpu_level.h"

#include <algorithm>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pliant {
namespace {

#if defined(__x86_64__)

struct CpuidWords {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidWords Cpuid(unsigned leaf, unsigned subleaf) {
  CpuidWords words;
  if (__get_cpuid_count(leaf, subleaf, &words.eax, &words.ebx, &words.ecx, &words.edx) == 0) {
    return {};
  }
  return words;
}

// State the operating system saves for us (XCR0). Raw bytes of xgetbv, so that no flag is needed.
unsigned long long EnabledState() {
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

bool Bit(unsigned word, int bit) { return ((word >> bit) & 1u) != 0; }

// Linux hands out the 8 KiB of tile state on request only.
bool AskForTiles() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuLevel Detect() {
  const CpuidWords leaf1 = Cpuid(1, 0);
  const bool osxsave = Bit(leaf1.ecx, 27);
  const bool fma = Bit(leaf1.ecx, 12);
  const bool f16c = Bit(leaf1.ecx, 29);
  if (!osxsave) return CpuLevel::kPlain;
  const unsigned long long state = EnabledState();
  constexpr unsigned long long kYmm = 0x6;
  constexpr unsigned long long kZmm = 0xe6;
  constexpr unsigned long long kTile = 0x60000;
  const CpuidWords leaf7 = Cpuid(7, 0);
  const CpuidWords leaf7_1 = Cpuid(7, 1);
  if ((state & kYmm) != kYmm || !fma || !f16c || !Bit(leaf7.ebx, 5)) return CpuLevel::kPlain;
  const bool avx512 = (state & kZmm) == kZmm && Bit(leaf7.ebx, 16) && Bit(leaf7.ebx, 17) &&
                      Bit(leaf7.ebx, 30) && Bit(leaf7.ebx, 31) && Bit(leaf7.ecx, 1) &&
                      Bit(leaf7.ecx, 11) && Bit(leaf7.ecx, 14) && Bit(leaf7_1.eax, 5);
  if (!avx512) return CpuLevel::kAvx2;
  const bool amx = (state & kTile) == kTile && Bit(leaf7.edx, 22) && Bit(leaf7.edx, 24);
  return amx && AskForTiles() ? CpuLevel::kAmx : CpuLevel::kAvx512;
}

#else

CpuLevel Detect() { return CpuLevel::kPlain; }

#endif

}  // namespace

std::string_view CpuLevelName(CpuLevel level) {
  switch (level) {
    case CpuLevel::kPlain:
      return "plain";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kAmx:
      return "amx";
  }
  return "?";
}

CpuLevel MachineLevel() {
  static const CpuLevel level = Detect();
  return level;
}

Result<CpuLevel> ChooseCpuLevel(std::string_view word) {
  if (word == "auto") return MachineLevel();
  for (const CpuLevel level :
       {CpuLevel::kPlain, CpuLevel::kAvx2, CpuLevel::kAvx512, CpuLevel::kAmx}) {
    if (word == CpuLevelName(level)) return std::min(level, MachineLevel());
  }
  return InvalidArgument("cpu level \"" + std::string(word) +
                         "\" is not one of auto, amx, avx512, avx2, plain");
}

}  // namespace pliant
