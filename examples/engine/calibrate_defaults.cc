#include "examples/engine/calibrate_defaults.h"

#include <algorithm>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "codecs/builtin.h"
#include "codecs/registry.h"
#include "codecs/zack_hack/sensitivity.h"
#include "examples/engine/local_backend.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

using calibrate::CalibrationPlan;
using calibrate::ZackMode;

constexpr int kPageTokens = 64;
// Of the daemon's default: what is near is raw.
constexpr int kLagPages = 2;
// More changes the allocation little: a window of 2048 tokens per part gives what four of 4096 do.
constexpr int kProbeTokens = 2048;
// What is compared is as coarse as what a user would want, so that options differ.
constexpr double kZackRate = 0.3;
constexpr char kStackMeasured[] = "zack+hack:k_bits=1.5,v_bits=1";

/// Where the text goes on behind what was trained on, or its beginning.
int64_t MeasuredFrom(absl::Span<const uint8_t> text, const CalibrateOptions& options, int64_t tokens) {
  const int64_t trained = int64_t{options.windows} * options.window;
  return int64_t(text.size()) - trained > tokens ? trained : 0;
}

/// The artifact in memory, under any name.
class OneArtifact final : public CalibrationSource {
 public:
  explicit OneArtifact(std::shared_ptr<const Calibration> calibration) : calibration_(std::move(calibration)) {}
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view name) override { return calibration_; }

 private:
  const std::shared_ptr<const Calibration> calibration_;  // shared with the codecs that are made from it
};

/// Measures the options of a default and says which loses least.
class Chooser {
 public:
  Chooser(const Model& model, absl::Span<const uint8_t> text, const CalibrateOptions& options,
          std::shared_ptr<const Calibration> artifact, CalibrateProgress progress,
          std::vector<CalibrateChoice>* choices)
      : model_(model), text_(text), source_(std::move(artifact)), progress_(progress), choices_(*choices) {
    RegisterBuiltinCodecs(registry_);
    registry_.SetCalibrations(&source_);
    evaluate_.window = options.window;
    evaluate_.windows = options.choice_windows;
    evaluate_.threads = options.threads;
    evaluate_.stride = options.window;
    first_ = MeasuredFrom(text, options, options.window);
    evaluate_.windows =
        int(std::clamp<int64_t>((int64_t(text.size()) - first_ - 1) / options.window, 0, options.choice_windows));
  }

  bool has_text() const { return evaluate_.windows > 0; }
  /// options: values of `parameter` of the codec spec. The first of equally good ones wins.
  absl::StatusOr<std::string> Choose(const std::string& what, const std::string& spec, const std::string& parameter,
                                     const std::vector<std::string>& options) {
    const size_t first = choices_.size();
    size_t best = first;
    for (const std::string& option : options) {
      const std::string text = absl::StrCat(spec, ",", parameter, "=", option, ",calibration=new");
      KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec,
                          registry_.CreateForCache(text, LocalContext(model_, kPageTokens)));
      const auto [known, is_new] = measured_.emplace(codec->info().spec, 0.0);
      if (is_new) {
        KV_ASSIGN_OR_RETURN(
            const LocalEvaluation done,
            EvaluateLocal(model_, *codec, text_.subspan(first_), evaluate_, kLagPages, [&](int64_t now, int64_t total) {
              progress_(absl::StrCat("measuring ", what, " ", option), now, total);
            }));
        known->second = done.loss.bpb;
      }
      choices_.push_back({what, option, known->second, false});
      if (choices_.back().bpb < choices_[best].bpb) best = choices_.size() - 1;
    }
    choices_[best].chosen = true;
    return choices_[best].option;
  }

 private:
  const Model& model_;
  const absl::Span<const uint8_t> text_;
  OneArtifact source_;
  const CalibrateProgress progress_;
  std::vector<CalibrateChoice>& choices_;
  CodecRegistry registry_;
  std::map<std::string, double> measured_;  // bits per byte by canonical spec
  EvaluateOptions evaluate_;
  int64_t first_ = 0;
};

/// Of one window at the beginning of `text`: [tokens][vocab].
absl::StatusOr<std::vector<float>> Logits(const Model& model, const Codec& codec, absl::Span<const uint8_t> text,
                                          int tokens, int threads) {
  EvaluateOptions options;
  options.window = tokens;
  options.windows = 1;
  options.threads = threads;
  LocalBackendOptions backend_options;
  backend_options.lag_pages = kLagPages;
  backend_options.rows_max = EvaluateRowsMax(options, kPageTokens);
  backend_options.threads = threads;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<LocalBackend> backend,
                      LocalBackend::Create(&model, &codec, backend_options));
  const std::unique_ptr<WindowStore> store = MakeLocalWindows(backend.get());
  std::vector<float> all;
  const auto keep = [&](int, int64_t, absl::Span<const float> logits) {
    all.insert(all.end(), logits.begin(), logits.end());
  };
  const LogitsVisitor visit = keep;
  KV_RETURN_IF_ERROR(VisitWindows(model, store.get(), text, options, kPageTokens, &visit, [](int64_t, int64_t) {}));
  return all;
}

/// Both modes' sensitivities, per layer and side; the KV heads of a layer have the same.
absl::Status MeasureSensitivity(const Model& model, absl::Span<const uint8_t> text, const CalibrateOptions& options,
                                std::shared_ptr<const Calibration> artifact, CalibrateProgress progress,
                                calibrate::TensorSet* set) {
  const ModelConfig& c = model.config();
  const int tokens = int(std::min<int64_t>({kProbeTokens, options.window, int64_t(text.size()) - 1}));
  const absl::Span<const uint8_t> window = text.subspan(MeasuredFrom(text, options, tokens));
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  CodecContext context = LocalContext(model, kPageTokens);
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> raw_codec, registry.Create("raw", context));
  KV_ASSIGN_OR_RETURN(const std::vector<float> raw, Logits(model, *raw_codec, window, tokens, options.threads));
  context.calibration = std::move(artifact);
  const int64_t runs = int64_t{2} * 2 * c.layers;
  int64_t done = 0;
  for (ZackMode mode : calibrate::kZackModes) {
    std::vector<float> values(size_t(c.layers) * c.kv_heads * 2);
    for (int layer = 0; layer < c.layers; ++layer) {
      for (int side = 0; side < 2; ++side) {
        progress("measuring sensitivities", done++, runs);
        const zack_hack::Part part{layer, zack_hack::Part::kAllHeads, side};
        KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> probe,
                            zack_hack::MakeProbe(context, calibrate::Name(mode), part));
        KV_ASSIGN_OR_RETURN(const double lost, zack_hack::ProbeLoss(context, calibrate::Name(mode), part));
        KV_ASSIGN_OR_RETURN(const std::vector<float> coded, Logits(model, *probe, window, tokens, options.threads));
        const double cost = zack_hack::MeanDivergence(raw, coded, c.vocab_size) / lost;
        for (int head = 0; head < c.kv_heads; ++head) {
          values[(size_t(layer) * c.kv_heads + head) * 2 + side] = float(cost);
        }
      }
    }
    KV_RETURN_IF_ERROR(calibrate::SetSensitivity(CalibrationModelOf(model), mode, values, set));
  }
  progress("measuring sensitivities", runs, runs);
  return absl::OkStatus();
}

}  // namespace

absl::Status ChooseDefaults(const Model& model, absl::Span<const uint8_t> text, const CalibrateOptions& options,
                            const CalibrationPlan& plan, CalibrateProgress progress, calibrate::TensorSet* set,
                            TensorMetadata* metadata, std::vector<CalibrateChoice>* choices) {
  const auto artifact = [&] {
    return Calibration::Parse(SerializeCalibration(CalibrationModelOf(model), set->tensors(), *metadata),
                              "the new artifact");
  };
  KV_ASSIGN_OR_RETURN(std::shared_ptr<const Calibration> unmeasured, artifact());
  Chooser zack(model, text, options, unmeasured, progress, choices);
  if (!zack.has_text()) return absl::OkStatus();  // one window without the target of its last token
  // Heads of 16 have no other rank; others may not reach the rate.
  double rate = kZackRate;
  for (ZackMode mode : calibrate::kZackModes) {
    const std::string name = calibrate::ZackName("zack", mode, "rates");
    KV_ASSIGN_OR_RETURN(const absl::Span<const float> rates,
                        unmeasured->Floats(name, unmeasured->tensors().at(name).shape, "zack"));
    rate = std::min<double>(rate, rates.back() * 0.9999);  // as text it must not be rounded beyond
  }
  if (rate > 0) {
    KV_ASSIGN_OR_RETURN((*metadata)["zack.mode"],
                        zack.Choose("zack mode", absl::StrCat("zack:rate=", rate), "mode", {"balanced", "joint"}));
  }
  if (!plan.zack_hack) return absl::OkStatus();
  KV_RETURN_IF_ERROR(MeasureSensitivity(model, text, options, std::move(unmeasured), progress, set));
  (*metadata)["zack_hack.sensitivity"] = "measured";
  KV_ASSIGN_OR_RETURN(std::shared_ptr<const Calibration> measured, artifact());
  Chooser stack(model, text, options, std::move(measured), progress, choices);
  KV_ASSIGN_OR_RETURN(
      (*metadata)["zack_hack.mode"],
      stack.Choose("zack+hack mode", absl::StrCat(kStackMeasured, ",allocation=model"), "mode", {"balanced", "joint"}));
  KV_ASSIGN_OR_RETURN(
      (*metadata)["zack_hack.allocation"],
      stack.Choose("zack+hack allocation", absl::StrCat(kStackMeasured, ",mode=", (*metadata)["zack_hack.mode"]),
                   "allocation", {"model", "head"}));
  return absl::OkStatus();
}

}  // namespace kvmanager::engine
