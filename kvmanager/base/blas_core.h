// Which kernels OpenBLAS uses. Debian 12's OpenBLAS 0.3.21 does not know newer CPUs and takes them for a Prescott, five
// times slower than they are; the choice is made while the library loads, so it must be in the environment before.
#pragma once

namespace kvmanager {

/// First thing in main(), before any thread: if OPENBLAS_CORETYPE is unset, sets it by cpuid (SkylakeX with AVX-512,
/// Haswell with AVX2), sets OPENBLAS_NUM_THREADS=1 if unset, and executes the program again. Returns if there is
/// nothing to set or the execution fails (the products are then slower, not wrong).
void ChooseBlasCore(char** argv);

/// For a program that loads OpenBLAS later, by dlopen: the environment alone. First thing in main(), too.
void SetBlasCore();

}  // namespace kvmanager
