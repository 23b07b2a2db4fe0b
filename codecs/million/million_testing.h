// Codebooks and aligned memory for MILLION's tests. Values; each test owns what it makes.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "codecs/million/million_codebooks.h"
#include "codecs/million/million_format.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::million {

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <typename T>
using AlignedArray = std::unique_ptr<T[], Free>;

template <typename T>
AlignedArray<T> MakeAligned(size_t n) {
  T* data = static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 127) / 64 * 64));
  std::memset(static_cast<void*>(data), 0, n * sizeof(T));
  return AlignedArray<T>(data);
}

inline PageLayout MakeLayout(int heads, int d, int page_tokens, DType dtype = DType::kFloat16) {
  PageLayout layout;
  layout.dtype = dtype;
  layout.kv_heads = uint16_t(heads);
  layout.head_dim = uint16_t(d);
  layout.page_tokens = uint16_t(page_tokens);
  return layout;
}

inline MillionFormat MakeFormat(const PageLayout& layout, SideParameters k, SideParameters v) {
  MillionParameters parameters;
  parameters.side[kSideK] = k;
  parameters.side[kSideV] = v;
  return MakeMillionFormat(layout, parameters);
}

/// A centroid's component.
using Component = std::function<float(int side, int channel, int index)>;

/// Codebooks of normal components, or of given ones, and their tables.
struct Books {
  Books(const MillionFormat& format, int layers, uint64_t seed, const Component& component = nullptr) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, 1);
    books.layers = layers;
    for (int side = 0; side < 2; ++side) {
      const SideLayout& s = format.side[side];
      for (int i = 0; i < layers * format.layout.kv_heads; ++i) {
        auto& values =
            *memory.emplace_back(std::make_unique<std::vector<uint16_t>>(size_t(format.layout.head_dim) * s.centroids));
        for (int m = 0; m < s.subspaces; ++m) {
          for (int j = 0; j < s.centroids; ++j) {
            for (int k = 0; k < s.width; ++k) {
              const float x = component ? component(side, m * s.width + k, j) : normal(random);
              values[(size_t(m) * s.centroids + j) * s.width + k] = FloatToHalf(x);
            }
          }
        }
        books.side[side].push_back(values.data());
      }
    }
    tables = std::make_unique<MillionTables>(format, books, TableOrder::kBoth, TableOrder::kBoth);
  }

  std::vector<std::unique_ptr<std::vector<uint16_t>>> memory;
  MillionCodebooks books;
  std::unique_ptr<MillionTables> tables;
};

}  // namespace kvmanager::million
