// Where a model keeps its keys and values and runs attention: the seam between the model's arithmetic and the cache.
//
// A step of one layer is: the model fills q, k and v of the batch's rows in the backend's buffers, calls
// AppendAndAttend, and reads out. Rows of all entries follow one another. One thread calls a backend; several may write
// disjoint rows of its buffers.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace kvmanager::engine {

/// One sequence's rows of a step.
struct KvEntry {
  uint64_t sequence = 0;
  uint64_t position = 0;  // of the first row's token: the tokens that the sequence holds already
  int tokens = 1;
};

/// Buffers of rows_max rows.
struct StepBuffers {
  float* q = nullptr;          // [rows][query_heads][head_dim], after RoPE
  uint16_t* k = nullptr;       // [rows][kv_heads][head_dim], float16, after RoPE
  uint16_t* v = nullptr;       // the same shape
  const float* out = nullptr;  // the shape of q
  /// [rows][hidden], float16: where the input of the projections goes, of which q, k and v are then made; nullptr: not
  /// wanted.
  uint16_t* x = nullptr;
};

class KvBackend {
 public:
  virtual ~KvBackend() = default;
  virtual int rows_max() const = 0;
  virtual StepBuffers buffers() = 0;
  /// Appends the rows' K and V to `layer` and attends with q, causal: token i of an entry sees positions 0 .. position
  /// + i.
  virtual absl::Status AppendAndAttend(int layer, absl::Span<const KvEntry> entries) = 0;
  /// W_O [hidden][query_heads][head_dim] of `layer` for outputs that the cache leaves in a space of its own; empty: the
  /// model's. It stays as it is.
  virtual absl::Span<const float> OutputWeights(int layer) const { return {}; }
};

}  // namespace kvmanager::engine
