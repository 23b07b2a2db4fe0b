// The inner loops of k-means, per instruction set. Rows are padded to kRowsBlock.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/cpu_isa.h"

namespace kvmanager::calibrate {

constexpr int kRowsBlock = 64;

struct KmeansKernels {
  /// nearest [rows] and score [rows]: the first centroid of the greatest x.c - |c|^2 / 2, and that. x [dims][rows],
  /// rows a multiple of kRowsBlock; centroids [count][dims]; half_norms [count].
  void (*assign)(const float* x, size_t rows, int dims, const float* centroids, const float* half_norms, int count,
                 int32_t* nearest, float* score);
  /// distance [rows] = min(distance, |x - centroid|^2); sums [rows / kRowsBlock]: of the blocks' distances.
  void (*approach)(const float* x, size_t rows, int dims, const float* centroid, float* distance, float* sums);
};

const KmeansKernels& KernelsOf(Isa isa);

}  // namespace kvmanager::calibrate
