// Stands for page_copy_bench where there is no CUDA Toolkit.
#include <cstdio>

int main() {
  std::fprintf(stderr, "page_copy_bench: built without CUDA: nvcc was not on PATH\n");
  return 1;
}
