// Lloyd's k-means for the sub-vectors of product quantisation: a few dimensions, many rows, hundreds to thousands of
// centroids.
//
// Functions of their arguments alone: any thread, and the same bits for every instruction set. Distances go over all
// rows of a vector register at once, which is why rows lie column by column.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "codecs/cpu_isa.h"

namespace kvmanager::calibrate {

struct KmeansOptions {
  static constexpr int kCentroidsMax = 4096;
  int centroids = 256;  // 1..kCentroidsMax
  int iterations = 25;  // at most; fewer when no row changes its centroid
  uint64_t seed = 0;
  Isa isa = BestIsa();
};

struct KmeansResult {
  std::vector<float> centroids;   // [centroids][dims]
  double mean_squared_error = 0;  // of a row against its centroid, before the last update
  int iterations = 0;
  int restarts = 0;  // of centroids that had lost all their rows
};

/// columns: [dims][rows], finite; rows >= 1. Starts from k-means++ (each next centroid a row, with probability
/// proportional to its squared distance from those there are); a centroid without rows restarts at a random row; of
/// equally near centroids the first counts. With fewer distinct rows than centroids, centroids repeat.
KmeansResult Kmeans(absl::Span<const float> columns, int dims, int rows, const KmeansOptions& options);

}  // namespace kvmanager::calibrate
