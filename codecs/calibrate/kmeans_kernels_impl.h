// The body of kmeans_kernels.cc, included once per instruction set, hence no include guard. Vectors of KV_KERNEL_LANES
// rows, one register of the enclosing #pragma GCC target: GCC compares longer ones element by element. Multiply and add
// stay apart, so that all instruction sets agree bit by bit.

namespace KV_KERNEL_ISA {

constexpr int kLanes = KV_KERNEL_LANES;
typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));

KV_KERNEL_INLINE F Load(const float* from) {
  F v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

/// kDims: known dimensions, or 0; kVectors: of rows that share a centroid's broadcasts.
template <int kDims, int kVectors>
void AssignRows(const float* x, size_t rows, int dims_given, const float* centroids, const float* half_norms, int count,
                int32_t* nearest, float* score) {
  const int dims = kDims == 0 ? dims_given : kDims;
  for (size_t row = 0; row < rows; row += kLanes * kVectors) {
    F own[kDims == 0 ? 1 : kDims][kVectors], best[kVectors];
    I index[kVectors];
    if constexpr (kDims != 0) {
      for (int d = 0; d < kDims; ++d) {
        for (int v = 0; v < kVectors; ++v) own[d][v] = Load(x + size_t(d) * rows + row + v * kLanes);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      best[v] = F{} - FLT_MAX;
      index[v] = I{};
    }
    for (int c = 0; c < count; ++c) {
      const float* centroid = centroids + size_t(c) * dims;
      for (int v = 0; v < kVectors; ++v) {
        F s = F{} - half_norms[c];
        for (int d = 0; d < dims; ++d) {
          if constexpr (kDims != 0) {
            s += own[d][v] * centroid[d];
          } else {
            s += Load(x + size_t(d) * rows + row + v * kLanes) * centroid[d];
          }
        }
        const I better = s > best[v];
        best[v] = better ? s : best[v];
        index[v] = better ? I{} + c : index[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(nearest + row + v * kLanes, &index[v], sizeof(I));
      std::memcpy(score + row + v * kLanes, &best[v], sizeof(F));
    }
  }
}

void Assign(const float* x, size_t rows, int dims, const float* centroids, const float* half_norms, int count,
            int32_t* nearest, float* score) {
  switch (dims) {
    case 1:
      return AssignRows<1, 4>(x, rows, dims, centroids, half_norms, count, nearest, score);
    case 2:
      return AssignRows<2, 4>(x, rows, dims, centroids, half_norms, count, nearest, score);
    case 4:
      return AssignRows<4, 2>(x, rows, dims, centroids, half_norms, count, nearest, score);
    case 8:
      return AssignRows<8, 2>(x, rows, dims, centroids, half_norms, count, nearest, score);
    default:
      return AssignRows<0, 4>(x, rows, dims, centroids, half_norms, count, nearest, score);
  }
}

void Approach(const float* x, size_t rows, int dims, const float* centroid, float* distance, float* sums) {
  for (size_t row = 0; row < rows; row += kRowsBlock) {
    constexpr int kParts = kSumLanes / kLanes;
    F sum[kParts] = {};
    for (int v = 0; v < kRowsBlock; v += kLanes) {
      F near = {};
      for (int d = 0; d < dims; ++d) {
        const F difference = Load(x + size_t(d) * rows + row + v) - centroid[d];
        near += difference * difference;
      }
      const F before = Load(distance + row + v);
      near = near < before ? near : before;
      std::memcpy(distance + row + v, &near, sizeof(F));
      sum[v / kLanes % kParts] += near;
    }
    float total = 0;
    for (int lane = 0; lane < kSumLanes; ++lane) total += sum[lane / kLanes][lane % kLanes];
    sums[row / kRowsBlock] = total;
  }
}

constexpr KmeansKernels kKernels = {Assign, Approach};

}  // namespace KV_KERNEL_ISA
