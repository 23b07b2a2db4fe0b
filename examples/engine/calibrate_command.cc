#include "examples/engine/calibrate_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "codecs/calibrate/measured.h"
#include "examples/engine/calibrate.h"
#include "examples/engine/observe.h"
#include "examples/engine/program.h"
#include "kvmanager/base/exit_code.h"
#include "kvmanager/base/safetensors.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

constexpr uint64_t kTextBytesMax = uint64_t{1} << 32;

/// One bar at a time on a terminal. Elsewhere lines for the stage that takes long, and one for each other stage.
class Stages {
 public:
  explicit Stages(bool quiet) : quiet_(quiet), terminal_(isatty(STDERR_FILENO) != 0) {}

  void Update(absl::string_view what, int64_t done, int64_t total) {
    if (what != what_) {
      progress_.reset();
      what_ = std::string(what);
      bars_ = terminal_ || absl::StartsWith(what, "reading");
      progress_ = std::make_unique<Progress>(absl::StrCat("calibrate: ", what), quiet_ || !bars_);
      if (!quiet_ && !bars_) std::fprintf(stderr, "calibrate: %s\n", what_.c_str());
    }
    progress_->Update(done, total);
  }

 private:
  const bool quiet_, terminal_;
  bool bars_ = false;
  std::string what_;
  std::unique_ptr<Progress> progress_;
};

std::string Bytes(uint64_t bytes) {
  return bytes >= 1 << 20 ? absl::StrFormat("%.1f MiB", double(bytes) / (1 << 20))
                          : absl::StrFormat("%.1f KiB", double(bytes) / (1 << 10));
}

/// A codec to try next, of those that were trained.
std::string Suggestion(const CalibrateArguments& arguments, const std::string& name) {
  std::string spec = arguments.codecs.back();
  for (const std::string& codec : arguments.codecs) {
    if (absl::StartsWith(codec, "zack+hack") || codec == "default") spec = "zack+hack:k_bits=2,v_bits=1";
  }
  return absl::StrCat(spec, absl::StrContains(spec, ':') ? "," : ":", "calibration=", name);
}

std::string Summary(const CalibrateArguments& arguments, const CalibrateResult& result, double seconds) {
  std::string text = absl::StrFormat(
      "%s: %s, %s, for model %s%s\n  digest %s\n  %d layers, %d KV heads of %d; %d tokens, %d rows of K and V kept per "
      "head\n",
      arguments.out, Bytes(result.file.size()), absl::StrCat(result.stages.size(), " parts"), result.model.model,
      result.model.revision.empty() ? "" : absl::StrCat(" (", result.model.revision.substr(0, 12), ")"), result.digest,
      result.model.layers, result.model.kv_heads, result.model.head_dim, result.tokens, result.rows);
  absl::StrAppend(&text, "\n  part                              bytes      seconds  error left\n");
  for (const calibrate::TrainStage& stage : result.stages) {
    absl::StrAppend(&text, absl::StrFormat("  %-28s %12s %9.1f  %s\n", stage.what, Bytes(stage.bytes), stage.seconds,
                                           stage.relative_error > 0
                                               ? absl::StrFormat("%.3f%% of the variance", 100 * stage.relative_error)
                                               : ""));
  }
  if (!result.choices.empty()) {
    absl::StrAppend(&text, "\n  default                       option     bits per byte\n");
    for (const CalibrateChoice& choice : result.choices) {
      absl::StrAppend(&text, absl::StrFormat("  %-28s  %-9s  %.4f%s\n", choice.what, choice.option, choice.bpb,
                                             choice.chosen ? "  <- chosen" : ""));
    }
  }
  absl::StrAppend(&text, absl::StrFormat("\n  %.1f s: %.1f reading, %.1f training, %.1f measuring defaults\n", seconds,
                                         result.read_seconds, result.train_seconds, result.choose_seconds));
  const std::filesystem::path out(arguments.out);
  const std::string directory = out.has_parent_path() ? out.parent_path().string() : ".";
  absl::StrAppend(&text, "\nNext:\n");
  if (!arguments.model.empty()) {
    absl::StrAppend(&text, "  evaluate --model ", arguments.model, " --text TEXT --codec ",
                    Suggestion(arguments, arguments.out), "\n");
  }
  absl::StrAppend(&text, "  kvmanagerd --calibration-dir ", directory, "   and a cache with codec ",
                  Suggestion(arguments, out.stem().string()), "\n");
  return text;
}

nlohmann::ordered_json ToJson(const CalibrateArguments& arguments, const CalibrateResult& result, double seconds) {
  nlohmann::ordered_json json = {{"out", arguments.out},
                                 {"bytes", result.file.size()},
                                 {"digest", result.digest},
                                 {"model", result.model.model},
                                 {"revision", result.model.revision},
                                 {"codecs", arguments.codecs},
                                 {"tokens", result.tokens},
                                 {"rows_per_head", result.rows},
                                 {"seconds", seconds},
                                 {"read_seconds", result.read_seconds},
                                 {"train_seconds", result.train_seconds},
                                 {"choose_seconds", result.choose_seconds}};
  for (const calibrate::TrainStage& stage : result.stages) {
    json["parts"].push_back({{"name", stage.what},
                             {"bytes", stage.bytes},
                             {"seconds", stage.seconds},
                             {"relative_error", stage.relative_error}});
  }
  for (const CalibrateChoice& choice : result.choices) {
    json["choices"].push_back(
        {{"what", choice.what}, {"option", choice.option}, {"bpb", choice.bpb}, {"chosen", choice.chosen}});
  }
  return json;
}

absl::StatusOr<CalibrateResult> Calibrate(const CalibrateArguments& arguments, const CalibrateOptions& options) {
  Stages stages(arguments.quiet);
  const auto progress = [&](absl::string_view what, int64_t done, int64_t total) { stages.Update(what, done, total); };
  if (!arguments.capture.empty()) {
    KV_ASSIGN_OR_RETURN(const std::unique_ptr<calibrate::Capture> capture, calibrate::Capture::Open(arguments.capture));
    return CalibrateCapture(*capture, options, progress);
  }
  KV_ASSIGN_OR_RETURN(const std::string text, ReadFile(arguments.text, kTextBytesMax));
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(arguments.model));
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  return CalibrateModel(*model, bytes, options, progress);
}

absl::Status AddMeasured(const CalibrateArguments& arguments) {
  KV_RETURN_IF_ERROR(CheckTensorsOut("--out", arguments.out));
  if (!arguments.json.empty()) KV_RETURN_IF_ERROR(CheckWritable("--json", arguments.json));
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<const Calibration> artifact, Calibration::Load(arguments.artifact));
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Safetensors> measured, Safetensors::Open(arguments.measured));
  KV_ASSIGN_OR_RETURN(const std::string file, calibrate::WithMeasured(*artifact, *measured));
  KV_ASSIGN_OR_RETURN(const auto parsed, Calibration::Parse(file, "the new artifact"));  // as every reader will
  KV_RETURN_IF_ERROR(WriteFileAtomically(arguments.out, file));
  std::printf("%s: %s, for model %s\n  digest %s\n", arguments.out.c_str(), Bytes(file.size()).c_str(),
              parsed->model().model.c_str(), parsed->digest().c_str());
  if (arguments.json.empty()) return absl::OkStatus();
  const nlohmann::ordered_json json = {{"out", arguments.out},
                                       {"bytes", file.size()},
                                       {"digest", parsed->digest()},
                                       {"model", parsed->model().model},
                                       {"revision", parsed->model().revision}};
  return WriteFile(arguments.json, json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace

void AddCalibrateOptions(CLI::App& app, CalibrateArguments& a) {
  auto* const model = app.add_option("--model", a.model, "directory of config.json and *.safetensors");
  auto* const text = app.add_option("--text", a.text, "text to train on, a token per byte; not one to measure on");
  auto* const capture = app.add_option(
      "--capture", a.capture, "Q, K and V that another engine captured (docs/calibration.md), instead of a model");
  model->needs(text);
  text->needs(model);
  capture->excludes(model)->excludes(text);
  auto* const codec = app.add_option(
      "--codec", a.codecs,
      "what to train: million:m=64,bits=8, zack, zack+hack, zack+million:m=64,bits=8, ...; may be repeated");
  auto* const artifact =
      app.add_option("--artifact", a.artifact, "an artifact to add --measured to; nothing is trained");
  auto* const measured = app.add_option(
      "--measured", a.measured, "sensitivities and defaults that were measured elsewhere (docs/calibration.md)");
  artifact->needs(measured)->excludes(model)->excludes(capture)->excludes(codec);
  measured->needs(artifact);
  app.add_option("--out", a.out, "FILE.safetensors to write")->required();
  app.add_option("--windows", a.windows, "windows of the text to train on, from its beginning")
      ->check(CLI::Range(1, CalibrateOptions::kWindowsMax))
      ->capture_default_str();
  app.add_option("--window", a.window, "tokens of a window")
      ->check(CLI::Range(ObserveOptions::kPageTokens, CalibrateOptions::kWindowTokensMax))
      ->capture_default_str();
  app.add_option("--choice-windows", a.choice_windows,
                 "windows behind those on which defaults (mode, allocation) are chosen; 0: do not measure")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  app.add_option("--iterations", a.iterations, "of k-means, at most")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--seed", a.seed, "of k-means")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--threads", a.threads, "0: one per usable CPU")->check(CLI::Range(0, 1024))->capture_default_str();
  app.add_option("--json", a.json, "write the report as JSON")->type_name("FILE");
  app.add_flag("--quiet", a.quiet, "no progress");
}

absl::Status RunCalibrate(const CalibrateArguments& arguments) {
  const auto begun = std::chrono::steady_clock::now();
  if (!arguments.artifact.empty()) return AddMeasured(arguments);
  if (arguments.model.empty() && arguments.capture.empty()) {
    return Misuse(absl::InvalidArgumentError(
        "calibrate wants --model DIR --text FILE, or --capture FILE, or --artifact FILE --measured FILE"));
  }
  if (arguments.codecs.empty())
    return Misuse(InvalidField("--codec", "absent", "what to train, zack+hack for example"));
  CalibrateOptions options;
  options.codecs = arguments.codecs;
  options.windows = arguments.windows;
  options.window = arguments.window;
  options.threads = arguments.threads == 0 ? CoreCount() : arguments.threads;
  options.choice_windows = arguments.choice_windows;
  options.train.seed = uint64_t(arguments.seed);
  options.train.iterations = arguments.iterations;
  KV_RETURN_IF_ERROR(CheckTensorsOut("--out", arguments.out));
  if (!arguments.json.empty()) KV_RETURN_IF_ERROR(CheckWritable("--json", arguments.json));
  KV_ASSIGN_OR_RETURN(const CalibrateResult result, Calibrate(arguments, options));
  KV_RETURN_IF_ERROR(WriteFileAtomically(arguments.out, result.file));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  std::fputs(Summary(arguments, result, seconds).c_str(), stdout);
  if (arguments.json.empty()) return absl::OkStatus();
  return WriteFile(
      arguments.json,
      ToJson(arguments, result, seconds).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace kvmanager::engine
