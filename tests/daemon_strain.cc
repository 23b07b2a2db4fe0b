// Causes what the alerts of monitoring/prometheus on codecs, attention and prefix hits are for, again and again. For
// their test; serves nobody.
//
//   daemon_strain unix:PATH     until its standard input ends
//
// The daemon should have one worker, a host pool of 96 MiB, and compare every encoded page (--quality-sample 1).
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "kvmanager/base/status.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::StepEntry;
using client::TensorView;
using std::chrono::steady_clock;

constexpr int kPauseMs = 50, kTokens = 512, kBlocks = 8;
constexpr int kContextTokensMax = 32768, kContextTokensStep = 2048, kQueryTokens = 1024;
constexpr auto kSlow = std::chrono::milliseconds(250);  // the alert's is 100 ms
constexpr auto kPhase = std::chrono::seconds(20);       // of hits, and of misses behind them

bool InputEnded() {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  if (poll(&input, 1, kPauseMs) == 0) return false;
  char byte;
  return read(STDIN_FILENO, &byte, 1) <= 0;
}

// Pages of one bit that are read encoded by the queries of the step that fills them: those wait for the encoder, and
// what they get errs.
absl::Status ReadAtOnce(client::Cache& cache, const CacheOptions& options) {
  KV_ASSIGN_OR_RETURN(CreatedSequence noise, cache.CreateSequence());
  return Feed(cache, noise.sequence->id(), {1, Kind::kNormal, options}, 0, kTokens, kTokens).status();
}

// Pages between the largest and the least of fp16, a step of one bit too far for a codec to note: they are declined.
absl::Status AppendHuge(client::Cache& cache, const CacheOptions& options) {
  KV_ASSIGN_OR_RETURN(CreatedSequence huge, cache.CreateSequence());
  const size_t token = size_t(options.kv_heads) * options.head_dim;
  std::vector<uint16_t> rows(kTokens * token);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = (i / token + i) % 2 ? 0x7bff : 0xfbff;  // +-65504, over both axes
  const TensorView view{rows.data(), rows.size() * sizeof(rows[0])};
  const StepEntry entry{huge.sequence->id(), 0, kTokens};
  for (int layer = 0; layer < options.layers; ++layer) {
    KV_RETURN_IF_ERROR(cache.Step({.layer = layer, .entries = {&entry, 1}, .k = view, .v = view}).status());
  }
  return Ask(cache, huge.sequence->id(), {2, Kind::kNormal, options}, kTokens - 1).status();  // waits for the encoder
}

// A context that grows until a call over it is slow on this machine, and such calls from then on.
class LongContext {
 public:
  static absl::StatusOr<LongContext> Begin(Client& client) {
    LongContext made;
    const CacheOptions options = SmallCache("raw");
    made.source_ = {3, Kind::kNormal, options};
    KV_ASSIGN_OR_RETURN(made.cache_, client.OpenCache(options));
    KV_ASSIGN_OR_RETURN(made.created_, made.cache_->CreateSequence());
    return made;
  }

  absl::Status Ask() {
    const uint64_t id = created_.sequence->id();
    if (!slow_ && tokens_ < kContextTokensMax) {
      KV_RETURN_IF_ERROR(Load(*cache_, id, source_, tokens_, kContextTokensStep, kContextTokensStep));
      tokens_ += kContextTokensStep;
    }
    const auto began = steady_clock::now();
    KV_RETURN_IF_ERROR(testing::Ask(*cache_, id, source_, tokens_ - kQueryTokens, kQueryTokens).status());
    slow_ = slow_ || steady_clock::now() - began >= source_.shape.layers * kSlow;
    return absl::OkStatus();
  }

 private:
  Source source_;
  std::unique_ptr<client::Cache> cache_;
  CreatedSequence created_;
  int tokens_ = 0;
  bool slow_ = false;
};

absl::Status Run(const std::string& address) {
  KV_ASSIGN_OR_RETURN(auto client, Client::Connect(address, {.name = "strain"}));
  const CacheOptions options = SmallCache("hack:k_bits=1,v_bits=1", /*lag_pages=*/0);
  KV_ASSIGN_OR_RETURN(auto cache, client->OpenCache(options));
  KV_ASSIGN_OR_RETURN(LongContext context, LongContext::Begin(*client));

  const Source shared{4, Kind::kNormal, options};
  const std::vector<BlockName> known = Names(*cache, shared, kBlocks);
  const std::vector<BlockName> unknown = Names(*cache, {5, Kind::kNormal, options}, kBlocks);
  KV_ASSIGN_OR_RETURN(CreatedSequence first, cache->CreateSequence());
  KV_RETURN_IF_ERROR(Load(*cache, first.sequence->id(), shared, 0, kTokens, kTokens));
  KV_RETURN_IF_ERROR(first.sequence->Publish(known).status());

  const auto began = steady_clock::now();
  while (!InputEnded()) {
    KV_RETURN_IF_ERROR(ReadAtOnce(*cache, options));
    KV_RETURN_IF_ERROR(AppendHuge(*cache, options));
    KV_RETURN_IF_ERROR(context.Ask());
    const bool hits = (steady_clock::now() - began) / kPhase % 2 == 0;
    KV_RETURN_IF_ERROR(cache->CreateSequence(hits ? known : unknown).status());
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) {
  std::string address;
  CLI::App app{"Strains a daemon's codecs and workers until standard input ends"};
  app.add_option("address", address, "unix:PATH")->required();
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = kvmanager::testing::Run(address);
  if (!status.ok()) std::fprintf(stderr, "daemon_strain: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
