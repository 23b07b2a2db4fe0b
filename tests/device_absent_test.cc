// What a daemon without a GPU pool says, on any machine.
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "client/client.h"
#include "client/device.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/raw_rpc.h"

namespace kvmanager::testing {
namespace {

using client::Client;
using client::DeviceClient;

TEST(DeviceAbsent, OpenDeviceSaysWhyNotAndWhatToDo) {
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start({}));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  const absl::Status refused = DeviceClient::Open(client.get(), 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "--device-pool-bytes")) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), DeviceSummary())) << refused;
  EXPECT_OK(client->Ping());
  ASSERT_OK_AND_ASSIGN(const client::DaemonDescription status, client->Status());
  EXPECT_EQ(status.gpus, DeviceSummary());
  EXPECT_EQ(status.pools.size(), 1u);
  EXPECT_EQ(status.pin_total_bytes, 0u);
}

TEST(DeviceAbsent, OverTcpItIsRefused) {
  DaemonOptions options;
  options.listen = "tcp:127.0.0.1:0";
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(options));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  const absl::Status refused = DeviceClient::Open(client.get(), 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "Unix")) << refused;
  EXPECT_OK(client->Ping());
}

TEST(DeviceAbsent, DeviceArenasAndFeaturesAreNotThere) {
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start({}));
  RawRpc rpc;
  auto connection = rpc.Connect(daemon->listen());
  ASSERT_NE(connection, nullptr);
  auto arena = connection->daemon.createDeviceArenaRequest();
  arena.setBytes(1 << 20);
  auto reply = arena.send().wait(rpc.wait());
  EXPECT_EQ(reply.getStatus().getCode(), 9);
  EXPECT_FALSE(reply.hasArena());
  auto hello = connection->daemon.helloRequest();
  hello.initRequest().setApiMajor(api::API_MAJOR);
  auto greeted = hello.send().wait(rpc.wait());
  for (const auto feature : greeted.getReply().getFeatures()) EXPECT_STRNE(feature.cStr(), "device");
  auto strangers = rpc.Connect(daemon->listen(), /*hello=*/false);
  auto open = strangers->daemon.openDeviceRequest().send().wait(rpc.wait());
  EXPECT_EQ(open.getStatus().getCode(), 9);
}

TEST(DeviceAbsent, APoolOnAGpuThatIsNotThereStopsTheStartAndNamesTheOption) {
  if (Device::Open(0).ok()) GTEST_SKIP() << "there is a GPU";
  ASSERT_OK_AND_ASSIGN(const CommandResult result,
                       RunCommand({"/bin/sh", "-c",
                                   DataPath("kvmanager/daemon/kvmanagerd") +
                                       " --listen tcp:127.0.0.1:0 --host-pool-bytes 64MiB --device-pool-bytes 1GiB "
                                       "--devices 0 2>&1"}));
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_TRUE(absl::StrContains(result.output, "GPUs: ")) << result.output;
  EXPECT_TRUE(absl::StrContains(result.output, "--device-pool-bytes asks for GPU 0")) << result.output;
  EXPECT_TRUE(absl::StrContains(result.output, "leave the option out")) << result.output;
}

}  // namespace
}  // namespace kvmanager::testing
