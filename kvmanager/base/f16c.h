// CpuHasF16c: whether this processor converts half-precision numbers (VCVTPH2PS and VCVTPS2PH). Any thread may call it.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvmanager {

/// As CPUID says (Intel SDM, volume 2A, CPUID, leaf 1, ECX bit 29): __builtin_cpu_supports("f16c") is GCC's alone. What
/// the operating system keeps of the registers is not asked: REQUIRES a look at AVX or AVX2 beside it.
inline bool CpuHasF16c() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
#else
  return false;
#endif
}

}  // namespace kvmanager
