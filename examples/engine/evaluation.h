// What a codec costs a model's quality: bits per byte of a text, read through the daemon's cache by the protocol of
// windows.h.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/calibration.h"
#include "examples/engine/kv_engine.h"
#include "examples/engine/model.h"
#include "examples/engine/windows.h"

namespace kvmanager::engine {

struct Evaluation {
  std::string codec;  // canonical
  double bpb = 0, bpb_second_half = 0;
  double bytes_per_token_head = 0;           // codes, metadata and sums of encoded pages; K and V together
  double resident_bytes_per_token_head = 0;  // everything the daemon holds for these windows at their end
  PairCounts pairs, expected_pairs;          // summed over layers and windows
  double seconds = 0;                        // of reading the windows
};

/// text: one byte a token. artifacts: where the cache's codec is found by its digest, to know what its pages should
/// take; nullptr: nowhere. progress(done, total) in steps. Errors: CheckEvaluate's and those of the engine. Whether
/// pairs equal expected_pairs is for the caller to judge.
absl::StatusOr<Evaluation> Evaluate(const Model& model, KvEngine* engine, absl::Span<const uint8_t> text,
                                    const EvaluateOptions& options, CalibrationSource* artifacts,
                                    absl::FunctionRef<void(int64_t done, int64_t total)> progress);

}  // namespace kvmanager::engine
