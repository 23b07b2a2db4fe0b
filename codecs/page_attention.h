// Attention of a few query rows over pages of one KV head, as a running softmax state that merges.
//
// The interface between attention/ (which plans, splits and merges) and a codec's folder (which knows the bytes of its
// pages). Implementations have no state of their own: every method may be called from any thread at once, and allocates
// nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager {

/// Softmax state of `rows` query rows, not normalised: row r's output so far is acc[r] / sum[r], its log-sum-exp is
/// max[r] + log(sum[r]). Empty state: max = -infinity, sum = 0, acc = 0. Two states over disjoint tokens merge
/// (attention.h).
struct SoftmaxRows {
  float* max = nullptr;  // [rows] largest scaled score so far
  float* sum = nullptr;  // [rows] sum of exp(score - max)
  float* acc = nullptr;  // [rows][head_dim] sum of exp(score - max) * v; 64-byte aligned
};

struct PageAttentionTask {
  const float* q =
      nullptr;   // [rows][head_dim], after RoPE, not scaled; 64-byte aligned. Rows are (query token, head of the group)
  int rows = 0;  // 1..kRowsMax
  float scale = 1;                         // of scores: 1/sqrt(head_dim) by default
  int layer = 0;                           // of the model
  int kv_head = 0;                         // which head of the pages
  absl::Span<const uint8_t* const> pages;  // in order of position; each 64-byte aligned
  /// Tokens of `pages` that each row sees, counted from the first page's first token: 1..pages.size() * page_tokens
  /// each. nullptr: every row sees every token. Only raw pages are ever seen in part (the query's own page is raw): a
  /// codec other than raw may require nullptr.
  const int* visible = nullptr;

  /// Hints of what to prefetch: the pages and head of the call right after this one; empty: unknown.
  absl::Span<const uint8_t* const> next_pages;
  int next_kv_head = 0;
  /// The caller's last call, just before, named `pages` and kv_head as its next_pages and next_kv_head.
  bool announced = false;

  static constexpr int kRowsMax = 64;
};

/// One page of a sequence, as the plan may read it. At least one form is there.
struct AttentionPage {
  const uint8_t* raw = nullptr;      // raw form (the open page: its appended tokens only), or nullptr
  const uint8_t* encoded = nullptr;  // encoded form, or nullptr (not sealed, or the codec declined)
  /// The lag applies: a query reads this page raw if it is its own or one of the `lag_pages` before it. False for pages
  /// that came by a prefix hit, which are read encoded whatever the distance.
  bool lag_applies = true;
  uint8_t rung = 0;  // of the encoded form (Codec::rung)
};

class PageAttention {
 public:
  virtual ~PageAttention() = default;
  /// Bytes of scratch that Attend needs for `rows` rows.
  virtual size_t workspace_bytes(int rows) const = 0;
  /// Adds the task's pages to `state`. workspace: at least workspace_bytes(task.rows), 64-byte aligned.
  virtual void Attend(const PageAttentionTask& task, const SoftmaxRows& state, absl::Span<uint8_t> workspace) const = 0;

  /// Bytes that Attend reads of one page for one head of a layer, where heads differ; 0: all heads are alike. A measure
  /// of the work per page, by which a plan shares it out.
  virtual size_t head_bytes(int layer, int kv_head) const { return 0; }

  /// Pages of one head that a call should see at least, where there are as many: what a call loads serves them all. A
  /// hint: a state's bits do not depend on how pages are spread over calls.
  virtual int visit_pages_min(int layer) const { return 1; }

  // A codec may keep K and V in a space of its own (rotated, of fewer dimensions). Its pages are then attended to with
  // mapped queries, and their state's acc is mapped back once, however many pages there are. Rows in either space are
  // head_dim floats apart; what a space does not use is zero. The caller of Attend does the mapping (attention/).

  /// Attend of this layer wants task.q mapped by MapQueries and leaves acc in the codec's space.
  virtual bool maps(int layer) const { return false; }
  /// mapped [rows][head_dim], as Attend reads them, from q [rows][head_dim]; both 64-byte aligned, and distinct.
  virtual void MapQueries(int layer, int kv_head, int rows, const float* q, float* mapped) const;
  /// The space's name: attentions of one layout whose names are equal map queries and outputs by equal numbers, so that
  /// pages of both may be attended to with the same mapped queries, into the same state. Empty: none is known to.
  virtual absl::string_view space(int layer) const { return {}; }
  /// With maps() and not folds_output(): out = what acc, in the codec's space, stands for. [rows][head_dim], distinct.
  virtual void ExpandOutput(int layer, int kv_head, int rows, const float* acc, float* out) const;
  /// The layer's outputs stay in the codec's space, for a client that folded the way back into W_O
  /// (Codec::OutputFactor). Only where maps().
  virtual bool folds_output(int layer) const { return false; }
  /// With folds_output(): acc of raw pages into the codec's space. [rows][head_dim], distinct.
  virtual void ProjectOutput(int layer, int kv_head, int rows, const float* acc, float* out) const;
};

}  // namespace kvmanager
