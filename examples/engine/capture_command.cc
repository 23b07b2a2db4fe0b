#include "examples/engine/capture_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "absl/strings/str_format.h"
#include "examples/engine/capture_model.h"
#include "examples/engine/program.h"
#include "kvmanager/base/exit_code.h"
#include "kvmanager/base/safetensors.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {

void AddCaptureOptions(CLI::App& app, CaptureArguments& a) {
  app.add_option("--model", a.model, "directory of config.json and *.safetensors")->required();
  app.add_option("--text", a.text, "text to read, a token per byte")->required();
  app.add_option("--tokens", a.tokens, "tokens to capture, from the text's beginning")->required();
  app.add_option("--out,--output", a.out, "FILE.safetensors to write (docs/calibration.md has the format)")->required();
  app.add_option("--dtype", a.dtype, "of what is written")->check(CLI::IsMember({"f16", "f32"}))->capture_default_str();
  app.add_option("--window", a.window, "tokens of one context, if there are more of them in all")
      ->capture_default_str();
  app.add_flag("--w-o", a.output_projection, "W_O too, by which training of `zack` weighs outputs");
  app.add_option("--threads", a.threads, "0: one per usable CPU")->check(CLI::Range(0, 1024))->capture_default_str();
  app.add_flag("--quiet", a.quiet, "no progress");
}

absl::Status RunCapture(const CaptureArguments& arguments) {
  CaptureOptions options;
  options.tokens = arguments.tokens;
  options.window = arguments.window;
  options.threads = arguments.threads == 0 ? CoreCount() : arguments.threads;
  options.output_projection = arguments.output_projection;
  if (arguments.dtype != "f16" && arguments.dtype != "f32") {
    return Misuse(InvalidField("--dtype", arguments.dtype, "f16 or f32"));
  }
  options.dtype = arguments.dtype == "f16" ? DType::kFloat16 : DType::kFloat32;
  KV_RETURN_IF_ERROR(Misuse(CheckCaptureOptions(options)));
  KV_RETURN_IF_ERROR(CheckTensorsOut("--out", arguments.out));
  KV_ASSIGN_OR_RETURN(const std::string text, ReadFile(arguments.text, CaptureOptions::kTokensMax));
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(arguments.model));
  Progress progress("capture: reading the text", arguments.quiet);
  KV_ASSIGN_OR_RETURN(
      const std::string file,
      CaptureModel(*model, absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size()), options,
                   [&](int64_t done, int64_t total) { progress.Update(done, total); }));
  KV_RETURN_IF_ERROR(WriteFileAtomically(arguments.out, file));
  const ModelConfig& c = model->config();
  std::fputs(
      absl::StrFormat("%s: %d bytes, %s, of model %s (%s)\n  %d layers, %d query heads and %d KV heads of %d; %d "
                      "tokens\n\nNext:\n  kvctl calibrate --capture %s --codec CODEC --out NAME.safetensors\n  "
                      "codec_conformance CODEC.so --capture %s\n",
                      arguments.out, file.size(), arguments.dtype, c.name, model->digest().substr(0, 12), c.layers,
                      c.query_heads, c.kv_heads, c.head_dim, arguments.tokens, arguments.out, arguments.out)
          .c_str(),
      stdout);
  return absl::OkStatus();
}

}  // namespace kvmanager::engine
