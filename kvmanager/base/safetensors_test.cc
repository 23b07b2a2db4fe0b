#include "kvmanager/base/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "kvmanager/base/safetensors_testing.h"

namespace kvmanager {
namespace {

using ::testing::HasSubstr;

absl::Status Parse(const std::string& file) {
  TensorMap tensors;
  return ParseSafetensors(Bytes(file), "f", &tensors);
}

TEST(Safetensors, ReadsWhatIsThere) {
  const std::string file = SafetensorsFile(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[],"data_offsets":[6,10]},"a":{"dtype":"F16","shape":[1,3],"data_offsets":[0,6]},)"
      R"("empty":{"dtype":"I64","shape":[0,5],"data_offsets":[6,6]}}   )",
      "abcdefghij");
  TensorMap tensors;
  ASSERT_EQ(ParseSafetensors(Bytes(file), "f", &tensors), absl::OkStatus());
  ASSERT_EQ(tensors.size(), 3);
  EXPECT_EQ(tensors["a"].shape, (std::vector<uint64_t>{1, 3}));
  EXPECT_EQ(tensors["a"].bytes.size(), 6);
  EXPECT_EQ(tensors["a"].bytes[0], 'a');
  EXPECT_EQ(tensors["b"].dtype, "F32");
  EXPECT_EQ(tensors["b"].bytes[0], 'g');
  EXPECT_TRUE(tensors["empty"].bytes.empty());
}

struct Lie {
  const char* name;
  std::string file;
  std::vector<std::string> told;  // parts of the message
};

std::string One(const std::string& entry, const std::string& data = "01234567") {
  return SafetensorsFile("{\"w\":" + entry + "}", data);
}

TEST(Safetensors, NamesEveryLie) {
  const std::string whole = One(R"({"dtype":"F16","shape":[4],"data_offsets":[0,8]})");
  ASSERT_EQ(Parse(whole), absl::OkStatus());
  std::string huge_header = whole;
  for (int i = 0; i < 8; ++i) huge_header[i] = '\xff';
  const std::string w = "f: tensor w: ";
  const std::vector<Lie> lies = {
      {"short file", "1234567", {"f: file bytes is 7", "at least 8"}},
      {"header past the end", whole.substr(0, 20), {"f: header bytes", "2..12"}},
      {"header length of all ones", huge_header, {"header bytes is 18446744073709551615"}},
      {"no JSON", SafetensorsFile("{\"w\":", ""), {"header is malformed JSON"}},
      {"an array", SafetensorsFile("[1]", ""), {"header is [1]", "object"}},
      {"repeated name",
       SafetensorsFile(
           R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
           "x"),
       {"tensor name is w", "unique"}},
      {"entry no object", One("3"), {w + "entry is 3"}},
      {"no dtype", One(R"({"shape":[4],"data_offsets":[0,8]})"), {w + "dtype is absent"}},
      {"no shape", One(R"({"dtype":"F16","data_offsets":[0,8]})"), {w + "shape is absent"}},
      {"no offsets", One(R"({"dtype":"F16","shape":[4]})"), {w + "data_offsets is absent"}},
      {"unknown dtype", One(R"({"dtype":"F17","shape":[4],"data_offsets":[0,8]})"), {w + "dtype is", "F17"}},
      {"numeric dtype", One(R"({"dtype":16,"shape":[4],"data_offsets":[0,8]})"), {w + "dtype is 16"}},
      {"negative size", One(R"({"dtype":"F16","shape":[-4],"data_offsets":[0,8]})"), {w + "shape is [-4]", "unsigned"}},
      {"fractional size", One(R"({"dtype":"F16","shape":[4.5],"data_offsets":[0,8]})"), {w + "shape is [4.5]"}},
      {"product overflows",
       One(R"({"dtype":"F16","shape":[4294967296,4294967296],"data_offsets":[0,8]})"),
       {w + "shape", "product below 2^64"}},
      {"bytes overflow",
       One(R"({"dtype":"F64","shape":[2305843009213693953],"data_offsets":[0,8]})"),
       {w + "shape", "below 2^64 bytes"}},
      {"rank", One(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,8],"data_offsets":[0,8]})"), {w + "shape", "at most 8"}},
      {"three offsets", One(R"({"dtype":"F16","shape":[4],"data_offsets":[0,8,8]})"), {w + "data_offsets is [0,8,8]"}},
      {"offset past the end",
       One(R"({"dtype":"F16","shape":[5],"data_offsets":[0,10]})"),
       {w + "data_offsets end is 10", "at most 8"}},
      {"offset near 2^64",
       One(R"({"dtype":"F16","shape":[4],"data_offsets":[18446744073709551608,18446744073709551615]})"),
       {w + "data_offsets end is 18446744073709551615"}},
      {"backwards",
       One(R"({"dtype":"F16","shape":[4],"data_offsets":[8,0]})"),
       {w + "data_offsets begin is 8", "at most its end 0"}},
      {"size against shape",
       One(R"({"dtype":"F16","shape":[3],"data_offsets":[0,8]})"),
       {w + "data_offsets size is 8", "6 (bytes of shape"}},
      {"hole at the start",
       One(R"({"dtype":"U8","shape":[4],"data_offsets":[4,8]})"),
       {w + "data_offsets begin is 4", "0 (the end"}},
      {"data left over",
       One(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})"),
       {"file bytes of data is 8", "4 (the end"}},
      {"overlap",
       SafetensorsFile(
           R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
           "01234567"),
       {w + "data_offsets begin is 4", "6 (the end"}},
      {"name with control bytes", SafetensorsFile("{\"\\u0007\\n\":3}", ""), {"tensor \\x07\\n: entry"}},
  };
  for (const Lie& lie : lies) {
    const absl::Status status = Parse(lie.file);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << lie.name;
    for (const std::string& part : lie.told) EXPECT_THAT(std::string(status.message()), HasSubstr(part)) << lie.name;
  }
}

TEST(Safetensors, DeepNestingIsAnErrorNotACrash) {
  EXPECT_FALSE(Parse(SafetensorsFile("{\"w\":" + std::string(1 << 20, '['), "")).ok());
  EXPECT_FALSE(Parse(One(std::string(100000, '[') + std::string(100000, ']'))).ok());
}

TEST(Safetensors, MutationsStayInsideTheFile) {
  const std::string good = SafetensorsFile({{"embeddings", "F16", {16, 12}, std::string(384, 'e')},
                                            {"layers.0.norm", "F32", {7}, std::string(28, 'n')},
                                            {"layers.0.projection", "F16", {4, 5, 2}, std::string(80, 'p')},
                                            {"scalar", "U8", {}, "s"}});
  const size_t header = 8 + (uint8_t(good[0]) | uint8_t(good[1]) << 8);
  std::mt19937 random(7);
  const std::string alphabet = "0123456789[]{}\",:-.eFBUI";
  int accepted = 0;
  for (int round = 0; round < 1200; ++round) {
    std::string bad = good;
    for (int n = 1 + random() % 3; n > 0; --n) {
      const size_t at = random() % 4 == 0 ? random() % 8 : 8 + random() % (header - 8);
      switch (random() % 3) {
        case 0:
          bad[at] = char(random());
          break;
        case 1:
          bad[at] = alphabet[random() % alphabet.size()];
          break;
        case 2:
          bad.resize(std::max<size_t>(at, 1));
          break;
      }
      if (bad.size() < header) break;
    }
    TensorMap tensors;
    const absl::Status status = ParseSafetensors(Bytes(bad), "f", &tensors);
    if (!status.ok()) {
      EXPECT_TRUE(tensors.empty());
      continue;
    }
    ++accepted;
    for (const auto& [name, tensor] : tensors) {
      ASSERT_GE(tensor.bytes.data(), Bytes(bad).data());
      ASSERT_LE(tensor.bytes.data() + tensor.bytes.size(), Bytes(bad).data() + bad.size());
    }
  }
  EXPECT_LT(accepted, 600);  // renamed tensors remain valid files
}

class SafetensorsDirectory : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string path = ::testing::TempDir() + "/safetensors-XXXXXX";
    ASSERT_NE(mkdtemp(path.data()), nullptr);
    directory_ = path;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  void Write(const std::string& name, const std::string& content) {
    std::ofstream(directory_ + "/" + name, std::ios::binary) << content;
  }
  std::string directory_;
};

TEST_F(SafetensorsDirectory, ShardsAreOneModel) {
  Write("model-00001-of-00002.safetensors", SafetensorsFile({{"a", "U8", {2}, "12"}}));
  Write("model-00002-of-00002.safetensors", SafetensorsFile({{"b", "U8", {3}, "345"}}));
  Write("notes.txt", "not a tensor");
  const auto opened = Safetensors::Open(directory_);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ((*opened)->tensors().size(), 2);
  ASSERT_EQ((*opened)->tensors().count("b"), 1);
  EXPECT_EQ((*opened)->tensors().at("b").bytes[0], '3');
  const auto single = Safetensors::Open(directory_ + "/model-00001-of-00002.safetensors");
  ASSERT_TRUE(single.ok());
  EXPECT_EQ((*single)->tensors().size(), 1);
}

TEST_F(SafetensorsDirectory, ErrorsNameTheFile) {
  EXPECT_EQ(Safetensors::Open(directory_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Safetensors::Open(directory_ + "/absent").status().code(), absl::StatusCode::kNotFound);
  Write("a.safetensors", SafetensorsFile({{"a", "U8", {2}, "12"}}));
  Write("b.safetensors", SafetensorsFile({{"a", "U8", {2}, "12"}}));
  const absl::Status twice = Safetensors::Open(directory_).status();
  EXPECT_THAT(std::string(twice.message()), HasSubstr("b.safetensors: tensor a: name"));
  Write("b.safetensors", "");
  EXPECT_THAT(std::string(Safetensors::Open(directory_).status().message()),
              HasSubstr("b.safetensors: file bytes is 0"));
}

}  // namespace
}  // namespace kvmanager
