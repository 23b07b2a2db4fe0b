#include "examples/engine/codec_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/safetensors.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class CodecFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string directory = ::testing::TempDir() + "codec-files-XXXXXX";
    ASSERT_NE(mkdtemp(directory.data()), nullptr);
    directory_ = directory;
    fs::create_directory(directory_ / "more");
    Write("a.safetensors", {{"digest", "aaaa"}});
    Write("b.safetensors", {{"digest", "bbbb"}});
    Write("more/b.safetensors", {{"digest", "bbbb"}});
    Write("weights.safetensors", {});
  }
  void TearDown() override { fs::remove_all(directory_); }
  void Write(const std::string& name, const TensorMetadata& metadata) {
    std::ofstream(directory_ / name, std::ios::binary) << SerializeSafetensors({}, metadata);
  }
  std::string Path(const std::string& name) const { return (directory_ / name).string(); }
  fs::path directory_;
};

TEST_F(CodecFilesTest, PathsBecomeNames) {
  for (const bool own : {true, false}) {
    for (const std::string name : {"a.safetensors", "a"}) {
      const auto files = ResolveCodecFiles(absl::StrCat("zack:rate=0.3,calibration=", Path(name), ",fold=1"), own);
      ASSERT_TRUE(files.ok()) << files.status();
      EXPECT_EQ(files->codec, "zack:rate=0.3,calibration=a.safetensors,fold=1");
      EXPECT_EQ(files->directory, directory_.string());
      EXPECT_EQ(files->calibration_digest, "aaaa");
    }
    const auto none = ResolveCodecFiles("hack:k_bits=3", own);
    ASSERT_TRUE(none.ok());
    EXPECT_EQ(none->codec, "hack:k_bits=3");
    EXPECT_EQ(none->directory + none->calibration_digest, "");
  }
}

TEST_F(CodecFilesTest, PoliciesNameSeveral) {
  const std::string text =
      absl::StrCat("million:calibration=", Path("a"), ";0..1=zack:calibration=", Path("b"), ",rate=0");
  const auto own = ResolveCodecFiles(text, true);
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_EQ(own->codec, "million:calibration=a.safetensors;0..1=zack:calibration=b.safetensors,rate=0");
  EXPECT_EQ(own->calibration_digest, "");
  const auto running = ResolveCodecFiles(text, false);
  ASSERT_TRUE(running.ok());
  EXPECT_EQ(running->codec, "million:calibration=aaaa;0..1=zack:calibration=bbbb,rate=0");
  const auto apart =
      ResolveCodecFiles(absl::StrCat("zack:calibration=", Path("a"), ";0=zack:calibration=", Path("more/b")), true);
  EXPECT_THAT(std::string(apart.status().message()), HasSubstr("put the files together"));
}

TEST_F(CodecFilesTest, WhatIsNoFileIsTheDaemonsOrAnError) {
  const auto named = ResolveCodecFiles("zack:calibration=llama-3", false);
  ASSERT_TRUE(named.ok());
  EXPECT_EQ(named->codec, "zack:calibration=llama-3");
  EXPECT_EQ(named->calibration_digest, "");
  EXPECT_EQ(ResolveCodecFiles("zack:calibration=/gone/x", false)->codec, "zack:calibration=x");
  const auto missing = ResolveCodecFiles(absl::StrCat("zack:calibration=", Path("c")), true);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("kvctl calibrate"));
  const auto weights = ResolveCodecFiles(absl::StrCat("zack:calibration=", Path("weights")), true);
  EXPECT_THAT(std::string(weights.status().message()), HasSubstr("kvctl calibrate"));
  std::ofstream(directory_ / "short.safetensors") << "short";
  EXPECT_FALSE(ResolveCodecFiles(absl::StrCat("zack:calibration=", Path("short")), true).ok());
}

}  // namespace
}  // namespace kvmanager::engine
