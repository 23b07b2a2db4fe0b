// What /proc says of a daemon, and the command that starts it again.
#include "client/cli/daemon_command.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace kvmanager::client::cli {
namespace {

namespace fs = std::filesystem;

// A folder as /proc/PID is.
std::string Process(const std::string& name, const std::string& cmdline, const std::string& parent,
                    const std::string& cgroup) {
  const fs::path folder = fs::path(::testing::TempDir()) / name;
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::ofstream(folder / "cmdline", std::ios::binary) << cmdline;
  std::ofstream(folder / "status") << "Name:\tkvmanagerd\nState:\tS (sleeping)\nPPid:\t" << parent << "\n";
  std::ofstream(folder / "cgroup") << cgroup;
  fs::create_symlink("/srv/my cache", folder / "cwd");
  return folder.string();
}

TEST(DaemonCommand, IsReadWordByWord) {
  using std::string_literals::operator""s;
  const std::string folder =
      Process("by-hand", "kvmanagerd\0--state-dir\0a b\0--tenants\0\0"s, "77", "0::/user.slice/session-1.scope\n");
  const DaemonCommand command = ReadCommand(folder);
  EXPECT_EQ(command.words, (std::vector<std::string>{"kvmanagerd", "--state-dir", "a b", "--tenants", ""}));
  EXPECT_EQ(command.directory, "/srv/my cache");
  EXPECT_EQ(command.unit, "");
  EXPECT_TRUE(Runs(folder));
  std::ofstream(folder + "/status") << "State:\tZ (zombie)\n";
  EXPECT_FALSE(Runs(folder));
  EXPECT_FALSE(Runs(folder + "/none"));
  EXPECT_TRUE(ReadCommand(folder + "/none").words.empty());
}

TEST(DaemonCommand, AServiceIsKnownByItsMainProcess) {
  const std::string group = "0::/system.slice/kvmanagerd.service\n";
  EXPECT_EQ(ReadCommand(Process("main", "x", "1", group)).unit, "kvmanagerd.service");
  EXPECT_EQ(ReadCommand(Process("old", "x", "1", "1:name=systemd:/system.slice/kv.service\n0::/\n")).unit,
            "kv.service");
  EXPECT_EQ(ReadCommand(Process("slice", "x", "1", "0::/kvmanager.slice/kvmanagerd.service\n")).unit,
            "kvmanagerd.service");
  EXPECT_EQ(ReadCommand(Process("child", "x", "77", group)).unit, "") << "started by hand in a service";
  EXPECT_EQ(ReadCommand(Process("container", "x", "1", "0::/\n")).unit, "");
  EXPECT_EQ(ReadCommand(Process("user", "x", "1", "0::/user.slice/user@5.service/app.slice/a.service\n")).unit, "");
}

TEST(DaemonCommand, OfThisProcessAndOfNobody) {
  const std::string self = "/proc/" + std::to_string(getpid());
  EXPECT_FALSE(ReadCommand(self).words.empty());
  EXPECT_TRUE(Runs(self));
  EXPECT_EQ(CommandOf("tcp:127.0.0.1:1").pid, 0);
  EXPECT_EQ(CommandOf("unix:/nonexistent/kv.sock").pid, 0);
}

TEST(DaemonCommand, TheHintHasTheFlags) {
  DaemonCommand before{.pid = 42,
                       .words = {"/usr/bin/kvmanagerd", "--listen", "unix:/run/kv.sock", "--state-dir", "/a b's"},
                       .directory = "/srv"};
  EXPECT_EQ(HowToStartAgain(before, false, "", false),
            "Process 42 has ended. Install the earlier version again, or take back what was changed in its "
            "configuration. Start it with the flags that it had, in /srv:\n"
            "  /usr/bin/kvmanagerd --listen unix:/run/kv.sock --state-dir '/a b'\\''s'\n"
            "With the same --state-dir it finds what was published, as long as --state-keep-s said.");
  const std::string cold = HowToStartAgain(before, true, "/new/kvmanagerd", true);
  EXPECT_EQ(cold.find("Process 42 still runs. If its configuration names another address"), 0u) << cold;
  EXPECT_NE(cold.find("Else end it (kill 42). Start it"), std::string::npos) << cold;
  EXPECT_EQ(cold.find("same --state-dir"), std::string::npos) << cold;
  before.unit = "kvmanagerd.service";
  EXPECT_NE(HowToStartAgain(before, false, "", false).find("systemctl restart kvmanagerd.service"), std::string::npos);
  const std::string unknown = HowToStartAgain({}, false, "/new/kvmanagerd", false);
  EXPECT_EQ(unknown.find("Start it with the flags that it had, --state-dir among them, which kvctl could not read"),
            0u);
  EXPECT_EQ(unknown.find("Process"), std::string::npos);
}

}  // namespace
}  // namespace kvmanager::client::cli
