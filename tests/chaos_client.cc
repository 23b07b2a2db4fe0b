// A client under tools/chaos: works at one daemon, hands sequences to another through a proxy, and checks every byte
// that it reads against what it wrote.
//
//   chaos_client HERE THERE PEER SEED
//
// HERE, THERE: addresses of the two daemons; PEER: where the second receives hand-offs. Commands come on standard
// input, a line each, and are answered on standard output:
//
//   go      works until the next line; "going"
//   rest    gives back all that it holds; "rested {...}", counts since the last
//   purge   purges both daemons; "purged {...}", what they hold
//
// What must never be is a line of its own, at once, as this process may be killed: "WRONG ..." (bytes), "LATE ..." (a
// call that ended behind its deadline), "UNEXPECTED ..." (an error that no fault explains). It ends with its input.
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "tests/known_rows.h"
#include "tests/working_client.h"

namespace kvmanager::testing {
namespace {

using client::Client;

constexpr int64_t kDeadlineMs = 3000;

/// Milliseconds that this process has run: time under SIGSTOP is no time that a call took.
class AwakeClock {
 public:
  AwakeClock() : thread_([this] { Tick(); }) { thread_.detach(); }
  int64_t ms() const { return awake_us_ / 1000; }

 private:
  void Tick() {
    auto last = std::chrono::steady_clock::now();
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const auto now = std::chrono::steady_clock::now();
      const int64_t us = std::chrono::duration_cast<std::chrono::microseconds>(now - last).count();
      awake_us_ += us < 400000 ? us : 5000;  // longer: it was stopped
      last = now;
    }
  }
  std::atomic<int64_t> awake_us_{0};
  std::thread thread_;
};

WorkingClientOptions OptionsOf(const std::string& here, const std::string& there, const std::string& peer,
                               uint64_t seed, const AwakeClock& clock) {
  WorkingClientOptions options;
  const Client::Options client{.name = "chaos", .deadline_ms = kDeadlineMs, .connect_ms = 300};
  options.here = {here, client, ""};
  options.there = {{there, client, peer}};
  for (const char* const codec : {"raw", "hack"}) {
    client::CacheOptions cache = SmallCache(codec, 1);
    cache.tenant = "chaos";
    const bool raw = options.caches.empty();
    options.caches.push_back({cache, raw ? KnownRows::Form::kWritten : KnownRows::Form::kDecoded, raw});
  }
  options.seed = seed;
  options.works = {Work::kCreate, Work::kCreate, Work::kCreate, Work::kAppend,  Work::kAppend,
                   Work::kRead,   Work::kFork,   Work::kCrop,   Work::kHandOff, Work::kHandOffAsGrows,
                   Work::kArena,  Work::kAttend, Work::kCancel};
  options.now_ms = [&clock] { return clock.ms(); };
  options.shout = [](const char* what, const std::string& text) {
    std::printf("%s %s\n", what, text.c_str());
    std::fflush(stdout);
  };
  return options;
}

void Rest(WorkingClient& worker) {
  worker.Rest();
  const WorkCounts counts = worker.TakeCounts();
  std::printf(
      "rested {\"calls\": %llu, \"checked_bytes\": %llu, \"hits\": %llu, \"handed_off\": %llu, \"refused\": %llu, "
      "\"unavailable\": %llu, \"late\": %llu, \"wrong\": %llu, \"unexpected\": %llu}\n",
      (unsigned long long)counts.calls, (unsigned long long)counts.checked_bytes, (unsigned long long)counts.hits,
      (unsigned long long)counts.handed_off, (unsigned long long)counts.refused, (unsigned long long)counts.unavailable,
      (unsigned long long)counts.late, (unsigned long long)counts.wrong, (unsigned long long)counts.unexpected);
}

void Purge(const std::string& here, const std::string& there) {
  std::string text;
  for (const std::string& address : {here, there}) {
    uint64_t leases = UINT64_MAX, used = UINT64_MAX, waiting = UINT64_MAX;
    auto client = Client::Connect(address, {.name = "chaos-purge", .deadline_ms = kDeadlineMs});
    if (client.ok() && (*client)->Purge(Client::kAllCaches).ok()) {
      if (const auto status = (*client)->Status(); status.ok()) {
        leases = status->leases;
        waiting = status->waiting_hand_offs;
        used = 0;
        for (const auto& pool : status->pools) used += pool.used_bytes;
      }
    }
    absl::StrAppend(&text, text.empty() ? "" : ", ", "{\"leases\": ", leases, ", \"used_bytes\": ", used,
                    ", \"waiting_hand_offs\": ", waiting, "}");
  }
  std::printf("purged [%s]\n", text.c_str());
}

int Run(const std::string& here, const std::string& there, const std::string& peer, uint64_t seed) {
  auto& clock = *new AwakeClock;  // its thread ends with the process
  KnownRows known("hack");
  WorkingClient worker(known, OptionsOf(here, there, peer, seed, clock));
  bool going = false;
  std::string lines;
  for (;;) {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (poll(&input, 1, going ? 0 : -1) > 0) {
      char bytes[256];
      const ssize_t n = read(STDIN_FILENO, bytes, sizeof bytes);
      if (n <= 0) return 0;
      lines.append(bytes, static_cast<size_t>(n));
      for (size_t end; (end = lines.find('\n')) != std::string::npos; lines.erase(0, end + 1)) {
        const std::string line = lines.substr(0, end);
        going = line == "go";
        if (going) std::printf("going\n");
        if (line == "rest") Rest(worker);
        if (line == "purge") Purge(here, there);
        std::fflush(stdout);
      }
    }
    if (going) worker.Turn();
  }
}

}  // namespace
}  // namespace kvmanager::testing

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: chaos_client HERE THERE PEER SEED\n");
    return 2;
  }
  return kvmanager::testing::Run(argv[1], argv[2], argv[3], std::stoull(argv[4]));
}
