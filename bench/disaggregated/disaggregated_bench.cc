// Disaggregated serving over an emulated link: requests are prefilled against one daemon and decoded against another,
// for each codec and link: where the time goes, how much of the transfer hides behind prefill, what is sent.
//
//   bazel build --config=opt //bench/disaggregated:disaggregated_bench
//   sudo bazel-bin/bench/disaggregated/disaggregated_bench [--model DIR --text FILE --calibration FILE] ...
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/disaggregated/emulated_link.h"
#include "bench/disaggregated/report.h"
#include "bench/disaggregated/request.h"
#include "examples/engine/blas_core.h"
#include "examples/engine/codec_files.h"
#include "examples/engine/daemon_process.h"
#include "examples/engine/program.h"
#include "kvmanager/base/status.h"
#include "tests/harness.h"

namespace kvmanager::bench {
namespace {

constexpr int kExitNoLink = 3, kExitBarMissed = 4;
constexpr char kMatched[] = "match";
constexpr char kMatchedName[] = "raw takes as long as prefill";
constexpr char kBarCodec[] = "hack K3V2";
constexpr double kBytesBar = 0.185, kHiddenBar = 0.80;

struct CodecChoice {
  std::string name, spec;
  int lag = 0;
};

// CALIBRATION stands for the artifact.
const CodecChoice kCodecs[] = {
    {"raw", "raw", 0},
    {kBarCodec, "hack", 0},
    {kBarCodec, "hack", 2},
    {"hack K2V2", "hack:k_bits=2,v_bits=2", 2},
    {"million (64,8)", "million:m=64,bits=8,calibration=CALIBRATION", 2},
    {"zack 1/4 removed", "zack:rate=0.25,calibration=CALIBRATION", 2},
    {"zack+hack 56", "zack+hack:bytes=56,calibration=CALIBRATION", 2},
    {"pq, a tenth", "pq:m=4,bits=8,ratio=0.1", 2},
};

struct Arguments {
  std::string model = "examples/model", text, calibration, daemon, json, svg;
  std::vector<std::string> links = {"1e9", "5e9", "1e10", kMatched}, codecs;
  uint64_t tokens = 4096, pool_bytes = uint64_t{1} << 30;
  int decode = 32, chunk = 0, repeats = 3, threads = 0;
  bool quiet = false, check = false;
};

absl::StatusOr<std::vector<CodecChoice>> Choices(const Arguments& arguments, std::vector<std::string>* notes) {
  std::vector<CodecChoice> choices(std::begin(kCodecs), std::end(kCodecs));
  if (!arguments.codecs.empty()) choices = {kCodecs[0]};
  for (const std::string& text : arguments.codecs) {
    const size_t at = text.rfind('@');
    CodecChoice choice{text.substr(0, at), text.substr(0, at), 2};
    if (at != std::string::npos && !absl::SimpleAtoi(text.substr(at + 1), &choice.lag)) {
      return InvalidField("--codec", text, "SPEC or SPEC@LAG");
    }
    if (choice.spec != "raw") choices.push_back(std::move(choice));
  }
  std::vector<CodecChoice> kept;
  for (CodecChoice& choice : choices) {
    const size_t at = choice.spec.find("CALIBRATION");
    if (at != std::string::npos && arguments.calibration.empty()) {
      notes->push_back(absl::StrCat("Left out: ", choice.name, ", which needs an artifact (--calibration FILE)."));
      continue;
    }
    if (at != std::string::npos) choice.spec.replace(at, std::string("CALIBRATION").size(), arguments.calibration);
    kept.push_back(std::move(choice));
  }
  return kept;
}

std::string Machine() {
  std::ifstream file("/proc/cpuinfo");
  std::string model = "unknown CPU";
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    model = std::string(absl::StripAsciiWhitespace(line.substr(line.find(':') + 1)));
    break;
  }
  return absl::StrCat(engine::CoreCount(), " cores, ", model);
}

double Load() {
  double load = 0;
  std::ifstream("/proc/loadavg") >> load;
  return load;
}

class Benchmark {
 public:
  explicit Benchmark(Arguments arguments) : arguments_(std::move(arguments)) {}

  absl::Status Run();
  bool no_link() const { return no_link_; }
  bool bar_missed() const { return bar_missed_; }

 private:
  struct Open {
    CodecChoice choice;
    std::unique_ptr<CodecPair> pair;
    std::vector<uint32_t> expected;  // tokens of one daemon alone
    double prefill = 0;              // there, median
  };

  void Say(const std::string& line) const {
    if (!arguments_.quiet) std::fprintf(stderr, "%s\n", line.c_str());
  }
  absl::Status Check() const;
  absl::Status LoadPrompt();
  absl::Status StartDaemons();
  absl::Status OpenCodecs();
  absl::Status Measure(double bits_per_s, const std::string& name);
  absl::StatusOr<Sample> One(Open& open, uint64_t* bytes);
  struct Encoded {
    double pages = 0, page_seconds_sum = 0, tasks = 0;
  };
  absl::StatusOr<Encoded> ReadEncoded() const;
  absl::Status Write();
  void CheckBars();

  const Arguments arguments_;
  std::unique_ptr<EmulatedLink> link_;
  std::unique_ptr<engine::Model> model_;
  RequestShape shape_;
  std::vector<CodecChoice> choices_;
  std::unique_ptr<engine::DaemonProcess> prefill_, decode_;
  std::unique_ptr<client::Client> client_;
  std::string metrics_;  // the prefill daemon's
  Daemons daemons_;
  std::vector<Open> open_;
  Report report_;
  bool no_link_ = false, bar_missed_ = false;
};

absl::Status Benchmark::Check() const {
  if (arguments_.tokens < 1 || arguments_.tokens > 1 << 20) {
    return InvalidField("--tokens", arguments_.tokens, "1..1048576");
  }
  if (arguments_.decode < 3) return InvalidField("--decode", arguments_.decode, "at least 3");
  if (arguments_.repeats < 1) return InvalidField("--repeats", arguments_.repeats, "at least 1");
  if (arguments_.chunk < 0) return InvalidField("--chunk", arguments_.chunk, "at least 0");
  for (const std::string& link : arguments_.links) {
    double rate = 0;
    if (link != kMatched && (!absl::SimpleAtod(link, &rate) || !(rate >= 1e6 && rate <= 1e12))) {
      return InvalidField("--links", link, absl::StrCat("bits per second, 1e6..1e12, or ", kMatched));
    }
  }
  for (const std::string& path : {arguments_.json, arguments_.svg}) {
    if (!path.empty()) KV_RETURN_IF_ERROR(engine::CheckWritable("output", path));
  }
  return absl::OkStatus();
}

absl::Status Benchmark::LoadPrompt() {
  std::string path = arguments_.text;
  if (path.empty()) path = arguments_.model + "/held_out.txt";
  KV_ASSIGN_OR_RETURN(const std::string text, engine::ReadFile(path, arguments_.tokens));
  if (text.size() < arguments_.tokens) {
    return InvalidField("--text", absl::StrCat(path, " of ", text.size(), " bytes"),
                        absl::StrCat("at least ", arguments_.tokens, " (a token is a byte)"));
  }
  for (const unsigned char byte : text) shape_.prompt.push_back(byte);
  shape_.decode_tokens = arguments_.decode;
  shape_.chunk = arguments_.chunk;
  shape_.threads = arguments_.threads > 0 ? arguments_.threads : engine::CoreCount();
  KV_ASSIGN_OR_RETURN(model_, engine::Model::Load(arguments_.model));
  if (model_->config().vocab_size < 256) {
    return InvalidField("vocab_size", model_->config().vocab_size, "at least 256 (a token is a byte)");
  }
  return absl::OkStatus();
}

absl::Status Benchmark::StartDaemons() {
  KV_ASSIGN_OR_RETURN(const std::string program, engine::FindDaemon(arguments_.daemon));
  std::string directory;
  std::vector<std::string> flags = {"--hand-off-peers", "any", "--peer-local-copy",
                                    "off"};  // the link is what is measured
  for (CodecChoice& choice : choices_) {
    KV_ASSIGN_OR_RETURN(const engine::CodecFiles files, engine::ResolveCodecFiles(choice.spec, /*own_daemon=*/true));
    choice.spec = files.codec;
    if (!files.directory.empty()) directory = files.directory;
  }
  if (!directory.empty()) flags.insert(flags.end(), {"--calibration-dir", directory});
  KV_ASSIGN_OR_RETURN(prefill_, engine::DaemonProcess::Start(program, arguments_.pool_bytes, flags));
  // The link is a network of its own.
  flags.insert(flags.end(),
               {"--peer-listen", EmulatedLink::far_address() + ":0", "--insecure", "--peer-tenants", "any"});
  KV_ASSIGN_OR_RETURN(decode_,
                      engine::DaemonProcess::Start(program, arguments_.pool_bytes, flags, link_->far_network()));
  daemons_.prefill = prefill_->address();
  daemons_.decode = decode_->address();
  KV_ASSIGN_OR_RETURN(client_, client::Client::Connect(daemons_.prefill, {.name = "disaggregated"}));
  KV_ASSIGN_OR_RETURN(const client::DaemonDescription prefill, client_->Status());
  metrics_ = prefill.metrics_listen;
  report_.workers = int(prefill.threads);
  KV_ASSIGN_OR_RETURN(const auto decode, client::Client::Connect(daemons_.decode, {.name = "disaggregated"}));
  daemons_.decode_peer = decode->peer_address();
  return absl::OkStatus();
}

absl::StatusOr<Benchmark::Encoded> Benchmark::ReadEncoded() const {
  KV_ASSIGN_OR_RETURN(const std::string text, testing::HttpGet(metrics_, "/metrics"));
  const testing::MetricsPage page = testing::ParseMetrics(text);
  const double raw_page_bytes = double(open_[0].pair->cache().raw_page_bytes);
  return Encoded{page.Sum("kvmanager_encode_input_bytes_total") / raw_page_bytes,
                 page.Sum("kvmanager_encode_seconds_sum"), page.Sum("kvmanager_encode_seconds_count")};
}

// What one daemon alone answers, and how long its prefill takes: what the others are compared with.
absl::Status Benchmark::OpenCodecs() {
  for (const CodecChoice& choice : choices_) {
    engine::KvEngineOptions options;
    options.codec = choice.spec;
    options.lag_pages = choice.lag;
    KV_ASSIGN_OR_RETURN(auto pair, CodecPair::Open(model_.get(), daemons_, options, shape_));
    Open open{choice, std::move(pair), {}, 0};
    const bool raw = choice.name == "raw";
    Row timed;
    for (int i = 0; i < (raw ? arguments_.repeats + 1 : 1); ++i) {
      KV_ASSIGN_OR_RETURN(const RequestTimes here, open.pair->Here());
      open.expected = here.tokens;
      if (i > 0 || !raw) timed.samples.push_back({.prefill = here.prefill});  // raw's first warms the machine up
    }
    open.prefill = timed.Median(&Sample::prefill);
    Say(absl::StrFormat("%s, lag %d: prefill of %d tokens without a transfer: %.3f s", choice.name, choice.lag,
                        shape_.prompt.size(), open.prefill));
    open_.push_back(std::move(open));
  }
  return absl::OkStatus();
}

absl::StatusOr<Sample> Benchmark::One(Open& open, uint64_t* bytes) {
  KV_ASSIGN_OR_RETURN(const Encoded encoded_before, ReadEncoded());
  KV_ASSIGN_OR_RETURN(const LinkCounters before, link_->Counters());
  KV_ASSIGN_OR_RETURN(const RequestTimes streamed, open.pair->Streamed());
  KV_ASSIGN_OR_RETURN(const LinkCounters after, link_->Counters());
  KV_ASSIGN_OR_RETURN(const Encoded encoded_after, ReadEncoded());
  KV_ASSIGN_OR_RETURN(const AloneTimes alone, open.pair->Alone());

  if (streamed.tokens != open.expected || alone.tokens != open.expected) {
    return absl::InternalError(absl::StrCat(open.choice.name, ", lag ", open.choice.lag,
                                            ": the decode host's tokens are not those of one daemon alone"));
  }
  if (streamed.bytes != alone.bytes + streamed.resent) {
    return absl::InternalError(
        absl::StrCat(open.choice.name, ": ", streamed.bytes, " bytes while prefill ran, ", alone.bytes, " behind it"));
  }
  const uint64_t crossed = after.sent_bytes - before.sent_bytes;
  if (crossed < alone.bytes) {
    return absl::InternalError(
        absl::StrCat("of ", alone.bytes, " bytes only ", crossed, " crossed the link: something else carried them"));
  }
  *bytes = alone.bytes;
  // Each task of a worker reports the mean time of its pages.
  const double tasks = encoded_after.tasks - encoded_before.tasks;
  const double encode = tasks > 0 ? (encoded_after.page_seconds_sum - encoded_before.page_seconds_sum) / tasks *
                                        (encoded_after.pages - encoded_before.pages)
                                  : 0;
  return Sample{.prefill = streamed.prefill,
                .encode = encode,
                .exposed = streamed.exposed,
                .wait = streamed.wait,
                .decode = streamed.decode,
                .job = streamed.job,
                .alone = alone.transfer,
                .link_bytes = crossed,
                .dropped = after.dropped - before.dropped};
}

absl::Status Benchmark::Measure(double bits_per_s, const std::string& name) {
  KV_RETURN_IF_ERROR(link_->SetRate(bits_per_s));
  LinkReport link{name, bits_per_s, {}};
  for (const Open& open : open_) {
    link.rows.push_back({open.choice.name, open.pair->cache().options.codec, open.choice.lag, 0, 0, 0, {}});
  }
  engine::Progress progress(absl::StrFormat("%s, %.4g Mbit/s: requests", name, bits_per_s / 1e6), arguments_.quiet);
  const int64_t total = int64_t{arguments_.repeats} * int64_t(open_.size());
  int64_t done = 0;
  for (int repeat = 0; repeat < arguments_.repeats; ++repeat) {
    for (size_t i = 0; i < open_.size(); ++i) {
      KV_ASSIGN_OR_RETURN(const Sample sample, One(open_[i], &link.rows[i].bytes));
      link.rows[i].samples.push_back(sample);
      progress.Update(++done, total);
    }
  }
  report_.links.push_back(std::move(link));
  return absl::OkStatus();
}

void Benchmark::CheckBars() {
  bar_missed_ = true;
  bool measured = false;
  for (const LinkReport& link : report_.links) {
    if (link.name != kMatchedName) continue;
    for (const Row& row : link.rows) {
      if ((row.codec != kBarCodec && row.codec != "hack") || row.lag != 0) continue;  // hack: of --codec hack@0
      measured = true;
      bar_missed_ = !(row.raw_bytes_ratio <= kBytesBar && row.Hidden() >= kHiddenBar);
      Say(absl::StrFormat(
          "bars: %s with lag 0 moves %.4f of raw's bytes (at most %.3f), hides %.3f of its transfer "
          "(at least %.2f): %s",
          kBarCodec, row.raw_bytes_ratio, kBytesBar, row.Hidden(), kHiddenBar, bar_missed_ ? "MISSED" : "met"));
    }
  }
  if (!measured)
    Say(absl::StrCat("bars: not measured; they are of ", kBarCodec, " with lag 0 over --links ", kMatched));
}

absl::Status Benchmark::Write() {
  std::cout << MarkdownTables(report_) << std::flush;
  if (!arguments_.json.empty()) {
    KV_RETURN_IF_ERROR(engine::WriteFile(arguments_.json, ToJson(report_).dump(1) + "\n"));
  }
  if (!arguments_.svg.empty()) KV_RETURN_IF_ERROR(engine::WriteFile(arguments_.svg, Chart(report_)));
  return absl::OkStatus();
}

absl::Status Benchmark::Run() {
  KV_RETURN_IF_ERROR(Check());
  // First of all: threads and daemons that are made from here on are on the near host.
  auto link = EmulatedLink::Create();
  no_link_ = !link.ok();
  KV_RETURN_IF_ERROR(link.status());
  link_ = *std::move(link);
  KV_RETURN_IF_ERROR(LoadPrompt());
  KV_ASSIGN_OR_RETURN(choices_, Choices(arguments_, &report_.notes));
  for (const std::string& note : report_.notes) Say(note);
  KV_RETURN_IF_ERROR(StartDaemons());
  report_.model = model_->config().name;
  report_.layers = model_->config().layers;
  report_.prompt_tokens = shape_.prompt.size();
  report_.decode_tokens = shape_.decode_tokens;
  report_.chunk = shape_.chunk;
  const double load = Load();
  KV_RETURN_IF_ERROR(OpenCodecs());

  for (const std::string& text : arguments_.links) {
    double bits_per_s = 0;
    std::string name = kMatchedName;
    if (text == kMatched) {
      // Of raw, every page travels once: whole pages, the last one filled up.
      const client::CacheDescription& raw = open_[0].pair->cache();
      const uint64_t pages = (shape_.prompt.size() + raw.options.page_tokens - 1) / raw.options.page_tokens;
      bits_per_s = 8 * double(pages * raw.options.layers * raw.raw_page_bytes) / open_[0].prefill;
    } else {
      (void)absl::SimpleAtod(text, &bits_per_s);  // checked before
      name = absl::StrFormat("%g Gbit/s", bits_per_s / 1e9);
    }
    KV_RETURN_IF_ERROR(Measure(bits_per_s, name));
  }
  report_.machine = absl::StrFormat("%s; load %.2f when it began, %.2f at the end", Machine(), load, Load());
  report_.notes.push_back(absl::StrCat("Machine: ", report_.machine, "."));
  AddRatios(&report_);
  KV_RETURN_IF_ERROR(Write());
  if (arguments_.check) CheckBars();
  return absl::OkStatus();
}

constexpr char kAbout[] =
    "Disaggregated serving on one machine: a prefill host and a decode host, each a network namespace with a\n"
    "kvmanagerd of its own, a veth pair between them that `tc tbf` holds to a rate, and the example engine at both\n"
    "ends. Every request is prefilled in one step, layer by layer; its pages leave as they are full and encoded, and "
    "a\n"
    "second engine goes on from them. Then the same sequence is handed over once more in one piece.\n\n"
    "Needs root, or `unshare --user --map-root-user --net`, and iproute2; without, it says so and exits with 3.\n\n"
    "Columns, in seconds, medians over --repeats:\n"
    "  prefill   from the request to its first token, while pages leave\n"
    "  encode    of the prefill daemon's workers, all together; it lies within prefill\n"
    "  transfer  the same hand-off sent behind the prefill in one piece, over the same link\n"
    "  exposed   from the first token until the decode host has every page\n"
    "  hidden    1 - exposed / transfer\n"
    "  link use  pages' bits over transfer, of the link's rate: far below 1, this machine was the bottleneck\n"
    "  wait      by how much the decode engine's first step was late: the claim, and pages that it needed\n"
    "  decode    its steps\n"
    "  job       from the request to the last token\n\n"
    "  disaggregated_bench --model DIR --text FILE --links match --check       the bars of the project\n"
    "  disaggregated_bench --codec hack@0 --codec hack:k_bits=2,v_bits=2@2     these beside raw\n";

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app(kAbout);
  app.add_option("--model", arguments.model, "directory of config.json and *.safetensors")->capture_default_str();
  app.add_option("--text", arguments.text, "the prompt, a token per byte (default: held_out.txt of the model)");
  app.add_option("--calibration", arguments.calibration,
                 "artifact of the model, FILE.safetensors from `kvctl calibrate`, for million, zack and zack+hack; "
                 "without, they are left out");
  app.add_option("--tokens", arguments.tokens, "of the prompt")->capture_default_str();
  app.add_option("--decode", arguments.decode, "tokens to generate, the first of which prefill gives")
      ->capture_default_str();
  app.add_option("--chunk", arguments.chunk, "prompt tokens of a prefill step; 0: all at once")->capture_default_str();
  app.add_option("--threads", arguments.threads, "of the prefill engine; 0: one per core")->capture_default_str();
  app.add_option("--links", arguments.links,
                 "bits per second, or match: a link over which raw takes as long as its prefill")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--codec", arguments.codecs,
                 "SPEC[@LAG], may be repeated: these beside raw instead of the usual ones");
  app.add_option("--repeats", arguments.repeats, "requests per codec and link")->capture_default_str();
  app.add_option("--pool-bytes", arguments.pool_bytes, "page memory of each daemon")->capture_default_str();
  app.add_option("--daemon", arguments.daemon, "kvmanagerd (default: $KVMANAGERD, or that of this build)");
  app.add_option("--json", arguments.json, "file for every number");
  app.add_option("--svg", arguments.svg, "file for the chart");
  app.add_flag("--check", arguments.check,
               "exit with 4 unless hack K3V2 with lag 0 over `match` moves at most 0.185 of raw's bytes and hides at "
               "least 0.80");
  app.add_flag("--quiet", arguments.quiet, "no progress");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : engine::kUsageExitCode;
  }
  Benchmark benchmark(arguments);
  const absl::Status status = benchmark.Run();
  const int code = engine::ExitCode("disaggregated_bench", status);
  if (benchmark.no_link()) return kExitNoLink;
  return code == 0 && benchmark.bar_missed() ? kExitBarMissed : code;
}

}  // namespace
}  // namespace kvmanager::bench

int main(int argc, char** argv) {
  kvmanager::engine::ChooseBlasCore(argv);
  return kvmanager::bench::Main(argc, argv);
}
