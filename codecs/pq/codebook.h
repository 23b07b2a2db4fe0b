// The centroids of one layer's keys, and the codes of its tokens.
//
// Codebook: filled by its training's tasks, immutable afterwards; shared by the sequences and selectors that use it.
// Codes: a persistent array. Chunks are shared by forks, by selectors and by what they were copied from; who appends
// behind somebody else's tokens copies the last chunk first. Appending is for the store's thread; readers on workers
// read chunks of their own snapshot, below its token count, where nothing is written any more.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codecs/pq/pq_parameters.h"

namespace kvmanager::pq {

struct Codebook {
  int kv_heads = 0, m = 0, count = 0, width = 0;  // width = head_dim / m
  std::vector<float> centroids;                   // [kv_heads][m][width][count], transposed for the kernels
  std::vector<float> half_norms;                  // [kv_heads][m][count] of |c|^2 / 2

  Codebook(int kv_heads, int m, int count, int width)
      : kv_heads(kv_heads),
        m(m),
        count(count),
        width(width),
        centroids(size_t(kv_heads) * m * width * count),
        half_norms(size_t(kv_heads) * m * count) {}
  float* centroids_of(int head, int sub) { return &centroids[(size_t(head) * m + sub) * width * count]; }
  const float* centroids_of(int head, int sub) const { return &centroids[(size_t(head) * m + sub) * width * count]; }
  float* half_norms_of(int head, int sub) { return &half_norms[(size_t(head) * m + sub) * count]; }
  const float* half_norms_of(int head, int sub) const { return &half_norms[(size_t(head) * m + sub) * count]; }
  uint64_t bytes() const { return (centroids.size() + half_norms.size()) * sizeof(float); }
};

/// Codes of consecutive tokens: a byte each, [kv_heads][m][tokens].
struct CodeChunk {
  static constexpr uint64_t kTokens = 1024;
  explicit CodeChunk(size_t rows, uint64_t capacity) : capacity(capacity), codes(rows * capacity) {}
  uint8_t* row(size_t r) { return &codes[r * capacity]; }
  const uint8_t* row(size_t r) const { return &codes[r * capacity]; }

  const uint64_t capacity;
  uint64_t written = 0;  // tokens: of the list that appended last; store's thread
  std::vector<uint8_t> codes;
};

class Codes {
 public:
  explicit Codes(size_t rows = 0) : rows_(rows) {}
  uint64_t tokens() const { return tokens_; }
  const std::vector<std::shared_ptr<CodeChunk>>& chunks() const { return chunks_; }

  /// Room for `tokens` more at the end, for a training's tasks to write: they count as there.
  void Extend(uint64_t tokens);
  /// Appends tokens first .. first + count - 1 of `from`.
  void Append(const CodeChunk& from, uint64_t first, uint64_t count);
  void Truncate(uint64_t tokens);
  uint64_t bytes() const { return chunks_.size() * rows_ * CodeChunk::kTokens; }

 private:
  CodeChunk& LastForAppend();

  size_t rows_;  // kv_heads * m
  uint64_t tokens_ = 0;
  std::vector<std::shared_ptr<CodeChunk>> chunks_;
};

}  // namespace kvmanager::pq
