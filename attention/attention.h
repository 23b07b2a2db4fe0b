// Plan, then run: attention of a batch of sequences over one layer's pages.
//
// A plan is made on the host from shapes and page tables, by the thread that owns the page tables; running it reads
// only the plan, the pages it names, and the caller's q and out. Whoever makes a plan keeps its pages pinned, and q and
// out alive, until Run has called back. Results do not depend on how the work was split, beyond fp32 rounding of the
// merges.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "codecs/codec.h"
#include "codecs/page_attention.h"
#include "codecs/sequence_index.h"
#include "kvmanager/base/page_layout.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager {

/// One sequence's part of a batch. q and out are rows of a batch-wide array, token-major.
struct AttentionSequence {
  absl::Span<const AttentionPage> pages;  // cover positions 0 .. first_position + tokens - 1
  uint64_t first_position = 0;            // of the first query token
  int tokens = 0;                         // query tokens, >= 1; token i sees positions 0 .. first_position + i
  const void* q = nullptr;                // [tokens][query_heads][head_dim] of q_dtype
  void* out = nullptr;                    // the same shape, of q_dtype
  float* lse = nullptr;                   // [tokens][query_heads] log-sum-exp of the scaled scores, or nullptr
  /// Chooses what queries at positions from its first_position() on read; its pages are raw (of an identity codec).
  /// nullptr: every query reads everything. Run calls it in workers; it must live until Run has called back.
  TokenSelector* selector = nullptr;
};

struct AttentionBatch {
  const Codec* codec = nullptr;                  // of encoded pages: by its rung that each page names
  const PageAttention* raw_attention = nullptr;  // of raw pages of the same layout
  PageLayout layout;
  int layer = 0;
  int query_heads = 0;  // a multiple of layout.kv_heads; G = query_heads / kv_heads
  int lag_pages = 0;
  float scale = 0;  // 0: 1/sqrt(head_dim)
  DType q_dtype = DType::kFloat32;
  WorkerPool::Owner owner = WorkerPool::kDaemon;  // whose work it is, among that of others
  absl::Span<const AttentionSequence> sequences;
};

/// How many (query token, context token) pairs of one layer a plan reads in either form; what a selector leaves out is
/// not read.
struct AttentionCounts {
  uint64_t encoded_pairs = 0;
  uint64_t raw_pairs = 0;
};

class AttentionPlan {
 public:
  /// threads: how many may work on it; decides the split over length. The batch's spans may be dropped afterwards, the
  /// memory that pages, q, out and lse point to may not.
  static std::unique_ptr<AttentionPlan> Make(const AttentionBatch& batch, int threads);
  virtual ~AttentionPlan() = default;

  virtual AttentionCounts counts() const = 0;
  /// Multiply-adds of the whole plan, to tell small work (run it here) from large.
  virtual uint64_t multiply_adds() const = 0;
  /// Runs everything in the calling thread.
  virtual void RunHere() = 0;
  /// Runs on `pool`, in turns of the batch's owner; `done` is called once, on the thread that finishes last. The plan
  /// and the pool must live until then.
  virtual void Run(WorkerPool& pool, absl::AnyInvocable<void()> done) = 0;
  /// What has not begun is left out, what is at work ends within a millisecond, and `done` is still called: outputs are
  /// undefined then. Any thread, once Run was called.
  virtual void Cancel() = 0;
};

/// Merges `from` into `into`: states of the same rows over disjoint tokens.
void MergeSoftmax(int rows, int head_dim, const SoftmaxRows& from, const SoftmaxRows& into);

}  // namespace kvmanager
