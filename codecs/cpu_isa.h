// Instruction sets that attention kernels are compiled for, and which of them this processor runs.
//
// Values; any thread. Factories take an Isa, so that tests compare all of them on one machine.
#pragma once

#include <vector>

namespace kvmanager {

enum class Isa {
  kPortable,  // the compiler's baseline
  kAvx2,      // AVX2, FMA, F16C
  kAvx512,    // AVX-512 F, BW, DQ, VL, VNNI
};

/// The widest set that this processor runs.
Isa BestIsa();
/// Every set that this processor runs, narrowest first.
std::vector<Isa> SupportedIsas();
const char* IsaName(Isa isa);

}  // namespace kvmanager
