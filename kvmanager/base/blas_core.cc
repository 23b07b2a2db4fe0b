#include "kvmanager/base/blas_core.h"

#include <unistd.h>

#include <cstdlib>

namespace kvmanager {
namespace {

const char* BestCore() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    return "SkylakeX";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "Haswell";
#endif
  return nullptr;
}

// Whether something was to be set, and is.
bool SetIfUnset() {
  const char* core = BestCore();
  if (std::getenv("OPENBLAS_CORETYPE") != nullptr || core == nullptr) return false;
  return setenv("OPENBLAS_CORETYPE", core, 0) == 0 && setenv("OPENBLAS_NUM_THREADS", "1", 0) == 0;
}

}  // namespace

void ChooseBlasCore(char** argv) {
  if (SetIfUnset()) execv("/proc/self/exe", argv);
}

void SetBlasCore() { SetIfUnset(); }

}  // namespace kvmanager
