#include "kvmanager/rpc/listen_socket.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

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
  EXPECT_NE(Refusal().find("another process listens there"), std::string::npos) << Refusal();
}

TEST_F(ListenSocketTest, NamesTheDirectoryToMake) {
  path_ = directory_ + "/not/yet/s";
  EXPECT_NE(Refusal().find("mkdir -p " + directory_ + "/not/yet"), std::string::npos) << Refusal();
}

}  // namespace
}  // namespace kvmanager
