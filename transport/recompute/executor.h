// The seam between what a reload does in which order (runtime.h) and who does it: a ReloadExecutor copies and computes.
// CpuExecutor (cpu_executor.h) is one on threads, CudaExecutor (cuda_executor.h) one on two streams of a GPU.
//
// An executor has two lanes, which run side by side:
// - the copy lane does PostActivations and PostKv in the order they were posted, one after another, over one link;
// - the compute lane does PostProjection in order; a projection begins once the activations posted before it to the
//   same buffer have arrived.
// Everything posted is answered by exactly one Wait(), in the order of completion, also what was aborted.
//
// Owned by whoever wires a reload; used by one thread, ReloadRuntime's caller.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/base/page_layout.h"
#include "transport/recompute/rope.h"

namespace kvmanager::recompute {

/// The model, as far as K and V are made of activations. A plain struct.
struct ProjectionModel {
  static constexpr int kLayersMax = 4096;
  static constexpr int kHiddenMax = 1 << 20;
  static constexpr int64_t kWeightsMax = int64_t{1} << 31;  // hidden * kv_heads * head_dim

  PageLayout layout;  // of raw pages; X has its dtype, kFloat16 or kBFloat16
  int layers = 0;     // 1..kLayersMax
  int hidden = 0;     // 1..kHiddenMax
  RopeFacts rope;

  int width() const { return int(layout.kv_heads) * layout.head_dim; }
  /// Bytes of one page of activations, [page_tokens][hidden] of layout.dtype, dense.
  size_t activation_page_bytes() const { return size_t(layout.page_tokens) * hidden * DTypeBytes(layout.dtype); }
};
/// Errors: INVALID_ARGUMENT naming the field.
absl::Status CheckModel(const ProjectionModel& model);

/// W_K and W_V of a layer, [kv_heads * head_dim][hidden] of `dtype`, dense: row o makes channel o % head_dim of KV head
/// o / head_dim, as Linear layers of transformers keep it. With half-split RoPE and interleaved RoPE the rows are in
/// the order that the engine uses.
struct LayerWeights {
  DType dtype = DType::kFloat16;
  absl::Span<const uint8_t> k, v;
  absl::Span<const uint8_t> k_bias, v_bias;  // [kv_heads * head_dim] of dtype, or empty
};
/// Sizes, and that everything is finite. Errors: INVALID_ARGUMENT naming the field.
absl::Status CheckWeights(const ProjectionModel& model, int layer, const LayerWeights& weights);

/// DATA_LOSS: what was recomputed is not finite. side: 0 K, 1 V.
absl::Status NotFinite(int layer, int side, int head, int64_t position);

/// Rows of activations on their way into a staging buffer.
struct ActivationRows {
  const uint8_t* from = nullptr;
  size_t bytes = 0;
};
/// Where the K and V of the next `tokens` rows of a staging buffer go.
struct PageRows {
  uint8_t* page = nullptr;  // raw; its first `tokens` tokens are written
  int tokens = 0;           // 1..page_tokens
  int64_t position = 0;     // of the first token, for RoPE
};
struct CopyPiece {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  size_t bytes = 0;
};

class ReloadExecutor {
 public:
  static constexpr int kBuffersMax = 8;

  struct Done {
    enum class What { kActivations, kKv, kProjection };
    What what = What::kKv;
    int buffer = -1;         // of activations and projections
    int64_t elapsed_ns = 0;  // that the lane worked on it
    absl::Status status;     // CANCELLED if it was aborted
  };

  virtual ~ReloadExecutor() = default;
  virtual const ProjectionModel& model() const = 0;
  virtual int buffers() const = 0;     // 2..kBuffersMax
  virtual int chunk_rows() const = 0;  // rows of a staging buffer, at least page_tokens
  /// Rows of a reload's first chunk, page_tokens..chunk_rows(); those that follow are larger, up to chunk_rows(). Small
  /// ones let projections begin earlier, where they are not much slower per row. By default all are alike.
  virtual int first_chunk_rows() const { return chunk_rows(); }
  /// Bytes of one PostKv, parts of pages too. What is posted holds up the next activations: by default an eighth of
  /// their chunk, at least 16 KiB.
  virtual size_t kv_piece_bytes() const;

  /// Copies what it needs of `weights`. Not during a reload. Errors: INVALID_ARGUMENT naming the field.
  virtual absl::Status RegisterWeights(int layer, const LayerWeights& weights) = 0;
  virtual bool HasWeights(int layer) const = 0;

  /// Begins a reload: clears an abort. cancelled: looked at between slices of work, may be set by any thread; nullptr,
  /// or outlives the reload. REQUIRES: everything posted has been waited for.
  virtual void Begin(const std::atomic<bool>* cancelled) = 0;
  /// Rows, packed one behind the other, into staging buffer `buffer`. REQUIRES: its last projection has been waited
  /// for; at most chunk_rows() rows. Spans stay valid until it is done.
  virtual void PostActivations(int buffer, absl::Span<const ActivationRows> rows) = 0;
  /// K and V of the rows in `buffer` to `pages`. REQUIRES: no other projection of the buffer is posted.
  virtual void PostProjection(int buffer, int layer, absl::Span<const PageRows> pages) = 0;
  virtual void PostKv(absl::Span<const CopyPiece> pieces) = 0;
  /// Blocks until something posted is done. REQUIRES: something is posted.
  virtual Done Wait() = 0;
  /// What is posted ends soon, with CANCELLED.
  virtual void Abort() = 0;
};

}  // namespace kvmanager::recompute
