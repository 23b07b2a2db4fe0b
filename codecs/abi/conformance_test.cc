#include "codecs/abi/conformance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/calibrate/random.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/calibrate/tensor_set.h"
#include "kvmanager/base/safetensors.h"

namespace kvmanager {
namespace {

using Outcome = ConformanceCheck::Outcome;

std::string Path(const std::string& file) {
  return absl::StrCat(std::getenv("TEST_SRCDIR"), "/kvmanager/codecs/abi/", file, ".so");
}

ConformanceReport Judge(const std::string& file, const CodecParameters& parameters = {},
                        std::vector<PageLayout> layouts = {{DType::kFloat16, 2, 32, 64}},
                        const std::string& calibration_path = "", const std::string& capture_path = "") {
  ConformanceOptions options;
  options.path = Path(file);
  options.parameters = parameters;
  options.layouts = std::move(layouts);
  options.calibration_path = calibration_path;
  options.capture_path = capture_path;
  options.rounds = 40;
  const auto report = RunConformance(options, nullptr);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : ConformanceReport();
}

std::string Failures(const ConformanceReport& report) {
  std::string text;
  for (const ConformanceCheck& check : report.checks) {
    if (check.outcome == Outcome::kFailed) absl::StrAppend(&text, check.where, " ", check.name, ": ", check.note, "\n");
  }
  return text;
}

TEST(ConformanceTest, EveryCodecOfThisRepositoryPassesAsAPlugin) {
  const struct {
    const char* file;
    CodecParameters parameters;
  } kCases[] = {{"raw", {}},
                {"pq", {}},
                {"hack", {}},
                {"hack", {{"k_bits", "2"}, {"v_bits", "1"}}},
                {"hack", {{"k_axis", "token"}, {"q", "asymmetric"}, {"rotation", "none"}}}};
  for (const auto& [file, parameters] : kCases) {
    const ConformanceReport report = Judge(file, parameters, {});
    EXPECT_EQ(Failures(report), "") << file;
    EXPECT_GT(report.passed(), 30) << file;
  }
}

TEST(ConformanceTest, APluginInAProcessOfItsOwnPasses) {
  const std::string host = absl::StrCat(std::getenv("TEST_SRCDIR"), "/kvmanager/codecs/abi/plugin_host_main");
  ASSERT_EQ(::setenv("KVMANAGER_PLUGIN_HOST", host.c_str(), 1), 0);
  ASSERT_EQ(::setenv("KVMANAGER_PLUGIN_RUN", Path("hack").c_str(), 1), 0);
  const ConformanceReport report = Judge("through_process");
  EXPECT_EQ(Failures(report), "");
  EXPECT_GT(report.passed(), 10);
}

TEST(ConformanceTest, CodecsWithACalibrationPassAsPlugins) {
  const std::string path = absl::StrCat(std::getenv("TEST_TMPDIR"), "/synthetic.safetensors");
  const auto made = SyntheticCalibration({"synthetic", "", 2, 2, 8, 64}, 1,
                                         {"million:m=32,bits=8", "million:m=16,bits=4", "zack+million:m=32,bits=8"});
  std::ofstream(path, std::ios::binary) << SerializeCalibration(made->model(), made->tensors(), made->metadata());
  const struct {
    const char* file;
    CodecParameters parameters;
  } kCases[] = {
      {"million", {{"m", "32"}, {"bits", "8"}}},
      {"million", {{"k_m", "32"}, {"k_bits", "8"}, {"v_m", "16"}, {"v_bits", "4"}}},
      {"zack", {{"rate", "0.25"}}},
      {"zack_million", {{"m", "32"}, {"bits", "8"}}},
      // Widths that the artifact spreads are for its model's keys: random ones have no channels that matter less.
      {"zack_hack", {{"k_bits", "4"}, {"v_bits", "4"}}}};
  for (const auto& [file, parameters] : kCases) {
    EXPECT_EQ(Failures(Judge(file, parameters, {}, path)), "") << file;
  }
}

/// Q, K and V of the statistics that a synthetic artifact's factors, orders and energies were made for: rotated,
/// channels of K and V have the artifact's energies, and Q is white.
void WriteSuitingCapture(const Calibration& artifact, int tokens, const std::string& path) {
  const CalibrationModel& model = artifact.model();
  const uint64_t layers = model.layers, heads = model.kv_heads, d = model.head_dim;
  const auto floats = [&](const std::string& name, std::vector<uint64_t> shape) {
    return artifact.Floats(name, shape, "").value();
  };
  const std::vector<uint64_t> channels = {layers, heads, 2, d}, matrices = {layers, heads, d, d};
  const auto order = artifact.Integers("zack_hack.joint.order", channels, 0, int(d) - 1, "").value();
  const auto energy = floats("zack_hack.joint.energy", channels);
  const absl::Span<const float> left[] = {floats("zack.joint.qk.left", matrices),
                                          floats("zack.joint.vw.left", matrices)};
  calibrate::Random random(7);
  calibrate::TensorSet set;
  for (uint64_t layer = 0; layer < layers; ++layer) {
    for (int side = 0; side < 2; ++side) {
      std::vector<float> values(heads * tokens * d);
      for (uint64_t head = 0; head < heads; ++head) {
        const size_t at = layer * heads + head;
        const float* const rotation = &left[side][at * d * d];
        for (int t = 0; t < tokens; ++t) {
          float* const row = &values[(head * tokens + t) * d];
          for (uint64_t i = 0; i < d; ++i) {
            const size_t rank = (at * 2 + side) * d + i;
            const float x = std::sqrt(energy[rank]) * random.Normal();
            for (uint64_t c = 0; c < d; ++c) row[c] += x * rotation[c * d + order[rank]];
          }
        }
      }
      set.AddFloats(absl::StrCat("layers.", layer, side == 0 ? ".k" : ".v"), {heads, uint64_t(tokens), d}, values);
    }
    std::vector<float> q(model.query_heads * tokens * d);
    for (float& x : q) x = random.Normal();
    set.AddFloats(absl::StrCat("layers.", layer, ".q"), {uint64_t(model.query_heads), uint64_t(tokens), d}, q);
  }
  std::ofstream(path, std::ios::binary) << SerializeSafetensors(set.tensors(), {{"model", model.model}});
}

TEST(ConformanceTest, MixedWidthsPassOnTheKeysTheyWereMadeFor) {
  const std::string artifact = absl::StrCat(std::getenv("TEST_TMPDIR"), "/mixed.safetensors");
  const std::string capture = absl::StrCat(std::getenv("TEST_TMPDIR"), "/capture.safetensors");
  const auto made = SyntheticCalibration({"synthetic", "", 2, 2, 8, 64}, 1, {});
  std::ofstream(artifact, std::ios::binary) << SerializeCalibration(made->model(), made->tensors(), made->metadata());
  WriteSuitingCapture(*made, 512, capture);
  const struct {
    const char *bytes, *allocation;
  } kCases[] = {{"56", "head"}, {"56", "model"}, {"44", "head"}, {"44", "model"}, {"22", "model"}};
  for (const auto& [bytes, allocation] : kCases) {
    const CodecParameters parameters = {{"mode", "joint"}, {"bytes", bytes}, {"allocation", allocation}};
    EXPECT_EQ(Failures(Judge("zack_hack", parameters, {}, artifact, capture)), "") << bytes << " " << allocation;
  }
}

TEST(ConformanceTest, DominantChannelsPassInEightBits) {
  for (const int d : {64, 128}) {
    const std::string artifact = absl::StrCat(std::getenv("TEST_TMPDIR"), "/loud.safetensors");
    const std::string capture = absl::StrCat(std::getenv("TEST_TMPDIR"), "/loud_capture.safetensors");
    const auto plain = SyntheticCalibration({"synthetic", "", 2, 2, 8, d}, 1, {});
    // K's first channels are a hundred times the others in each layer's first head.
    const std::string name = "zack_hack.joint.energy";
    const auto energy = plain->Floats(name, {2, 2, 2, uint64_t(d)}, "").value();
    std::vector<float> loud(energy.begin(), energy.end());
    for (int layer = 0; layer < 2; ++layer) {
      for (int c = 0; c < 4; ++c) loud[size_t(layer) * 4 * d + c] *= 1e4f;
    }
    TensorMap tensors = plain->tensors();
    tensors[name].bytes = {reinterpret_cast<const uint8_t*>(loud.data()), loud.size() * sizeof(float)};
    TensorMetadata metadata = plain->metadata();
    metadata.erase("digest");
    const std::string text = SerializeCalibration(plain->model(), tensors, metadata);
    const auto made = Calibration::Parse(text, "loud");
    ASSERT_TRUE(made.ok()) << made.status();
    std::ofstream(artifact, std::ios::binary) << text;
    WriteSuitingCapture(**made, 512, capture);
    for (const double share : {38.0 / 64, 46.0 / 64}) {
      const CodecParameters parameters = {
          {"mode", "joint"}, {"bytes", absl::StrCat(share * d)}, {"allocation", "model"}};
      EXPECT_EQ(Failures(Judge("zack_hack", parameters, {}, artifact, capture)), "") << d << " " << share;
    }
  }
}

TEST(ConformanceTest, WhiteNoiseMayBeToBlameWhereACodecWasTrained) {
  const std::string artifact = absl::StrCat(std::getenv("TEST_TMPDIR"), "/noise.safetensors");
  const std::string capture = absl::StrCat(std::getenv("TEST_TMPDIR"), "/noise_capture.safetensors");
  const auto made = SyntheticCalibration({"synthetic", "", 2, 2, 8, 64}, 1, {});
  std::ofstream(artifact, std::ios::binary) << SerializeCalibration(made->model(), made->tensors(), made->metadata());
  WriteSuitingCapture(*made, 64, capture);
  const auto blames_noise = [](const ConformanceReport& report) {
    EXPECT_TRUE(absl::StrContains(Failures(report), "attend: exact")) << Failures(report);
    return absl::StrContains(Failures(report), "--capture FILE");
  };
  EXPECT_TRUE(blames_noise(Judge("bad/bad_attend_wrong", {}, {}, artifact)));
  EXPECT_FALSE(blames_noise(Judge("bad/bad_attend_wrong", {}, {}, artifact, capture)));
  EXPECT_FALSE(blames_noise(Judge("bad/bad_attend_wrong")));
}

TEST(ConformanceTest, CapturesThatDoNotFitAreRefused) {
  const std::string artifact = absl::StrCat(std::getenv("TEST_TMPDIR"), "/refused.safetensors");
  const std::string capture = absl::StrCat(std::getenv("TEST_TMPDIR"), "/refused_capture.safetensors");
  const auto three = SyntheticCalibration({"synthetic", "", 3, 2, 8, 64}, 1, {});
  std::ofstream(artifact, std::ios::binary)
      << SerializeCalibration(three->model(), three->tensors(), three->metadata());
  WriteSuitingCapture(*SyntheticCalibration({"synthetic", "", 2, 2, 8, 64}, 1, {}), 48, capture);
  ConformanceOptions options;
  options.path = Path("raw");
  options.capture_path = capture;
  const auto refusal = [&] {
    const auto report = RunConformance(options, nullptr);
    EXPECT_FALSE(report.ok());
    return std::string(report.status().message());
  };
  EXPECT_TRUE(absl::StrContains(refusal(), "capture's tokens")) << refusal();
  options.layouts = {{DType::kFloat16, 2, 128, 16}};
  EXPECT_TRUE(absl::StrContains(refusal(), "layout beside a capture")) << refusal();
  options.layouts = {{DType::kFloat16, 2, 64, 16}};
  EXPECT_EQ(Failures(*RunConformance(options, nullptr)), "");
  options.calibration_path = artifact;
  EXPECT_TRUE(absl::StrContains(refusal(), "capture's layers")) << refusal();
  options.capture_path = artifact;
  EXPECT_FALSE(RunConformance(options, nullptr).ok());
}

TEST(ConformanceTest, TablesOfOtherVersionsPass) {
  for (const char* file : {"bad/good", "bad/older_table", "bad/newer_table"}) {
    EXPECT_EQ(Failures(Judge(file)), "") << file;
  }
}

TEST(ConformanceTest, WhatIsWrongIsFoundAndSaid) {
  const struct {
    const char* variant;
    const char* check;  // a prefix of its name
    const char* says;
  } kCases[] = {
      {"bad_struct_size_small", "table", "beyond struct_size"},
      {"bad_null_entry", "table", "decode_batch is NULL"},
      {"bad_version", "table", "abi_version is 7"},
      {"bad_symbol", "table", "kvmanager_codec_v2"},
      {"bad_size_not_aligned", "describe", "a multiple of 64"},
      {"bad_size_huge", "describe", "bytes_of_layer[0]"},
      {"bad_parameters_without_end", "describe", "without an end"},
      {"bad_workspace_huge", "describe", "workspace_bytes"},
      {"bad_size_too_small", "encode, decode: within their buffers", "past the end of the encoded page"},
      {"bad_writes_past", "encode, decode: within their buffers", "wrote byte 1 past the end of the encoded page"},
      {"bad_writes_before", "encode, decode: within their buffers", "before the start of the encoded page"},
      {"bad_reads_past", "encode, decode: within their buffers", "past the end of the raw page"},
      {"bad_writes_input", "encode, decode: within their buffers", "byte 5 of the raw page, which is read-only"},
      {"bad_workspace_past", "encode", "past the end of the workspace"},
      {"bad_not_deterministic", "encode: deterministic", "other bytes the second time"},
      {"bad_takes_nan", "encode: NaN", "was encoded, not declined"},
      {"bad_encode_error", "encode: deterministic", "out of paper"},
      {"bad_decode_error", "decode: close", "cannot read my own writing"},
      {"bad_first_head_ignored", "decode: one head", "decoded alone is not that of the whole page"},
      {"bad_crashes", "encode: deterministic", "it crashed: signal 6"},
      {"bad_exits", "encode: deterministic", "it ended the process"},
      {"bad_attend_error", "attend: exact", "attention wandered off"},
      {"bad_attend_wrong", "attend: exact", "relative error"},
      {"bad_validate_follows_bytes", "validate", "it "},
      {"bad_stride", "encode: a batch", ""},
  };
  for (const auto& [variant, name, says] : kCases) {
    const ConformanceReport report = Judge(absl::StrCat("bad/", variant));
    EXPECT_GT(report.failed(), 0) << variant;
    bool found = false;
    for (const ConformanceCheck& check : report.checks) {
      found = found || (check.outcome == Outcome::kFailed && absl::StartsWith(check.name, name) &&
                        absl::StrContains(check.note, says));
    }
    EXPECT_TRUE(found) << variant << ", expected " << name << ": " << says << "\ngot:\n" << Failures(report);
  }
}

TEST(ConformanceTest, ACodecThatTakesNoLayoutFails) {
  const ConformanceReport report = Judge("hack", {}, {{DType::kFloat16, 2, 32, 16}});
  EXPECT_EQ(report.failed(), 1);
  EXPECT_EQ(report.count(Outcome::kNotTaken), 1);
}

TEST(ConformanceTest, LayoutsAsText) {
  const auto layout = ParseLayoutText("bf16x8x128x64");
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(*layout, (PageLayout{DType::kBFloat16, 8, 128, 64}));
  EXPECT_EQ(LayoutText(*layout), "bf16x8x128x64");
  for (const char* bad :
       {"", "f16", "f32x8x128x64", "f16x0x128x64", "f16x8x100x64", "f16x8x128x64x1", "f16x8x128x-64"}) {
    EXPECT_FALSE(ParseLayoutText(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace kvmanager
