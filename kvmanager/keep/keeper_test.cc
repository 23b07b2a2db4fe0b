// The keeper as a process of its own, and daemons that come and go.
#include "kvmanager/keep/keeper.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/child_process.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"
#include "kvmanager/keep/keeper_testing.h"
#include "kvmanager/keep/keeper_wire.h"
#include "kvmanager/keep/memory_keeper.h"
#include "kvmanager/memory/region.h"

namespace kvmanager {
namespace {

using testing::KeeperOf;
using testing::KillKeeperOf;

class KeeperTest : public ::testing::Test {
 protected:
  KeeperTest() {
    // Short, for its socket.
    std::string name = "/tmp/kv-keeper-XXXXXX";
    KV_CHECK(mkdtemp(name.data()) != nullptr);
    folder_ = name;
    const char* const tests = std::getenv("TEST_SRCDIR");
    const char* const workspace = std::getenv("TEST_WORKSPACE");
    program_ = absl::StrCat(tests, "/", workspace, "/kvmanager/keep/keeper_main");
  }
  ~KeeperTest() override {
    KillKeeperOf(folder_);
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::unique_ptr<MemoryKeeper> Open(const std::string& seconds = "30") {
    auto keeper = MemoryKeeper::Open(folder_, {program_, kKeeperFlag, folder_, seconds});
    EXPECT_TRUE(keeper.ok()) << keeper.status();
    return *std::move(keeper);
  }
  pid_t Run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), program_);
    auto process = ChildProcess::Start(arguments, {});
    KV_CHECK(process.ok());
    const pid_t pid = process->pid();
    process->Leave();
    return pid;
  }
  // Waits for its end: the exit status, or the signal's number, negative.
  static int StatusOf(pid_t pid) {
    int status = 0;
    KV_CHECK(waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }
  std::string folder_, program_;
};

int MakeMemory(const std::string& bytes) {
  const int fd = memfd_create("test", MFD_CLOEXEC);
  KV_CHECK(fd >= 0 && pwrite(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  return fd;
}

std::string ReadMemory(int fd) {
  char bytes[100];
  const ssize_t size = pread(fd, bytes, sizeof bytes, 0);
  return {bytes, static_cast<size_t>(std::max<ssize_t>(size, 0))};
}

TEST_F(KeeperTest, KeepsWhatADaemonHadUntilTheNextOne) {
  auto keeper = Open();
  EXPECT_EQ(keeper->left(), 0u);
  const pid_t pid = KeeperOf(folder_);
  ASSERT_GT(pid, 0);
  const int one = MakeMemory("one"), two = MakeMemory("two"), three = MakeMemory("three");
  ASSERT_TRUE(keeper->Keep("a", one).ok());
  ASSERT_TRUE(keeper->Keep("b", two).ok());
  ASSERT_TRUE(keeper->Keep("a", three).ok());  // in its place
  for (const int fd : {one, two, three}) close(fd);
  keeper = nullptr;
  keeper = Open();
  EXPECT_EQ(keeper->left(), 2u);
  const int a = keeper->Take("a"), b = keeper->Take("b");
  EXPECT_EQ(ReadMemory(a), "three");
  EXPECT_EQ(ReadMemory(b), "two");
  EXPECT_EQ(keeper->Take("a"), -1);
  EXPECT_EQ(keeper->Take("c"), -1);
  for (const int fd : {a, b}) close(fd);
  // Taken is not gone.
  keeper = nullptr;
  keeper = Open();
  EXPECT_EQ(keeper->left(), 2u);
  ASSERT_TRUE(keeper->Forget().ok());
  EXPECT_EQ(keeper->left(), 0u);
  keeper = nullptr;
  keeper = Open();
  EXPECT_EQ(keeper->left(), 0u);
  keeper = nullptr;
  EXPECT_EQ(KeeperOf(folder_), pid) << "it was one process all the time";
  struct stat info;
  ASSERT_EQ(stat(KeeperPath(folder_)->c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(KeeperTest, OutlivesAKillOfItsDaemonAndTheTerminalsSignals) {
  const pid_t daemon = fork();
  if (daemon == 0) {
    setpgid(0, 0);
    auto keeper = MemoryKeeper::Open(folder_, {program_, kKeeperFlag, folder_, "30"});
    const bool kept = keeper.ok() && (*keeper)->Keep("a", MakeMemory("bytes")).ok();
    if (!kept) _exit(1);
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(daemon, &status, 0), daemon);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  kill(-daemon, SIGINT);  // what a terminal sends to all that were started in it
  auto keeper = Open();
  const int fd = keeper->Take("a");
  EXPECT_EQ(ReadMemory(fd), "bytes");
  close(fd);
}

TEST_F(KeeperTest, EndsWhenItsTimeIsOverAndNoDaemonIsThere) {
  auto keeper = Open("1");
  usleep(1500000);
  ASSERT_TRUE(keeper->Keep("a", 0).ok());  // with a daemon it stays
  keeper = nullptr;
  usleep(500000);
  keeper = Open("1");
  EXPECT_EQ(keeper->left(), 1u);
  keeper = nullptr;
  for (int i = 0; i < 500 && std::filesystem::exists(*KeeperPath(folder_)); ++i) usleep(10000);
  EXPECT_FALSE(std::filesystem::exists(*KeeperPath(folder_)));
  keeper = Open("1");
  EXPECT_EQ(keeper->left(), 0u);
}

TEST_F(KeeperTest, ADaemonSaysHowLongItStays) {
  auto keeper = Open("100000");
  EXPECT_TRUE(keeper->Ping().ok());
  EXPECT_TRUE(keeper->SetIdle(1).ok());
  EXPECT_FALSE(keeper->SetIdle(-1).ok());
  EXPECT_TRUE(keeper->Ping().ok());
  keeper = nullptr;
  for (int i = 0; i < 500 && std::filesystem::exists(*KeeperPath(folder_)); ++i) usleep(10000);
  EXPECT_FALSE(std::filesystem::exists(*KeeperPath(folder_)));
  keeper = Open("1");
  KillKeeperOf(folder_);
  EXPECT_TRUE(absl::IsUnavailable(keeper->Ping())) << "it has gone";
}

TEST_F(KeeperTest, ASocketThatNobodyServesIsReplaced) {
  Open();
  KillKeeperOf(folder_);  // its socket stays
  ASSERT_TRUE(std::filesystem::exists(*KeeperPath(folder_)));
  EXPECT_EQ(Open()->left(), 0u);
}

TEST_F(KeeperTest, OfTwoOfDaemonsTheSecondEnds) {
  const auto keeper = Open();
  EXPECT_EQ(StatusOf(Run({kKeeperFlag, folder_, "30"})), 0);
  EXPECT_TRUE(keeper->Ping().ok());
}

// One that a daemon started ends with the daemon's service.
TEST_F(KeeperTest, AServicesKeeperTakesThePlaceOfADaemonsAndAllThatItKeeps) {
  auto of_daemon = Open("1");
  const pid_t first = KeeperOf(folder_);
  const int one = MakeMemory("one"), two = MakeMemory("two");
  ASSERT_TRUE(of_daemon->Keep("a", one).ok());
  ASSERT_TRUE(of_daemon->Keep("b", two).ok());
  for (const int fd : {one, two}) close(fd);
  const pid_t service = Run({kKeeperFlag, folder_});
  for (int i = 0; i < 500 && KeeperOf(folder_) != service; ++i) usleep(10000);
  ASSERT_EQ(KeeperOf(folder_), service);
  EXPECT_NE(service, first);
  EXPECT_TRUE(of_daemon->gone() || !of_daemon->Ping().ok());
  of_daemon = nullptr;
  usleep(1200000);  // it does not end when the time of the one before would be over
  auto keeper = Open();
  EXPECT_EQ(keeper->pid(), static_cast<uint32_t>(service));
  ASSERT_EQ(keeper->left(), 2u);
  const int a = keeper->Take("a"), b = keeper->Take("b");
  EXPECT_EQ(ReadMemory(a), "one");
  EXPECT_EQ(ReadMemory(b), "two");
  for (const int fd : {a, b}) close(fd);
  // Another service's does not.
  EXPECT_EQ(StatusOf(Run({kKeeperFlag, folder_})), 1);
  EXPECT_TRUE(keeper->Ping().ok());
  EXPECT_EQ(KeeperOf(folder_), service);
  keeper = nullptr;
  KillKeeperOf(folder_);
  EXPECT_EQ(StatusOf(service), -SIGKILL);
}

TEST_F(KeeperTest, OfManyServicesAndDaemonsThatStartAtOnceAServicesStays) {
  for (int round = 0; round < 20; ++round) {
    std::vector<pid_t> services, of_daemons;
    for (int i = 0; i < 3; ++i) {
      of_daemons.push_back(Run({kKeeperFlag, folder_, "30"}));
      services.push_back(Run({kKeeperFlag, folder_}));
    }
    int stay = 0;
    for (int i = 0; i < 500 && stay == 0; ++i) {
      usleep(10000);
      for (const pid_t service : services) stay = KeeperOf(folder_) == service ? service : stay;
    }
    ASSERT_NE(stay, 0);
    for (const pid_t each : of_daemons) EXPECT_EQ(StatusOf(each), 0);
    for (const pid_t each : services) {
      if (each != stay) {
        EXPECT_EQ(StatusOf(each), 1);
      }
    }
    EXPECT_EQ(KeeperOf(folder_), stay);
    KillKeeperOf(folder_);
    EXPECT_EQ(StatusOf(stay), -SIGKILL);
  }
}

TEST_F(KeeperTest, SaysWhatIsWrong) {
  const auto run = [&](const std::vector<std::string>& arguments) { return StatusOf(Run(arguments)); };
  EXPECT_EQ(run({kKeeperFlag}), 2);
  EXPECT_EQ(run({kKeeperFlag, folder_, "soon"}), 2);
  EXPECT_EQ(run({kKeeperFlag, folder_, "1000001"}), 2);
  EXPECT_EQ(run({kKeeperFlag, folder_ + "/none"}), 1);
  EXPECT_EQ(run({kKeeperFlag, folder_ + std::string(100, 'x')}), 1);
  const auto none = MemoryKeeper::Open(folder_, {"/bin/true"});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(MemoryKeeper::Open("/" + std::string(200, 'x'), {program_}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// A daemon that starts is not to wait for ever, even where connecting would.
TEST_F(KeeperTest, AKeeperThatIsStoppedIsAnError) {
  Open();
  const pid_t keeper = KeeperOf(folder_);
  ASSERT_GT(keeper, 0);
  ASSERT_EQ(kill(keeper, SIGSTOP), 0);
  std::vector<int> waiting;
  const sockaddr_un address = UnixAddress(KeeperPath(folder_).value());
  for (bool more = true; more;) {
    waiting.push_back(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    more = connect(waiting.back(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  EXPECT_EQ(errno, EAGAIN);
  const auto stopped = MemoryKeeper::Open(folder_, {program_, kKeeperFlag, folder_, "30"});
  EXPECT_EQ(stopped.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(stopped.status().message()), ::testing::HasSubstr("--state-dir " + folder_));
  EXPECT_EQ(StatusOf(Run({kKeeperFlag, folder_})), 1) << "a service's neither waits for it for ever";
  for (const int fd : waiting) close(fd);
  EXPECT_EQ(StatusOf(Run({kKeeperFlag, folder_})), 1) << "nor where it can connect";
  ASSERT_EQ(kill(keeper, SIGCONT), 0);
  EXPECT_NE(Open(), nullptr);
}

TEST_F(KeeperTest, WhatNoDaemonSaysIsRefusedAndTheKeeperLives) {
  rlimit limit;  // as the daemon does it; the keeper inherits it
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  {
    auto keeper = Open();
    ASSERT_TRUE(keeper->Keep("a", 0).ok());
    for (size_t i = 1; i < kKeptMax; ++i) ASSERT_TRUE(keeper->Keep(absl::StrCat("m", i), 0).ok());
    EXPECT_FALSE(keeper->Keep("one more", 0).ok());
    EXPECT_TRUE(keeper->Keep("a", 0).ok());
    EXPECT_FALSE(keeper->Keep("", 0).ok());
    EXPECT_FALSE(keeper->Keep("without a descriptor", -1).ok());
  }
  const auto answer = [&](int fd, const std::string& bytes) {
    EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    const auto packet = ReceiveKeeperPacket(fd);
    return packet.ok() ? packet->type : KeeperPacketType::kDone;
  };
  const int fd = ConnectToKeeper(KeeperPath(folder_).value());
  ASSERT_GE(fd, 0);
  EXPECT_EQ(answer(fd, "?"), KeeperPacketType::kRefused);
  EXPECT_EQ(answer(fd, std::string(5000, 'K')), KeeperPacketType::kRefused);
  EXPECT_EQ(answer(fd, "D"), KeeperPacketType::kRefused);
  EXPECT_EQ(answer(fd, "Kname"), KeeperPacketType::kRefused);
  close(fd);
  EXPECT_EQ(Open()->left(), kKeptMax);
}

}  // namespace
}  // namespace kvmanager
