// What a codec costs a model's quality: bits per byte of a text, read through the daemon's cache by a fixed protocol.
//
// Windows of `window` tokens start at 0, stride, 2 * stride, ...; each is prefilled page by page, so that a page's
// queries attend to earlier encoded pages, `lag` raw pages and themselves. Inputs are t[o .. o + window), targets t[o +
// 1 .. o + window]. Several windows form one batch. Runs on the calling thread (the engine's) and the runner's workers.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/engine/kv_engine.h"
#include "examples/engine/model.h"

namespace kvmanager::engine {

struct EvaluateOptions {
  static constexpr int kBatchWindows = 8;  // run together; more windows follow in further batches
  static constexpr int kWindowTokensMax = 1 << 20;
  static constexpr int kWindowsMax = 1 << 16;
  int window = 4096, windows = 6;
  int64_t stride = 12288;
  int threads = 1;
};

/// (query token, context token) pairs.
struct PairCounts {
  uint64_t encoded = 0, raw = 0;
  friend bool operator==(const PairCounts&, const PairCounts&) = default;
};

/// The pairs that a sequence of `tokens` reads in one layer: of the pages before its own, a query reads all but the
/// newest `lag_pages` encoded; the rest and its own page raw. encodes: false for a codec whose pages stay raw.
PairCounts ExpectedPairs(uint64_t tokens, int page_tokens, int lag_pages, bool encodes);

struct Evaluation {
  std::string codec;  // canonical
  double bpb = 0, bpb_second_half = 0;
  double bytes_per_token_head = 0;           // codes, metadata and sums of encoded pages; K and V together
  double resident_bytes_per_token_head = 0;  // everything the daemon holds for these windows at their end
  PairCounts pairs, expected_pairs;          // summed over layers and windows
  double seconds = 0;
};

/// What Evaluate would refuse, before anything is started for it: INVALID_ARGUMENT (options; a text that is too short;
/// a vocabulary that is not of bytes).
absl::Status CheckEvaluate(const Model& model, absl::Span<const uint8_t> text, const EvaluateOptions& options);

/// Rows of a step that Evaluate needs of its engine.
int EvaluateRowsMax(const EvaluateOptions& options, int page_tokens);

/// text: one byte a token. progress(done, total) in steps. Errors: CheckEvaluate's and those of the engine. Whether
/// pairs equal expected_pairs is for the caller to judge.
absl::StatusOr<Evaluation> Evaluate(const Model& model, KvEngine* engine, absl::Span<const uint8_t> text,
                                    const EvaluateOptions& options,
                                    absl::FunctionRef<void(int64_t done, int64_t total)> progress);

}  // namespace kvmanager::engine
