#include "codecs/calibrate/train.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/calibrate/capture.h"
#include "codecs/calibrate/random.h"
#include "codecs/calibrate/rank_table.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::calibrate {
namespace {

const CalibrationModel kModel{"test", "r1", 2, 2, 4, 32};
constexpr int kTokens = 300, kHidden = 24;

/// Q, K and V [layers][heads][tokens][d], W_O [layers][hidden][query_heads * d]; K and V are exact in fp16.
struct Data {
  std::vector<std::vector<float>> q, k, v, w_o;
};

Data RandomData(uint64_t seed) {
  Random random(seed);
  Data data;
  const auto fill = [&](size_t n, bool half) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; ++i) {
      x[i] = random.Normal() * float(std::exp(-0.1 * double(i % 32)));
      if (half) x[i] = HalfToFloat(FloatToHalf(x[i]));
    }
    return x;
  };
  for (int layer = 0; layer < kModel.layers; ++layer) {
    data.q.push_back(fill(size_t(kModel.query_heads) * kTokens * 32, false));
    data.k.push_back(fill(size_t(kModel.kv_heads) * kTokens * 32, true));
    data.v.push_back(fill(size_t(kModel.kv_heads) * kTokens * 32, true));
    data.w_o.push_back(fill(size_t(kHidden) * kModel.query_heads * 32, false));
  }
  return data;
}

/// [heads][tokens][d] as [tokens][heads][d].
std::vector<float> TokenMajor(const std::vector<float>& x, int heads, int first, int count) {
  std::vector<float> out;
  for (int t = first; t < first + count; ++t) {
    for (int h = 0; h < heads; ++h) {
      const float* from = &x[(size_t(h) * kTokens + t) * 32];
      out.insert(out.end(), from, from + 32);
    }
  }
  return out;
}

Samples Collect(const Data& data, const SampleLimits& limits, WorkerPool* pool, int chunk) {
  Collector collector(kModel, kTokens, limits, pool);
  for (int first = 0; first < kTokens; first += chunk) {
    const int count = std::min(chunk, kTokens - first);
    for (int layer = 0; layer < kModel.layers; ++layer) {
      EXPECT_TRUE(collector
                      .Add(layer, count, count, TokenMajor(data.q[layer], 4, first, count),
                           TokenMajor(data.k[layer], 2, first, count), TokenMajor(data.v[layer], 2, first, count))
                      .ok());
    }
  }
  for (int layer = 0; layer < kModel.layers; ++layer) {
    EXPECT_TRUE(collector.SetOutputProjection(layer, data.w_o[layer]).ok());
  }
  return collector.Finish();
}

void Ignore(absl::string_view, int64_t, int64_t) {}

TensorSet TrainAll(const Samples& samples, const std::vector<std::string>& codecs, WorkerPool* pool,
                   std::vector<TrainStage>* stages) {
  const auto plan = CalibrationPlan::Make(codecs, 32);
  EXPECT_TRUE(plan.ok()) << plan.status();
  TensorSet set;
  EXPECT_TRUE(Train(samples, *plan, {}, pool, Ignore, &set, stages).ok());
  return set;
}

TEST(CollectorTest, MomentsAndRowsAreThoseOfTheData) {
  const Data data = RandomData(1);
  WorkerPool pool(2);
  const Samples samples = Collect(data, {}, &pool, 77);
  ASSERT_EQ(samples.rows, kTokens);
  for (int layer = 0; layer < 2; ++layer) {
    for (int h = 0; h < 2; ++h) {
      const HeadSamples& head = samples.head(layer, h);
      EXPECT_EQ(head.q.count, 2 * kTokens);
      EXPECT_EQ(head.w_o.count, 2 * kHidden);
      for (int i : {0, 5, 31}) {
        for (int j : {0, 7, 30}) {
          double q = 0, k = 0, w = 0;
          for (int t = 0; t < kTokens; ++t) {
            for (int g = 0; g < 2; ++g) {
              const float* row = &data.q[layer][(size_t(h * 2 + g) * kTokens + t) * 32];
              q += double(row[i]) * row[j];
            }
            const float* row = &data.k[layer][(size_t(h) * kTokens + t) * 32];
            k += double(row[i]) * row[j];
          }
          for (int o = 0; o < kHidden; ++o) {
            for (int g = 0; g < 2; ++g) {
              const float* row = &data.w_o[layer][size_t(o) * 128 + (h * 2 + g) * 32];
              w += double(row[i]) * row[j];
            }
          }
          EXPECT_NEAR(head.q.sum[i * 32 + j], q, 1e-6);
          EXPECT_NEAR(head.k.sum[i * 32 + j], k, 1e-6);
          EXPECT_NEAR(head.w_o.sum[i * 32 + j], w, 1e-6);
        }
      }
      ASSERT_EQ(head.rows[1].size(), size_t(kTokens) * 32);
      for (int t : {0, 100, 299}) {
        EXPECT_EQ(HalfToFloat(head.rows[1][t * 32 + 3]), data.v[layer][(size_t(h) * kTokens + t) * 32 + 3]);
      }
    }
  }
}

TEST(CollectorTest, LimitsThinRows) {
  const Data data = RandomData(2);
  SampleLimits limits;
  limits.rows_max = 100;
  EXPECT_EQ(Collect(data, limits, nullptr, 50).rows, 100);
  limits.rows_max = 99;  // one of four
  EXPECT_EQ(Collect(data, limits, nullptr, 50).rows, 75);
  limits.bytes_max = 50 * 2 * 2 * 2 * 32 * 2;
  const Samples few = Collect(data, limits, nullptr, 64);
  EXPECT_EQ(few.rows, 50);
  EXPECT_EQ(few.head(1, 1).rows[0].size(), 50u * 32);
  EXPECT_EQ(few.head(1, 1).k.count, kTokens);  // moments are of all
}

TEST(CollectorTest, WhatIsNotFiniteIsNamed) {
  Collector collector(kModel, kTokens, {}, nullptr);
  std::vector<float> q(128), k(64), v(64);
  k[40] = NAN;
  const absl::Status status = collector.Add(1, 1, 1, q, k, v);
  EXPECT_TRUE(absl::StrContains(status.message(), "K of layer 1, token 0, head 1, channel 8")) << status;
  k[40] = 1e6f;
  EXPECT_TRUE(absl::StrContains(collector.Add(1, 1, 1, q, k, v).message(), "float16"));
}

TEST(TrainTest, TensorsHaveTheirShapesAndFitTheData) {
  const Data data = RandomData(3);
  const Samples samples = Collect(data, {}, nullptr, 300);
  std::vector<TrainStage> stages;
  const TensorSet set = TrainAll(samples,
                                 {"zack+hack", "million:k_m=16,k_bits=6,v_m=8,v_bits=5",
                                  "million:m=4,bits=4,scope=model", "zack+million:m=16,bits=4"},
                                 nullptr, &stages);
  std::map<std::string, std::string> shapes;
  for (const auto& [name, tensor] : set.tensors()) {
    std::string shape = tensor.dtype;
    for (uint64_t n : tensor.shape) absl::StrAppend(&shape, " ", n);
    shapes[name] = shape;
  }
  EXPECT_EQ(shapes.at("million.k.m16.b6"), "F16 2 2 16 64 2");
  EXPECT_EQ(shapes.at("million.v.m8.b5"), "F16 2 2 8 32 4");
  EXPECT_EQ(shapes.at("million_model.v.m4.b4"), "F16 1 1 4 16 8");
  for (const char* const mode : {"joint", "balanced"}) {
    EXPECT_EQ(shapes.at(absl::StrCat("zack.", mode, ".qk.left")), "F32 2 2 32 32");
    EXPECT_EQ(shapes.at(absl::StrCat("zack.", mode, ".vw.weights")), "F32 2 2 32");
    EXPECT_EQ(shapes.at(absl::StrCat("zack_hack.", mode, ".order")), "I32 2 2 2 32");
    EXPECT_EQ(shapes.at(absl::StrCat("zack_hack.", mode, ".energy")), "F32 2 2 2 32");
    EXPECT_EQ(shapes.at(absl::StrCat("zack_hack.", mode, ".sensitivity")), "F32 2 2 2");
    EXPECT_EQ(shapes.at(absl::StrCat("zack_million.", mode, ".v.m16.b4")), "F16 2 2 16 16 2");
  }
  EXPECT_EQ(stages.size(), 2u + 2 + 2 + 4);
  for (const TrainStage& stage : stages) {
    EXPECT_GT(stage.bytes, 0u) << stage.what;
    if (absl::StrContains(stage.what, "million")) {
      EXPECT_LT(stage.relative_error, 0.9) << stage.what;
    }
  }

  // zack+hack: order and energy of layer 1, head 0, V, against the rows themselves.
  const auto floats = [&](const std::string& name) {
    const Tensor& tensor = set.tensors().at(name);
    std::vector<float> values(tensor.bytes.size() / 4);
    for (size_t i = 0; i < values.size(); ++i) values[i] = LoadElement(tensor.bytes.data(), DType::kFloat32, i);
    return values;
  };
  const std::vector<float> left = floats("zack.balanced.vw.left"), right = floats("zack.balanced.vw.right");
  const std::vector<float> energy = floats("zack_hack.balanced.energy");
  const size_t factor = size_t(1 * 2 + 0) * 32 * 32, row_at = ((1 * 2 + 0) * 2 + 1) * 32;
  std::vector<double> wanted(32);
  for (int c = 0; c < 32; ++c) {
    double spread = 0, weight = 0;
    for (int page = 0; page < kTokens; page += 64) {
      double sum = 0, squares = 0;
      const int end = std::min(page + 64, kTokens);
      for (int t = page; t < end; ++t) {
        double x = 0;
        for (int i = 0; i < 32; ++i) x += double(data.v[1][size_t(t) * 32 + i]) * right[factor + i * 32 + c];
        sum += x;
        squares += x * x;
      }
      spread += squares - sum * sum / (end - page);
    }
    for (int g = 0; g < 2; ++g) {
      for (int o = 0; o < kHidden; ++o) {
        double x = 0;
        for (int i = 0; i < 32; ++i) x += double(data.w_o[1][size_t(o) * 128 + g * 32 + i]) * left[factor + i * 32 + c];
        weight += x * x / kHidden;
      }
    }
    wanted[c] = spread / kTokens * weight;
  }
  const Tensor& order = set.tensors().at("zack_hack.balanced.order");
  for (int i = 0; i < 32; ++i) {
    int32_t column;
    std::memcpy(&column, order.bytes.data() + (row_at + i) * 4, 4);
    EXPECT_NEAR(energy[row_at + i], wanted[column], 1e-4 * wanted[column]) << i;
    if (i > 0) {
      EXPECT_LE(energy[row_at + i], energy[row_at + i - 1]);
    }
  }
}

TEST(TrainTest, ThreadsChangeNothing) {
  const Data data = RandomData(4);
  const std::vector<std::string> codecs = {"zack+hack", "million:m=8,bits=5", "zack+million:m=8,bits=4"};
  std::vector<TrainStage> stages;
  const Samples alone = Collect(data, {}, nullptr, 300);
  const TensorSet one = TrainAll(alone, codecs, nullptr, &stages);
  WorkerPool pool(3);
  const Samples together = Collect(data, {}, &pool, 300);
  const TensorSet many = TrainAll(together, codecs, &pool, &stages);
  EXPECT_EQ(CalibrationDigest(one.tensors(), {}), CalibrationDigest(many.tensors(), {}));
}

TEST(TrainTest, TooLittleTextIsNamed) {
  const auto check = [](const std::string& codec, uint64_t tokens, SampleLimits limits = {}) {
    return CheckEnough(*CalibrationPlan::Make({codec}, 32), tokens, limits, kModel);
  };
  EXPECT_TRUE(check("million:m=8,bits=8", 1024).ok());
  EXPECT_TRUE(absl::StrContains(check("million:m=8,bits=8", 1023).message(), "at least 1024"));
  EXPECT_TRUE(absl::StrContains(check("million:m=8,bits=12", 1024).message(), "at least 16384"));
  EXPECT_TRUE(check("zack", 32).ok());
  EXPECT_FALSE(check("zack", 31).ok());
  SampleLimits limits;
  limits.bytes_max = 500 * 2 * 2 * 2 * 32 * 2;
  EXPECT_TRUE(absl::StrContains(check("million:m=8,bits=8", 100000, limits).message(), "limit on samples"));
}

TEST(TrainTest, SensitivitiesCanBeReplaced) {
  TensorSet set;
  EXPECT_TRUE(SetSensitivity(kModel, ZackMode::kJoint, std::vector<float>(8, 2.0f), &set).ok());
  EXPECT_EQ(set.tensors().at("zack_hack.joint.sensitivity").shape, (std::vector<uint64_t>{2, 2, 2}));
  EXPECT_FALSE(SetSensitivity(kModel, ZackMode::kJoint, std::vector<float>(7, 2.0f), &set).ok());
  EXPECT_FALSE(SetSensitivity(kModel, ZackMode::kJoint, std::vector<float>(8, NAN), &set).ok());
  EXPECT_FALSE(SetSensitivity(kModel, ZackMode::kJoint, std::vector<float>(8, -1.0f), &set).ok());
}

class CaptureTest : public ::testing::Test {
 protected:
  CaptureTest() : data_(RandomData(5)) {
    path_ = std::filesystem::path(::testing::TempDir()) / "capture.safetensors";
    const uint64_t q = 4, kv = 2, tokens = kTokens, d = 32, hidden = kHidden;
    for (int layer = 0; layer < 2; ++layer) {
      const std::string prefix = absl::StrCat("layers.", layer, ".");
      set_.AddFloats(prefix + "q", {q, tokens, d}, data_.q[layer]);
      set_.AddHalves(prefix + "k", {kv, tokens, d}, data_.k[layer]);
      set_.AddFloats(prefix + "v", {kv, tokens, d}, data_.v[layer]);
      set_.AddFloats(prefix + "w_o", {hidden, q * d}, data_.w_o[layer]);
    }
  }
  ~CaptureTest() override { std::filesystem::remove(path_); }

  absl::StatusOr<std::unique_ptr<Capture>> Open(const TensorMap& tensors) {
    std::ofstream(path_, std::ios::binary) << SerializeSafetensors(tensors, metadata_);
    return Capture::Open(path_);
  }
  /// The error's text when `change` was made to the tensors.
  std::string Refusal(const std::function<void(TensorMap&)>& change) {
    TensorMap tensors = set_.tensors();
    change(tensors);
    const auto capture = Open(tensors);
    EXPECT_FALSE(capture.ok());
    return std::string(capture.status().message());
  }

  const Data data_;
  TensorSet set_;
  TensorMetadata metadata_ = {{"model", "test"}, {"revision", "r1"}, {"windows", "128"}};
  std::string path_;
};

TEST_F(CaptureTest, TrainsWhatTheModelWould) {
  const auto capture = Open(set_.tensors());
  ASSERT_TRUE(capture.ok()) << capture.status();
  EXPECT_EQ((*capture)->model(), kModel);
  EXPECT_EQ((*capture)->tokens(), uint64_t{kTokens});
  EXPECT_TRUE((*capture)->has_output_projection());
  int64_t last = 0;
  const auto samples = ReadSamples(**capture, {}, nullptr, [&](int64_t done, int64_t) { last = done; });
  ASSERT_TRUE(samples.ok()) << samples.status();
  EXPECT_EQ(last, 2);
  std::vector<TrainStage> stages;
  const std::vector<std::string> codecs = {"zack+hack", "million:m=8,bits=4"};
  EXPECT_EQ(CalibrationDigest(TrainAll(*samples, codecs, nullptr, &stages).tensors(), {}),
            CalibrationDigest(TrainAll(Collect(data_, {}, nullptr, 512), codecs, nullptr, &stages).tensors(), {}));
}

TEST(HadamardTest, MatrixIsOrthogonal) {
  for (int d : {1, 16, 128}) {
    const Matrix h = HadamardMatrix(d);
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) {
        double sum = 0;
        for (int c = 0; c < d; ++c) sum += h[size_t(i) * d + c] * h[size_t(j) * d + c];
        EXPECT_NEAR(sum, i == j, 1e-12);
      }
    }
  }
  EXPECT_FALSE(IsPowerOfTwo(96));
}

TEST_F(CaptureTest, SinksAreLeftOut) {
  metadata_["sinks"] = "64";  // contexts of 128, 128 and 44 tokens: 64, 64 and none are left
  const auto capture = Open(set_.tensors());
  ASSERT_TRUE(capture.ok()) << capture.status();
  EXPECT_EQ((*capture)->counted_tokens(), 128u);
  const auto samples = ReadSamples(**capture, {}, nullptr, [](int64_t, int64_t) {});
  ASSERT_TRUE(samples.ok()) << samples.status();
  Collector wanted(kModel, 128, {}, nullptr);
  for (int layer = 0; layer < kModel.layers; ++layer) {
    for (int first : {64, 192}) {
      ASSERT_TRUE(wanted
                      .Add(layer, 64, 64, TokenMajor(data_.q[layer], 4, first, 64),
                           TokenMajor(data_.k[layer], 2, first, 64), TokenMajor(data_.v[layer], 2, first, 64))
                      .ok());
    }
    ASSERT_TRUE(wanted.SetOutputProjection(layer, data_.w_o[layer]).ok());
  }
  std::vector<TrainStage> stages;
  EXPECT_EQ(CalibrationDigest(TrainAll(*samples, {"zack+hack"}, nullptr, &stages).tensors(), {}),
            CalibrationDigest(TrainAll(wanted.Finish(), {"zack+hack"}, nullptr, &stages).tensors(), {}));
}

TEST_F(CaptureTest, WorksWithoutTheOutputProjection) {
  TensorMap tensors = set_.tensors();
  tensors.erase("layers.0.w_o");
  tensors.erase("layers.1.w_o");
  const auto capture = Open(tensors);
  ASSERT_TRUE(capture.ok()) << capture.status();
  const auto samples = ReadSamples(**capture, {}, nullptr, [](int64_t, int64_t) {});
  ASSERT_TRUE(samples.ok());
  std::vector<TrainStage> stages;
  EXPECT_TRUE(TrainAll(*samples, {"zack+hack"}, nullptr, &stages).tensors().count("zack.joint.vw.left"));
}

TEST_F(CaptureTest, WrongCapturesAreNamed) {
  const auto refused = [&](const std::string& wanted, const std::function<void(TensorMap&)>& change) {
    const std::string message = Refusal(change);
    EXPECT_TRUE(absl::StrContains(message, wanted)) << message;
  };
  refused("layers.1.q", [](TensorMap& t) { t.erase("layers.1.q"); });
  refused("layers.0.w_o", [](TensorMap& t) {
    t.erase("layers.1.w_o");
    t["layers.0.w_o"].shape = {24 * 128};
  });
  refused("layers.1.w_o", [](TensorMap& t) { t.erase("layers.1.w_o"); });
  refused("w_o in all layers or none", [](TensorMap& t) { t.erase("layers.0.w_o"); });
  refused("layers.0.k", [](TensorMap& t) { t.erase("layers.0.k"); });
  refused("tensor", [](TensorMap& t) { t["layers.0.x"] = t["layers.0.q"]; });
  refused("[2,300,32]", [](TensorMap& t) { t["layers.1.v"].shape = {4, 150, 32}; });
  refused("query_heads a multiple of 2", [](TensorMap& t) { t["layers.0.q"].shape = {4 * 300, 32}; });
  refused("multiple of 16", [](TensorMap& t) {
    for (const char* name : {"layers.0.k"}) t[name].shape = {2, 1200, 8};
  });
  refused("[hidden, 128]", [](TensorMap& t) { t["layers.0.w_o"].shape = {48, 64}; });
  refused("F16, BF16 or F32", [](TensorMap& t) { t["layers.0.v"].dtype = "I32"; });
  metadata_.erase("model");
  refused("metadata model", [](TensorMap&) {});
  metadata_["model"] = "test";
  for (const char* windows : {"many", "0", "301", "1000", "100", "299", "32"}) {
    metadata_["windows"] = windows;
    refused("metadata windows", [](TensorMap&) {});
  }
  for (const char* windows : {"64", "256", "300"}) {  // 300: all of them
    metadata_["windows"] = windows;
    EXPECT_TRUE(Open(set_.tensors()).ok()) << windows;
  }
  metadata_["windows"] = "128";
  for (const char* sinks : {"many", "-64", "32", "65", "128", "192"}) {
    metadata_["sinks"] = sinks;
    refused("metadata sinks", [](TensorMap&) {});
  }
  EXPECT_EQ(Capture::Open(path_ + ".none").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CaptureTest, ElementsThatAreNotFiniteAreNamed) {
  Data bad = data_;
  bad.v[1][5] = INFINITY;
  set_.AddFloats("layers.1.v", {2, kTokens, 32}, bad.v[1]);
  const auto capture = Open(set_.tensors());
  ASSERT_TRUE(capture.ok());
  const auto samples = ReadSamples(**capture, {}, nullptr, [](int64_t, int64_t) {});
  EXPECT_TRUE(absl::StrContains(samples.status().message(), "V of layer 1, token 0, head 0, channel 5"))
      << samples.status();
}

}  // namespace
}  // namespace kvmanager::calibrate
