// Windows of a text read page by page through a KV backend: the protocol by which codecs are compared.
//
// Windows of `window` tokens start at 0, stride, 2 * stride, ...; each is prefilled page by page, so that a page's
// queries attend to earlier encoded pages, `lag` raw pages and themselves. Inputs are t[o .. o + window), targets t[o +
// 1 .. o + window]. Several windows form one batch. Runs on the calling thread (the engine's) and the runner's workers.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "examples/engine/kv_backend.h"
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
/// sink_tokens: whole pages at the start that stay raw.
PairCounts ExpectedPairs(uint64_t tokens, int page_tokens, int lag_pages, bool encodes, uint64_t sink_tokens = 0);

/// The sinks of a canonical codec: N of a policy's last clause ";sinks=N", else 0.
uint64_t SinkTokens(absl::string_view codec);

/// What an evaluation would refuse, before anything is started for it: INVALID_ARGUMENT (options; a text that is too
/// short; a vocabulary that is not of bytes).
absl::Status CheckEvaluate(const Model& model, absl::Span<const uint8_t> text, const EvaluateOptions& options);

/// Rows of a step that an evaluation needs of its backend.
int EvaluateRowsMax(const EvaluateOptions& options, int page_tokens);

struct WindowLoss {
  double bpb = 0, bpb_second_half = 0;  // bits per byte
};

/// Where the windows of a batch live.
class WindowStore {
 public:
  virtual ~WindowStore() = default;
  virtual KvBackend* backend() = 0;
  /// Makes `count` empty sequences.
  virtual absl::Status Begin(int count, std::vector<uint64_t>* sequences) = 0;
  /// The batch is read to its end; its sequences are not used any more.
  virtual absl::Status End() = 0;
};

/// A row's logits [vocab]: of the token at `position` of a window.
using LogitsVisitor = absl::FunctionRef<void(int window, int64_t position, absl::Span<const float> logits)>;

/// Reads the windows of `text`, one byte a token. visit: nullptr computes no logits. progress(done, total) in steps.
/// Errors: CheckEvaluate's and the store's.
absl::Status VisitWindows(const Model& model, WindowStore* store, absl::Span<const uint8_t> text,
                          const EvaluateOptions& options, int page_tokens, const LogitsVisitor* visit,
                          absl::FunctionRef<void(int64_t done, int64_t total)> progress);

/// The loss of all windows.
absl::StatusOr<WindowLoss> ReadWindows(const Model& model, WindowStore* store, absl::Span<const uint8_t> text,
                                       const EvaluateOptions& options, int page_tokens,
                                       absl::FunctionRef<void(int64_t done, int64_t total)> progress);

}  // namespace kvmanager::engine
