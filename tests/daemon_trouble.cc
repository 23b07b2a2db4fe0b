// Causes what the alerts of monitoring/prometheus are for, again and again. For their test; serves nobody.
//
//   daemon_trouble unix:PATH --peer HOST:PORT --draining HOST:PORT     until its standard input ends
//
// The daemon and its peer must not copy from memory to memory, so that a bit can be changed on the way; the peer's
// hand-off lease should be short.
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "kvmanager/base/status.h"
#include "tests/harness.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

constexpr int kPauseMs = 100, kTokens = 512, kBlocks = 8;
constexpr uint64_t kFlipAfterBytes = 100 << 10;  // behind what the daemons say to one another first: inside a page

bool InputEnded() {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  if (poll(&input, 1, kPauseMs) == 0) return false;
  char byte;
  return read(STDIN_FILENO, &byte, 1) <= 0;
}

absl::Status MustFail(const absl::Status& status, absl::StatusCode code) {
  if (status.code() == code) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("expected ", absl::StatusCodeToString(code), ", got ", status.ToString()));
}

// Appends to sequences that stay held until nothing more fits.
absl::Status FillPool(client::Cache& cache, const Source& source, std::vector<CreatedSequence>* held) {
  for (;;) {
    KV_ASSIGN_OR_RETURN(CreatedSequence made, cache.CreateSequence());
    held->push_back(std::move(made));
    const absl::Status loaded = Load(cache, held->back().sequence->id(), source, 0, kTokens, kTokens);
    if (!loaded.ok()) return MustFail(loaded, absl::StatusCode::kResourceExhausted);
  }
}

absl::Status Run(const std::string& address, const std::string& peer, const std::string& draining) {
  KV_ASSIGN_OR_RETURN(auto client, Client::Connect(address, {.name = "trouble"}));
  Proxy proxy(peer);
  const CacheOptions options = SmallCache("raw", 1);
  const Source source{7, Kind::kNormal, options};
  KV_ASSIGN_OR_RETURN(auto cache, client->OpenCache(options));
  KV_ASSIGN_OR_RETURN(CreatedSequence made, cache->CreateSequence());
  KV_RETURN_IF_ERROR(Load(*cache, made.sequence->id(), source, 0, kTokens, kTokens));
  std::vector<BlockName> names = Names(*cache, source, kBlocks);
  KV_RETURN_IF_ERROR(made.sequence->Publish(names).status());
  for (BlockName& name : names) name.tokens.bytes[0] ^= 1;  // other tokens under the same keys

  // What no receiver has yet, so that it travels each time.
  KV_ASSIGN_OR_RETURN(CreatedSequence fresh, cache->CreateSequence());
  KV_RETURN_IF_ERROR(Load(*cache, fresh.sequence->id(), source, 0, kTokens, kTokens));

  std::vector<CreatedSequence> held;
  while (!InputEnded()) {
    KV_ASSIGN_OR_RETURN(CreatedSequence lied, cache->CreateSequence(names));
    if (lied.match.hit_blocks != 0) return absl::InternalError("blocks of other tokens were found");
    (void)made.sequence->HandOff("127.0.0.1:1", "");                    // nobody is there
    if (!draining.empty()) (void)made.sequence->HandOff(draining, "");  // refused
    proxy.Spoil(Proxy::Fault::kFlip, kFlipAfterBytes);
    (void)fresh.sequence->HandOff(proxy.address(), "");  // arrives, and is not claimed
    const int stranger = ConnectSocket(address);
    if (stranger >= 0) {
      WriteAll(stranger, std::string(64, '\xff'));
      (void)ClosedByPeer(stranger);
      close(stranger);
    }
    KV_RETURN_IF_ERROR(FillPool(*cache, source, &held));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) {
  std::string address, peer, draining;
  CLI::App app{"Troubles a daemon until standard input ends"};
  app.add_option("address", address, "unix:PATH")->required();
  app.add_option("--peer", peer, "where a second daemon receives hand-offs")->required();
  app.add_option("--draining", draining, "where one that drains would");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = kvmanager::testing::Run(address, peer, draining);
  if (!status.ok()) std::fprintf(stderr, "daemon_trouble: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
