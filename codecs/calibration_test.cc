#include "codecs/calibration.h"

#include <openssl/sha.h>
#include <sys/stat.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/registry.h"
#include "gtest/gtest.h"
#include "kvmanager/base/safetensors_testing.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

namespace fs = std::filesystem;

const CalibrationModel kModel{"model", "revision", 2, 2, 4, 16};

/// An artifact of a few small tensors.
std::string SmallFile(const TensorMetadata& metadata = {{"note", "small"}}, float first = 1) {
  std::vector<float> floats = {first, 2, 3, 4, 5, 6};
  std::vector<uint16_t> halves = {0x3c00, 0x4000};
  std::vector<int32_t> integers = {16, 32, -1};
  TensorMap tensors;
  const auto bytes = [](const auto& v) {
    return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(v.data()), v.size() * sizeof(v[0]));
  };
  tensors["floats"] = {"F32", {2, 3}, bytes(floats)};
  tensors["halves"] = {"F16", {2}, bytes(halves)};
  tensors["integers"] = {"I32", {3, 1}, bytes(integers)};
  return SerializeCalibration(kModel, tensors, metadata);
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(CalibrationTest, HandsOutWhatWasWritten) {
  const auto calibration = Calibration::Parse(SmallFile(), "small");
  ASSERT_TRUE(calibration.ok()) << calibration.status();
  const Calibration& c = **calibration;
  EXPECT_EQ(c.model(), kModel);
  EXPECT_EQ(c.source(), "small");
  EXPECT_EQ(c.metadata().at("note"), "small");
  EXPECT_TRUE(c.Has("floats"));
  EXPECT_FALSE(c.Has("other"));
  const auto floats = c.Floats("floats", {2, 3}, "x");
  ASSERT_TRUE(floats.ok());
  EXPECT_EQ((*floats)[5], 6);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(floats->data()) % 64, 0u);
  EXPECT_EQ((*c.Halves("halves", {2}, "x"))[1], 0x4000);
  EXPECT_EQ((*c.Integers("integers", {3, 1}, -1, 32, "x"))[2], -1);
}

TEST(CalibrationTest, TensorsThatDoNotFitAreRefused) {
  const auto calibration = Calibration::Parse(SmallFile({}, INFINITY), "small");
  ASSERT_TRUE(calibration.ok());
  const Calibration& c = **calibration;
  const absl::Status absent = c.Floats("zack.joint.rates", {1}, "zack").status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(absent.message(), "kvctl calibrate --codec zack")) << absent;
  EXPECT_TRUE(absl::StrContains(Message(c.Floats("floats", {3, 2}, "x").status()), "[3,2]"));
  EXPECT_TRUE(absl::StrContains(Message(c.Floats("halves", {2}, "x").status()), "F32"));
  EXPECT_TRUE(absl::StrContains(Message(c.Floats("floats", {2, 3}, "x").status()), "element 0"));
  EXPECT_TRUE(absl::StrContains(Message(c.Integers("integers", {3, 1}, 0, 32, "x").status()), "element 2"));
  EXPECT_TRUE(absl::StrContains(Message(c.Integers("integers", {3, 1}, -1, 31, "x").status()), "element 1"));
}

TEST(CalibrationTest, DigestIsTheDocumentedOne) {
  // By hand: name, dtype, shape and bytes of each tensor, then the metadata, each preceded by its length.
  const std::string file = SmallFile();
  TensorMap tensors;
  TensorMetadata metadata;
  ASSERT_TRUE(ParseSafetensors(Bytes(file), "file", &tensors, &metadata).ok());
  std::string text;
  const auto add = [&](const std::string& part) {
    for (int i = 0; i < 8; ++i) text.push_back(char(uint64_t(part.size()) >> (8 * i)));
    text += part;
  };
  const char* const shapes[] = {"2,3", "2", "3,1"};
  int i = 0;
  for (const auto& [name, tensor] : tensors) {
    add(name);
    add(tensor.dtype);
    add(shapes[i++]);
    add(std::string(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()));
  }
  for (const char* key : {"format", "head_dim", "kv_heads", "layers", "model", "note", "query_heads", "revision"}) {
    add(key);
    add(metadata.at(key));
  }
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest);
  const std::string hex =
      absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), sizeof digest));
  EXPECT_EQ(metadata.at("digest"), hex);
  EXPECT_EQ((*Calibration::Parse(file, "file"))->digest(), hex);
}

TEST(CalibrationTest, TruncatedFilesAreRefused) {
  const std::string file = SmallFile();
  for (size_t bytes = 0; bytes < file.size(); ++bytes) {
    EXPECT_FALSE(Calibration::Parse(file.substr(0, bytes), "cut").ok()) << bytes;
  }
  EXPECT_FALSE(Calibration::Parse(file + "x", "longer").ok());
}

TEST(CalibrationTest, AFlippedBitIsRefused) {
  const std::string small = SmallFile();
  for (size_t bit = 0; bit < small.size() * 8; ++bit) {
    std::string damaged = small;
    damaged[bit / 8] = char(damaged[bit / 8] ^ 1 << bit % 8);
    EXPECT_FALSE(Calibration::Parse(damaged, "damaged").ok()) << "bit " << bit;
  }
  const auto whole = SyntheticCalibration(kModel, 1, {"million:m=8,bits=4"});
  const std::string file = SerializeCalibration(kModel, whole->tensors(), whole->metadata());
  ASSERT_TRUE(Calibration::Parse(file, "whole").ok());
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    std::string damaged = file;
    const size_t bit = random() % (file.size() * 8);
    damaged[bit / 8] = char(damaged[bit / 8] ^ 1 << bit % 8);
    const auto parsed = Calibration::Parse(std::move(damaged), "damaged");
    EXPECT_FALSE(parsed.ok()) << "bit " << bit;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(CalibrationTest, HostileHeadersAreRefused) {
  const auto refused = [](const std::string& file) { return !Calibration::Parse(file, "hostile").ok(); };
  EXPECT_TRUE(refused(""));
  EXPECT_TRUE(refused(std::string(8, '\xff')));
  EXPECT_TRUE(refused(SafetensorsFile("{}", "")));
  EXPECT_TRUE(refused(SafetensorsFile("[]", "")));
  EXPECT_TRUE(refused(SafetensorsFile(R"({"__metadata__":{"format":3}})", "")));
  EXPECT_TRUE(refused(SafetensorsFile(R"({"__metadata__":{"format":"kvmanager-calibration-2"}})", "")));
  EXPECT_TRUE(refused(SafetensorsFile(R"({"__metadata__":{"format":"kvmanager-calibration-1","digest":"00"}})", "")));
  EXPECT_TRUE(
      refused(SafetensorsFile(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", "")));
  EXPECT_TRUE(refused(SafetensorsFile(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,400]}})", "abcd")));
  EXPECT_TRUE(refused(SafetensorsFile("{" + std::string(100000, '['), "")));
}

TEST(CalibrationTest, MetadataIsCheckedEvenWhereTheDigestFits) {
  const auto with = [](CalibrationModel model) {
    return Message(Calibration::Parse(SerializeCalibration(model, {}, {}), "file").status());
  };
  CalibrationModel model = kModel;
  EXPECT_TRUE(Calibration::Parse(SerializeCalibration(model, {}, {}), "file").ok());
  model.model = "";
  EXPECT_TRUE(absl::StrContains(with(model), "metadata model"));
  model = kModel;
  model.layers = 0;
  EXPECT_TRUE(absl::StrContains(with(model), "metadata layers"));
  model = kModel;
  model.kv_heads = 257;
  EXPECT_TRUE(absl::StrContains(with(model), "metadata kv_heads"));
  model = kModel;
  model.query_heads = 3;
  EXPECT_TRUE(absl::StrContains(with(model), "multiple of kv_heads 2"));
  model = kModel;
  model.head_dim = -16;
  EXPECT_TRUE(absl::StrContains(with(model), "metadata head_dim"));
}

/// A codec of nothing, to see what the registry lets through.
absl::Status CreateWith(CalibrationSource* source, const std::string& name, const CodecContext& context) {
  CodecRegistry registry;
  std::shared_ptr<const Calibration> seen;
  registry.Register("probe", "", [&](const CodecContext& with, const CodecParameters& parameters) {
    EXPECT_TRUE(parameters.empty());
    seen = with.calibration;
    return absl::StatusOr<std::unique_ptr<Codec>>(nullptr);
  });
  registry.SetCalibrations(source);
  const auto codec = registry.Create("probe:calibration=" + name, context);
  EXPECT_EQ(codec.ok(), seen != nullptr);
  return codec.status();
}

class CalibrationDirectoryTest : public ::testing::Test {
 protected:
  CalibrationDirectoryTest() : directory_(fs::path(::testing::TempDir()) / "calibrations") {
    fs::remove_all(directory_);
    fs::create_directories(directory_);
    context_.layout = {DType::kFloat16, 2, 16, 64};
    context_.layers = 2;
    context_.query_heads = 4;
    context_.model = "model";
    context_.revision = "revision";
  }
  ~CalibrationDirectoryTest() override { fs::remove_all(directory_); }

  void Write(const std::string& name, const std::string& bytes) {
    ASSERT_TRUE(WriteFileAtomically((directory_ / name).string(), bytes).ok());
  }

  const fs::path directory_;
  CodecContext context_;
};

TEST_F(CalibrationDirectoryTest, ByNameAndByDigest) {
  Write("one.safetensors", SmallFile());
  Write("two.safetensors", SmallFile({}, 7));
  Write("broken.safetensors", "nonsense");
  const auto source = MakeCalibrationDirectory(directory_.string());
  const auto one = source->Get("one");
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(*source->Get("one.safetensors"), *one);  // shared
  EXPECT_EQ(*source->Get((*one)->digest()), *one);
  const auto two = source->Get("two");
  ASSERT_TRUE(two.ok());
  EXPECT_NE((*two)->digest(), (*one)->digest());
  EXPECT_EQ(*source->Get((*two)->digest()), *two);
  EXPECT_EQ(source->Get("broken").status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status none = source->Get("three").status();
  EXPECT_EQ(none.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(none.message(), "one.safetensors, two.safetensors")) << none;
  EXPECT_EQ(source->Get(std::string(64, 'a')).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CalibrationDirectoryTest, ARenamedFileIsTheSameArtifact) {
  Write("one.safetensors", SmallFile());
  const auto source = MakeCalibrationDirectory(directory_.string());
  const auto one = source->Get("one");
  ASSERT_TRUE(one.ok());
  fs::rename(directory_ / "one.safetensors", directory_ / "other.safetensors");
  EXPECT_EQ(source->Get("one").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ((*source->Get("other"))->digest(), (*one)->digest());
  EXPECT_EQ((*source->Get((*one)->digest()))->digest(), (*one)->digest());
}

TEST_F(CalibrationDirectoryTest, AReplacedFileIsReadAnew) {
  Write("one.safetensors", SmallFile());
  const auto source = MakeCalibrationDirectory(directory_.string());
  const auto before = source->Get("one");
  ASSERT_TRUE(before.ok());
  Write("one.safetensors", SmallFile({{"note", "another"}}, 9));
  // Whatever the file system's clock resolves.
  fs::last_write_time(directory_ / "one.safetensors",
                      fs::last_write_time(directory_ / "one.safetensors") + std::chrono::seconds(2));
  const auto after = source->Get("one");
  ASSERT_TRUE(after.ok());
  EXPECT_NE((*after)->digest(), (*before)->digest());
  EXPECT_EQ((*(*before)->Floats("floats", {2, 3}, "x"))[0], 1);  // what a codec holds stays as it was
  EXPECT_EQ((*(*after)->Floats("floats", {2, 3}, "x"))[0], 9);
}

TEST_F(CalibrationDirectoryTest, AFileThatLiesAboutItsDigestIsRefused) {
  std::string file = SmallFile();
  const std::string digest = (*Calibration::Parse(file, "x"))->digest();
  file[file.size() - 1] = char(file[file.size() - 1] ^ 1);
  Write("liar.safetensors", file);
  EXPECT_EQ(MakeCalibrationDirectory(directory_.string())->Get(digest).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CalibrationDirectoryTest, ADamagedCopyDoesNotHideAGoodOne) {
  const std::string good = SmallFile();
  const std::string digest = (*Calibration::Parse(good, "x"))->digest();
  std::string damaged = good;
  damaged.back() = char(damaged.back() ^ 1);
  Write("a.safetensors", damaged);
  Write("b.safetensors", good.substr(0, good.size() - 1));
  Write("c.safetensors", good);
  Write("d.safetensors", damaged);
  const auto source = MakeCalibrationDirectory(directory_.string());
  const auto got = source->Get(digest);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ((*got)->digest(), digest);
  EXPECT_TRUE(absl::StrContains((*got)->source(), "c.safetensors")) << (*got)->source();
  fs::remove(directory_ / "c.safetensors");
  const absl::Status none = source->Get(digest).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument) << none;
  EXPECT_TRUE(absl::StrContains(none.message(), "a.safetensors")) << none;
}

TEST_F(CalibrationDirectoryTest, OnlyRegularFilesCount) {
  Write("one.safetensors", SmallFile());
  fs::create_directories(directory_ / "inner.safetensors");
  fs::create_symlink(directory_ / "nowhere", directory_ / "dangling.safetensors");
  ASSERT_EQ(mkfifo((directory_ / "pipe.safetensors").c_str(), 0600), 0);
  const auto source = MakeCalibrationDirectory(directory_.string());
  const std::string digest = (*source->Get("one"))->digest();
  EXPECT_TRUE(source->Get(digest).ok());
  for (const std::string& name : {std::string("pipe"), std::string("inner"), std::string(64, 'a')}) {
    const absl::Status status = source->Get(name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    EXPECT_TRUE(absl::EndsWith(DetailOf(status).bound, ": one.safetensors")) << status;
  }
}

TEST_F(CalibrationDirectoryTest, NamesStayInTheDirectory) {
  Write("one.safetensors", SmallFile());
  fs::create_directories(directory_ / "inner.safetensors");
  ASSERT_TRUE(WriteFileAtomically((directory_.parent_path() / "outside.safetensors").string(), SmallFile()).ok());
  const auto source = MakeCalibrationDirectory((directory_).string());
  for (const std::string& name :
       {std::string(), std::string("../outside"), std::string("/etc/passwd"), std::string(".."), std::string(".one"),
        std::string("inner/one"), std::string(300, 'a'), std::string("one\0x", 5)}) {
    EXPECT_EQ(source->Get(name).status().code(), absl::StatusCode::kInvalidArgument) << absl::CHexEscape(name);
  }
  EXPECT_EQ(source->Get("inner").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(Message(MakeCalibrationDirectory("")->Get("one").status()), "--calibration-dir"));
  EXPECT_EQ(MakeCalibrationDirectory("/nonexistent")->Get("one").status().code(), absl::StatusCode::kNotFound);
  fs::remove(directory_.parent_path() / "outside.safetensors");
}

TEST_F(CalibrationDirectoryTest, AnotherModelOrGeometryIsRefused) {
  Write("one.safetensors", SmallFile());
  const auto source = MakeCalibrationDirectory(directory_.string());
  EXPECT_TRUE(CreateWith(source.get(), "one", context_).ok());
  const auto refused = [&](const char* field, auto change) {
    CodecContext other = context_;
    change(other);
    const absl::Status status = CreateWith(source.get(), "one", other);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << field;
    EXPECT_TRUE(absl::StrContains(status.message(), field)) << status;
  };
  refused("model", [](CodecContext& c) { c.model = "another"; });
  refused("revision", [](CodecContext& c) { c.revision = "another"; });
  refused("layers", [](CodecContext& c) { c.layers = 3; });
  refused("kv_heads", [](CodecContext& c) { c.layout.kv_heads = 4; });
  refused("query_heads", [](CodecContext& c) { c.query_heads = 8; });
  refused("head_dim", [](CodecContext& c) { c.layout.head_dim = 32; });
  // Engines name a model by its path or repository, too.
  for (const char* name : {"/models/org/model", "org/model", "model/"}) {
    context_.model = name;
    EXPECT_TRUE(CreateWith(source.get(), "one", context_).ok()) << name;
  }
  refused("model", [](CodecContext& c) { c.model = "model/v2"; });
  context_.query_heads = context_.layout.kv_heads;  // an engine that does not know its query heads
  EXPECT_TRUE(CreateWith(source.get(), "one", context_).ok());
  context_.model.clear();  // not compared
  context_.revision.clear();
  EXPECT_TRUE(CreateWith(source.get(), "one", context_).ok());
}

TEST_F(CalibrationDirectoryTest, FilesByPath) {
  Write("one.safetensors", SmallFile());
  const auto source = MakeCalibrationFiles();
  const auto one = source->Get((directory_ / "one.safetensors").string());
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(*source->Get((directory_ / "one.safetensors").string()), *one);
  EXPECT_EQ(source->Get((directory_ / "none.safetensors").string()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(source->Get(directory_.string()).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace kvmanager
