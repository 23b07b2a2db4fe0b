// evaluate: bits per byte of a text while the model's keys and values live in the daemon, behind a codec.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "codecs/calibration.h"
#include "examples/engine/blas_core.h"
#include "examples/engine/codec_files.h"
#include "examples/engine/daemon_process.h"
#include "examples/engine/evaluation.h"
#include "examples/engine/program.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

constexpr int64_t kDeadlineMs = 300000;  // of a call: a layer of a batch of windows, on slow machines too

struct Flags {
  std::string model, text, codec = "raw", json, connect, daemon;
  std::vector<std::string> codec_plugins;
  int lag_pages = 2;
  EvaluateOptions evaluate;
};

/// Both forms of every page of a batch, and slack for partly filled slabs.
uint64_t PoolBytes(const ModelConfig& c, const EvaluateOptions& options, int page_tokens) {
  const uint64_t windows = std::min(options.windows, EvaluateOptions::kBatchWindows);
  const uint64_t pages = options.window / page_tokens + 1;
  const PageLayout layout{DType::kFloat16, uint16_t(c.kv_heads), uint16_t(c.head_dim), uint16_t(page_tokens)};
  return (2 * windows * pages * c.layers * layout.raw_bytes() + (uint64_t{256} << 20)) >> 21 << 21;
}

absl::Status Run(Flags flags) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(flags.model));
  KV_ASSIGN_OR_RETURN(const std::string text, ReadFile(flags.text));
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  KV_RETURN_IF_ERROR(CheckEvaluate(*model, bytes, flags.evaluate));
  if (!flags.json.empty()) KV_RETURN_IF_ERROR(CheckWritable("--json", flags.json));
  flags.evaluate.threads = CoreCount();
  KV_ASSIGN_OR_RETURN(const CodecFiles files, ResolveCodecFiles(flags.codec, /*own_daemon=*/flags.connect.empty()));
  KvEngineOptions engine_options;
  engine_options.codec = files.codec;
  engine_options.calibration_digest = files.calibration_digest;
  engine_options.lag_pages = flags.lag_pages;
  engine_options.rows_max = EvaluateRowsMax(flags.evaluate, engine_options.page_tokens);

  std::unique_ptr<DaemonProcess> daemon;
  if (flags.connect.empty()) {
    KV_ASSIGN_OR_RETURN(const std::string program, FindDaemon(flags.daemon));
    std::vector<std::string> more_flags;
    if (!files.directory.empty()) more_flags = {"--calibration-dir", files.directory};
    for (const std::string& plugin : flags.codec_plugins) {
      more_flags.push_back("--codec-plugin");
      more_flags.push_back(plugin);
    }
    KV_ASSIGN_OR_RETURN(
        daemon, DaemonProcess::Start(program, PoolBytes(model->config(), flags.evaluate, engine_options.page_tokens),
                                     more_flags));
    flags.connect = daemon->address();
  }
  client::Client::Options client_options;
  client_options.name = "evaluate";
  client_options.deadline_ms = kDeadlineMs;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<client::Client> client,
                      client::Client::Connect(flags.connect, client_options));
  if (daemon != nullptr) daemon->HideSocket();
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<KvEngine> engine, KvEngine::Open(client.get(), *model, engine_options));

  const std::unique_ptr<CalibrationSource> artifacts = MakeCalibrationDirectory(files.directory);
  absl::StatusOr<Evaluation> done;
  {
    Progress progress(absl::StrCat("evaluate ", flags.codec, ", pages"), /*quiet=*/false);
    done = Evaluate(*model, engine.get(), bytes, flags.evaluate, artifacts.get(),
                    [&](int64_t now, int64_t total) { progress.Update(now, total); });
  }
  KV_RETURN_IF_ERROR(done.status());
  const nlohmann::ordered_json report = {{"codec", done->codec},
                                         {"lag_pages", flags.lag_pages},
                                         {"bytes_per_token_head", done->bytes_per_token_head},
                                         {"resident_bytes_per_token_head", done->resident_bytes_per_token_head},
                                         {"bpb", done->bpb},
                                         {"bpb_second_half", done->bpb_second_half},
                                         {"encoded_pairs", done->pairs.encoded},
                                         {"raw_pairs", done->pairs.raw},
                                         {"expected_encoded_pairs", done->expected_pairs.encoded},
                                         {"expected_raw_pairs", done->expected_pairs.raw},
                                         {"seconds", done->seconds}};
  const std::string dumped = report.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  std::fputs(dumped.c_str(), stdout);
  if (!flags.json.empty()) KV_RETURN_IF_ERROR(WriteFile(flags.json, dumped));
  if (done->pairs != done->expected_pairs) {
    return FieldError(absl::StatusCode::kDataLoss, "encoded and raw pairs counted by the daemon",
                      absl::StrCat(done->pairs.encoded, " and ", done->pairs.raw),
                      absl::StrCat(done->expected_pairs.encoded, " and ", done->expected_pairs.raw, " (the protocol)"));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvmanager::engine

int main(int argc, char** argv) {
  using namespace kvmanager::engine;
  ChooseBlasCore(argv);
  Flags flags;
  CLI::App app("Bits per byte of a text while the model's keys and values live in kvmanagerd behind a codec.");
  app.add_option("--model", flags.model, "directory of config.json and *.safetensors")->required();
  app.add_option("--text", flags.text, "text to measure on, a token per byte")->required();
  app.add_option("--codec", flags.codec,
                 "NAME[:key=value,...], calibration=FILE naming an artifact, a policy: "
                 "SPEC;FIRST..LAST=SPEC;sinks=N, or a ladder: ladder=SPEC>SPEC")
      ->capture_default_str();
  app.add_option("--codec-plugin", flags.codec_plugins,
                 "a codec's shared object, for the daemon that is started; may be repeated")
      ->type_name("FILE.so")
      ->allow_extra_args(false);
  app.add_option("--lag", flags.lag_pages, "newest full pages that a query reads raw, beside its own")
      ->capture_default_str()
      ->check(CLI::Range(0, 64));
  app.add_option("--window", flags.evaluate.window, "tokens of a window")->capture_default_str();
  app.add_option("--stride", flags.evaluate.stride, "tokens from one window's start to the next's")
      ->capture_default_str();
  app.add_option("--windows", flags.evaluate.windows, "windows")->capture_default_str();
  app.add_option("--json", flags.json, "file for the result");
  app.add_option("--connect", flags.connect,
                 "a running daemon: unix:PATH or tcp:HOST:PORT; without it, one is started");
  app.add_option("--daemon", flags.daemon,
                 "kvmanagerd to start (default: $KVMANAGERD, beside this program, its Bazel tree)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageExitCode;
  }
  return ExitCode("evaluate", Run(flags));
}
