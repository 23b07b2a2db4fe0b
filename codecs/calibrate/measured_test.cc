#include "codecs/calibrate/measured.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/calibrate/factors.h"
#include "codecs/calibrate/plan.h"
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

TEST_F(MeasuredTest, AnotherBasisOfV) {
  const CalibrationModel model{"model", "", 1, 2, 2, 16};
  TensorSet trained;
  std::vector<int32_t> order(2 * 2 * 16);
  for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(15 - i % 16);
  const std::vector<float> energy(order.size(), 3.0f);
  for (ZackMode mode : kZackModes) {
    trained.AddIntegers(ZackName("zack_hack", mode, "order"), {1, 2, 2, 16}, order);
    trained.AddFloats(ZackName("zack_hack", mode, "energy"), {1, 2, 2, 16}, energy);
  }
  trained.AddFloats(kHadamardEnergy, {1, 2}, {5, 7});
  artifact_ = *Calibration::Parse(SerializeCalibration(model, trained.tensors(), {}), "artifact");
  tensors_ = TensorSet();
  metadata_ = {{"zack_hack.v_basis", "trained"}};
  auto made = Calibration::Parse(*Add(), "made");
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_FALSE((*made)->Has("zack_hack.balanced.vw.left"));
  EXPECT_EQ((*made)->metadata().count("zack_hack.sensitivity"), 0u);
  metadata_ = {{"zack_hack.v_basis", "hadamard"}};
  made = Calibration::Parse(*Add(), "made");
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ((*made)->metadata().at("zack_hack.v_basis"), "hadamard");
  for (const char* mode : {"joint", "balanced"}) {
    const std::string prefix = absl::StrCat("zack_hack.", mode, ".");
    const auto left = (*made)->Floats(prefix + "vw.left", {1, 2, 16, 16}, "");
    const auto right = (*made)->Floats(prefix + "vw.right", {1, 2, 16, 16}, "");
    ASSERT_TRUE(left.ok() && right.ok());
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 16; ++j) {
        float product = 0;  // left right^T of the second head
        for (int c = 0; c < 16; ++c) product += (*left)[256 + i * 16 + c] * (*right)[256 + j * 16 + c];
        EXPECT_NEAR(product, i == j, 1e-6);
        EXPECT_EQ(std::fabs((*right)[i * 16 + j]), 0.25f);
      }
    }
    const auto new_order = (*made)->Integers(prefix + "order", {1, 2, 2, 16}, 0, 15, "");
    const auto new_energy = (*made)->Floats(prefix + "energy", {1, 2, 2, 16}, "");
    ASSERT_TRUE(new_order.ok() && new_energy.ok());
    for (int c = 0; c < 16; ++c) {
      EXPECT_EQ((*new_order)[32 + c], 15 - c);  // K's of the second head
      EXPECT_EQ((*new_energy)[32 + c], 3);
      EXPECT_EQ((*new_order)[16 + c], c);  // V's
      EXPECT_EQ((*new_energy)[16 + c], 5);
      EXPECT_EQ((*new_energy)[48 + c], 7);
    }
  }
}

TEST_F(MeasuredTest, OtherThingsAreRefused) {
  tensors_.AddFloats("zack.balanced.rates", {1}, {0.1f});
  Refused("zack.balanced.rates");
  tensors_ = TensorSet();
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
  metadata_["zack_hack.v_basis"] = "random";
  Refused("zack_hack.v_basis");
  metadata_["zack_hack.v_basis"] = "hadamard";
  Refused("zack_hack.v_hadamard");  // this artifact cannot
  metadata_.erase("zack_hack.v_basis");
  metadata_["model"] = "another";
  Refused("metadata model");
}

}  // namespace
}  // namespace kvmanager::calibrate
