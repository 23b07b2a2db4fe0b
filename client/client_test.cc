#include "client/client.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "client/client_testing.h"
#include "client/dial.h"
#include "client/fake_daemon.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client {
namespace {

using absl::StatusCode;

std::vector<float> Random(size_t count) {
  std::mt19937 random(1);
  std::vector<float> values(count);
  for (float& v : values) v = float(random()) / 1e9f;
  return values;
}

TensorView View(std::vector<float>& values) { return TensorView::Inline(values.data(), values.size() * sizeof(float)); }

TEST(Address, FormsAndBounds) {
  EXPECT_TRUE(ParseAddress("unix:/run/x.sock")->is_unix);
  EXPECT_EQ(ParseAddress("tcp:[::1]:70")->host, "::1");
  EXPECT_EQ(ParseAddress("tcp:host:70")->port, "70");
  for (const char* bad :
       {"", "unix:", "tcp:", "tcp:host", "tcp::70", "tcp:h:0", "tcp:h:65536", "tcp:h:x", "/run/x", "http:x"}) {
    const auto address = ParseAddress(bad);
    EXPECT_EQ(address.status().code(), StatusCode::kInvalidArgument) << bad;
    EXPECT_EQ(DetailOf(address.status()).field, "address") << bad;
  }
  EXPECT_FALSE(ParseAddress("unix:" + std::string(108, 'a')).ok());
  EXPECT_FALSE(ParseAddress(absl::string_view("unix:a\0b", 8)).ok());
}

TEST(Client, ConnectsAndPings) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon, {.name = "engine-7"});
  EXPECT_EQ(client->boot_epoch(), 1000u);
  EXPECT_EQ(client->peer_address(), "127.0.0.1:7000");
  EXPECT_TRUE(client->connected());
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(client->Ping().ok());
  EXPECT_EQ(daemon.seen().client_name, "engine-7");
}

TEST(Client, OptionsOutOfRangeAreNamed) {
  const std::pair<const char*, Client::Options> bad[] = {
      {"deadline_ms", {.deadline_ms = 0}},
      {"deadline_ms", {.deadline_ms = 3600001}},
      {"connect_ms", {.connect_ms = 0}},
      {"hello_ms", {.hello_ms = -1}},
      {"busy_poll_us", {.busy_poll_us = -1}},
      {"busy_poll_us", {.busy_poll_us = 1000001}},
      {"address", {.admin_address = "/run/x"}},
      {"token (bytes)", {.token = std::string(15, 't')}},
      {"token (bytes)", {.token = std::string(1025, 't')}},
  };
  for (const auto& [field, options] : bad) {
    const auto client = Client::Connect("unix:/nowhere", options);
    EXPECT_EQ(client.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(DetailOf(client.status()).field, field);
  }
}

// The fake daemon has the features of an early version.
TEST(Client, AnEarlierDaemonHasAdminOnItsOneSocketAndNoTokens) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon, {.admin_address = "unix:/nowhere"});
  EXPECT_TRUE(client->Drain(true).ok());
  EXPECT_TRUE(daemon.seen().draining);
  EXPECT_EQ(daemon.seen().connections_open, 1);
  const auto refused = Client::Connect(daemon.address(), {.token = std::string(16, 't')});
  EXPECT_EQ(refused.status().code(), StatusCode::kUnimplemented) << refused.status();
}

TEST(Client, NobodyThereIsUnavailableWithinItsTime) {
  const auto start = std::chrono::steady_clock::now();
  const auto client = Client::Connect("unix:/tmp/kv_nobody_is_there", {.connect_ms = 50});
  EXPECT_EQ(client.status().code(), StatusCode::kUnavailable) << client.status();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Client, AnotherApiMajorIsRefused) {
  FakeDaemon daemon(FakeDaemon::Behaviour{.api_major = 2});
  const auto client = Client::Connect(daemon.address(), {});
  EXPECT_EQ(client.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(client.status()).field, "api_major");
  EXPECT_EQ(DetailOf(client.status()).value, "2");
}

TEST(Client, AListenerThatSaysNothingDoesNotHangTheClient) {
  FakeDaemon daemon(FakeDaemon::Behaviour{.silent_hello = true});
  const auto client = Client::Connect(daemon.address(), {.connect_ms = 50});
  const auto patient = Client::Connect(daemon.address(), {.connect_ms = 20, .hello_ms = 73});
  EXPECT_NE(patient.status().message().find("within 73 ms"), absl::string_view::npos) << patient.status();
  EXPECT_EQ(client.status().code(), StatusCode::kUnavailable) << client.status();
}

TEST(Client, ADeadlineEndsTheCallOnBothSidesAndTheConnectionLives) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon, {.deadline_ms = 30});
  daemon.HoldPings(true);
  EXPECT_EQ(client->Ping().code(), StatusCode::kDeadlineExceeded);
  daemon.Await([](const auto& seen) { return seen.calls_cancelled == 1; });
  daemon.HoldPings(false);
  EXPECT_TRUE(client->Status().ok());
  EXPECT_TRUE(client->connected());
}

TEST(Client, AnIdleTimeIsNotChargedToTheNextCall) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon, {.deadline_ms = 2000});
  auto other = ConnectTo(daemon, {.deadline_ms = 2500});
  // The loop last turned here; its timer knows no later time.
  const auto idle_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(30);
  while (std::chrono::steady_clock::now() < idle_until) {
  }
  EXPECT_TRUE(client->Ping().ok());
  EXPECT_TRUE(other->Ping().ok());  // two clients of one thread share its loop
}

TEST(Client, DisconnectionIsUnavailableAtOnceForPendingAndLaterCalls) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon, {.deadline_ms = 3600000});
  auto cache = *client->OpenCache(SmallCache());
  auto pending = cache->StepAsync({.layer = FakeDaemon::kHeldLayer});
  daemon.Await([](const auto& seen) { return seen.calls_held == 1; });
  EXPECT_FALSE(pending.ready());
  daemon.Stop();
  EXPECT_EQ(pending.Wait().status().code(), StatusCode::kUnavailable);
  EXPECT_FALSE(client->connected());
  EXPECT_EQ(client->Ping().code(), StatusCode::kUnavailable);
  EXPECT_EQ(cache->CreateSequence().status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(client->OpenCache(SmallCache()).status().code(), StatusCode::kUnavailable);
}

TEST(Client, AnIdleClientLearnsOfTheEndAtItsNextCall) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  daemon.Stop();
  EXPECT_EQ(client->Ping().code(), StatusCode::kUnavailable);
}

TEST(Client, ReconnectVoidsEarlierHandles) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon, {.connect_ms = 20000});
  auto cache = *client->OpenCache(SmallCache());
  auto sequence = std::move(cache->CreateSequence()->sequence);
  auto arena = *client->CreateArena(4096);
  daemon.Stop();
  EXPECT_EQ(sequence->Info().status().code(), StatusCode::kUnavailable);
  std::thread later([&] { daemon.Start(); });
  EXPECT_TRUE(client->Reconnect().ok());  // with back-off, until the daemon is there again
  later.join();
  EXPECT_EQ(client->boot_epoch(), 1001u);
  EXPECT_TRUE(client->Ping().ok());
  EXPECT_EQ(sequence->Info().status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(cache->Refresh().status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(cache->Step({}).status().code(), StatusCode::kFailedPrecondition);
  auto again = *client->OpenCache(SmallCache());
  std::vector<float> q(1024);
  const auto step = again->Step({.q = arena->View(0, 4096), .out = arena->View(0, 4096)});
  EXPECT_EQ(step.status().code(), StatusCode::kFailedPrecondition) << step.status();
  sequence.reset();
  cache.reset();
  EXPECT_TRUE(client->Ping().ok());
}

TEST(Client, ReconnectGivesUpInTime) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon, {.connect_ms = 50, .hello_ms = 10000});
  daemon.Stop();
  EXPECT_EQ(client->Ping().code(), StatusCode::kUnavailable);
  EXPECT_EQ(client->Reconnect().code(), StatusCode::kUnavailable);
  EXPECT_EQ(client->Ping().code(), StatusCode::kUnavailable);
}

TEST(Client, ErrorsKeepFieldValueAndBound) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  CacheOptions options = SmallCache();
  options.codec = "nope";
  const auto refused = client->OpenCache(options);
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  const ErrorDetail detail = DetailOf(refused.status());
  EXPECT_EQ(detail.field, "codec");
  EXPECT_EQ(detail.value, "nope");
  EXPECT_EQ(detail.bound, "one of raw, hack");
  options.codec = "raw";
  options.lag_pages = -1;
  EXPECT_EQ(DetailOf(client->OpenCache(options).status()).field, "lag_pages");

  auto cache = *client->OpenCache(SmallCache());
  EXPECT_EQ(DetailOf(cache->Step({.layer = FakeDaemon::kRefusedLayer}).status()).bound, "0..31");
  auto sequence = std::move(cache->CreateSequence()->sequence);
  EXPECT_EQ(DetailOf(sequence->Crop(101)).field, "tokens");
  EXPECT_TRUE(sequence->Crop(3).ok());
  // One refused request of a batch.
  const BlockName names[3] = {};
  const absl::Span<const BlockName> prefixes[] = {{}, {names, 3}, {names, 2}};
  auto created = *cache->CreateSequences(prefixes);
  ASSERT_EQ(created.size(), 3u);
  EXPECT_TRUE(created[0].ok());
  EXPECT_EQ(DetailOf(created[1].status()).field, "prefix");
  EXPECT_EQ(created[2]->match.hit_blocks, 2);
}

TEST(Client, DroppingAHandleGivesItBackWithoutAnotherCall) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  auto cache = *client->OpenCache(SmallCache());
  auto sequence = std::move(cache->CreateSequence()->sequence);
  auto fork = *sequence->Fork();
  EXPECT_EQ(fork->id(), sequence->id() + 1000);
  daemon.Await([](const auto& seen) { return seen.sequences_alive == 2; });
  sequence.reset();
  daemon.Await([](const auto& seen) { return seen.sequences_alive == 1; });
  cache.reset();
  daemon.Await([](const auto& seen) { return seen.caches_alive == 0; });
  client.reset();
  EXPECT_EQ(fork->Info()->id, fork->id());  // a handle keeps the connection
  fork.reset();
  daemon.Await([](const auto& seen) { return seen.sequences_alive == 0 && seen.connections_open == 0; });
}

TEST(Client, InlineTensorsAreCopiedBothWays) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  auto cache = *client->OpenCache(SmallCache());
  std::vector<float> q = Random(2 * 8 * 128), out(q.size()), lse(2 * 8, 5.0f);
  const StepEntry entries[] = {{1, 0, 1}, {2, 0, 1}};
  const auto done = cache->Step({.entries = entries, .q = View(q), .out = View(out), .lse = View(lse)});
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(done->raw_pairs, 2u);
  EXPECT_EQ(out, q);
  EXPECT_EQ(lse[15], 0.0f);
  std::vector<float> small(5);
  EXPECT_EQ(DetailOf(cache->Step({.entries = entries, .q = View(q), .out = View(small)}).status()).field,
            "out (bytes)");
  EXPECT_EQ(DetailOf(cache->Step({.entries = entries, .q = View(q)}).status()).field, "out");
}

TEST(Client, LargeInlineTensorsAndTheBoundOfAMessage) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  auto cache = *client->OpenCache(SmallCache());
  const int tokens = 4096;  // 16 MiB each way
  std::vector<float> q = Random(size_t{tokens} * 8 * 128), out(q.size());
  const StepEntry entries[] = {{1, 0, tokens}};
  ASSERT_TRUE(cache->Step({.entries = entries, .q = View(q), .out = View(out)}).ok());
  EXPECT_EQ(0, std::memcmp(out.data(), q.data(), q.size() * sizeof(float)));
  std::vector<float> k(4 << 20);
  const auto refused = cache->Step({.entries = entries, .k = View(k), .v = View(k), .q = View(q), .out = View(out)});
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument) << refused.status();
  EXPECT_NE(DetailOf(refused.status()).bound.find("33554432"), std::string::npos);
  EXPECT_TRUE(client->Ping().ok());
}

TEST(Client, ASmallerBoundOfTheDaemonIsKept) {
  FakeDaemon daemon(FakeDaemon::Behaviour{.message_bytes_max = 4096});
  auto client = ConnectTo(daemon);
  auto cache = *client->OpenCache(SmallCache());
  auto sequence = std::move(cache->CreateSequence()->sequence);
  const std::vector<BlockName> names(100);
  EXPECT_EQ(sequence->Publish(names).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence->Publish(absl::MakeConstSpan(names).first(5))->published, 5);
  EXPECT_EQ(sequence->HandOff("h:1", std::string(5000, 'x')).status().code(), StatusCode::kInvalidArgument);
}

TEST(Client, ArenasAreSharedMemory) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  auto cache = *client->OpenCache(SmallCache());
  auto arena = client->CreateArena(8192);
  ASSERT_TRUE(arena.ok()) << arena.status();
  auto data = (*arena)->data();
  ASSERT_EQ(data.size(), 8192u);
  for (size_t i = 0; i < 4096; ++i) data[i] = uint8_t(i * 7);
  const StepEntry entries[] = {{1, 0, 1}};
  ASSERT_TRUE(cache->Step({.entries = entries, .q = (*arena)->View(0, 4096), .out = (*arena)->View(4096, 4096)}).ok());
  EXPECT_EQ(0, std::memcmp(data.data(), data.data() + 4096, 4096));
  const auto outside =
      cache->Step({.entries = entries, .q = (*arena)->View(8000, 4096), .out = (*arena)->View(0, 4096)});
  EXPECT_EQ(outside.status().code(), StatusCode::kInvalidArgument);
  arena->reset();
  daemon.Await([](const auto& seen) { return seen.arenas_alive == 0; });
}

TEST(Client, OverTcpInlineWorksAndArenasAreRefused) {
  FakeDaemon daemon(FakeDaemon::Behaviour{.tcp = true});
  auto client = ConnectTo(daemon);
  EXPECT_EQ(client->CreateArena(4096).status().code(), StatusCode::kFailedPrecondition);
  auto cache = *client->OpenCache(SmallCache());
  std::vector<float> q = Random(8 * 128), out(q.size());
  const StepEntry entries[] = {{1, 0, 1}};
  ASSERT_TRUE(cache->Step({.entries = entries, .q = View(q), .out = View(out)}).ok());
  EXPECT_EQ(out, q);
}

TEST(Client, DroppingAPendingCancelsItThere) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  auto cache = *client->OpenCache(SmallCache());
  {
    auto pending = cache->StepAsync({.layer = FakeDaemon::kHeldLayer});
    daemon.Await([](const auto& seen) { return seen.calls_held == 1; });  // it was sent without being waited for
  }
  daemon.Await([](const auto& seen) { return seen.calls_cancelled == 1; });
  EXPECT_TRUE(client->Ping().ok());
}

TEST(Client, PendingCallsOverlapAndComeInAnyOrder) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  auto cache = *client->OpenCache(SmallCache());
  std::vector<Pending<absl::StatusOr<StepResult>>> pending;
  std::vector<std::vector<float>> in, out;
  const StepEntry entries[] = {{1, 0, 1}};
  for (int i = 0; i < 20; ++i) {
    in.emplace_back(8 * 128, float(i));
    out.emplace_back(8 * 128);
  }
  auto held = cache->StepAsync({.layer = FakeDaemon::kHeldLayer});
  for (int i = 0; i < 20; ++i)
    pending.push_back(cache->StepAsync({.entries = entries, .q = View(in[i]), .out = View(out[i])}));
  for (int i = 19; i >= 0; --i) {
    EXPECT_TRUE(pending[i].Wait().ok());
    EXPECT_EQ(out[i], in[i]);
  }
  EXPECT_FALSE(held.ready());
}

TEST(Client, BusyPollingGivesTheSameAnswers) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon, {.deadline_ms = 50, .busy_poll_us = 1000});
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(client->Ping().ok());
  daemon.HoldPings(true);
  EXPECT_EQ(client->Ping().code(), StatusCode::kDeadlineExceeded);  // polls, then blocks, then gives up
  daemon.Stop();
  EXPECT_EQ(client->Ping().code(), StatusCode::kUnavailable);
}

TEST(Client, HandOffClaimAndMatch) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon, {.deadline_ms = 5000});
  auto cache = *client->OpenCache(SmallCache());
  auto sequence = std::move(cache->CreateSequence()->sequence);
  const auto outcome = sequence->HandOff("10.0.0.2:7000", absl::string_view("a\0b", 3), 1234);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->ticket, std::string("a\0b", 3));
  EXPECT_EQ(outcome->pages_sent, 1234u);
  EXPECT_EQ(DetailOf(sequence->HandOff("h:1", "", 0).status()).field, "timeout_ms");
  const auto claimed = cache->Claim(outcome->ticket);
  EXPECT_EQ(claimed->tokens, 64u);
  EXPECT_EQ(claimed->blob, outcome->ticket);
  EXPECT_EQ(claimed->sequence->id(), 42u);
  const BlockName names[2] = {};
  const absl::Span<const BlockName> prefixes[] = {{names, 1}, {names, 2}};
  const auto matches = *cache->Match(prefixes);
  EXPECT_EQ(matches[1].hit_blocks, 2);
  EXPECT_EQ(matches[1].reason, Miss::kNotFound);
}

TEST(Client, AHandOffThatIsUnderWay) {
  FakeDaemon daemon(FakeDaemon::Behaviour{.message_bytes_max = 4096});
  auto client = ConnectTo(daemon, {.deadline_ms = 5000});
  auto cache = *client->OpenCache(SmallCache());
  auto sequence = std::move(cache->CreateSequence()->sequence);
  EXPECT_EQ(DetailOf(sequence->BeginHandOff("h:1", 101).status()).field, "tokens");
  EXPECT_EQ(DetailOf(sequence->BeginHandOff("h:1", 1, 0).status()).field, "timeout_ms");
  EXPECT_EQ(DetailOf(sequence->BeginHandOff("h:1", 1, 1, -1).status()).field, "room_ms");
  EXPECT_EQ(sequence->BeginHandOff("held:1", 1, 1).status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(DetailOf(cache->ClaimAsync("ticket", -1).Wait().status()).field, "deadline_ms");
  auto begun = sequence->BeginHandOff("h:1", 100, 1000, 77);
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_EQ((*begun)->ticket(), "early");
  EXPECT_EQ((*begun)->Finish(std::string(5000, 'x')).status().code(), StatusCode::kInvalidArgument);
  const auto outcome = (*begun)->Finish(absl::string_view("a\0b", 3));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->ticket, std::string("a\0b", 3));
  EXPECT_EQ(outcome->pages_sent, 77u);
  EXPECT_EQ(outcome->resumes, 2u);
}

TEST(Client, Administration) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  EXPECT_EQ(client->Status()->pools[0].capacity_bytes, uint64_t{1} << 30);
  EXPECT_EQ(client->Caches()->front().options.model, "m");
  EXPECT_EQ(client->Sequences()->back().tokens, 77u);
  const auto peers = client->Peers({"10.0.0.3:7000"});
  ASSERT_TRUE(peers.ok()) << peers.status();
  ASSERT_EQ(peers->size(), 2u);
  EXPECT_EQ(peers->front().peer, "10.0.0.2:7000");
  ASSERT_TRUE(peers->front().load.ok());
  EXPECT_EQ(peers->front().load->free_bytes, 77u);
  EXPECT_EQ(peers->front().load->queued_bytes, 5u);
  EXPECT_EQ(peers->back().peer, "10.0.0.3:7000");
  EXPECT_EQ(peers->back().load.status(), absl::UnavailableError("gone"));
  EXPECT_EQ(client->Peers()->size(), 1u);
  EXPECT_TRUE(client->Drain(true).ok());
  EXPECT_TRUE(daemon.seen().draining);
  EXPECT_TRUE(client->Drain(false).ok());
  EXPECT_FALSE(daemon.seen().draining);
  EXPECT_EQ(*client->Purge(5), 5u);
  EXPECT_FALSE(daemon.seen().purge_all);
  EXPECT_EQ(*client->Purge(Client::kAllCaches), 9u);
}

TEST(Client, AnotherThreadIsToldToConnectItsOwn) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  StatusCode code = StatusCode::kOk;
  std::thread other([&] {
    code = client->Ping().code();
    EXPECT_TRUE(ConnectTo(daemon)->Ping().ok());
  });
  other.join();
  EXPECT_EQ(code, StatusCode::kFailedPrecondition);
}

TEST(Client, AForkedChildHoldsNoLeaseAndMayConnectAnew) {
  FakeDaemon daemon;
  auto client = ConnectTo(daemon);
  auto cache = *client->OpenCache(SmallCache());
  auto sequence = std::move(cache->CreateSequence()->sequence);
  auto pending =
      std::make_unique<Pending<absl::StatusOr<StepResult>>>(cache->StepAsync({.layer = FakeDaemon::kHeldLayer}));
  int to_child[2], to_parent[2];
  ASSERT_EQ(::pipe(to_child), 0);
  ASSERT_EQ(::pipe(to_parent), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char result = 'k';
    if (client->Ping().code() != StatusCode::kFailedPrecondition) result = '1';
    if (sequence->Info().status().code() != StatusCode::kFailedPrecondition) result = '2';
    if (client->Reconnect().code() != StatusCode::kFailedPrecondition) result = '3';
    if (pending->Wait().status().code() != StatusCode::kFailedPrecondition) result = '4';
    pending.reset();
    sequence.reset();
    cache.reset();
    client.reset();  // destroying what was inherited must not disturb the parent
    {
      auto own = Client::Connect(daemon.address(), {});
      if (!own.ok() || !(*own)->Ping().ok()) result = '5';
    }
    (void)!::write(to_parent[1], &result, 1);
    char byte;
    (void)!::read(to_child[0], &byte, 1);  // stays alive, as a worker of an engine would
    ::_exit(0);
  }
  char result = 0;
  ASSERT_EQ(::read(to_parent[0], &result, 1), 1);
  EXPECT_EQ(result, 'k');
  EXPECT_TRUE(client->Ping().ok());  // the parent goes on
  EXPECT_TRUE(sequence->Info().ok());
  pending.reset();
  sequence.reset();
  cache.reset();
  client.reset();
  // With the child still alive.
  daemon.Await([](const auto& seen) { return seen.connections_open == 0 && seen.sequences_alive == 0; });
  ASSERT_EQ(::write(to_child[1], "x", 1), 1);
  ::waitpid(child, nullptr, 0);
  for (int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) ::close(fd);
}

}  // namespace
}  // namespace kvmanager::client
