#include "kvmanager/rpc/listen_socket.h"

#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

class ListenSocketTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/kv_listen_XXXXXX";  // short: a socket's path has at most 107 bytes
    ASSERT_NE(mkdtemp(name), nullptr);
    directory_ = name;
    path_ = directory_ + "/s";
  }
  void TearDown() override {
    unlink(path_.c_str());
    rmdir(path_.c_str());
    rmdir(directory_.c_str());
  }
  std::string Refusal() {
    const auto socket = ListenSocket::Bind("unix:" + path_);
    EXPECT_EQ(socket.status().code(), absl::StatusCode::kUnavailable);
    return std::string(socket.status().message());
  }

  std::string directory_, path_;
};

TEST_F(ListenSocketTest, SaysWhatIsInTheWay) {
  std::ofstream(path_) << "precious";
  EXPECT_NE(Refusal().find("a file that is no socket is there"), std::string::npos) << Refusal();
  EXPECT_EQ(access(path_.c_str(), F_OK), 0) << "it stays";
  unlink(path_.c_str());
  mkdir(path_.c_str(), 0700);
  EXPECT_NE(Refusal().find("a directory is there"), std::string::npos) << Refusal();
  rmdir(path_.c_str());
  const auto first = ListenSocket::Bind("unix:" + path_);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_NE(Refusal().find(absl::StrCat("process ", getpid(), " listens there already")), std::string::npos)
      << Refusal();
}

TEST_F(ListenSocketTest, NamesTheDirectoryToMake) {
  path_ = directory_ + "/not/yet/s";
  EXPECT_NE(Refusal().find("mkdir -p " + directory_ + "/not/yet"), std::string::npos) << Refusal();
}

TEST_F(ListenSocketTest, TheFileHasItsModeAsSoonAsItIsThere) {
  const mode_t before = umask(0);
  const auto open = ListenSocket::Bind("unix:" + path_ + "o");
  const auto closed = ListenSocket::Bind("unix:" + path_, {.flag = "--admin-listen", .mode = 0600, .admin = true});
  umask(before);
  ASSERT_TRUE(open.ok() && closed.ok()) << open.status() << closed.status();
  struct stat file;
  ASSERT_EQ(lstat((path_ + "o").c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, mode_t{0777});
  EXPECT_FALSE((*open)->admin());
  ASSERT_EQ(lstat(path_.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, mode_t{0600});
  EXPECT_TRUE((*closed)->admin());
}

TEST_F(ListenSocketTest, ErrorsNameTheFlag) {
  const auto first = ListenSocket::Bind("unix:" + path_);
  const auto second = ListenSocket::Bind("unix:" + path_, {.flag = "--admin-listen"});
  EXPECT_EQ(DetailOf(second.status()).field, "--admin-listen");
  EXPECT_EQ(DetailOf(ListenSocket::Bind("unix:", {.flag = "--admin-listen"}).status()).field, "--admin-listen");
}

TEST_F(ListenSocketTest, RemovesItsOwnFileAlone) {
  auto first = ListenSocket::Bind("unix:" + path_);
  ASSERT_TRUE(first.ok()) << first.status();
  unlink(path_.c_str());  // as who starts a successor by hand does
  auto successor = ListenSocket::Bind("unix:" + path_);
  ASSERT_TRUE(successor.ok()) << successor.status();
  first->reset();
  EXPECT_EQ(access(path_.c_str(), F_OK), 0) << "the successor's file is gone";
  successor->reset();
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
}

TEST_F(ListenSocketTest, ReplacesAStaleSocket) {
  {
    auto dead = ListenSocket::Bind("unix:" + path_);
    ASSERT_TRUE(dead.ok()) << dead.status();
    ASSERT_EQ(rename(path_.c_str(), (path_ + "x").c_str()), 0);  // stays when its listener goes, as after SIGKILL
  }
  ASSERT_EQ(rename((path_ + "x").c_str(), path_.c_str()), 0);
  const auto next = ListenSocket::Bind("unix:" + path_);
  EXPECT_TRUE(next.ok()) << next.status();
}

}  // namespace
}  // namespace kvmanager
