// From a model and a text, or from a capture of another engine, to a calibration artifact.
//
// The text is read in windows by a cache in this process, raw; what the windows show of Q, K and V trains the codecs
// (codecs/calibrate). With a model, choices that an artifact makes for its codecs are measured on windows of the same
// text. The artifact is the same bytes for any number of threads. One thread calls; it works on others of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "codecs/calibrate/capture.h"
#include "codecs/calibrate/train.h"
#include "examples/engine/model.h"

namespace kvmanager::engine {

struct CalibrateOptions {
  static constexpr int kWindowTokensMax = 1 << 20;
  static constexpr int kWindowsMax = 1 << 16;
  std::vector<std::string> codecs;  // as CalibrationPlan::Make takes them
  int windows = 16, window = 4096;  // one after the other from the text's beginning
  int threads = 1;
  int choice_windows = 2;  // behind those, on which defaults are chosen; 0: balanced, and bits per head
  calibrate::SampleLimits limits;
  calibrate::TrainOptions train;
};

/// A default that was measured: "zack mode", "joint", 0.8804.
struct CalibrateChoice {
  std::string what, option;
  double bpb = 0;
  bool chosen = false;
};

struct CalibrateResult {
  std::string file;  // the artifact's bytes
  std::string digest;
  CalibrationModel model;
  uint64_t tokens = 0;
  int rows = 0;  // of K and of V that were kept per head
  std::vector<calibrate::TrainStage> stages;
  std::vector<CalibrateChoice> choices;
  double read_seconds = 0, train_seconds = 0, choose_seconds = 0;
};

using CalibrateProgress = absl::FunctionRef<void(absl::string_view what, int64_t done, int64_t total)>;

/// The model as an artifact names it.
CalibrationModel CalibrationModelOf(const Model& model);

/// What CalibrateModel would refuse, before any work: INVALID_ARGUMENT (options, codecs, a text that is too short, a
/// vocabulary that is not of bytes).
absl::Status CheckCalibrate(const Model& model, absl::Span<const uint8_t> text, const CalibrateOptions& options);

/// text: one byte a token. Errors: CheckCalibrate's; INTERNAL.
absl::StatusOr<CalibrateResult> CalibrateModel(const Model& model, absl::Span<const uint8_t> text,
                                               const CalibrateOptions& options, CalibrateProgress progress);
/// Errors: INVALID_ARGUMENT (codecs, too few tokens, elements that are not finite); INTERNAL.
absl::StatusOr<CalibrateResult> CalibrateCapture(const calibrate::Capture& capture, const CalibrateOptions& options,
                                                 CalibrateProgress progress);

}  // namespace kvmanager::engine
