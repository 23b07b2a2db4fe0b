// A model reads windows of a text with K and V raw in this process, and somebody watches Q, K and V: training of
// codecs, and captures.
//
// Windows follow one another from the text's beginning, and run in batches (windows.h). The calling thread shows the
// steps in order; the model works on threads of its own beside it.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "examples/engine/kv_backend.h"
#include "examples/engine/model.h"

namespace kvmanager::engine {

struct ObserveOptions {
  static constexpr int kPageTokens = 64;  // of a step, at most, and of the raw pages
  int windows = 1, window = 4096;
  int threads = 1;
};

/// What a layer's attention gets in one step, rows of all entries one after the other. Valid during the call.
struct Observation {
  int layer = 0;
  absl::Span<const KvEntry> entries;  // one per window of the batch; all begin at one position, with as many tokens
  int first_window = 0;               // the first entry's, counted from the text's beginning; the others follow
  absl::Span<const float> q;          // [rows][query_heads][head_dim], after RoPE
  absl::Span<const float> k, v;       // [rows][kv_heads][head_dim], K after RoPE; finite, and exact in float16
};

/// text: one byte a token, all of the windows at least. After an error of `observe` nothing more is shown. Errors:
/// INVALID_ARGUMENT (options, a text that is too short, a vocabulary that is not of bytes); `observe`'s.
absl::Status ObserveWindows(const Model& model, absl::Span<const uint8_t> text, const ObserveOptions& options,
                            absl::FunctionRef<absl::Status(const Observation&)> observe,
                            absl::FunctionRef<void(int64_t done, int64_t total)> progress);

}  // namespace kvmanager::engine
