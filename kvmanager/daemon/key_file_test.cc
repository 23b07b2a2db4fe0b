#include "kvmanager/daemon/key_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kMin = 32, kMax = 4096;

std::string Write(const std::string& name, size_t bytes, mode_t mode) {
  const std::string path = testing::TempDir() + "/" + name;
  unlink(path.c_str());
  std::ofstream(path) << std::string(bytes, 'k');
  EXPECT_EQ(chmod(path.c_str(), mode), 0);
  return path;
}

TEST(KeyFile, OfGoodLengthAndMode) {
  for (const size_t bytes : {kMin, size_t{100}, kMax}) {
    for (const mode_t mode : {0600, 0400}) {
      const auto key = ReadKeyFile("--key", Write("good", bytes, mode), kMin, kMax);
      ASSERT_TRUE(key.ok()) << key.status();
      EXPECT_EQ(*key, std::string(bytes, 'k'));
    }
  }
}

TEST(KeyFile, WhichOthersCanReadOrWriteIsRefused) {
  for (const mode_t mode : {0640, 0604, 0620, 0602, 0610, 0601, 0644, 0660, 0444}) {
    const std::string path = Write("open", kMin, mode);
    const auto key = ReadKeyFile("--key", path, kMin, kMax);
    ASSERT_TRUE(absl::IsInvalidArgument(key.status())) << std::oct << mode;
    EXPECT_EQ(DetailOf(key.status()).field, "--key");
    EXPECT_NE(DetailOf(key.status()).bound.find("chmod 600 " + path), std::string::npos) << key.status();
  }
}

TEST(KeyFile, OfAnotherLengthIsRefused) {
  for (const size_t bytes : {size_t{0}, kMin - 1, kMax + 1, size_t{100000}}) {
    const auto key = ReadKeyFile("--key", Write("length", bytes, 0600), kMin, kMax);
    ASSERT_TRUE(absl::IsInvalidArgument(key.status())) << bytes;
    EXPECT_NE(DetailOf(key.status()).bound.find("32..4096 bytes"), std::string::npos) << key.status();
  }
}

TEST(KeyFile, WhatIsNoFileIsRefused) {
  for (const std::string& path : {testing::TempDir(), testing::TempDir() + "/nothing", std::string("/dev/zero")}) {
    const auto key = ReadKeyFile("--key", path, kMin, kMax);
    EXPECT_TRUE(absl::IsInvalidArgument(key.status())) << path;
    EXPECT_EQ(DetailOf(key.status()).field, "--key");
  }
}

TEST(KeyFile, OfAnotherUserIsRefused) {
  const std::string path = Write("theirs", kMin, 0600);
  if (chown(path.c_str(), 65534, 65534) != 0) GTEST_SKIP() << "only root can give a file away";
  const auto key = ReadKeyFile("--key", path, kMin, kMax);
  EXPECT_TRUE(absl::IsInvalidArgument(key.status())) << key.status();
}

}  // namespace
}  // namespace kvmanager
