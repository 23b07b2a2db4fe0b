#include "codecs/page_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/raw/raw_attention.h"
#include "kvmanager/base/half.h"

namespace kvmanager {
namespace {

constexpr int kQueryHeads = 6, kKvHeads = 2, kDim = 64, kTokens = 64, kQueries = 3, kDraws = 8;
const PageLayout kLayout = {DType::kFloat16, kKvHeads, kDim, kTokens};

struct alignas(64) Line {
  uint8_t bytes[64];
};
struct Page {
  explicit Page(size_t bytes) : lines((bytes + 63) / 64) {}
  uint8_t* data() { return lines[0].bytes; }
  std::vector<Line> lines;
};

Page RandomPage(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Page page(kLayout.raw_bytes());
  for (size_t i = 0; i < kLayout.raw_bytes() / 2; ++i) StoreElement(page.data(), kLayout.dtype, i, normal(random));
  return page;
}
std::vector<float> RandomQueries(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(size_t{kQueries} * kQueryHeads * kDim);
  // Values that 16 bits hold, too.
  for (float& x : q) x = HalfToFloat(FloatToHalf(normal(random)));
  return q;
}

// Keeps V times `gain`, K as it is.
class LouderCodec final : public Codec {
 public:
  explicit LouderCodec(float gain) : gain_(gain), attention_(MakeRawAttention(kLayout)) {
    info_.name = info_.spec = "louder";
    info_.encoded_bytes = info_.payload_bytes = kLayout.raw_bytes();
  }
  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return kLayout; }
  size_t encode_workspace_bytes() const override { return 0; }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t>) const override {
    for (EncodeItem& item : items) {
      std::memcpy(item.encoded, item.raw, kLayout.raw_bytes());
      const size_t elements = kLayout.raw_bytes() / 2;
      for (size_t i = elements / 2; i < elements; ++i) {
        StoreElement(item.encoded, kLayout.dtype, i, LoadElement(item.raw, kLayout.dtype, i) * gain_);
      }
      item.declined = false;
    }
  }
  void Decode(absl::Span<const DecodeItem> items) const override {
    for (const DecodeItem& item : items) std::memcpy(item.raw, item.encoded, kLayout.raw_bytes());
  }
  absl::Status Validate(int, absl::Span<const uint8_t>) const override { return absl::OkStatus(); }
  const PageAttention& attention() const override { return *attention_; }

 private:
  const float gain_;
  CodecInfo info_;
  const std::unique_ptr<PageAttention> attention_;
};

Page Encoded(const Codec& codec, Page& raw, int layer) {
  Page page(codec.info().page_bytes(layer)), workspace(codec.encode_workspace_bytes() + 64);
  EncodeItem item{raw.data(), page.data(), uint32_t(layer), 0};
  codec.Encode(absl::MakeSpan(&item, 1), {workspace.data(), codec.encode_workspace_bytes()});
  EXPECT_FALSE(item.declined);
  return page;
}

PageErrorTask Task(const Codec& codec, Page& raw, Page& encoded, const std::vector<float>& q, int layer) {
  PageErrorTask task;
  task.codec = &codec;
  task.layer = layer;
  task.raw = raw.data();
  task.encoded = encoded.data();
  task.q = q.data();
  task.q_tokens = kQueries;
  task.query_heads = kQueryHeads;
  return task;
}

// Attention over the page alone, in double precision, by its raw form.
std::vector<double> Attend(const uint8_t* page, const std::vector<float>& q, double scale) {
  std::vector<double> out(q.size());
  for (int row = 0; row < kQueries * kQueryHeads; ++row) {
    const int kv_head = row % kQueryHeads / (kQueryHeads / kKvHeads);
    double sum = 0;
    for (int t = 0; t < kTokens; ++t) {
      double score = 0;
      const size_t k = kLayout.raw_offset(0, kv_head, t) / 2, v = kLayout.raw_offset(1, kv_head, t) / 2;
      for (int c = 0; c < kDim; ++c) score += double(q[row * kDim + c]) * LoadElement(page, kLayout.dtype, k + c);
      const double p = std::exp(score * scale);
      sum += p;
      for (int c = 0; c < kDim; ++c) out[row * kDim + c] += p * LoadElement(page, kLayout.dtype, v + c);
    }
    for (int c = 0; c < kDim; ++c) out[row * kDim + c] /= sum;
  }
  return out;
}
double ErrorByDecode(const Codec& codec, Page& raw, Page& encoded, const std::vector<float>& q, int layer,
                     double scale) {
  Page decoded(kLayout.raw_bytes());
  const DecodeItem item{encoded.data(), decoded.data(), uint32_t(layer)};
  codec.Decode(absl::MakeConstSpan(&item, 1));
  const std::vector<double> expected = Attend(raw.data(), q, scale), got = Attend(decoded.data(), q, scale);
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

/// Errors of several draws: their root mean squares.
struct Errors {
  double error = 0, by_decode = 0;
};
// Attention of some codecs rounds queries and weights to 8 bits, which decoding does not: an error of its own that adds
// to the decoded page's as independent ones do. It is 0.008 at the usual scale and 0.013 at a scale of 0.5, whose
// weights follow the queries more closely; rotated or not, with norms of V or without.
void ExpectClose(const Errors& errors, double own) {
  EXPECT_GT(errors.error, 0.95 * errors.by_decode);
  EXPECT_LT(errors.error, 1.05 * std::hypot(errors.by_decode, own));
}

TEST(PageErrorTest, IsTheKnownErrorOfACodecThatScalesV) {
  const std::vector<float> q = RandomQueries(1);
  for (const float gain : {1.0f, 1.25f, 0.5f}) {
    const LouderCodec codec(gain);
    Page raw = RandomPage(2), encoded = Encoded(codec, raw, 0);
    EXPECT_NEAR(RelativePageError(Task(codec, raw, encoded, q, 0)), std::abs(gain - 1), 1e-4);
  }
}

TEST(PageErrorTest, IsThatOfDecodedPagesForEveryCodec) {
  const std::string million = "million:m=16,bits=6", stacked = "zack+million:m=32,bits=6";
  CodecContext context;
  context.layout = kLayout;
  context.layers = 2;
  context.query_heads = kQueryHeads;
  context.calibration = SyntheticCalibration({"m", "1", 2, kKvHeads, kQueryHeads, kDim}, 3, {million, stacked});
  class One final : public CalibrationSource {
   public:
    explicit One(std::shared_ptr<const Calibration> all) : all_(std::move(all)) {}
    absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return all_; }

   private:
    const std::shared_ptr<const Calibration> all_;
  } source(context.calibration);
  context.calibration = nullptr;
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  registry.SetCalibrations(&source);
  for (const std::string& spec :
       {std::string("hack:k_bits=8,v_bits=8"), std::string("hack:k_bits=8,v_bits=8,rotation=none,v_norm=0"),
        std::string("hack:k_bits=4,v_bits=3"), std::string("hack:k_bits=3,v_bits=2"),
        std::string("hack:k_bits=2,v_bits=1"), million + ",calibration=a",
        std::string("zack:mode=joint,rate=0.3,calibration=a"),
        std::string("zack:mode=joint,rate=0.3,fold=1,calibration=a"), std::string("zack+hack:calibration=a"),
        std::string("zack+hack:fold=1,calibration=a"), stacked + ",calibration=a", stacked + ",fold=1,calibration=a",
        std::string("hack;1=zack:mode=joint,rate=0.3,fold=1,calibration=a")}) {
    SCOPED_TRACE(spec);
    auto codec = registry.Create(spec, context);
    ASSERT_TRUE(codec.ok()) << codec.status();
    for (int layer = 0; layer < 2; ++layer) {
      for (const auto& [scale, own] : {std::pair(0.f, 0.01), std::pair(0.5f, 0.015)}) {
        Errors errors;
        for (int draw = 0; draw < kDraws; ++draw) {
          const std::vector<float> q = RandomQueries(100 + draw);
          Page raw = RandomPage(200 + draw), encoded = Encoded(**codec, raw, layer);
          PageErrorTask task = Task(**codec, raw, encoded, q, layer);
          task.scale = scale;
          const double error = RelativePageError(task);
          const double expected =
              ErrorByDecode(**codec, raw, encoded, q, layer, scale > 0 ? scale : 1 / std::sqrt(double(kDim)));
          EXPECT_GT(expected, 1e-3);
          errors.error = std::hypot(errors.error, error / std::sqrt(double(kDraws)));
          errors.by_decode = std::hypot(errors.by_decode, expected / std::sqrt(double(kDraws)));
          std::vector<uint16_t> q16;
          for (const float x : q) q16.push_back(FloatToHalf(x));
          task.q = q16.data();
          task.q_dtype = DType::kFloat16;
          EXPECT_DOUBLE_EQ(RelativePageError(task), error);
        }
        ExpectClose(errors, own);
      }
    }
  }
}

TEST(PageErrorTest, IsNotANumberWhereThereIsNothingToCompare) {
  const LouderCodec codec(2);
  std::vector<float> q = RandomQueries(6);
  Page raw = RandomPage(7);
  std::memset(raw.data() + kLayout.raw_bytes() / 2, 0, kLayout.raw_bytes() / 2);
  Page encoded = Encoded(codec, raw, 0);
  EXPECT_TRUE(std::isnan(RelativePageError(Task(codec, raw, encoded, q, 0))));
  raw = RandomPage(7);
  encoded = Encoded(codec, raw, 0);
  q[100] = INFINITY;
  EXPECT_TRUE(std::isnan(RelativePageError(Task(codec, raw, encoded, q, 0))));
}

}  // namespace
}  // namespace kvmanager
