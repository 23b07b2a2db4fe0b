#include "codecs/bench_codecs.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "codecs/abi/plugin_codec.h"
#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"

namespace kvmanager {
namespace {

constexpr char kSynthetic[] = "synthetic";
constexpr uint32_t kSeed = 1;

absl::string_view CalibrationOf(absl::string_view spec) {
  for (absl::string_view part : absl::StrSplit(spec, absl::ByAnyChar(";,:>"))) {
    if (absl::ConsumePrefix(&part, "calibration=")) return part;
  }
  return {};
}

}  // namespace

class BenchCodecs::Source final : public CalibrationSource {
 public:
  Source() : files_(MakeCalibrationFiles()) {}

  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view name) override {
    if (name != kSynthetic) return files_->Get(name);
    if (made_ == nullptr) made_ = SyntheticCalibration(model_, kSeed, specs_);
    return made_;
  }
  void Shape(CalibrationModel model, absl::string_view spec) {
    model_ = std::move(model);
    specs_.clear();
    absl::ConsumePrefix(&spec, CodecRegistry::kLadderPrefix);
    for (absl::string_view clause : absl::StrSplit(spec, absl::ByAnyChar(";>"))) {
      // "FIRST..LAST=SPEC" of a policy.
      const size_t equals = clause.find('=');
      if (!clause.empty() && absl::ascii_isdigit(clause[0]) && equals != absl::string_view::npos) {
        clause.remove_prefix(equals + 1);
      }
      if (absl::StrContains(clause, kSynthetic)) specs_.emplace_back(clause);
    }
    made_ = nullptr;
  }

 private:
  const std::unique_ptr<CalibrationSource> files_;
  CalibrationModel model_;
  std::vector<std::string> specs_;
  std::shared_ptr<const Calibration> made_;
};

BenchCodecs::BenchCodecs() : source_(std::make_unique<Source>()) {
  RegisterBuiltinCodecs(registry_);
  registry_.SetCalibrations(source_.get());
}

BenchCodecs::~BenchCodecs() = default;

absl::Status BenchCodecs::LoadPlugins(int* argc, char** argv) {
  return LoadCodecPlugins(TakeFlags("codec-plugin", argc, argv), registry_, /*events=*/nullptr);
}

absl::StatusOr<std::unique_ptr<Codec>> BenchCodecs::Make(const std::string& spec, const PageLayout& layout,
                                                         int query_heads, int layers) {
  CodecContext context;
  context.layout = layout;
  context.layers = layers;
  context.query_heads = query_heads;
  source_->Shape({"synthetic", "", layers, layout.kv_heads, query_heads, layout.head_dim}, spec);
  return registry_.Create(spec, context);
}

absl::StatusOr<std::shared_ptr<const Calibration>> BenchCodecs::ArtifactOf(const std::string& spec) {
  const absl::string_view name = CalibrationOf(spec);
  if (name.empty() || name == kSynthetic) return std::shared_ptr<const Calibration>();
  return source_->Get(name);
}

std::vector<std::string> TakeFlags(absl::string_view name, int* argc, char** argv) {
  const std::string prefix = absl::StrCat("--", name, "=");
  std::vector<std::string> values;
  int kept = 0;
  for (int i = 0; i < *argc; ++i) {
    absl::string_view argument = argv[i];
    if (absl::ConsumePrefix(&argument, prefix)) {
      values.emplace_back(argument);
    } else {
      argv[kept++] = argv[i];
    }
  }
  *argc = kept;
  return values;
}

const std::vector<BenchSpec>& BenchSpecs() {
  static const std::vector<BenchSpec> specs = {
      {"raw", "raw"},
      {"K2V2", "hack:k_bits=2,v_bits=2"},
      {"K3V2", "hack:k_bits=3,v_bits=2"},
      {"K2V1", "hack:k_bits=2,v_bits=1"},
      {"K4V3", "hack:k_bits=4,v_bits=3"},
      {"token_K2V2", "hack:k_axis=token,k_bits=2,v_bits=2"},
      {"zack_hack_56", "zack+hack:bytes=56,calibration=synthetic"},
      {"zack_hack_48", "zack+hack:bytes=48,calibration=synthetic"},
      {"million_64_8", "million:m=64,bits=8,calibration=synthetic"},
      {"million_64_6", "million:m=64,bits=6,calibration=synthetic"},
      {"million_32_12", "million:m=32,bits=12,calibration=synthetic"},
      {"zack_50", "zack:rate=0.5,calibration=synthetic"},
      {"zack_25", "zack:rate=0.25,calibration=synthetic"},
      {"pq_4_8", "pq:m=4,bits=8,ratio=0.1,iterations=3"},
  };
  return specs;
}

}  // namespace kvmanager
