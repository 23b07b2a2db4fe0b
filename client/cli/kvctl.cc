// kvctl: looks at a running kvmanagerd, drains it, purges and retains what it has published; trains calibration
// artifacts, writes captures and tunes policies; explains how K and V are best reloaded; replays traces through
// eviction policies.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cli/explain.h"
#include "client/cli/format.h"
#include "client/cli/measured_plan.h"
#include "client/cli/prefetch.h"
#include "client/cli/retain.h"
#include "client/cli/top.h"
#include "client/cli/upgrade.h"
#include "client/client.h"
#include "client/dial.h"
#include "examples/engine/blas_core.h"
#include "examples/engine/calibrate_command.h"
#include "examples/engine/capture_command.h"
#include "examples/engine/program.h"
#include "examples/engine/tune_command.h"
#include "kvmanager/base/exit_code.h"
#include "kvmanager/base/status.h"
#include "kvmanager/simulator/simulate_command.h"
#include "transport/recompute/plan_command.h"

namespace kvmanager::client::cli {
namespace {

constexpr char kDefaultAddress[] = "unix:/run/kvmanager/kvmanager.sock";
constexpr int kExitOk = kExitDone, kExitUsage = kExitMisused;

struct Arguments {
  std::string connect = kDefaultAddress;
  std::string admin;
  std::string token_file;
  std::string tls_ca, tls_cert, tls_key, tls_name;
  int64_t deadline_ms = 5000;
  bool json = false;
  bool drain_off = false;
  bool reached = false;  // the daemon
  std::vector<std::string> peers;
  std::string purge_cache;
  bool purge_all = false;
  std::string plan_cache, plan_peer;
  std::string explain_cache;
  PromptArguments explain;
  std::string prefetch_cache;
  PromptArguments prefetch;
  std::string retain_cache;
  RetainArguments retain;
  UpgradeArguments upgrade;
};

int Fail(const absl::Status& error, const Arguments& arguments) {
  if (arguments.json) std::cout << ErrorToJson(error, arguments.connect, arguments.reached).dump(2) << "\n";
  std::cerr << "kvctl: " << absl::StatusCodeToString(error.code()) << ": " << std::string(error.message()) << "\n";
  if (const std::string advice = Advice(error, arguments.connect, arguments.reached); !advice.empty())
    std::cerr << advice << "\n";
  return ExitCodeOf(error);
}

// The exit code.
int Print(const Arguments& arguments, const std::string& text, const nlohmann::json& json) {
  std::cout << (arguments.json ? json.dump(2) + "\n" : text) << std::flush;
  if (std::cout.good()) return kExitOk;
  std::cerr << "kvctl: standard output cannot be written\n";
  return kExitFailed;
}

template <typename T>
int Show(const absl::StatusOr<T>& got, const Arguments& arguments, std::string (*format)(const T&)) {
  if (!got.ok()) return Fail(got.status(), arguments);
  return Print(arguments, format(*got), ToJson(*got));
}

// The admin socket, where everything is asked, however many engines there are; else what --connect says: an earlier
// version's socket, or one that says what is wrong.
std::string Where(const Arguments& arguments) {
  constexpr int64_t kProbeMs = 100;
  if (!arguments.admin.empty()) return arguments.admin;
  if (!absl::StartsWith(arguments.connect, "unix:")) return arguments.connect;
  const std::string beside = absl::StrCat(arguments.connect, ".admin");
  const auto address = ParseAddress(beside);
  return address.ok() && Dial(*address, kProbeMs).ok() ? beside : arguments.connect;
}

int Drain(Client& client, const Arguments& arguments, bool on) {
  if (absl::Status status = client.Drain(on); !status.ok()) return Fail(status, arguments);
  const auto now = client.Status();
  if (!now.ok()) return Fail(now.status(), arguments);
  const std::string text =
      on ? absl::StrCat(
               "draining: no new sequences or incoming hand-offs; ", now->leases, " leases are still held and ",
               now->waiting_hand_offs,
               " received sequences wait to be claimed. `kvctl undrain` takes it back; SIGTERM exits when both "
               "are gone.\n")
         : "serving: new sequences and hand-offs are accepted\n";
  return Print(arguments, text,
               {{"draining", now->draining}, {"leases", now->leases}, {"waiting_hand_offs", now->waiting_hand_offs}});
}

int ExplainReload(const recompute::PlanArguments& plan, const std::string& measured, const Arguments& arguments) {
  const auto explanation = recompute::Explain(plan);
  if (explanation.ok()) {
    return Print(arguments, measured + (measured.empty() ? "" : "\n") + recompute::FormatPlan(*explanation),
                 recompute::PlanToJson(*explanation));
  }
  // Without a daemon it is made of flags alone.
  return Fail(arguments.plan_cache.empty() ? Misuse(explanation.status()) : explanation.status(), arguments);
}

// What is wrong with the flags that say where the daemon is, and who this is.
absl::Status CheckConnection(const Arguments& arguments) {
  const bool by_admin = !arguments.admin.empty();
  const auto address = ParseAddress(by_admin ? arguments.admin : arguments.connect);
  if (!address.ok()) {
    const ErrorDetail detail = DetailOf(address.status());
    return InvalidField(by_admin ? "--admin" : "--connect", detail.value, detail.bound);
  }
  const bool any_tls = !(arguments.tls_ca.empty() && arguments.tls_cert.empty() && arguments.tls_key.empty() &&
                         arguments.tls_name.empty());
  if (!address->is_unix && !address->is_tls && any_tls) {
    return InvalidField("--connect", address->text, "tls:HOST:PORT with --tls-ca, --tls-cert, --tls-key or --tls-name");
  }
  if (address->is_tls && arguments.tls_cert.empty() != arguments.tls_key.empty()) {
    return InvalidField(arguments.tls_cert.empty() ? "--tls-cert" : "--tls-key", "missing",
                        "given with the other half of --tls-cert and --tls-key");
  }
  return absl::OkStatus();
}

int Purge(Client& client, const Arguments& arguments, uint32_t cache_id) {
  const auto blocks = client.Purge(cache_id);
  if (!blocks.ok()) return Fail(blocks.status(), arguments);
  return Print(arguments,
               absl::StrCat("purged ", *blocks,
                            " published blocks, where one in memory and on the disk counts twice; those that "
                            "sequences hold stay\n"),
               {{"blocks", *blocks}});
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app{
      "kvctl looks at a running kvmanagerd, drains it, and purges or retains what it has published.\n\n"
      "  kvctl status                       what the daemon is, how full its memory is\n"
      "  kvctl top                          what it does now: memory, hits, times, transfers, holders, errors\n"
      "  kvctl caches                       which models' caches, their codecs and sizes\n"
      "  kvctl sequences                    who holds how many tokens\n"
      "  kvctl peers                        hand-offs to and from other daemons, and how much those have to do\n"
      "  kvctl peers 10.0.0.2:9470 10.0.0.3:9470\n"
      "                                     whether a hand-off to these could be taken, and how soon\n"
      "  kvctl limits                       what clients and tenants may have at most, and what they have now\n"
      "  kvctl explain --cache 3 --tokens PROMPT.json\n"
      "                                     why a prompt missed: where each of its blocks is, or how it went\n"
      "  kvctl retain --cache 3 --tokens PROMPT.json --priority 80 --ttl-s 3600\n"
      "                                     keep the blocks of a prompt longer than others, for an hour\n"
      "  kvctl prefetch --cache 3 --tokens PROMPT.json\n"
      "                                     bring them from the disk into memory, ahead of a request\n"
      "  kvctl drain                        before a restart: take in nothing new\n"
      "  kvctl drain --off                  take it back (the same as undrain)\n"
      "  kvctl upgrade                      the next version goes on in the daemon's place, with its memory\n"
      "  kvctl purge --cache 3              forget the published blocks of cache 3 that nobody holds\n"
      "  kvctl --connect tcp:10.0.0.2:7000 status --json\n"
      "  kvctl calibrate --model DIR --text FILE --codec zack+hack --out NAME.safetensors\n"
      "  kvctl capture --model DIR --text FILE --tokens 4096 --out CAPTURE.safetensors\n"
      "  kvctl tune --model DIR --text FILE --max-loss 0.5%   the smallest codec policy that is good enough\n"
      "  kvctl simulate --help              which eviction policy and how much memory a trace of requests needs\n"
      "  kvctl recompute-plan --help        copy K and V from slower memory, or recompute some of them?\n"
      "  kvctl recompute-plan --tokens 4096 --cache 3    the same by what the daemon measured\n",
      "kvctl"};
  app.footer(
      "The address is that of --connect, or else of $KVMANAGER_ADDRESS, or else\n"
      "unix:/run/kvmanager/kvmanager.sock.\n"
      "Exit code of every command:\n"
      "  0  done\n"
      "  1  not done: the daemon is not reached or refuses, or a file cannot be read, written, or used\n"
      "  2  the command line is wrong by itself: nothing was read, asked or changed");
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("-c,--connect", arguments.connect, "the daemon: unix:PATH, tcp:HOST:PORT or tls:HOST:PORT")
      ->envname("KVMANAGER_ADDRESS")
      ->capture_default_str();
  app.add_option("--admin", arguments.admin,
                 "the daemon's --admin-listen, unix:PATH, which its user and root reach (default: PATH.admin of "
                 "--connect unix:PATH)")
      ->envname("KVMANAGER_ADMIN_ADDRESS");
  app.add_option("--token-file", arguments.token_file, "a file with the token that shows who this is (--tenants)")
      ->envname("KVMANAGER_TOKEN_FILE");
  app.add_option("--tls-ca", arguments.tls_ca,
                 "of tls:HOST:PORT: who signed the daemon's certificate, in PEM (default: whom the system trusts)")
      ->envname("KVMANAGER_TLS_CA");
  app.add_option("--tls-cert", arguments.tls_cert, "of tls:HOST:PORT: a certificate that says who this is, in PEM")
      ->envname("KVMANAGER_TLS_CERT");
  app.add_option("--tls-key", arguments.tls_key, "its private key, in PEM")->envname("KVMANAGER_TLS_KEY");
  app.add_option("--tls-name", arguments.tls_name,
                 "the host name or IP address that the daemon's certificate must have (default: HOST)")
      ->envname("KVMANAGER_TLS_NAME");
  app.add_option("--deadline-ms", arguments.deadline_ms, "how long to wait for an answer")
      ->check(CLI::Range(int64_t{1}, int64_t{3600000}))
      ->capture_default_str();
  app.add_flag("--json", arguments.json, "JSON instead of tables: sizes in bytes, times in seconds; errors too");

  auto* status = app.add_subcommand("status", "What the daemon is, whether it drains, how full its memory is");
  TopArguments top_arguments;
  auto* top = app.add_subcommand(
      "top",
      "What the daemon does now, drawn every second until Ctrl-C; piped, one picture behind the other, without colours "
      "or "
      "cursor movement; 80 columns\n\n"
      "  kvctl top                     watch\n"
      "  kvctl top --interval 10       rates and quantiles are of the last ten seconds\n"
      "  kvctl top --once              one picture, for a ticket: rates of the second that begins now\n"
      "  kvctl top --once --json | jq .tiers\n\n"
      "host, gpuN   memory in use of what was taken at start; evictable: published blocks that nobody holds\n"
      "hits         blocks found of the blocks that new sequences asked for\n"
      "attention    time of a step's attention in the daemon: small ones on the loop, others on workers\n"
      "encoding     full pages that wait for their codec: should be near 0\n"
      "transfer     pages to and from other daemons; hand-offs that did not arrive count as `not`\n"
      "quality      relative error of attention on encoded pages, if the daemon samples it");
  top->add_option("--interval", top_arguments.interval_s, "seconds between two readings")
      ->check(CLI::Range(TopArguments::kIntervalMinS, TopArguments::kIntervalMaxS))
      ->capture_default_str();
  top->add_flag("--once", top_arguments.once, "one picture, then end");
  auto* caches = app.add_subcommand("caches", "The caches: model, codec, geometry, pages resident raw and encoded");
  auto* sequences = app.add_subcommand("sequences", "The sequences that clients hold");
  auto* peers = app.add_subcommand(
      "peers",
      "The daemons that sequences were handed to or came from. Those handed to, or those given, are asked by the "
      "daemon "
      "how much memory they have free, and how much is on its way to them; RATE is what was measured to there while "
      "there was something to send");
  peers->add_option("peers", arguments.peers, "HOST:PORT of daemons' --peer-listen: these alone")->expected(0, 256);
  auto* limits = app.add_subcommand("limits",
                                    "Every limit of the daemon, with its use: of a tenant, a connection or a process "
                                    "by the one that has most; `-`: not "
                                    "counted");
  auto* explain = app.add_subcommand(
      "explain",
      "Where each block of a prompt is, or why it is not there\n\n"
      "  kvctl caches                                   which cache the prompt was for\n"
      "  kvctl explain --cache 3 --tokens PROMPT.json   its token ids, as the engine had them: [1, 15043, 3186, ...]\n"
      "  kvctl explain --keys HEX HEX                   keys from an engine's log, of any cache that is open\n"
      "  kvctl explain --cache 3 --tokens PROMPT.json --json | jq '.blocks[] | select(.place == \"nowhere\")'\n\n"
      "A prompt hits up to its first block that is not there. WHERE is the memory, or `disk`, that has the block;\n"
      "`to host`: it is on its way there. RETAINED is a priority that `kvctl retain` or an engine gave it, and for "
      "how\n"
      "long still. Of the others WHY NOT says\n"
      "evicted       room was short: from where, for whose request, and whose it was (labels of tenants, as\n"
      "              `kvctl caches` shows them); see --host-pool-bytes, shares in --tenants, --disk-path\n"
      "purged        by `kvctl purge`\n"
      "dropped       its bytes, or its record on the disk, were not what was written\n"
      "never stored  as far as the daemon remembers: since its start, or of the last blocks that went\n"
      "cache N has these tokens: it differs in ...\n"
      "              the same tokens under another name: an engine asks with another tenant, codec, model, ...\n"
      "cache N has these tokens behind others\n"
      "              what comes before them differs: names cover all tokens up to the block's end");
  auto* explain_cache =
      explain->add_option("--cache", arguments.explain_cache, "of this cache: an id that `kvctl caches` shows");
  auto* explain_tokens =
      explain
          ->add_option("--tokens", arguments.explain.tokens,
                       "a file with the prompt's token ids: a list in JSON, such as [1, 15043, 3186]")
          ->needs(explain_cache);
  explain
      ->add_option("--keys", arguments.explain.keys, "keys of blocks, 64 hexadecimal digits each, instead of a prompt")
      ->excludes(explain_tokens);
  auto* retain = app.add_subcommand(
      "retain",
      "How long the blocks of a prompt are kept when memory is short\n\n"
      "  kvctl retain --cache 3 --tokens PROMPT.json --priority 80 --ttl-s 3600\n"
      "                                             an hour longer than others of their tenant\n"
      "  kvctl retain --cache 3 --tokens PROMPT.json --priority 100      last of all, as long as the daemon runs\n"
      "  kvctl retain --cache 3 --tokens PROMPT.json --priority 0 --blocks 12..40\n"
      "                                             these will not return: they go first\n"
      "  kvctl retain --cache 3 --keys HEX HEX --priority 50             as usual again\n\n"
      "When a tenant has to give up memory, its blocks with a priority below 50 go first, the lowest priority before\n"
      "others; then those that the daemon's eviction chooses; then those above 50, again the lowest first. So "
      "retaining\n"
      "takes nothing from other tenants, and locks nothing. `kvctl explain` shows what is retained.");
  retain->add_option("--cache", arguments.retain_cache, "of this cache: an id that `kvctl caches` shows")->required();
  auto* retain_tokens = retain->add_option("--tokens", arguments.retain.prompt.tokens,
                                           "a file with the prompt's token ids: a list in JSON, such as [1, 15043, "
                                           "3186]");
  retain
      ->add_option("--keys", arguments.retain.prompt.keys,
                   "keys of blocks, 64 hexadecimal digits each, instead of a prompt")
      ->excludes(retain_tokens);
  retain->add_option("--priority", arguments.retain.priority, "0..100; 50: the daemon's eviction decides")
      ->check(CLI::Range(0, 100))
      ->required();
  retain->add_option("--ttl-s", arguments.retain.ttl_s, "seconds until it is as usual again; 0: no end")
      ->check(CLI::Range(0.0, kTtlSMax))
      ->capture_default_str();
  retain->add_option("--blocks", arguments.retain.blocks, "FIRST..LAST of these, from 0 on (default: all)");
  auto* prefetch = app.add_subcommand("prefetch",
                                      "Bring the blocks of a prompt into memory before a request needs them\n\n"
                                      "  kvctl prefetch --cache 3 --tokens PROMPT.json\n\n"
                                      "From the disk into host memory and, of a cache on a GPU, on to that GPU, as far "
                                      "as there is room. They are then\n"
                                      "the blocks that were used last; `kvctl retain` keeps them longer than others.");
  prefetch->add_option("--cache", arguments.prefetch_cache, "of this cache: an id that `kvctl caches` shows")
      ->required();
  prefetch->add_option("--tokens", arguments.prefetch.tokens, "a file with the prompt's token ids: a list in JSON")
      ->required();
  auto* drain = app.add_subcommand(
      "drain", "Take in no new sequences, forks or hand-offs; those that exist go on and can be claimed");
  drain->add_flag("--off", arguments.drain_off, "serve again");
  auto* undrain = app.add_subcommand("undrain", "Serve again after a drain");
  auto* upgrade = app.add_subcommand(
      "upgrade",
      "Another program goes on in the daemon's process: the version that was installed in its place\n\n"
      "  install kvmanagerd /usr/local/bin/ && kvctl upgrade     with --state-dir: what is published stays in memory\n"
      "  kvctl upgrade --program /opt/kvmanager-0.2/kvmanagerd   another path\n\n"
      "The program is tried first, with the daemon's flags: one that refuses them, or would give up the memory, is "
      "not\n"
      "taken, and the daemon serves on. Then calls under way end, within a second, the listening sockets are handed\n"
      "over, and clients that connect wait until the new version serves. Sequences that are held are lost, as in a\n"
      "restart: engines begin them anew from what is published.");
  upgrade->add_option("--program", arguments.upgrade.program,
                      "of the daemon's user or root, and theirs alone to write (default: the path that the daemon was "
                      "started by)");
  upgrade->add_flag("--cold", arguments.upgrade.cold,
                    "what is in memory alone may be lost: the daemon has no --state-dir, or the program another");
  upgrade->add_option("--wait-s", arguments.upgrade.wait_s, "how long to wait until the new version serves")
      ->check(CLI::Range(1, 3600))
      ->capture_default_str();
  auto* purge =
      app.add_subcommand("purge", "Forget published blocks that no sequence holds; later prompts compute them anew");
  auto* one = purge->add_option("--cache", arguments.purge_cache, "of this cache: an id that `kvctl caches` shows");
  auto* all = purge->add_flag("--all", arguments.purge_all, "of every cache");
  one->excludes(all);
  engine::CalibrateArguments calibrate_arguments;
  auto* calibrate = app.add_subcommand("calibrate", "Train what codecs need of a model: needs no daemon");
  engine::AddCalibrateOptions(*calibrate, calibrate_arguments);
  engine::CaptureArguments capture_arguments;
  auto* capture = app.add_subcommand("capture", "Write what attention sees of a model, Q, K and V: needs no daemon");
  engine::AddCaptureOptions(*capture, capture_arguments);
  engine::TuneArguments tune_arguments;
  auto* tune = app.add_subcommand("tune", "Measure codec policies, and name the best under a loss: needs no daemon");
  engine::AddTuneOptions(*tune, tune_arguments);
  simulator::SimulateArguments simulate_arguments;
  auto* simulate = app.add_subcommand("simulate", "");
  simulator::AddSimulateOptions(*simulate, simulate_arguments);
  recompute::PlanArguments plan_arguments;
  auto* recompute_plan =
      app.add_subcommand("recompute-plan", "How many tokens to recompute while a reload copies the rest");
  recompute::AddPlanOptions(*recompute_plan, plan_arguments);
  recompute_plan->add_option(
      "--cache", arguments.plan_cache,
      "of --connect's daemon, an id that `kvctl caches` shows: what is not given here is as this "
      "cache has it and as the daemon measured it; without this no daemon is asked");
  recompute_plan->add_option("--peer", arguments.plan_peer,
                             "with --cache: the link from this host, by default the only one that pages came from");
  const auto misused = [](const std::string& why) {
    std::cerr << "kvctl: " << why << "\n`kvctl --help` shows every command with an example.\n";
    return kExitUsage;
  };
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    const std::vector<std::string> left = app.remaining();
    if (app.get_subcommands().empty() && !left.empty() && left[0][0] != '-') {
      return misused(absl::StrCat("there is no command ", left[0]));
    }
    return misused(e.what());
  }
  if (calibrate->parsed()) return engine::ExitCode("kvctl calibrate", engine::RunCalibrate(calibrate_arguments));
  if (capture->parsed()) return engine::ExitCode("kvctl capture", engine::RunCapture(capture_arguments));
  if (tune->parsed()) return engine::ExitCode("kvctl tune", engine::RunTune(tune_arguments));
  if (simulate->parsed()) {
    return engine::ExitCode("kvctl simulate", simulator::RunSimulate(simulate_arguments, arguments.json));
  }
  if (recompute_plan->parsed() && arguments.plan_cache.empty()) return ExplainReload(plan_arguments, "", arguments);
  uint32_t cache_id = Client::kAllCaches;
  if (recompute_plan->parsed() && !absl::SimpleAtoi(arguments.plan_cache, &cache_id)) {
    return misused(absl::StrCat("--cache is ", arguments.plan_cache, ", must be an id that `kvctl caches` shows"));
  }
  if (purge->parsed() && !arguments.purge_all) {
    uint64_t id = 0;
    if (one->count() == 0) return misused("purge wants --cache ID (see `kvctl caches`) or --all");
    if (!absl::SimpleAtoi(arguments.purge_cache, &id) || id >= Client::kAllCaches) {
      return misused(absl::StrCat("--cache is ", arguments.purge_cache, ", must be an id that `kvctl caches` shows"));
    }
    cache_id = uint32_t(id);
  }
  if (explain->parsed()) {
    if (arguments.explain.tokens.empty() && arguments.explain.keys.empty()) {
      return misused("explain wants --cache ID (see `kvctl caches`) with --tokens FILE, or --keys");
    }
    uint32_t id = 0;
    if (explain_cache->count() > 0 && (!absl::SimpleAtoi(arguments.explain_cache, &id) || id == 0)) {
      return misused(absl::StrCat("--cache is ", arguments.explain_cache, ", must be an id that `kvctl caches` shows"));
    }
    if (id > 0) arguments.explain.cache = id;
    if (auto keys = ParseKeys(arguments.explain.keys); !keys.ok()) return Fail(Misuse(keys.status()), arguments);
  }
  if (prefetch->parsed()) {
    uint32_t id = 0;
    if (!absl::SimpleAtoi(arguments.prefetch_cache, &id) || id == 0) {
      return misused(
          absl::StrCat("--cache is ", arguments.prefetch_cache, ", must be an id that `kvctl caches` shows"));
    }
    arguments.prefetch.cache = id;
  }
  if (retain->parsed()) {
    const PromptArguments& prompt = arguments.retain.prompt;
    if (prompt.tokens.empty() && prompt.keys.empty()) return misused("retain wants --tokens FILE, or --keys");
    uint32_t id = 0;
    if (!absl::SimpleAtoi(arguments.retain_cache, &id) || id == 0) {
      return misused(absl::StrCat("--cache is ", arguments.retain_cache, ", must be an id that `kvctl caches` shows"));
    }
    arguments.retain.prompt.cache = id;
    if (auto status = CheckRetain(arguments.retain); !status.ok()) return Fail(Misuse(status), arguments);
  }
  if (auto status = CheckConnection(arguments); !status.ok()) return Fail(Misuse(status), arguments);

  std::string token;
  if (!arguments.token_file.empty()) {
    std::ifstream file(arguments.token_file);
    if (!file.is_open()) {
      return Fail(
          FieldError(absl::StatusCode::kNotFound, "--token-file", arguments.token_file, "a file that can be read"),
          arguments);
    }
    token.assign(std::istreambuf_iterator<char>(file), {});
    token = std::string(absl::StripAsciiWhitespace(token));
  }
  constexpr int64_t kConnectMs = 500;  // a person waits: a daemon that runs accepts at once, though it may answer late
  const Client::Options options{.name = "kvctl",
                                .deadline_ms = arguments.deadline_ms,
                                .connect_ms = std::min(kConnectMs, arguments.deadline_ms),
                                .hello_ms = arguments.deadline_ms,
                                .admin_address = arguments.admin,
                                .token = token,
                                .tls_ca = arguments.tls_ca,
                                .tls_cert = arguments.tls_cert,
                                .tls_key = arguments.tls_key,
                                .tls_name = arguments.tls_name};
  auto client = Client::Connect(Where(arguments), options);
  if (!client.ok()) return Fail(client.status(), arguments);
  arguments.reached = true;
  if (recompute_plan->parsed()) {
    const auto measured = FillFromDaemon(**client, cache_id, arguments.plan_peer, &plan_arguments);
    if (!measured.ok()) return Fail(measured.status(), arguments);
    return ExplainReload(plan_arguments, *measured, arguments);
  }
  if (status->parsed()) return Show((*client)->Status(), arguments, FormatStatus);
  if (top->parsed()) {
    const absl::Status ended = RunTop(**client, top_arguments, arguments.connect, arguments.json);
    return ended.ok() ? kExitOk : Fail(ended, arguments);
  }
  if (caches->parsed()) return Show((*client)->Caches(), arguments, FormatCaches);
  if (sequences->parsed()) return Show((*client)->Sequences(), arguments, FormatSequences);
  if (peers->parsed()) return Show((*client)->Peers(arguments.peers), arguments, FormatPeers);
  if (limits->parsed()) return Show((*client)->Limits(), arguments, FormatLimits);
  if (explain->parsed()) return Show(Explain(**client, arguments.explain), arguments, FormatExplained);
  if (prefetch->parsed()) {
    const bool shows = isatty(STDERR_FILENO) == 1;
    const auto prefetched = Prefetch(**client, arguments.prefetch, [shows](size_t done, size_t of) {
      if (shows) std::cerr << "\rprefetching: " << done << " of " << of << " blocks" << std::flush;
    });
    if (shows) std::cerr << "\r\033[K";
    return Show(prefetched, arguments, FormatPrefetched);
  }
  if (retain->parsed()) return Show(Retain(**client, arguments.retain), arguments, FormatRetained);
  if (upgrade->parsed()) {
    return Show(Upgrade(*std::move(client), Where(arguments), options, arguments.upgrade), arguments, FormatUpgraded);
  }
  if (drain->parsed()) return Drain(**client, arguments, !arguments.drain_off);
  if (undrain->parsed()) return Drain(**client, arguments, false);
  return Purge(**client, arguments, cache_id);
}

}  // namespace
}  // namespace kvmanager::client::cli

int main(int argc, char** argv) {
  // Only what computes executes the program anew, for OpenBLAS' sake.
  if (std::any_of(argv + 1, argv + argc,
                  [](absl::string_view word) { return word == "calibrate" || word == "tune"; })) {
    kvmanager::engine::ChooseBlasCore(argv);
  }
  return kvmanager::client::cli::Main(argc, argv);
}
