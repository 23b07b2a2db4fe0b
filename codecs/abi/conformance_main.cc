// codec_conformance: tries a codec's shared object against everything that kvmanager_codec.h demands.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "codecs/abi/conformance.h"
#include "kvmanager/base/status.h"

namespace {

constexpr int kExitFailed = 1, kExitUsage = 2;

constexpr char kAbout[] =
    "Tries a codec plug-in against everything that kvmanager_codec.h demands: sizes, determinism, buffers, errors,\n"
    "hostile bytes, threads, and attention against exact attention on what it decodes to. Each check runs in a "
    "process\n"
    "of its own, so a crash is a failed check. Exit status: 0 all passed, 1 some failed, 2 usage.";
constexpr char kExamples[] =
    "Examples:\n"
    "  codec_conformance libint8.so\n"
    "  codec_conformance libint8.so --parameters bits=4 --layout f16x8x128x64\n"
    "  codec_conformance zack.so --calibration model.safetensors --parameters rate=0.25\n"
    "  codec_conformance zack_hack.so --calibration model.safetensors --capture capture.safetensors\n";

int Usage(const absl::Status& error) {
  std::fprintf(stderr, "codec_conformance: %s\nTry codec_conformance --help.\n", std::string(error.message()).c_str());
  return kExitUsage;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace kvmanager;
  ConformanceOptions options;
  std::string parameters;
  std::vector<std::string> layouts;
  CLI::App app(kAbout, "codec_conformance");
  app.footer(kExamples);
  app.add_option("file", options.path, "the shared object")->required()->type_name("FILE.so");
  app.add_option("--calibration", options.calibration_path, "artifact to make codecs from")->type_name("FILE");
  app.add_option("--capture", options.capture_path,
                 "a model's Q, K and V (docs/calibration.md), which attention is tried on instead of white noise")
      ->type_name("FILE");
  app.add_option("--parameters", parameters, "the codec's parameters")->type_name("KEY=VALUE,...");
  app.add_option("--layout", layouts,
                 "page to try, TYPExHEADSxDIMxTOKENS; may be repeated (default: the artifact's or capture's, or five "
                 "unlike ones)")
      ->type_name("LAYOUT");
  CLI11_PARSE(app, argc, argv);
  if (!parameters.empty()) {
    const absl::StatusOr<CodecSpec> spec = ParseCodecSpec("codec:" + parameters);
    if (!spec.ok()) return Usage(spec.status());
    options.parameters = spec->parameters;
  }
  for (const std::string& text : layouts) {
    const absl::StatusOr<PageLayout> layout = ParseLayoutText(text);
    if (!layout.ok()) return Usage(layout.status());
    options.layouts.push_back(*layout);
  }
  const absl::StatusOr<ConformanceReport> report = RunConformance(options, stdout);
  if (!report.ok()) return Usage(report.status());
  return report->failed() == 0 ? 0 : kExitFailed;
}
