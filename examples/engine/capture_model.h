// Q, K and V of a model over a text, as a file in the capture format (docs/calibration.md).
//
// What calibrate::Capture reads: the same model seen by `kvctl calibrate --capture` and `codec_conformance --capture`
// without running it. Held in memory as a whole while it is made. One thread calls; the model works on others.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/engine/model.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::engine {

struct CaptureOptions {
  static constexpr int64_t kTokensMax = int64_t{1} << 24;
  static constexpr uint64_t kBytesMax = uint64_t{4} << 30;  // of all tensors
  int64_t tokens = 4096;                                    // of the text, from its beginning
  int window = 4096;                                        // tokens of one context; a text that is shorter is one
  int threads = 1;
  DType dtype = DType::kFloat16;   // or kFloat32
  bool output_projection = false;  // layers.{i}.w_o too
};

/// The part of CheckCapture that needs neither model nor text.
absl::Status CheckCaptureOptions(const CaptureOptions& options);

/// What CaptureModel would refuse, before any work: INVALID_ARGUMENT (tokens, window, dtype, size; a text that is too
/// short).
absl::Status CheckCapture(const ModelConfig& config, absl::Span<const uint8_t> text, const CaptureOptions& options);

/// The file's bytes. text: one byte a token. Errors: CheckCapture's; INVALID_ARGUMENT (a vocabulary that is not of
/// bytes, threads, elements that are not finite in dtype).
absl::StatusOr<std::string> CaptureModel(const Model& model, absl::Span<const uint8_t> text,
                                         const CaptureOptions& options,
                                         absl::FunctionRef<void(int64_t done, int64_t total)> progress);

}  // namespace kvmanager::engine
