#include "kvmanager/base/private_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kMin = 32, kMax = 4096;
const PrivateFileRules kSecret = {.secret = true, .bytes_min = kMin, .bytes_max = kMax, .made_by = "make one"};
const PrivateFileRules kOpen = {.bytes_min = kMin, .bytes_max = kMax};

std::string Write(const std::string& name, size_t bytes, mode_t mode) {
  const std::string path = testing::TempDir() + "/" + name;
  unlink(path.c_str());
  std::ofstream(path) << std::string(bytes, 'k');
  EXPECT_EQ(chmod(path.c_str(), mode), 0);
  return path;
}

TEST(PrivateFile, OfGoodLengthAndMode) {
  for (const size_t bytes : {kMin, size_t{100}, kMax}) {
    for (const mode_t mode : {0600, 0400}) {
      const auto file = ReadPrivateFile("--key", Write("good", bytes, mode), kSecret);
      ASSERT_TRUE(file.ok()) << file.status();
      EXPECT_EQ(file->text, std::string(bytes, 'k'));
      EXPECT_EQ(file->mode & 07777, mode);
    }
  }
  for (const mode_t mode : {0644, 0444, 0640, 0755}) {
    const auto file = ReadPrivateFile("--list", Write("list", kMin, mode), kOpen);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->mode & 07777, mode);
  }
}

TEST(PrivateFile, ASecretThatOthersCanReadOrWriteIsRefused) {
  for (const mode_t mode : {0640, 0604, 0620, 0602, 0610, 0601, 0644, 0660, 0444}) {
    const std::string path = Write("open", kMin, mode);
    const auto file = ReadPrivateFile("--key", path, kSecret);
    ASSERT_TRUE(absl::IsInvalidArgument(file.status())) << std::oct << mode;
    EXPECT_EQ(DetailOf(file.status()).field, "--key");
    EXPECT_NE(DetailOf(file.status()).bound.find("chmod 600 " + path), std::string::npos) << file.status();
  }
}

TEST(PrivateFile, WhatOthersCanWriteIsRefused) {
  for (const mode_t mode : {0620, 0602, 0666, 0664, 0622}) {
    const std::string path = Write("written", kMin, mode);
    const auto file = ReadPrivateFile("--list", path, kOpen);
    ASSERT_TRUE(absl::IsInvalidArgument(file.status())) << std::oct << mode;
    EXPECT_NE(DetailOf(file.status()).bound.find("chmod go-w " + path), std::string::npos) << file.status();
  }
}

TEST(PrivateFile, OfAnotherLengthIsRefused) {
  for (const size_t bytes : {size_t{0}, kMin - 1, kMax + 1, size_t{100000}}) {
    const auto file = ReadPrivateFile("--key", Write("length", bytes, 0600), kSecret);
    ASSERT_TRUE(absl::IsInvalidArgument(file.status())) << bytes;
    EXPECT_EQ(DetailOf(file.status()).bound, "32..4096 bytes: make one") << file.status();
  }
  const auto file = ReadPrivateFile("--list", Write("length", 1, 0600), kOpen);
  EXPECT_EQ(DetailOf(file.status()).bound, "32..4096 bytes") << file.status();
}

TEST(PrivateFile, WhatIsNoFileIsRefused) {
  const std::string pipe = testing::TempDir() + "/pipe";
  unlink(pipe.c_str());
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path :
       {testing::TempDir(), testing::TempDir() + "/nothing", std::string("/dev/zero"), pipe}) {
    const auto file = ReadPrivateFile("--key", path, kSecret);
    EXPECT_TRUE(absl::IsInvalidArgument(file.status())) << path;
    EXPECT_EQ(DetailOf(file.status()).field, "--key");
  }
}

TEST(PrivateFile, OfAnotherUserIsRefused) {
  const std::string path = Write("theirs", kMin, 0600);
  if (chown(path.c_str(), 65534, 65534) != 0) GTEST_SKIP() << "only root can give a file away";
  for (const PrivateFileRules& rules : {kSecret, kOpen}) {
    const auto file = ReadPrivateFile("--key", path, rules);
    EXPECT_TRUE(absl::IsInvalidArgument(file.status())) << file.status();
    EXPECT_NE(DetailOf(file.status()).value.find("user 65534"), std::string::npos) << file.status();
  }
}

}  // namespace
}  // namespace kvmanager
