#include "examples/engine/tune_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "codecs/builtin.h"
#include "codecs/registry.h"
#include "examples/engine/calibrate.h"
#include "examples/engine/local_backend.h"
#include "examples/engine/model.h"
#include "examples/engine/program.h"
#include "examples/engine/tuning.h"
#include "kvmanager/base/exit_code.h"
#include "kvmanager/base/safetensors.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

/// Where measuring begins: behind the windows that kvctl calibrate trains on and chooses with, if the text goes on.
int64_t OffsetOf(const TuneArguments& arguments, int64_t text_bytes) {
  if (arguments.offset >= 0) return arguments.offset;
  const CalibrateOptions trained;
  const int64_t behind = int64_t{trained.windows + trained.choice_windows} * trained.window;
  const int64_t wanted = int64_t{arguments.windows} * arguments.window + 1;
  return text_bytes >= behind + wanted ? behind : 0;
}

/// Sub-spaces of MILLION that are tried, as far as they divide a head.
constexpr int kMillionSubspaces[] = {64, 32};

/// An artifact for every codec of the grid.
CalibrateOptions TrainOptionsOf(const TuneArguments& arguments, const Model& model) {
  CalibrateOptions options;
  options.codecs = {"zack", "zack+hack"};
  for (const int m : kMillionSubspaces) {
    if (model.config().head_dim % m == 0) options.codecs.push_back(absl::StrCat("million:m=", m, ",bits=8"));
  }
  options.threads = arguments.threads > 0 ? arguments.threads : CoreCount();
  return options;
}

/// What Train would refuse in the end.
absl::Status CheckTrain(const TuneArguments& arguments, const Model& model, absl::Span<const uint8_t> text,
                        const std::string& path) {
  const CalibrateOptions options = TrainOptionsOf(arguments, model);
  const uint64_t needed = uint64_t(options.windows) * options.window;
  if (text.size() < needed) {
    return InvalidField("text bytes", text.size(),
                        absl::StrCat("at least ", needed, " (", options.windows, " windows of ", options.window,
                                     ") to train an artifact, since there is no ", path,
                                     ": give a longer text, or the file of a kvctl calibrate with --calibration"));
  }
  KV_RETURN_IF_ERROR(CheckCalibrate(model, text, options));
  return CheckWritable("--calibration", path);
}

/// Trains on the text's beginning and writes `path`.
absl::Status Train(const TuneArguments& arguments, const Model& model, absl::Span<const uint8_t> bytes,
                   const std::string& path) {
  const CalibrateOptions options = TrainOptionsOf(arguments, model);
  std::fprintf(stderr, "kvctl tune: no artifact %s yet: training one\n", path.c_str());
  Progress progress("training", arguments.quiet);
  KV_ASSIGN_OR_RETURN(const CalibrateResult result,
                      CalibrateModel(model, bytes, options, [&](absl::string_view, int64_t done, int64_t total) {
                        progress.Update(done, total);
                      }));
  return WriteFileAtomically(path, result.file);
}

/// "million.k.m64.b8" and "million.v.m64.b8" -> "m=64,bits=8".
std::vector<std::string> MillionShapes(const Calibration& calibration) {
  std::vector<std::string> shapes;
  for (const auto& [name, tensor] : calibration.tensors()) {
    absl::string_view rest = name;
    if (!absl::ConsumePrefix(&rest, "million.k.") || !calibration.Has(absl::StrCat("million.v.", rest))) continue;
    const std::vector<std::string> parts = absl::StrSplit(rest, '.');
    if (parts.size() == 2 && parts[0].size() > 1 && parts[1].size() > 1) {
      shapes.push_back(absl::StrCat("m=", parts[0].substr(1), ",bits=", parts[1].substr(1)));
    }
  }
  return shapes;
}

absl::Status CheckModel(const Calibration& calibration, const Model& model) {
  CalibrationModel wanted = CalibrationModelOf(model);
  const CalibrationModel& has = calibration.model();
  if (has.revision.empty()) wanted.revision.clear();
  if (has == wanted) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "--calibration", calibration.source(),
                    absl::StrCat("an artifact for ", wanted.model, " of these weights; this one is for ", has.model,
                                 ", ", has.layers, " layers, ", has.kv_heads, " KV heads of ", has.head_dim,
                                 has.revision.empty() ? "" : absl::StrCat(", revision ", has.revision.substr(0, 12))));
}

bool HasTensors(const Calibration& calibration, absl::string_view prefix) {
  for (const auto& [name, tensor] : calibration.tensors()) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  return false;
}

nlohmann::json ToJson(const RatePoint& p) {
  return {{"codec", p.codec},
          {"family", p.family},
          {"bytes_per_token_head", p.bytes_per_token_head},
          {"bpb", p.bpb},
          {"loss", p.loss}};
}

using Dropped = std::vector<std::pair<std::string, std::string>>;

nlohmann::json ToJson(const TuneResult& result, const Dropped& dropped, double max_loss) {
  nlohmann::json points = nlohmann::json::array();
  for (const RatePoint& p : result.points) points.push_back(ToJson(p));
  nlohmann::json json = {{"raw", ToJson(result.raw)}, {"points", points}, {"max_loss", max_loss}};
  json["best"] = result.best < 0 ? nlohmann::json() : ToJson(result.points[result.best]);
  json["dropped"] = nlohmann::json::array();
  for (const auto& [codec, why] : dropped) json["dropped"].push_back({{"codec", codec}, {"why", why}});
  return json;
}

}  // namespace

void AddTuneOptions(CLI::App& app, TuneArguments& a) {
  app.add_option("--model", a.model, "directory of config.json and *.safetensors")->required()->type_name("DIR");
  app.add_option("--text", a.text, "text to measure on, one byte a token; not what you will evaluate on")
      ->required()
      ->type_name("FILE");
  app.add_option("--max-loss", a.max_loss, "change of per-byte perplexity that is acceptable: 0.5%, 0.01, ...")
      ->capture_default_str();
  app.add_option("--calibration", a.calibration,
                 "artifact of kvctl calibrate for this model; trained on the text's beginning if there is no such file "
                 "(default: MODEL.calibration.safetensors in this folder, MODEL being the model's name)")
      ->type_name("FILE");
  app.add_option("--codec", a.codecs, "a codec or policy to try besides the built-in grid; may be repeated");
  app.add_option("--windows", a.windows, "windows of the text to measure on")
      ->check(CLI::Range(1, EvaluateOptions::kWindowsMax))
      ->capture_default_str();
  app.add_option("--window", a.window, "tokens of a window")
      ->check(CLI::Range(2, EvaluateOptions::kWindowTokensMax))
      ->capture_default_str();
  app.add_option("--offset", a.offset,
                 "bytes of the text to skip; by default those that kvctl calibrate trains on, if the text goes on");
  app.add_option("--lag", a.lag_pages, "newest full pages read raw")->check(CLI::Range(0, 64))->capture_default_str();
  app.add_option("--threads", a.threads, "0: one per usable CPU")->check(CLI::Range(0, 1024))->capture_default_str();
  app.add_option("--svg", a.svg, "write a plot of loss against bytes")->type_name("FILE");
  app.add_option("--json", a.json, "write the table as JSON")->type_name("FILE");
  app.add_flag("--quiet", a.quiet, "no progress");
}

absl::Status RunTune(const TuneArguments& arguments) {
  TuneOptions options;
  const absl::StatusOr<double> max_loss = ParseLoss(arguments.max_loss);
  if (!max_loss.ok()) return Misuse(max_loss.status());
  options.max_loss = *max_loss;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(arguments.model));
  KV_ASSIGN_OR_RETURN(const std::string text, ReadFile(arguments.text));
  // What is wrong is noticed here, not after minutes of training and measuring.
  const CodecContext context = LocalContext(*model);
  const int64_t window_min = (int64_t{arguments.lag_pages} + 1) * context.layout.page_tokens + 1;
  if (arguments.window < window_min) {
    return InvalidField("--window", arguments.window,
                        absl::StrCat("at least ", window_min, ": within a lag of ", arguments.lag_pages,
                                     " pages every codec is read raw"));
  }
  EvaluateOptions evaluate;
  evaluate.window = arguments.window;
  evaluate.windows = arguments.windows;
  evaluate.stride = arguments.window;
  evaluate.threads = arguments.threads > 0 ? arguments.threads : CoreCount();
  const int64_t offset = OffsetOf(arguments, int64_t(text.size()));
  if (offset > int64_t(text.size())) {
    return InvalidField("--offset", offset, absl::StrCat("at most the text's ", text.size(), " bytes"));
  }
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  const auto measured = bytes.subspan(offset);
  KV_RETURN_IF_ERROR(CheckEvaluate(*model, measured, evaluate));

  const std::unique_ptr<CalibrationSource> files = MakeCalibrationFiles();
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  registry.SetCalibrations(files.get());
  options.layers = model->config().layers;
  options.more_codecs = arguments.codecs;
  options.calibration = arguments.calibration;
  if (options.calibration.empty()) {
    options.calibration = absl::StrCat(absl::StrReplaceAll(model->config().name, {{"/", "_"}, {",", "_"}, {";", "_"}}),
                                       ".calibration.safetensors");
  }
  TuneHooks hooks;
  hooks.check = [&](const std::string& spec) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, registry.CreateForCache(spec, context));
    return CheckLocalCodec(*model, *codec);
  };
  std::error_code error;
  const bool trained = std::filesystem::exists(options.calibration, error);
  for (const std::string& codec : arguments.codecs) {
    // One that names the artifact that is not there yet is checked when it is.
    if (trained || !absl::StrContains(codec, options.calibration)) KV_RETURN_IF_ERROR(hooks.check(codec));
  }
  if (!arguments.json.empty()) KV_RETURN_IF_ERROR(CheckWritable("--json", arguments.json));
  if (!arguments.svg.empty()) KV_RETURN_IF_ERROR(CheckWritable("--svg", arguments.svg));
  if (!trained) {
    KV_RETURN_IF_ERROR(CheckTrain(arguments, *model, bytes, options.calibration));
    KV_RETURN_IF_ERROR(Train(arguments, *model, bytes, options.calibration));
  }
  // Held, so that it is read once.
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<const Calibration> calibration, files->Get(options.calibration));
  KV_RETURN_IF_ERROR(CheckModel(*calibration, *model));
  options.million = MillionShapes(*calibration);
  options.has_zack = HasTensors(*calibration, "zack.");
  options.has_zack_hack = HasTensors(*calibration, "zack_hack.");

  Progress progress("tuning", arguments.quiet);
  int done_candidates = 0, all_candidates = 1;
  hooks.measure = [&](const std::string& spec) -> absl::StatusOr<RatePoint> {
    KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, registry.CreateForCache(spec, context));
    KV_ASSIGN_OR_RETURN(
        const LocalEvaluation evaluation,
        EvaluateLocal(*model, *codec, measured, evaluate, arguments.lag_pages, [&](int64_t done, int64_t total) {
          progress.Update(done_candidates * total + done, all_candidates * total);
        }));
    RatePoint point;
    point.bytes_per_token_head = evaluation.bytes_per_token_head;
    point.bpb = evaluation.loss.bpb;
    return point;
  };
  hooks.progress = [&](int done, int total, const std::string&) {
    done_candidates = done;
    all_candidates = total;
  };
  Dropped dropped;
  hooks.dropped = [&](const std::string& codec, const absl::Status& why) {
    dropped.emplace_back(codec, why.message());
    progress.Say(absl::StrCat("without ", codec, ": ", why.message()));
  };
  KV_ASSIGN_OR_RETURN(const TuneResult result, Tune(options, hooks));
  std::printf("%s: %d windows of %d bytes of %s from byte %lld on, lag %d\n%s", model->config().name.c_str(),
              arguments.windows, arguments.window, arguments.text.c_str(), static_cast<long long>(offset),
              arguments.lag_pages, TuneTable(result, options.max_loss).c_str());
  if (!arguments.json.empty()) {
    KV_RETURN_IF_ERROR(WriteFile(arguments.json, ToJson(result, dropped, options.max_loss).dump(2) + "\n"));
  }
  if (!arguments.svg.empty()) {
    KV_RETURN_IF_ERROR(WriteFile(
        arguments.svg, TuneSvg(result, options.max_loss,
                               absl::StrCat(model->config().name, ": loss against bytes, lag ", arguments.lag_pages))));
    std::printf("plot: %s\n", arguments.svg.c_str());
  }
  return absl::OkStatus();
}

}  // namespace kvmanager::engine
