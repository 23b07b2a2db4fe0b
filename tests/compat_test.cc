// Programs of an earlier commit with those of this one: old clients with the new daemon, new clients with the old
// daemon, and hand-offs between daemons of both, to either side.
//
// The environment variable KVMANAGER_OLD_BUILD names a folder with the earlier kvmanagerd, kvctl and compat_client;
// tests/old_build makes one. Without it nothing is tested, and the test says so.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "codecs/calibrate/synthetic.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

constexpr char kVariable[] = "KVMANAGER_OLD_BUILD";

enum class Side { kNew, kOld };
const char* Name(Side side) { return side == Side::kNew ? "new" : "old"; }

/// What users have: no loss, `default` without an artifact and its sinks, other sinks and a raw layer, none, an
/// artifact.
const char* const kCodecs[] = {"raw",
                               "hack:k_bits=4,v_bits=3",
                               "hack:k_bits=3,v_bits=2;0=raw;sinks=100",
                               "hack:k_bits=4,v_bits=3;sinks=0",
                               "zack+hack:calibration=a",
                               "pq:bits=4,ratio=1,iterations=1"};

class CompatTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const folder = std::getenv(kVariable);
    if (folder == nullptr || *folder == '\0') {
      GTEST_SKIP() << kVariable << " names no folder: nothing is tested against an earlier build (tests/old_build)";
    }
    old_ = folder;
    for (const char* const program : {"kvmanagerd", "kvctl", "compat_client"}) {
      ASSERT_EQ(access(absl::StrCat(old_, "/", program).c_str(), X_OK), 0)
          << kVariable << "=" << old_ << " has no program " << program << "; tests/old_build makes it";
    }
    const client::CacheOptions shape = SmallCache("raw");
    const auto artifact = SyntheticCalibration(
        {shape.model, shape.revision, shape.layers, shape.kv_heads, shape.query_heads, shape.head_dim}, 7, {});
    const std::string file = SerializeCalibration(artifact->model(), artifact->tensors(), artifact->metadata());
    std::ofstream(std::filesystem::path(artifacts_.path()) / "a.safetensors", std::ios::binary)
        .write(file.data(), std::streamsize(file.size()));
  }
  std::string Program(Side side, const std::string& name, const std::string& here) const {
    return side == Side::kOld ? absl::StrCat(old_, "/", name) : DataPath(here);
  }
  absl::StatusOr<std::unique_ptr<DaemonProcess>> StartDaemon(Side side) const {
    DaemonOptions options;
    options.program = Program(side, "kvmanagerd", "kvmanager/daemon/kvmanagerd");
    if (side == Side::kOld) options.hand_off_peers = "";  // its default is any, which it has no word for
    options.more_flags = {"--threads", "2", "--calibration-dir", artifacts_.path()};
    return DaemonProcess::Start(options);
  }
  /// Where a program that asks for Admin connects: an earlier one asks for it at the socket that it was told.
  static std::string AddressFor(Side program, Side daemon, const DaemonProcess& process) {
    return program == Side::kOld && daemon == Side::kNew ? process.admin() : process.listen();
  }
  void ExpectOk(Side client, const std::vector<std::string>& args) const {
    std::vector<std::string> argv = {Program(client, "compat_client", "tests/compat_client"),
                                     absl::StrCat("--calibration-dir=", artifacts_.path())};
    argv.insert(argv.end(), args.begin(), args.end());
    ASSERT_OK_AND_ASSIGN(const CommandResult result, RunCommand(argv, 60000));
    EXPECT_TRUE(result.status == 0 && result.output == "ok\n")
        << "exit status " << result.status << ": " << result.output;
  }

  std::string old_;
  TempDir artifacts_;
};

TEST_F(CompatTest, ClientsAndDaemonsOfBothSpeak) {
  for (const auto& [client, daemon] : {std::pair{Side::kOld, Side::kNew}, std::pair{Side::kNew, Side::kOld}}) {
    for (const std::string codec : kCodecs) {
      SCOPED_TRACE(absl::StrCat(Name(client), " client, ", Name(daemon), " daemon, ", codec));
      ASSERT_OK_AND_ASSIGN(const auto process, StartDaemon(daemon));
      ExpectOk(client, {"serve", AddressFor(client, daemon, *process), codec});
    }
  }
}

TEST_F(CompatTest, KvctlOfBothSpeaks) {
  for (const auto& [kvctl, daemon] : {std::pair{Side::kOld, Side::kNew}, std::pair{Side::kNew, Side::kOld}}) {
    SCOPED_TRACE(absl::StrCat(Name(kvctl), " kvctl, ", Name(daemon), " daemon"));
    ASSERT_OK_AND_ASSIGN(const auto process, StartDaemon(daemon));
    for (const char* const command : {"status", "caches", "sequences", "peers"}) {
      ASSERT_OK_AND_ASSIGN(const CommandResult result,
                           RunCommand({Program(kvctl, "kvctl", "client/cli/kvctl"), "--connect",
                                       AddressFor(kvctl, daemon, *process), command}));
      EXPECT_EQ(result.status, 0) << command << ": " << result.output;
    }
  }
}

class CompatHandOffTest : public CompatTest, public ::testing::WithParamInterface<std::tuple<const char*, Side>> {};

TEST_P(CompatHandOffTest, GetsThere) {
  const auto& [codec, from] = GetParam();
  const Side to = from == Side::kNew ? Side::kOld : Side::kNew;
  ASSERT_OK_AND_ASSIGN(const auto sender, StartDaemon(from));
  ASSERT_OK_AND_ASSIGN(const auto receiver, StartDaemon(to));
  for (const std::string how : {"whole", "streamed"}) {
    for (const Side client : {Side::kNew, Side::kOld}) {
      SCOPED_TRACE(absl::StrCat(codec, ", ", Name(from), " daemon to ", Name(to), " daemon, ", how, ", ", Name(client),
                                " client"));
      ExpectOk(client, {"hand_off", sender->listen(), receiver->listen(), receiver->peer(), codec, how});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, CompatHandOffTest,
                         ::testing::Combine(::testing::ValuesIn(kCodecs), ::testing::Values(Side::kOld, Side::kNew)),
                         [](const auto& info) {
                           return absl::StrCat("Codec", info.index / 2,
                                               std::get<1>(info.param) == Side::kOld ? "OldToNew" : "NewToOld");
                         });

}  // namespace
}  // namespace kvmanager::testing
