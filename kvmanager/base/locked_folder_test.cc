#include "kvmanager/base/locked_folder.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using ::testing::HasSubstr;

class LockedFolderTest : public ::testing::Test {
 protected:
  LockedFolderTest() {
    const char* const base = std::getenv("TEST_TMPDIR");
    std::string name = absl::StrCat(base != nullptr ? base : "/tmp", "/locked-XXXXXX");
    KV_CHECK(mkdtemp(name.data()) != nullptr);
    folder_ = name;
  }
  ~LockedFolderTest() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string Error() { return std::string(LockedFolder::Open("--folder", folder_).status().message()); }

  std::string folder_;
};

TEST_F(LockedFolderTest, IsOfOneProcess) {
  const auto first = LockedFolder::Open("--folder", folder_);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(Error(), HasSubstr("open in another process"));
}

// As of a daemon that was killed: its memory goes first, then its files.
TEST_F(LockedFolderTest, WaitsForAHolderThatIsEnding) {
  constexpr size_t kBytes = size_t{1} << 30;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t holder = fork();
  if (holder == 0) {
    const auto lock = LockedFolder::Open("--folder", folder_);
    void* const memory =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    const bool is_ready = lock.ok() && memory != MAP_FAILED && write(ready[1], "r", 1) == 1;
    while (is_ready) pause();
    _exit(1);
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_THAT(Error(), HasSubstr("open in another process"));
  ASSERT_EQ(kill(holder, SIGKILL), 0);
  EXPECT_EQ(Error(), "");
  ASSERT_EQ(waitpid(holder, nullptr, 0), holder);
  close(ready[0]);
  close(ready[1]);
}

// As on a file system that is mounted read-only.
TEST_F(LockedFolderTest, NamesTheOptionOfOneThatCannotBeWritten) {
  ASSERT_EQ(mkdir((folder_ + "/lock").c_str(), 0700), 0);  // which nobody can open for writing, root included
  const absl::Status status = LockedFolder::Open("--folder", folder_).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(DetailOf(status).field, "--folder");
  EXPECT_THAT(Error(), HasSubstr("--folder is " + folder_ + " (opening " + folder_ + "/lock: "));
  EXPECT_THAT(Error(), HasSubstr("must be a directory in which this daemon can write"));
}

TEST_F(LockedFolderTest, APlaceIsCheckedBeforeAnythingIsMade) {
  const auto check = [&](const std::string& path) {
    const absl::Status status = LockedFolder::CheckPlace("--folder", path);
    if (status.ok()) EXPECT_TRUE(LockedFolder::Open("--folder", path).ok()) << path;
    return std::string(status.message());
  };
  EXPECT_EQ(LockedFolder::CheckPlace("--folder", folder_ + "/new"), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/new"));
  EXPECT_EQ(check(folder_), "");
  EXPECT_EQ(check(folder_ + "/new/"), "");
  EXPECT_THAT(check(folder_ + "/no/parent"), HasSubstr("a directory that can be made (No such file or directory)"));
  EXPECT_THAT(check("/dev/null"), HasSubstr("--folder is /dev/null, must be a directory"));
  EXPECT_THAT(check(""), HasSubstr("must be a directory"));
  ASSERT_EQ(symlink((folder_ + "/gone").c_str(), (folder_ + "/link").c_str()), 0);
  EXPECT_THAT(check(folder_ + "/link"), HasSubstr("must be a directory"));
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  EXPECT_THAT(check(folder_), HasSubstr("chmod 700 " + folder_));
}

TEST_F(LockedFolderTest, SaysWhatToDoAboutOneThatOthersCanRead) {
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  EXPECT_THAT(Error(), HasSubstr("chmod 700 " + folder_));
  ASSERT_EQ(chmod(folder_.c_str(), 01777), 0);
  EXPECT_THAT(Error(), HasSubstr("a directory of the daemon's own: " + folder_ + "/kvmanager"));
}

}  // namespace
}  // namespace kvmanager
