#include "codecs/abi/conformance.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/calibrate/synthetic.h"

namespace kvmanager {
namespace {

using Outcome = ConformanceCheck::Outcome;

std::string Path(const std::string& file) {
  return absl::StrCat(std::getenv("TEST_SRCDIR"), "/kvmanager/codecs/abi/", file, ".so");
}

ConformanceReport Judge(const std::string& file, const CodecParameters& parameters = {},
                        std::vector<PageLayout> layouts = {{DType::kFloat16, 2, 32, 64}},
                        const std::string& calibration_path = "") {
  ConformanceOptions options;
  options.path = Path(file);
  options.parameters = parameters;
  options.layouts = std::move(layouts);
  options.calibration_path = calibration_path;
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
                {"hack", {{"k_axis", "token"}, {"q", "asymmetric"}, {"hadamard", "1"}}}};
  for (const auto& [file, parameters] : kCases) {
    const ConformanceReport report = Judge(file, parameters, {});
    EXPECT_EQ(Failures(report), "") << file;
    EXPECT_GT(report.passed(), 30) << file;
  }
}

TEST(ConformanceTest, CodecsWithACalibrationPassAsPlugins) {
  const std::string path = absl::StrCat(std::getenv("TEST_TMPDIR"), "/synthetic.safetensors");
  const auto made =
      SyntheticCalibration({"synthetic", "", 2, 2, 8, 64}, 1, {"million:m=32,bits=8", "million:m=16,bits=4"});
  std::ofstream(path, std::ios::binary) << SerializeCalibration(made->model(), made->tensors(), made->metadata());
  const struct {
    const char* file;
    CodecParameters parameters;
  } kCases[] = {
      {"million", {{"m", "32"}, {"bits", "8"}}},
      {"million", {{"k_m", "32"}, {"k_bits", "8"}, {"v_m", "16"}, {"v_bits", "4"}}},
      {"zack", {{"rate", "0.25"}}},
      // Widths that the artifact spreads are for its model's keys: random ones have no channels that matter less.
      {"zack_hack", {{"k_bits", "4"}, {"v_bits", "4"}}}};
  for (const auto& [file, parameters] : kCases) {
    EXPECT_EQ(Failures(Judge(file, parameters, {}, path)), "") << file;
  }
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
