// A load that moves everything there is to see of a daemon: tenants, codecs, prefix hits, forks, hand-offs to a peer
// and back, blocks that are kept longer, calls that are refused. For tests of dashboards; serves nobody.
//
//   daemon_load unix:PATH --peer unix:PATH --peer-address HOST:PORT     until its standard input ends
//
// Each of twelve caches is asked for a prompt three times, then for the next one; there are 40. With --returns N every
// second prompt is the new one of N prompts before, for ever, so that a disk is written and read all the time: a prompt
// takes 3.3 MiB, so 13 of them do not fit a pool of 32 MiB.
#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
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

constexpr int kPromptTokens = 512, kBlocks = 8;  // of 64 tokens
constexpr int kRoundsOfPrompt = 36, kPrompts = 40;
constexpr int64_t kRetainedMs = 5000;
constexpr int kPauseMs = 20;  // between rounds: machines that run tests are small

// From 1 on. returns: 0, or odd.
uint64_t PromptOf(int round, int returns) {
  const int nth = round / kRoundsOfPrompt;
  if (returns == 0) return static_cast<uint64_t>(1 + nth % kPrompts);
  return static_cast<uint64_t>(1 + (nth % 2 == 1 && nth >= returns ? nth - returns : nth));
}

bool InputEnded() {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  if (poll(&input, 1, kPauseMs) == 0) return false;
  char byte;
  return read(STDIN_FILENO, &byte, 1) <= 0;
}

// One prompt of a tenant: shares what an earlier one published, computes the rest, is forked, cropped, handed over.
absl::Status Round(Client& client, Client& peer, const std::string& peer_address, const CacheOptions& options,
                   uint64_t seed, int round, std::vector<CreatedSequence>* held) {
  const Source source{seed, Kind::kNormal, options};
  KV_ASSIGN_OR_RETURN(auto cache, client.OpenCache(options));
  const std::vector<BlockName> names = Names(*cache, source, kBlocks);
  KV_ASSIGN_OR_RETURN(CreatedSequence made, cache->CreateSequence(names));
  const int found = made.match.hit_blocks * 64;
  if (found < kPromptTokens) {
    KV_RETURN_IF_ERROR(Feed(*cache, made.sequence->id(), source, found, kPromptTokens - found, 64).status());
    KV_RETURN_IF_ERROR(made.sequence->Publish(names).status());
  }
  if (round % 4 == 2) {
    KV_RETURN_IF_ERROR(cache->Retain(names, {.priority = 80, .ttl_ms = kRetainedMs}).status());
  }
  KV_RETURN_IF_ERROR(Feed(*cache, made.sequence->id(), source, kPromptTokens, 16, 1).status());
  KV_ASSIGN_OR_RETURN(auto fork, made.sequence->Fork());
  KV_RETURN_IF_ERROR(fork->Crop(kPromptTokens + 8));
  if (fork->Crop(kPromptTokens + 1000).ok()) return absl::InternalError("a crop beyond the end was accepted");
  if (!peer_address.empty() && round % 4 == 0) {
    KV_ASSIGN_OR_RETURN(const auto sent, made.sequence->HandOff(peer_address, ""));
    KV_ASSIGN_OR_RETURN(auto there, peer.OpenCache(options));
    KV_ASSIGN_OR_RETURN(auto claimed, there->Claim(sent.ticket));
    KV_RETURN_IF_ERROR(Feed(*there, claimed.sequence->id(), source, kPromptTokens + 16, 4, 1).status());
    KV_ASSIGN_OR_RETURN(const auto back, claimed.sequence->HandOff(client.peer_address(), ""));
    KV_RETURN_IF_ERROR(cache->Claim(back.ticket).status());  // and dropped
  }
  held->push_back(std::move(made));
  if (held->size() > 6) held->erase(held->begin());
  return absl::OkStatus();
}

absl::Status Run(const std::string& address, const std::string& peer, const std::string& peer_address, int returns) {
  KV_ASSIGN_OR_RETURN(auto client, Client::Connect(address, {.name = "load"}));
  KV_ASSIGN_OR_RETURN(auto there, Client::Connect(peer.empty() ? address : peer, {.name = "load"}));
  std::vector<CreatedSequence> held;
  const char* const codecs[] = {"hack:k_bits=3,v_bits=2", "raw", "hack:k_bits=4,v_bits=3"};
  for (int round = 0; !InputEnded(); ++round) {
    CacheOptions options = SmallCache(codecs[round % 3], 1);
    options.tenant = std::string("tenant-") + char('a' + round % 4);
    const absl::Status done = Round(*client, *there, peer_address, options, PromptOf(round, returns), round, &held);
    if (absl::IsResourceExhausted(done)) {
      held.clear();  // a full pool is something to see, too
    } else if (!done.ok()) {
      return done;
    }
    if (round == kRoundsOfPrompt) {
      std::puts("loaded");  // every path was walked by every tenant
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) {
  std::string address, peer, peer_address;
  int returns = 0;
  CLI::App app{"Loads a daemon until standard input ends"};
  app.add_option("address", address, "unix:PATH or tcp:HOST:PORT")->required();
  app.add_option("--peer", peer, "a second daemon");
  app.add_option("--peer-address", peer_address, "where that one receives hand-offs");
  app.add_option("--returns", returns, "every second prompt is the new one of so many before; an odd number");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = kvmanager::testing::Run(address, peer, peer_address, returns);
  if (!status.ok()) std::fprintf(stderr, "daemon_load: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
