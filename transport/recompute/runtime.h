// Reloads one layer of K and V of a batch of sequences: of each sequence's first tokens recomputed from activations, of
// the others copied as they are stored, both at once, with double buffering (KVPR, section 3.3).
//
// Order. While a staging buffer is free, the next chunk of activations goes over the link; else K and V do. So the link
// never waits for arithmetic as long as anything is left to copy, and arithmetic has its next chunk as early as it can
// take it. At most kCopiesInFlight copies are posted ahead of the link.
//
// What is recomputed arrives in raw pages of the layout's dtype; what is copied arrives as it was, raw or encoded, in
// slots of kv_page_bytes. Splits are whole pages.
//
// Weights that are streamed themselves go over the same link before a reload, W_K and W_V first, since recomputation
// needs nothing of W_Q and W_O; that adds alike to every split, so plans do not know it.
//
// Owned by the engine's side of a fetch; one thread calls, one reload at a time; `cancelled` may be set by any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/clock.h"
#include "transport/recompute/executor.h"
#include "transport/recompute/profile.h"

namespace kvmanager::recompute {

/// One sequence's pages of the layer. Pages from 0: page p holds tokens p * page_tokens onwards. What spans point to
/// outlives the reload, sources and destinations do not overlap, and nobody reads destinations before it is over.
struct ReloadSequence {
  static constexpr int64_t kTokensMax = int64_t{1} << 24;

  int64_t tokens = 0;          // 1..kTokensMax
  int64_t split_tokens = 0;    // l: 0..tokens, a multiple of page_tokens or `tokens`
  int64_t first_position = 0;  // of token 0, for RoPE; 0 .. RopeFacts::kPositionMax - tokens
  /// Activations of the pages below the split: [tokens of the page][hidden] of the layout's dtype.
  absl::Span<const uint8_t* const> activations;
  /// Where each page goes, ceil(tokens / page_tokens) of them: raw_bytes() below the split, kv_page_bytes from there
  /// on.
  absl::Span<uint8_t* const> pages;
  /// Stored pages from the split on, kv_page_bytes each; sources[0] is that of the first page behind the split.
  absl::Span<const uint8_t* const> sources;
};

struct ReloadRequest {
  static constexpr size_t kSequencesMax = 4096;
  static constexpr size_t kPageBytesMax = size_t{1} << 28;

  int layer = 0;
  size_t kv_page_bytes = 0;  // 1..kPageBytesMax: of a stored page, encoded or raw
  absl::Span<const ReloadSequence> sequences;
  const std::atomic<bool>* cancelled = nullptr;  // set: the reload ends soon, with CANCELLED
};

/// What a reload did.
struct ReloadReport {
  int64_t elapsed_ns = 0;
  int64_t activation_bytes = 0, kv_bytes = 0;
  double flops = 0;
  int64_t link_ns = 0, compute_ns = 0;  // that each lane worked
};

/// A batch of sequences of equal length is planned best as one sequence of all their tokens, since a split of one page
/// more of each would be a coarse step. This shares such a split out, in whole pages: the split_tokens of sequence i.
/// batch_split: 0..batch * tokens; i: 0..batch - 1.
int64_t SplitOfSequence(int64_t batch_split, int64_t batch, int64_t tokens, int64_t page_tokens, int64_t i);

class ReloadRuntime {
 public:
  static constexpr int kCopiesInFlight = 2;

  /// executor, clock, profile (nullptr: nothing is recorded): outlive this. Weights are registered with the executor.
  ReloadRuntime(ReloadExecutor* executor, const Clock* clock, Profile* profile)
      : executor_(executor), clock_(clock), profile_(profile) {}

  /// Returns when everything has arrived, or nothing more will be written. Its rates go into the profile. Errors:
  /// INVALID_ARGUMENT naming the field, and FAILED_PRECONDITION for a layer without weights: nothing was written;
  /// CANCELLED, and the executor's own: destinations hold some mixture, and are to be given up.
  absl::StatusOr<ReloadReport> Run(const ReloadRequest& request);

  /// A profiler's start: reloads `request` twice, once all copied and once all recomputed, whatever its splits are; its
  /// sequences have activations and sources of every page. Pages are raw_bytes() or kv_page_bytes, the larger.
  absl::Status Measure(const ReloadRequest& request);

 private:
  /// What goes into a staging buffer at once, and what of K and V goes over the link at once: ranges of the lists
  /// below.
  struct Range {
    size_t begin = 0, count = 0;
  };
  absl::Status Check(const ReloadRequest& request) const;
  void Cut(const ReloadRequest& request);

  ReloadExecutor* const executor_;
  const Clock* const clock_;
  Profile* const profile_;
  std::vector<ActivationRows> activations_;
  std::vector<PageRows> pages_;  // of activations_, alike
  std::vector<CopyPiece> copies_;
  std::vector<Range> chunks_, pieces_;
};

}  // namespace kvmanager::recompute
