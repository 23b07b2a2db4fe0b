#include "examples/engine/calibrate.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "examples/engine/calibrate_defaults.h"
#include "examples/engine/observe.h"
#include "kvmanager/base/sha256.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

using calibrate::CalibrationPlan;
using SteadyTime = std::chrono::steady_clock;

constexpr int kPageTokens = ObserveOptions::kPageTokens;

double SecondsSince(SteadyTime::time_point begun) {
  return std::chrono::duration<double>(SteadyTime::now() - begun).count();
}

absl::Status CheckOptions(const CalibrationModel& model, uint64_t tokens, const CalibrateOptions& options) {
  KV_ASSIGN_OR_RETURN(const CalibrationPlan plan, CalibrationPlan::Make(options.codecs, model.head_dim));
  if (options.threads < 1 || options.threads > WorkerPool::kThreadsMax) {
    return InvalidField("threads", options.threads, absl::StrCat("1..", WorkerPool::kThreadsMax));
  }
  return calibrate::CheckEnough(plan, tokens, options.limits, model);
}

/// model: nullptr for a capture, whose defaults cannot be measured.
absl::StatusOr<CalibrateResult> TrainAndWrite(const calibrate::Samples& samples, const Model* model,
                                              absl::Span<const uint8_t> text, TensorMetadata metadata,
                                              const CalibrateOptions& options, WorkerPool* pool,
                                              CalibrateProgress progress) {
  CalibrateResult result;
  result.model = samples.model;
  result.tokens = samples.tokens;
  result.rows = samples.rows;
  KV_ASSIGN_OR_RETURN(const CalibrationPlan plan, CalibrationPlan::Make(options.codecs, samples.model.head_dim));
  calibrate::TensorSet set;
  auto begun = SteadyTime::now();
  KV_RETURN_IF_ERROR(calibrate::Train(samples, plan, options.train, pool, progress, &set, &result.stages));
  result.train_seconds = SecondsSince(begun);
  metadata["codecs"] = absl::StrJoin(options.codecs, ";");
  metadata["tokens"] = absl::StrCat(samples.tokens);
  metadata["rows"] = absl::StrCat(samples.rows);
  metadata["seed"] = absl::StrCat(options.train.seed);
  metadata["iterations"] = absl::StrCat(options.train.iterations);
  begun = SteadyTime::now();
  if (plan.zack) metadata["zack.mode"] = "balanced";
  if (plan.zack_hack) {
    metadata["zack_hack.mode"] = "balanced";
    metadata["zack_hack.allocation"] = "head";
  }
  if (plan.zack && model != nullptr && options.choice_windows > 0) {
    KV_RETURN_IF_ERROR(ChooseDefaults(*model, text, options, plan, progress, &set, &metadata, &result.choices));
  }
  result.choose_seconds = SecondsSince(begun);
  result.file = SerializeCalibration(samples.model, set.tensors(), std::move(metadata));
  // Read back, as every reader will.
  KV_ASSIGN_OR_RETURN(const auto parsed, Calibration::Parse(result.file, "the new artifact"));
  result.digest = parsed->digest();
  return result;
}

std::unique_ptr<WorkerPool> MakePool(int threads) {
  return threads > 1 ? std::make_unique<WorkerPool>(threads - 1) : nullptr;
}

}  // namespace

CalibrationModel CalibrationModelOf(const Model& model) {
  const ModelConfig& c = model.config();
  return {c.name, model.digest(), c.layers, c.kv_heads, c.query_heads, c.head_dim};
}

absl::Status CheckCalibrate(const Model& model, absl::Span<const uint8_t> text, const CalibrateOptions& options) {
  if (model.config().vocab_size != 256) {
    return InvalidField("vocab_size", model.config().vocab_size, "256 (a token is a byte)");
  }
  if (options.window < kPageTokens || options.window > CalibrateOptions::kWindowTokensMax) {
    return InvalidField("window", options.window, absl::StrCat(kPageTokens, "..", CalibrateOptions::kWindowTokensMax));
  }
  if (options.windows < 1 || options.windows > CalibrateOptions::kWindowsMax) {
    return InvalidField("windows", options.windows, absl::StrCat("1..", CalibrateOptions::kWindowsMax));
  }
  const uint64_t needed = uint64_t(options.windows) * options.window;
  if (text.size() < needed) {
    return InvalidField(
        "text bytes", text.size(),
        absl::StrCat("at least ", needed, ": ", options.windows, " windows of ", options.window,
                     text.size() < size_t(options.window)
                         ? ""
                         : absl::StrCat("; this text has room for --windows ", text.size() / options.window)));
  }
  return CheckOptions(CalibrationModelOf(model), needed, options);
}

absl::StatusOr<CalibrateResult> CalibrateModel(const Model& model, absl::Span<const uint8_t> text,
                                               const CalibrateOptions& options, CalibrateProgress progress) {
  KV_RETURN_IF_ERROR(CheckCalibrate(model, text, options));
  const auto begun = SteadyTime::now();
  const ModelConfig& c = model.config();
  const std::unique_ptr<WorkerPool> pool = MakePool(options.threads);
  calibrate::Collector collector(CalibrationModelOf(model), uint64_t(options.windows) * options.window, options.limits,
                                 pool.get());
  for (int layer = 0; layer < c.layers; ++layer) {
    KV_RETURN_IF_ERROR(collector.SetOutputProjection(layer, model.layers()[layer].o));
  }
  ObserveOptions windows;
  windows.windows = options.windows;
  windows.window = options.window;
  windows.threads = options.threads;
  KV_RETURN_IF_ERROR(ObserveWindows(
      model, text, windows,
      [&](const Observation& seen) {
        int rows = 0;
        for (const KvEntry& entry : seen.entries) rows += entry.tokens;
        return collector.Add(seen.layer, rows, seen.entries[0].tokens, seen.q, seen.k, seen.v);
      },
      [&](int64_t done, int64_t total) { progress("reading the text", done, total); }));
  const double read_seconds = SecondsSince(begun);
  TensorMetadata metadata = {
      {"source", "text"},
      {"text.sha256", Sha256(text).ToHex(sizeof(Digest))},
      {"windows", absl::StrCat(options.windows)},
      {"window", absl::StrCat(options.window)},
  };
  KV_ASSIGN_OR_RETURN(CalibrateResult result, TrainAndWrite(collector.Finish(), &model, text, std::move(metadata),
                                                            options, pool.get(), progress));
  result.read_seconds = read_seconds;
  return result;
}

absl::StatusOr<CalibrateResult> CalibrateCapture(const calibrate::Capture& capture, const CalibrateOptions& options,
                                                 CalibrateProgress progress) {
  KV_RETURN_IF_ERROR(CheckOptions(capture.model(), capture.counted_tokens(), options));
  const auto begun = SteadyTime::now();
  const std::unique_ptr<WorkerPool> pool = MakePool(options.threads);
  KV_ASSIGN_OR_RETURN(const calibrate::Samples samples,
                      calibrate::ReadSamples(capture, options.limits, pool.get(), [&](int64_t done, int64_t total) {
                        progress("reading the capture, layers", done, total);
                      }));
  const double read_seconds = SecondsSince(begun);
  TensorMetadata metadata = {{"source", "capture"}, {"sinks", absl::StrCat(capture.sinks())}};
  if (!capture.has_output_projection()) metadata["w_o"] = "unknown";
  KV_ASSIGN_OR_RETURN(CalibrateResult result,
                      TrainAndWrite(samples, nullptr, {}, std::move(metadata), options, pool.get(), progress));
  result.read_seconds = read_seconds;
  return result;
}

}  // namespace kvmanager::engine
