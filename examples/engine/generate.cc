// generate: continues a text. Prefill and decode here, or prefill here and hand off, or claim a hand-off and decode
// here.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "examples/engine/blas_core.h"
#include "examples/engine/codec_files.h"
#include "examples/engine/generation.h"
#include "examples/engine/kv_engine.h"
#include "examples/engine/program.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kTokensMax = 1 << 20;
constexpr int64_t kDeadlineMs = 120000;
constexpr client::HandOffOptions kHandOff = {.will_append = true};  // the blob holds the next token

struct Flags {
  std::string connect, model, prompt_file, codec = "raw", hand_off, ticket_file, claim_ticket_file, json;
  uint64_t prompt_bytes = UINT64_MAX;
  int tokens = 200, lag_pages = 2, chunk = 512;
  int64_t busy_poll_us = 0;
  SamplingState sampling;
  bool quiet = false, stream = false, activations = false;
};

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

/// One run of the program: a connection, an engine, a runner, and what is reported in the end.
class Program {
 public:
  explicit Program(Flags flags) : flags_(std::move(flags)) {}

  absl::Status Run() {
    KV_RETURN_IF_ERROR(Check());
    KV_ASSIGN_OR_RETURN(model_, Model::Load(flags_.model));
    if (model_->config().vocab_size < 256)
      return InvalidField("vocab_size", model_->config().vocab_size, "at least 256 (a token is a byte)");
    client::Client::Options client_options;
    client_options.name = "generate";
    client_options.deadline_ms = kDeadlineMs;
    client_options.busy_poll_us = flags_.busy_poll_us;
    KV_ASSIGN_OR_RETURN(client_, client::Client::Connect(flags_.connect, client_options));
    KV_ASSIGN_OR_RETURN(const CodecFiles files, ResolveCodecFiles(flags_.codec, /*own_daemon=*/false));
    KvEngineOptions engine_options;
    engine_options.codec = files.codec;
    engine_options.calibration_digest = files.calibration_digest;
    engine_options.lag_pages = flags_.lag_pages;
    engine_options.activations = flags_.activations;
    engine_options.rows_max = flags_.claim_ticket_file.empty() ? flags_.chunk : 1;
    KV_ASSIGN_OR_RETURN(engine_, KvEngine::Open(client_.get(), *model_, engine_options));
    runner_ = std::make_unique<Runner>(model_.get(), engine_.get(), flags_.claim_ticket_file.empty() ? CoreCount() : 1);
    report_["codec"] = engine_->cache().description().options.codec;
    KV_RETURN_IF_ERROR(flags_.claim_ticket_file.empty() ? FromPrompt() : FromTicket());

    const KvCounts& counts = engine_->counts();
    report_["computed_tokens"] = counts.computed;
    report_["prompt_computed_tokens"] = counts.prompt_computed;
    report_["hit_tokens"] = counts.hit;
    report_["encoded_pairs"] = counts.encoded_pairs;
    report_["raw_pairs"] = counts.raw_pairs;
    Say(absl::StrCat("prompt tokens whose K and V were computed here: ", counts.prompt_computed));
    if (flags_.json.empty()) return absl::OkStatus();
    return WriteFile(flags_.json, report_.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  }

 private:
  absl::Status Check() const {
    if (flags_.tokens < 0 || flags_.tokens > kTokensMax)
      return InvalidField("--tokens", flags_.tokens, absl::StrCat("0..", kTokensMax));
    if (flags_.chunk < 1) return InvalidField("--chunk", flags_.chunk, "at least 1");
    if (!(flags_.sampling.temperature >= 0 && flags_.sampling.temperature <= SamplingState::kTemperatureMax)) {
      return InvalidField("--temperature", flags_.sampling.temperature,
                          absl::StrCat("0..", SamplingState::kTemperatureMax));
    }
    if (flags_.claim_ticket_file.empty() == flags_.prompt_file.empty()) {
      return absl::InvalidArgumentError("give either --prompt-file or --claim-ticket-file");
    }
    if (flags_.hand_off.empty() != flags_.ticket_file.empty())
      return absl::InvalidArgumentError("--hand-off and --ticket-file go together");
    if (flags_.stream && flags_.hand_off.empty()) return absl::InvalidArgumentError("--stream goes with --hand-off");
    if (!flags_.hand_off.empty() && !flags_.claim_ticket_file.empty()) {
      return absl::InvalidArgumentError("--hand-off goes with --prompt-file");
    }
    return absl::OkStatus();
  }

  void Say(const std::string& line) const {
    if (!flags_.quiet) std::fprintf(stderr, "%s\n", line.c_str());
  }

  absl::Status FromPrompt() {
    KV_ASSIGN_OR_RETURN(const std::string prompt, ReadFile(flags_.prompt_file, flags_.prompt_bytes));
    if (prompt.empty()) return InvalidField("prompt bytes", 0, "at least 1");
    for (unsigned char byte : prompt) tokens_.push_back(byte);
    prompt_tokens_ = tokens_.size();
    engine_->set_prompt_tokens(prompt_tokens_);

    const auto begun = std::chrono::steady_clock::now();
    KV_ASSIGN_OR_RETURN(client::CreatedSequence created, engine_->CreateSequence(tokens_, tokens_.size()));
    sequence_ = std::move(created.sequence);
    if (flags_.stream) KV_RETURN_IF_ERROR(BeginHandOff());
    std::vector<float> logits;
    {
      Progress progress("prefill, tokens", flags_.quiet);
      KV_RETURN_IF_ERROR(Prefill(
          *runner_, sequence_->id(), tokens_, engine_->counts().hit, flags_.chunk,
          [&](uint64_t done) { progress.Update(int64_t(done), int64_t(prompt_tokens_)); }, &logits));
    }
    KV_RETURN_IF_ERROR(engine_->Publish(*sequence_, tokens_).status());
    report_["prompt_tokens"] = prompt_tokens_;
    report_["prefill_seconds"] = Seconds(begun);
    const uint32_t first = Sample(logits, &flags_.sampling);
    Say(absl::StrCat("prefill: ", prompt_tokens_, " tokens, ", engine_->counts().hit, " of them found in the cache, ",
                     Seconds(begun), " s"));
    if (!flags_.hand_off.empty()) return HandOff(first);
    KV_RETURN_IF_ERROR(DecodeHere(first));
    if (flags_.tokens > 0) tokens_.pop_back();  // the last token's K and V were not computed
    return engine_->Publish(*sequence_, tokens_).status();
  }

  // The other host may claim it from now on.
  absl::Status BeginHandOff() {
    KV_ASSIGN_OR_RETURN(hand_off_, sequence_->BeginHandOff(flags_.hand_off, prompt_tokens_, kHandOff));
    return WriteTicket(hand_off_->ticket());
  }

  absl::Status WriteTicket(const std::string& ticket) {
    return WriteFile(flags_.ticket_file, absl::BytesToHexString(ticket) + "\n");
  }

  absl::Status HandOff(uint32_t first) {
    const std::string blob = EncodeBlob({prompt_tokens_, first, flags_.sampling});
    const auto begun = std::chrono::steady_clock::now();
    KV_ASSIGN_OR_RETURN(const client::HandOffOutcome done, hand_off_ != nullptr
                                                               ? hand_off_->Finish(blob)
                                                               : sequence_->HandOff(flags_.hand_off, blob, kHandOff));
    if (hand_off_ == nullptr) KV_RETURN_IF_ERROR(WriteTicket(done.ticket));
    report_["exposed_seconds"] = Seconds(begun);
    report_["transferred_bytes"] = done.bytes_sent;
    report_["transferred_seconds"] = done.seconds;
    report_["pages_sent"] = done.pages_sent;
    report_["pages_skipped"] = done.pages_skipped;
    report_["begun_unix_ns"] = done.begun_unix_ns;
    for (size_t layer = 0; layer < done.layers.size(); ++layer) {
      const client::LayerTimes& times = done.layers[layer];
      const LayerSteps& steps = engine_->layer_steps()[layer];
      report_["layers"].push_back({{"prefill_begun_unix_ns", steps.first_begun_ns},
                                   {"prefill_ended_unix_ns", steps.last_ended_ns},
                                   {"ready_first", times.ready_first},
                                   {"ready_last", times.ready_last},
                                   {"sent_first", times.sent_first},
                                   {"arrived_last", times.arrived_last}});
    }
    report_["peer"] = done.peer;
    Say(absl::StrCat("hand-off to ", done.peer, ": ", done.pages_sent, " pages, ", done.bytes_sent, " bytes in ",
                     done.seconds, " s"));
    return absl::OkStatus();
  }

  absl::Status FromTicket() {
    KV_ASSIGN_OR_RETURN(const std::string file, ReadFile(flags_.claim_ticket_file, /*bytes_max=*/4096));
    const absl::string_view hex = absl::StripAsciiWhitespace(file);
    if (hex.empty() || hex.size() % 2 != 0 ||
        hex.find_first_not_of("0123456789abcdefABCDEF") != absl::string_view::npos) {
      return InvalidField("ticket file", flags_.claim_ticket_file, "one line of hexadecimal digits");
    }
    KV_ASSIGN_OR_RETURN(client::ClaimedSequence claimed, engine_->cache().Claim(absl::HexStringToBytes(hex)));
    sequence_ = std::move(claimed.sequence);
    KV_ASSIGN_OR_RETURN(const HandOffBlob blob, DecodeBlob(claimed.blob, model_->config().vocab_size));
    if (blob.prompt_tokens != claimed.tokens)
      return InvalidField("hand-off blob: prompt_tokens", blob.prompt_tokens, absl::StrCat(claimed.tokens));
    prompt_tokens_ = blob.prompt_tokens;
    flags_.sampling = blob.sampling;
    engine_->set_prompt_tokens(prompt_tokens_);
    report_["prompt_tokens"] = prompt_tokens_;
    KV_RETURN_IF_ERROR(DecodeHere(blob.first_token));
    for (const LayerSteps& steps : engine_->layer_steps()) {
      report_["layers"].push_back(
          {{"read_begun_unix_ns", steps.first_begun_ns}, {"read_ended_unix_ns", steps.first_ended_ns}});
    }
    return absl::OkStatus();
  }

  absl::Status DecodeHere(uint32_t first) {
    std::vector<uint32_t> generated;
    std::string text;
    const auto begun = std::chrono::steady_clock::now();
    KV_RETURN_IF_ERROR(Decode(
        *runner_, sequence_->id(), prompt_tokens_, first, flags_.tokens, &flags_.sampling,
        [&](uint32_t token) {
          const char byte = token < 256 ? char(token) : '?';
          text.push_back(byte);
          if (flags_.quiet) return;
          std::fputc(byte, stdout);
          std::fflush(stdout);
        },
        &generated));
    const double seconds = Seconds(begun);
    if (!flags_.quiet) std::fputc('\n', stdout);
    const int steps = std::max(flags_.tokens - 1, 0);
    report_["generated_tokens"] = generated.size();
    report_["decode_seconds"] = seconds;
    report_["tokens_per_second"] = seconds > 0 ? steps / seconds : 0;
    report_["text"] = text;
    Say(absl::StrCat("decode: ", steps, " steps in ", seconds, " s, ", seconds > 0 ? steps / seconds : 0, " tokens/s"));
    tokens_.insert(tokens_.end(), generated.begin(), generated.end());
    return absl::OkStatus();
  }

  Flags flags_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<KvEngine> engine_;
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::HandOff> hand_off_;  // under way while the prompt is prefilled
  std::vector<uint32_t> tokens_;               // of the whole context, where it is known
  uint64_t prompt_tokens_ = 0;
  Json report_;
};

}  // namespace
}  // namespace kvmanager::engine

int main(int argc, char** argv) {
  using namespace kvmanager::engine;
  ChooseBlasCore(argv);
  Flags flags;
  CLI::App app(
      "Continues a text with a model whose keys and values live in kvmanagerd.\n"
      "With --hand-off, only prefills and hands the sequence to another daemon; with --claim-ticket-file, goes on from "
      "such a hand-off.");
  app.add_option("--connect", flags.connect, "the daemon: unix:PATH or tcp:HOST:PORT")->required();
  app.add_option("--model", flags.model, "directory of config.json and *.safetensors")->required();
  app.add_option("--prompt-file", flags.prompt_file, "text to continue, a token per byte");
  app.add_option("--prompt-bytes", flags.prompt_bytes, "only its first bytes");
  app.add_option("--tokens", flags.tokens, "tokens to generate")->capture_default_str();
  app.add_option("--codec", flags.codec,
                 "NAME[:key=value,...], calibration=FILE naming an artifact that the daemon has too, a policy: "
                 "SPEC;FIRST..LAST=SPEC;sinks=N, or a ladder: ladder=SPEC>SPEC")
      ->capture_default_str();
  app.add_option("--lag", flags.lag_pages, "newest full pages that a query reads raw, beside its own")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--chunk", flags.chunk, "tokens of a prefill step")->capture_default_str();
  app.add_option("--temperature", flags.sampling.temperature, "of sampling; 0: the most likely token")
      ->capture_default_str();
  app.add_option("--seed", flags.sampling.random_state, "of sampling")->capture_default_str();
  app.add_option("--hand-off", flags.hand_off,
                 "HOST:PORT of another daemon's --peer-listen, or several with commas between: the one that would have "
                 "it first gets it");
  app.add_flag("--stream", flags.stream, "with --hand-off: send pages during prefill, and write the ticket before it");
  app.add_flag(
      "--activations", flags.activations,
      "give the daemon activations and projections, so that a receiver of a hand-off may recompute K and V: on "
      "both sides, or on none");
  app.add_option("--ticket-file", flags.ticket_file, "where to write the hand-off's ticket");
  app.add_option("--claim-ticket-file", flags.claim_ticket_file,
                 "the ticket of a hand-off to --connect's daemon, to go on from");
  app.add_option("--busy-poll-us", flags.busy_poll_us, "spin so long for an answer before blocking")
      ->capture_default_str();
  app.add_option("--json", flags.json, "file for the result");
  app.add_flag("--quiet", flags.quiet, "print nothing but errors");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageExitCode;
  }
  return ExitCode("generate", Program(flags).Run());
}
