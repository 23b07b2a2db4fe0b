// Microseconds of a round trip: a bare socket (the floor), an empty call, and one append-and-attend step (one sequence,
// 8 query and 2 KV heads, head_dim 128, one layer, 64 tokens of context, inline); first both ends blocking, then both
// polling.
//
//   rpc_bench --daemon bazel-bin/kvmanager/daemon/kvmanagerd [--json]
//   rpc_bench --connect unix:/run/kvmanager/kvmanager.sock    # that daemon's own way of waiting; blocking here
//
// The context is held at 64 tokens by a crop after each step, outside the timed region.
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/bench_daemon.h"
#include "client/client.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client {
namespace {

constexpr int kKvHeads = 2, kQueryHeads = 8, kHeadDim = 128, kContextTokens = 64;
constexpr size_t kRequestBytes = 2 * kKvHeads * kHeadDim * 2 + kQueryHeads * kHeadDim * 4;
constexpr size_t kReplyBytes = kQueryHeads * kHeadDim * 4;

struct Arguments {
  std::string connect, daemon, tls_ca;
  int rounds = 5000;
  int64_t busy_poll_us = 1000;
  bool json = false;
};

/// The floor: as many bytes there and back over a socket pair, between two threads, with nothing else done.
Percentiles BareSocket(size_t request_bytes, size_t reply_bytes, int rounds, bool poll) {
  int pair[2];
  KV_CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  const int flags = poll ? MSG_DONTWAIT : 0;
  const auto receive = [flags](int fd, std::vector<char>& to) {
    for (size_t got = 0; got < to.size();) {
      const ssize_t n = ::recv(fd, to.data() + got, to.size() - got, flags);
      if (n == 0) return false;
      if (n > 0) got += size_t(n);
    }
    return true;
  };
  std::thread echo([&] {
    std::vector<char> in(request_bytes), out(reply_bytes);
    while (receive(pair[1], in)) (void)!::send(pair[1], out.data(), out.size(), MSG_NOSIGNAL);
  });
  std::vector<char> out(request_bytes), in(reply_bytes);
  std::vector<double> us;
  for (int i = 0; i < rounds; ++i) {
    const double start = NowUs();
    (void)!::send(pair[0], out.data(), out.size(), MSG_NOSIGNAL);
    receive(pair[0], in);
    us.push_back(NowUs() - start);
  }
  ::shutdown(pair[0], SHUT_RDWR);
  echo.join();
  ::close(pair[0]);
  ::close(pair[1]);
  return Of(std::move(us));
}

absl::StatusOr<BenchDaemon> StartDaemon(const Arguments& arguments, bool poll) {
  std::vector<std::string> flags = {"--host-pool-bytes", "134217728"};
  if (poll) flags.insert(flags.end(), {"--busy-poll-us", absl::StrCat(arguments.busy_poll_us)});
  return BenchDaemon::Start(arguments.daemon, flags);
}

struct Measured {
  Percentiles socket_empty, socket_step, ping, step;
  nlohmann::json Json() const {
    return {{"bare_socket", socket_empty.Json()},
            {"bare_socket_step_bytes", socket_step.Json()},
            {"empty_call", ping.Json()},
            {"step", step.Json()},
            {"step_minus_empty_p50_us", step.p50_us - ping.p50_us}};
  }
};

absl::StatusOr<Measured> Measure(const std::string& address, const Arguments& arguments, bool poll) {
  const int warm_up = arguments.rounds / 10 + 1;
  Measured measured;
  measured.socket_empty = BareSocket(64, 64, arguments.rounds, poll);
  measured.socket_step = BareSocket(kRequestBytes, kReplyBytes, arguments.rounds, poll);

  Client::Options options{.name = "rpc_bench",
                          .connect_ms = 10000,
                          .busy_poll_us = poll ? arguments.busy_poll_us : 0,
                          .tls_ca = arguments.tls_ca};
  KV_ASSIGN_OR_RETURN(auto client, Client::Connect(address, options));
  std::vector<double> us;
  for (int i = -warm_up; i < arguments.rounds; ++i) {
    const double start = NowUs();
    KV_RETURN_IF_ERROR(client->Ping());
    if (i >= 0) us.push_back(NowUs() - start);
  }
  measured.ping = Of(std::move(us));

  CacheOptions cache_options;
  cache_options.model = "rpc_bench";
  cache_options.layers = 1;
  cache_options.kv_heads = kKvHeads;
  cache_options.query_heads = kQueryHeads;
  cache_options.head_dim = kHeadDim;
  cache_options.page_tokens = 128;  // so that no page is sealed and the crop is always within the open one
  KV_ASSIGN_OR_RETURN(auto cache, client->OpenCache(cache_options));
  KV_ASSIGN_OR_RETURN(auto created, cache->CreateSequence());
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> kv(size_t{kContextTokens} * kKvHeads * kHeadDim);
  for (uint16_t& x : kv) x = FloatToHalf(normal(random));
  std::vector<float> q(kQueryHeads * kHeadDim), out(q.size());
  for (float& x : q) x = normal(random);
  const auto step = [&](uint64_t position, int tokens, bool attend) {
    const size_t kv_bytes = size_t(tokens) * kKvHeads * kHeadDim * sizeof(uint16_t);
    const StepEntry entries[] = {{created.sequence->id(), position, tokens}};
    StepBatch batch{
        .entries = entries, .k = TensorView::Inline(kv.data(), kv_bytes), .v = TensorView::Inline(kv.data(), kv_bytes)};
    if (attend) {
      batch.q = TensorView::Inline(q.data(), q.size() * sizeof(float));
      batch.out = TensorView::Inline(out.data(), out.size() * sizeof(float));
    }
    return cache->Step(batch).status();
  };
  KV_RETURN_IF_ERROR(step(0, kContextTokens - 1, false));
  us.clear();
  for (int i = -warm_up; i < arguments.rounds; ++i) {
    const double start = NowUs();
    KV_RETURN_IF_ERROR(step(kContextTokens - 1, 1, true));
    if (i >= 0) us.push_back(NowUs() - start);
    KV_RETURN_IF_ERROR(created.sequence->Crop(kContextTokens - 1));
  }
  measured.step = Of(std::move(us));
  return measured;
}

void Print(const char* how, const Measured& m) {
  const auto line = [](const char* what, const Percentiles& p) {
    std::cout << absl::StrFormat("  %-44s p50 %7.1f us   p99 %7.1f us\n", what, p.p50_us, p.p99_us);
  };
  std::cout << how << "\n";
  line("bare socket, 64 bytes each way", m.socket_empty);
  line(absl::StrCat("bare socket, ", kRequestBytes, " there, ", kReplyBytes, " back").c_str(), m.socket_step);
  line("empty call", m.ping);
  line("append and attend, 8/2 heads, d=128, 64 tokens", m.step);
  std::cout << absl::StrFormat("  %-44s p50 %7.1f us\n", "step less empty call", m.step.p50_us - m.ping.p50_us);
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app{"Round trips to kvmanagerd, beside those of a bare socket.", "rpc_bench"};
  auto* connect =
      app.add_option("--connect", arguments.connect, "a running daemon: unix:PATH, tcp:HOST:PORT or tls:HOST:PORT");
  app.add_option("--tls-ca", arguments.tls_ca, "of tls:HOST:PORT: who signed the daemon's certificate");
  app.add_option("--daemon", arguments.daemon, "path of kvmanagerd: starts one that blocks, then one that polls")
      ->excludes(connect);
  app.add_option("--rounds", arguments.rounds, "calls per measurement")
      ->check(CLI::Range(100, 10000000))
      ->capture_default_str();
  app.add_option("--busy-poll-us", arguments.busy_poll_us, "how long both ends poll")
      ->check(CLI::Range(int64_t{1}, int64_t{1000000}))
      ->capture_default_str();
  app.add_flag("--json", arguments.json);
  CLI11_PARSE(app, argc, argv);
  if (arguments.connect.empty() == arguments.daemon.empty()) {
    std::cerr << "rpc_bench: give --connect ADDRESS or --daemon PATH\n";
    return 2;
  }
  nlohmann::json json = {{"rounds", arguments.rounds}};
  for (const bool poll : {false, true}) {
    if (poll && arguments.daemon.empty()) break;
    std::optional<BenchDaemon> daemon;
    if (!arguments.daemon.empty()) {
      auto started = StartDaemon(arguments, poll);
      if (!started.ok()) {
        std::cerr << "rpc_bench: " << started.status() << "\n";
        return 1;
      }
      daemon.emplace(*std::move(started));
    }
    const auto measured = Measure(daemon.has_value() ? daemon->address() : arguments.connect, arguments, poll);
    if (!measured.ok()) {
      std::cerr << "rpc_bench: " << measured.status() << "\n";
      return 1;
    }
    json[poll ? "polling" : "blocking"] = measured->Json();
    if (!arguments.json) Print(poll ? "both ends polling" : "both ends blocking", *measured);
  }
  if (arguments.json) std::cout << json.dump(2) << "\n";
  return 0;
}

}  // namespace
}  // namespace kvmanager::client

int main(int argc, char** argv) { return kvmanager::client::Main(argc, argv); }
