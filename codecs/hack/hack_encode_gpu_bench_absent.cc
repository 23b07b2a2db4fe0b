#include <cstdio>

int main() {
  std::fprintf(stderr, "hack_encode_gpu_bench: this build has no CUDA Toolkit\n");
  return 1;
}
