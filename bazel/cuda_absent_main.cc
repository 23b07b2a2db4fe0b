// Stands for a benchmark of the GPU where there is no CUDA Toolkit.
#include <errno.h>

#include <cstdio>

#include "kvmanager/base/needs_cuda.h"

int main() {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, kvmanager::kBuiltWithoutCuda);
  return 1;
}
