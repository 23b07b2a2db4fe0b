#include <cstdio>

int main() {
  std::printf("built without CUDA: nvcc was not on PATH\n");
  return 0;
}
