#include "codecs/calibrate/measured.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "codecs/calibrate/tensor_set.h"
#include "gtest/gtest.h"

namespace kvmanager::calibrate {
namespace {

constexpr char kTensor[] = "zack_hack.balanced.sensitivity";

class MeasuredTest : public ::testing::Test {
 protected:
  MeasuredTest() : path_(std::filesystem::path(::testing::TempDir()) / "measured.safetensors") {
    TensorSet trained;
    trained.AddFloats(kTensor, {2, 1, 2}, {1, 1, 1, 1});
    trained.AddFloats("zack.balanced.rates", {1}, {0.5f});
    artifact_ = *Calibration::Parse(
        SerializeCalibration({"model", "", 2, 1, 1, 16}, trained.tensors(),
                             {{"zack_hack.mode", "balanced"}, {"zack_hack.allocation", "head"}, {"seed", "3"}}),
        "artifact");
    tensors_.AddFloats(kTensor, {2, 1, 2}, {0.5f, 0, 2, 3});
    metadata_ = {{"zack_hack.allocation", "model"}, {"measured.parts", "layer"}, {"format", "pt"}};
  }
  ~MeasuredTest() override { std::filesystem::remove(path_); }

  absl::StatusOr<std::string> Add() {
    std::ofstream(path_, std::ios::binary) << SerializeSafetensors(tensors_.tensors(), metadata_);
    const auto measured = Safetensors::Open(path_);
    EXPECT_TRUE(measured.ok()) << measured.status();
    return WithMeasured(*artifact_, **measured);
  }
  void Refused(absl::string_view wanted) {
    const auto added = Add();
    EXPECT_FALSE(added.ok());
    EXPECT_TRUE(absl::StrContains(added.status().message(), wanted)) << added.status();
  }

  const std::string path_;
  std::shared_ptr<const Calibration> artifact_;
  TensorSet tensors_;
  TensorMetadata metadata_;
};

TEST_F(MeasuredTest, ReplacesSensitivitiesAndDefaults) {
  const auto file = Add();
  ASSERT_TRUE(file.ok()) << file.status();
  const auto made = Calibration::Parse(*file, "made");
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ((*made)->model(), artifact_->model());
  EXPECT_NE((*made)->digest(), artifact_->digest());
  const auto values = (*made)->Floats(kTensor, {2, 1, 2}, "");
  ASSERT_TRUE(values.ok());
  EXPECT_EQ(std::vector<float>(values->begin(), values->end()), (std::vector<float>{0.5f, 0, 2, 3}));
  EXPECT_EQ((*(*made)->Floats("zack.balanced.rates", {1}, ""))[0], 0.5f);
  TensorMetadata metadata = (*made)->metadata();
  EXPECT_EQ(metadata["zack_hack.allocation"], "model");
  EXPECT_EQ(metadata["zack_hack.mode"], "balanced");
  EXPECT_EQ(metadata["zack_hack.sensitivity"], "measured");
  EXPECT_EQ(metadata["measured.parts"], "layer");
  EXPECT_EQ(metadata["seed"], "3");
}

TEST_F(MeasuredTest, OtherThingsAreRefused) {
  tensors_.AddFloats("zack.balanced.rates", {1}, {0.1f});
  Refused("zack.balanced.rates");
  tensors_ = TensorSet();
  Refused("measured tensors");
  tensors_.AddFloats("zack_hack.joint.sensitivity", {2, 1, 2}, {1, 1, 1, 1});
  Refused("zack_hack.joint.sensitivity");
  tensors_ = TensorSet();
  tensors_.AddFloats(kTensor, {4}, {1, 1, 1, 1});
  Refused("[2,1,2]");
  for (const float bad : {-1.0f, INFINITY, NAN}) {
    tensors_.AddFloats(kTensor, {2, 1, 2}, {1, 1, bad, 1});
    Refused("[2]");
  }
  tensors_.AddFloats(kTensor, {2, 1, 2}, {1, 1, 1, 1});
  metadata_["zack_hack.allocation"] = "layer";
  Refused("zack_hack.allocation");
  metadata_["zack_hack.allocation"] = "head";
  metadata_["zack.mode"] = "joint";  // this artifact has no such default
  Refused("zack.mode");
  metadata_.erase("zack.mode");
  metadata_["model"] = "another";
  Refused("metadata model");
}

}  // namespace
}  // namespace kvmanager::calibrate
