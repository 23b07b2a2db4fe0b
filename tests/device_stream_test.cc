// A daemon, an engine and a GPU between them: streams of two processes that wait for one another by words alone, and
// what becomes of them when one process is killed.
//
// The engines that are killed are this program again, with a mode in the environment (Engine.*).
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/device.h"
#include "kvmanager/memory/device_testing.h"
#include "tests/device_fixture.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

using client::Arena;
using client::Client;
using client::DeviceClient;

constexpr uint64_t kBytes = 64 << 20;
constexpr char kAddressVariable[] = "KVMANAGER_TEST_DAEMON";

absl::StatusOr<std::unique_ptr<DaemonProcess>> StartDaemon(const std::string& pool_bytes = "512MiB") {
  DaemonOptions options;
  options.more_flags = {"--device-pool-bytes", pool_bytes};
  return DaemonProcess::Start(options);
}

double StreamsOf(const DaemonProcess& daemon, const std::string& metric) {
  const auto page = Scrape(daemon);
  return page.ok() ? page->Sum(absl::StrCat("kvmanager_", metric)) : -1;
}

/// How many of the bytes at `data`, on the device, differ from `value`. Waits for `stream` alone.
int64_t CountOthers(const uint8_t* data, uint64_t bytes, uint8_t value, cudaStream_t stream) {
  std::vector<uint8_t> copy(bytes);
  if (cudaMemcpyAsync(copy.data(), data, bytes, cudaMemcpyDeviceToHost, stream) != cudaSuccess ||
      cudaStreamSynchronize(stream) != cudaSuccess) {
    return -1;
  }
  int64_t others = 0;
  for (const uint8_t byte : copy) others += byte != value;
  return others;
}

/// One engine: a client, its GPU, two arenas and a stream.
struct Engine {
  static absl::StatusOr<std::unique_ptr<Engine>> Start(const std::string& address, uint64_t bytes = kBytes,
                                                       const Client::Options& options = {}) {
    auto engine = std::make_unique<Engine>();
    KV_ASSIGN_OR_RETURN(engine->client, Client::Connect(address, options));
    KV_ASSIGN_OR_RETURN(engine->device, DeviceClient::Open(engine->client.get(), 0));
    KV_ASSIGN_OR_RETURN(engine->in, engine->device->CreateArena(bytes));
    KV_ASSIGN_OR_RETURN(engine->out, engine->device->CreateArena(bytes));
    KV_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&engine->stream, cudaStreamNonBlocking), "stream"));
    return engine;
  }
  ~Engine() {
    in.reset();
    out.reset();
    device.reset();
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
  absl::StatusOr<uint64_t> Copy(uint64_t ready, uint64_t bytes) {
    return device->Copy(in->View(0, bytes), out->View(0, bytes), ready);
  }

  std::unique_ptr<Client> client;
  std::unique_ptr<DeviceClient> device;
  std::unique_ptr<Arena> in, out;
  cudaStream_t stream = nullptr;
};

/// The second process: it owes the daemon `ready`, says so, and waits for its end.
TEST(EngineProcess, OwesAWord) {
  const char* const address = std::getenv(kAddressVariable);
  if (address == nullptr) GTEST_SKIP() << "a process of other tests";
  ASSERT_OK_AND_ASSIGN(auto engine, Engine::Start(address));
  for (int i = 0; i < 5; ++i) ASSERT_OK(engine->Copy(1000, kBytes));
  std::printf("owes\n");
  std::fflush(stdout);
  for (;;) pause();
}

class DeviceStreamTest : public GpuTest {
 protected:
  static absl::StatusOr<std::unique_ptr<ChildProcess>> StartDebtor(const DaemonProcess& daemon) {
    setenv(kAddressVariable, daemon.listen().c_str(), 1);
    auto child = ChildProcess::Start({"/proc/self/exe", "--gtest_filter=EngineProcess.OwesAWord"});
    unsetenv(kAddressVariable);
    if (!child.ok()) return child;
    for (;;) {
      KV_ASSIGN_OR_RETURN(const std::string line, (*child)->ReadLine());
      if (line == "owes") return child;
    }
  }
};

TEST_F(DeviceStreamTest, BytesGoThroughTheDaemonsStreamInTheOrderOfWordsAlone) {
  ASSERT_OK_AND_ASSIGN(auto daemon, StartDaemon());
  ASSERT_OK_AND_ASSIGN(auto engine, Engine::Start(daemon->listen()));
  EXPECT_EQ(engine->device->description().pool_bytes, 512u << 20);
  EXPECT_EQ(engine->device->description().uuid, engine->device->device().info().uuid);
  EXPECT_EQ(CountOthers(engine->in->data().data(), kBytes, 0, engine->stream), 0);  // zeroed
  // Rounds are submitted far ahead of the GPU: fill, ready, (daemon: copy), done, check against a copy made here. Each
  // fill overwrites the last, so a copy that came too early or too late would be seen.
  constexpr int kRounds = 40;
  std::unique_ptr<Arena> kept;
  ASSERT_OK_AND_ASSIGN(kept, engine->device->CreateArena(kRounds << 20));
  for (int round = 1; round <= kRounds; ++round) {
    for (int again = 0; again < 8; ++again) {  // work in front of the word
      ASSERT_CUDA(cudaMemsetAsync(engine->in->data().data(), again == 7 ? round : 255 - again, kBytes, engine->stream));
    }
    ASSERT_OK(engine->device->EnqueueReady(engine->stream, round));
    ASSERT_OK_AND_ASSIGN(const uint64_t done, engine->Copy(round, kBytes));
    ASSERT_OK(engine->device->EnqueueWaitDone(engine->stream, done));
    ASSERT_CUDA(cudaMemcpyAsync(kept->data().data() + ((round - 1) << 20),
                                engine->out->data().data() + kBytes - (1 << 20), 1 << 20, cudaMemcpyDeviceToDevice,
                                engine->stream));
  }
  for (int round = 1; round <= kRounds; ++round) {
    EXPECT_EQ(CountOthers(kept->data().data() + ((round - 1) << 20), 1 << 20, round, engine->stream), 0) << round;
  }
  EXPECT_FALSE(engine->device->lost());
  ASSERT_OK_AND_ASSIGN(const client::DaemonDescription status, engine->client->Status());
  ASSERT_EQ(status.pools.size(), 2u);
  EXPECT_EQ(status.pools[1].tier, "device:0");
  EXPECT_EQ(status.pools[1].capacity_bytes, 512u << 20);
  EXPECT_EQ(status.pin_total_bytes, status.pools[0].capacity_bytes);
  EXPECT_TRUE(Eventually([&] { return engine->client->Status()->pinned_bytes == status.pin_total_bytes; }));
  EXPECT_EQ(StreamsOf(*daemon, "device_streams"), 1);
  kept.reset();
  engine.reset();
  EXPECT_TRUE(Eventually([&] { return StreamsOf(*daemon, "device_streams") == 0; }));
  EXPECT_TRUE(Eventually([&] { return StreamsOf(*daemon, "arena_bytes") == 0; }));
}

TEST_F(DeviceStreamTest, WhatIsWrongIsRefusedAndTheStreamGoesOn) {
  ASSERT_OK_AND_ASSIGN(auto daemon, StartDaemon());
  ASSERT_OK_AND_ASSIGN(auto engine, Engine::Start(daemon->listen()));
  const auto code = [&](auto&& status) { return status.status().code(); };
  EXPECT_EQ(code(DeviceClient::Open(engine->client.get(), 0)), absl::StatusCode::kFailedPrecondition);  // a second one
  EXPECT_EQ(code(DeviceClient::Open(engine->client.get(), 7)), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(engine->device->CreateArena(0)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(engine->device->CreateArena(uint64_t{2} << 30)), absl::StatusCode::kInvalidArgument);
  ASSERT_OK_AND_ASSIGN(auto host, engine->client->CreateArena(1 << 20));
  ASSERT_OK_AND_ASSIGN(auto small, engine->device->CreateArena(1));
  EXPECT_EQ(small->data().size(), 2u << 20);
  EXPECT_EQ(code(engine->device->Copy(host->View(0, 4096), engine->out->View(0, 4096), 0)),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(code(engine->device->Copy(engine->in->View(0, 4096), engine->in->View(64, 4096), 0)),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(engine->device->Copy(engine->in->View(kBytes - 64, 128), engine->out->View(0, 128), 0)),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(engine->Copy(UINT64_MAX, 4096)), absl::StatusCode::kInvalidArgument);
  // More than may be under way, none of it able to begin: refused, and the daemon answers others meanwhile.
  absl::Status status;
  uint64_t done = 0;
  int accepted = 0;
  for (; accepted < 1000; ++accepted) {
    const auto copied = engine->Copy(1, 4096);
    if (!copied.ok()) {
      status = copied.status();
      break;
    }
    done = *copied;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(accepted, 96);
  ASSERT_OK_AND_ASSIGN(auto other, Engine::Start(daemon->listen()));
  ASSERT_OK_AND_ASSIGN(const uint64_t others_done, other->Copy(0, kBytes));
  ASSERT_OK(other->device->EnqueueWaitDone(other->stream, others_done));
  ASSERT_CUDA(cudaStreamSynchronize(other->stream));
  // Arenas go, although the stream stands: in order, later.
  small.reset();
  engine->in.reset();
  EXPECT_OK(engine->client->Ping());
  ASSERT_OK(engine->device->EnqueueReady(engine->stream, 1));
  ASSERT_OK(engine->device->EnqueueWaitDone(engine->stream, done));
  ASSERT_CUDA(cudaStreamSynchronize(engine->stream));
}

TEST_F(DeviceStreamTest, AnEngineThatIsKilledWhileItOwesAWordLeavesNothingBehind) {
  ASSERT_OK_AND_ASSIGN(auto daemon, StartDaemon());
  ASSERT_OK_AND_ASSIGN(auto neighbour, Engine::Start(daemon->listen()));
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK_AND_ASSIGN(auto debtor, StartDebtor(*daemon));
    EXPECT_EQ(StreamsOf(*daemon, "device_streams"), 2);
    EXPECT_EQ(StreamsOf(*daemon, "arena_bytes"), 4 * double(kBytes));
    debtor->Signal(SIGKILL);
    ASSERT_OK(debtor->Wait());
    EXPECT_TRUE(Eventually([&] { return StreamsOf(*daemon, "device_draining_streams") == 0; }));
    EXPECT_TRUE(Eventually([&] { return StreamsOf(*daemon, "device_streams") == 1; }));
    EXPECT_TRUE(Eventually([&] { return StreamsOf(*daemon, "arena_bytes") == 2 * double(kBytes); }));
    ASSERT_OK_AND_ASSIGN(const uint64_t done, neighbour->Copy(0, kBytes));
    ASSERT_OK(neighbour->device->EnqueueWaitDone(neighbour->stream, done));
    ASSERT_CUDA(cudaStreamSynchronize(neighbour->stream));
  }
  ASSERT_OK_AND_ASSIGN(auto next, Engine::Start(daemon->listen()));
  ASSERT_OK_AND_ASSIGN(const uint64_t done, next->Copy(0, kBytes));
  ASSERT_OK(next->device->EnqueueWaitDone(next->stream, done));
  ASSERT_CUDA(cudaStreamSynchronize(next->stream));
}

TEST_F(DeviceStreamTest, ADaemonThatIsKilledLeavesNoStreamHanging) {
  ASSERT_OK_AND_ASSIGN(auto daemon, StartDaemon());
  ASSERT_OK_AND_ASSIGN(auto engine, Engine::Start(daemon->listen()));
  ASSERT_OK_AND_ASSIGN(const uint64_t done, engine->Copy(1, kBytes));
  ASSERT_OK(engine->device->EnqueueWaitDone(engine->stream, done));
  ASSERT_OK(engine->device->EnqueueWaitDone(engine->stream, done + 1000));
  EXPECT_EQ(cudaStreamQuery(engine->stream), cudaErrorNotReady);
  daemon->Kill();
  ASSERT_CUDA(cudaStreamSynchronize(engine->stream));  // this thread runs no event loop meanwhile
  EXPECT_TRUE(engine->device->lost());
  ASSERT_OK(engine->device->EnqueueWaitDone(engine->stream, done + 2000));
  ASSERT_CUDA(cudaStreamSynchronize(engine->stream));
  EXPECT_FALSE(engine->Copy(2, kBytes).ok());
}

TEST_F(DeviceStreamTest, ADaemonThatIsStoppedHoldsUpAStreamForTheDeadlineAtMost) {
  ASSERT_OK_AND_ASSIGN(auto daemon, StartDaemon());
  Client::Options options;
  options.deadline_ms = 1000;
  ASSERT_OK_AND_ASSIGN(auto engine, Engine::Start(daemon->listen(), kBytes, options));
  ASSERT_OK_AND_ASSIGN(const uint64_t done, engine->Copy(1, kBytes));
  ASSERT_OK(engine->device->EnqueueReady(engine->stream, 1));
  ASSERT_OK(engine->device->EnqueueWaitDone(engine->stream, done));
  ASSERT_CUDA(cudaStreamSynchronize(engine->stream));
  EXPECT_FALSE(engine->device->lost());
  daemon->process().Signal(SIGSTOP);
  ASSERT_OK(
      engine->device->EnqueueWaitDone(engine->stream, done + 1));  // what it was asked for and had no time to begin
  ASSERT_CUDA(cudaStreamSynchronize(engine->stream));
  EXPECT_TRUE(engine->device->lost());
  daemon->process().Signal(SIGCONT);
  EXPECT_EQ(engine->Copy(2, kBytes).status().code(), absl::StatusCode::kUnavailable);
  ASSERT_OK_AND_ASSIGN(auto next, Engine::Start(daemon->listen()));
  ASSERT_OK_AND_ASSIGN(const uint64_t again, next->Copy(0, kBytes));
  ASSERT_OK(next->device->EnqueueWaitDone(next->stream, again));
  ASSERT_CUDA(cudaStreamSynchronize(next->stream));
  EXPECT_FALSE(next->device->lost());
}

TEST_F(DeviceStreamTest, ADaemonEndsThoughAnEngineOwesItAWord) {
  ASSERT_OK_AND_ASSIGN(auto daemon, StartDaemon());
  ASSERT_OK_AND_ASSIGN(auto debtor, StartDebtor(*daemon));
  daemon->process().Signal(SIGINT);
  ASSERT_OK_AND_ASSIGN(const int status, daemon->Terminate());
  EXPECT_EQ(status, 0);
}

TEST_F(DeviceStreamTest, AsManyEnginesAsTheLimitSaysAllStalledHoldUpNobody) {
  constexpr int kStreams = 12;  // user_gpu_streams
  ASSERT_OK_AND_ASSIGN(auto daemon, StartDaemon());
  std::vector<std::unique_ptr<Engine>> engines;
  for (int i = 0; i < kStreams; ++i) {
    ASSERT_OK_AND_ASSIGN(auto engine, Engine::Start(daemon->listen(), 1 << 20));
    engines.push_back(std::move(engine));
    ASSERT_OK(engines.back()->Copy(1, 1 << 20));
  }
  const absl::Status refused = Engine::Start(daemon->listen(), 1 << 20).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(DetailOf(refused).bound, absl::StrCat("at most ", kStreams)) << refused;
  for (int i = kStreams - 1; i >= 0; --i) {  // each alone, the rest standing
    engines[i]->device->words().Store(SharedSemaphores::Word::kReady, 1);
    EXPECT_TRUE(Eventually([&] { return engines[i]->device->words().Load(SharedSemaphores::Word::kDone) == 1; })) << i;
  }
  engines.pop_back();
  EXPECT_TRUE(Eventually([&] { return Engine::Start(daemon->listen(), 1 << 20).ok(); }));
}

TEST_F(DeviceStreamTest, APoolThatDoesNotFitStopsTheStartAndSaysWhatIsFree) {
  ASSERT_OK_AND_ASSIGN(const CommandResult result,
                       RunCommand({"/bin/sh", "-c",
                                   DataPath("kvmanager/daemon/kvmanagerd") +
                                       " --listen tcp:127.0.0.1:0 --host-pool-bytes 64MiB --device-pool-bytes 256GiB "
                                       "--device-slab-bytes 8GiB 2>&1"}));
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_TRUE(absl::StrContains(result.output, "--device-pool-bytes")) << result.output;
  EXPECT_TRUE(absl::StrContains(result.output, "has free")) << result.output;
}

}  // namespace
}  // namespace kvmanager::testing
