#include "codecs/ladder/lower_pages.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager {
namespace {

constexpr int kLayers = 2;
constexpr float kHalfMax = 65504;

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Memory = std::unique_ptr<uint8_t[], Free>;
Memory MakeMemory(size_t bytes) {
  const size_t size = (bytes + 63) / 64 * 64 + 64;
  uint8_t* const data = static_cast<uint8_t*>(std::aligned_alloc(64, size));
  std::memset(data, 0xff, size);
  return Memory(data);
}

class Artifact final : public CalibrationSource {
 public:
  explicit Artifact(const PageLayout& layout)
      : made_(SyntheticCalibration({"model", "", kLayers, layout.kv_heads, 4, layout.head_dim}, 1, {})) {}
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return made_; }

 private:
  const std::shared_ptr<const Calibration> made_;
};

enum class Like { kRandom, kTiny, kEqual, kZero, kNearLargest, kLargest, kOutlier, kZeroValues };
constexpr Like kEvery[] = {Like::kRandom,      Like::kTiny,    Like::kEqual,   Like::kZero,
                           Like::kNearLargest, Like::kLargest, Like::kOutlier, Like::kZeroValues};

class LowerPagesTest : public ::testing::TestWithParam<std::tuple<const char*, DType>> {
 protected:
  LowerPagesTest() : layout_{std::get<1>(GetParam()), 2, 128, 64}, artifact_(layout_) {
    CodecRegistry registry;
    RegisterBuiltinCodecs(registry);
    registry.SetCalibrations(&artifact_);
    CodecContext context;
    context.layout = layout_;
    context.layers = kLayers;
    context.query_heads = 4;
    auto made = registry.Create(std::get<0>(GetParam()), context);
    EXPECT_TRUE(made.ok()) << made.status();
    codec_ = *std::move(made);
  }

  Memory RawPage(Like like) {
    std::normal_distribution<float> normal;
    Memory page = MakeMemory(layout_.raw_bytes());
    const size_t values = layout_.raw_bytes() / 2;
    for (size_t i = 0; i < values; ++i) {
      float x = normal(random_);
      if (like == Like::kTiny) x *= 1e-7f;
      if (like == Like::kEqual) x = 1.5f;
      if (like == Like::kZero || (like == Like::kZeroValues && i >= values / 2)) x = 0;
      if (like == Like::kNearLargest) x = std::clamp(x * 20000, -60000.0f, 60000.0f);
      if (like == Like::kLargest) x = x < 0 ? -kHalfMax : kHalfMax;
      if (like == Like::kOutlier && i % 997 == 0) x = 3000;
      StoreElement(page.get(), layout_.dtype, i, x);
    }
    return page;
  }

  size_t bytes(int rung, int layer) const { return codec_->rung(rung).info().page_bytes(layer); }

  /// False: declined.
  bool Encode(int rung, const uint8_t* raw, int layer, uint64_t first_token, uint8_t* encoded) {
    const Codec& codec = codec_->rung(rung);
    const Memory workspace = MakeMemory(codec.encode_workspace_bytes());
    EncodeItem item{raw, encoded, uint32_t(layer), first_token};
    codec.Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace.get(), codec.encode_workspace_bytes()));
    return !item.declined;
  }
  Memory Decode(int rung, const uint8_t* encoded, int layer) {
    Memory raw = MakeMemory(layout_.raw_bytes());
    const DecodeItem item{encoded, raw.get(), uint32_t(layer)};
    codec_->rung(rung).Decode(absl::MakeConstSpan(&item, 1));
    return raw;
  }
  bool IsFinite(const uint8_t* raw) {
    for (size_t i = 0; i < layout_.raw_bytes() / 2; ++i) {
      if (!std::isfinite(LoadElement(raw, layout_.dtype, i))) return false;
    }
    return true;
  }
  double ErrorOf(const uint8_t* before, const uint8_t* after) {
    double relative = 0;
    const size_t half = layout_.raw_bytes() / 4;
    for (size_t side = 0; side < 2; ++side) {
      double error = 0, norm = 0;
      for (size_t i = side * half; i < (side + 1) * half; ++i) {
        const double x = LoadElement(before, layout_.dtype, i);
        error += std::pow(LoadElement(after, layout_.dtype, i) - x, 2);
        norm += x * x;
      }
      relative += error / norm;
    }
    return std::sqrt(relative / 2);
  }

  const PageLayout layout_;
  Artifact artifact_;
  std::unique_ptr<Codec> codec_;
  std::mt19937 random_{1};
};

TEST_P(LowerPagesTest, IsDecodingAndEncodingAgain) {
  const size_t workspace_bytes = LowerWorkspaceBytes(*codec_);
  const Memory workspace = MakeMemory(workspace_bytes);
  int lowered = 0, declined = 0;
  for (int from = 0; from + 1 < codec_->rungs(); ++from) {
    std::vector<Memory> encoded, to;
    std::vector<LowerItem> items;
    std::vector<Like> likes;
    for (int i = 0; i < 40; ++i) {
      const int layer = i % kLayers;
      const Like like = kEvery[i / kLayers % std::size(kEvery)];
      const uint64_t first_token = 64 * (i + 1);
      const Memory raw = RawPage(like);
      Memory page = MakeMemory(bytes(from, layer));
      if (!Encode(from, raw.get(), layer, first_token, page.get())) continue;
      encoded.push_back(std::move(page));
      to.push_back(MakeMemory(bytes(from + 1, layer)));
      items.push_back({encoded.back().get(), to.back().get(), uint32_t(layer), first_token, i % 2 == 0});
      likes.push_back(like);
    }
    ASSERT_GT(items.size(), 20u);
    // The workspace is used to its end, not beyond.
    std::memset(workspace.get(), 0xa5, workspace_bytes + 64);
    LowerPages(*codec_, from, absl::MakeSpan(items), absl::MakeSpan(workspace.get(), workspace_bytes));
    for (size_t i = 0; i < 64; ++i) ASSERT_EQ(workspace[workspace_bytes + i], 0xa5);
    for (size_t i = 0; i < items.size(); ++i) {
      const LowerItem& item = items[i];
      const int layer = int(item.layer);
      SCOPED_TRACE(testing::Message() << "rung " << from << " item " << i << " like " << int(likes[i]));
      const Memory raw = Decode(from, item.encoded, layer);
      const Memory wanted = MakeMemory(bytes(from + 1, layer));
      if (!IsFinite(raw.get()) || !Encode(from + 1, raw.get(), layer, item.first_token, wanted.get())) {
        EXPECT_TRUE(item.declined);
        ++declined;
        continue;
      }
      ASSERT_FALSE(item.declined);
      ++lowered;
      ASSERT_EQ(std::memcmp(item.lowered, wanted.get(), bytes(from + 1, layer)), 0);
      EXPECT_EQ(item.lowered[bytes(from + 1, layer)], 0xff);
      EXPECT_TRUE(codec_->rung(from + 1).Validate(layer, {item.lowered, bytes(from + 1, layer)}).ok());
      const double error = LoweringError(*codec_, from, item, absl::MakeSpan(workspace.get(), workspace_bytes));
      const double expected = ErrorOf(raw.get(), Decode(from + 1, item.lowered, layer).get());
      if (!std::isfinite(expected)) {
        EXPECT_TRUE(std::isnan(error));
        continue;
      }
      EXPECT_NEAR(error, expected, 1e-9 + 1e-9 * expected);
      if (likes[i] == Like::kRandom) {
        EXPECT_GT(error, 1e-3);
        EXPECT_LT(error, 0.9);
      }
    }
  }
  EXPECT_GT(lowered, 0);
  RecordProperty("declined", declined);
}

// A step down the whole ladder loses at least as much as each of its parts does of random values.
TEST_P(LowerPagesTest, PagesGoDownRungByRung) {
  const Memory workspace = MakeMemory(LowerWorkspaceBytes(*codec_));
  const absl::Span<uint8_t> scratch = absl::MakeSpan(workspace.get(), LowerWorkspaceBytes(*codec_));
  for (int i = 0; i < 4; ++i) {
    const int layer = i % kLayers;
    const Memory raw = RawPage(Like::kRandom);
    Memory page = MakeMemory(bytes(0, layer));
    ASSERT_TRUE(Encode(0, raw.get(), layer, 64, page.get()));
    double before = ErrorOf(raw.get(), Decode(0, page.get(), layer).get());
    for (int from = 0; from + 1 < codec_->rungs(); ++from) {
      Memory lower = MakeMemory(bytes(from + 1, layer));
      LowerItem item{page.get(), lower.get(), uint32_t(layer), 64};
      LowerPages(*codec_, from, absl::MakeSpan(&item, 1), scratch);
      ASSERT_FALSE(item.declined);
      EXPECT_LT(bytes(from + 1, layer), bytes(from, layer));
      const double after = ErrorOf(raw.get(), Decode(from + 1, lower.get(), layer).get());
      EXPECT_GE(after, before);
      before = after;
      page = std::move(lower);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ladders, LowerPagesTest,
    ::testing::Combine(
        ::testing::Values("ladder=hack:k_bits=4,v_bits=3>hack:k_bits=2,v_bits=1",
                          "ladder=hack:k_bits=8,v_bits=8>hack:k_bits=4,v_bits=3>hack:k_bits=3,v_bits=2>hack:k_bits=2",
                          "ladder=zack+hack:bytes=56,calibration=m>zack+hack:bytes=32,calibration=m",
                          "ladder=hack:k_bits=8,v_bits=8;1=hack:k_bits=4>zack+hack:bytes=56,calibration=m"),
        ::testing::Values(DType::kFloat16, DType::kBFloat16)));

// A page that the next rung cannot encode stays; the others of the batch go down.
TEST(LowerPages, ADeclinedPageStays) {
  class Picky final : public Codec {
   public:
    Picky(const Codec* upper, uint8_t bad) : upper_(*upper), bad_(bad) { info_.encoded_bytes = 64; }
    const CodecInfo& info() const override { return info_; }
    const PageLayout& layout() const override { return upper_.layout(); }
    size_t encode_workspace_bytes() const override { return 0; }
    void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t>) const override {
      for (EncodeItem& item : items) {
        item.declined = item.raw[0] == bad_;
        std::memset(item.encoded, item.raw[0], 64);
      }
    }
    void Decode(absl::Span<const DecodeItem> items) const override {
      for (const DecodeItem& item : items) std::memset(item.raw, item.encoded[0], layout().raw_bytes());
    }
    absl::Status Validate(int, absl::Span<const uint8_t>) const override { return absl::OkStatus(); }
    const PageAttention& attention() const override { return upper_.attention(); }
    int rungs() const override { return 2; }
    const Codec& rung(int) const override { return *this; }

   private:
    const Codec& upper_;
    const uint8_t bad_;
    CodecInfo info_;
  };
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  const auto hack = *registry.Create("hack", PageLayout{DType::kFloat16, 1, 16, 64});
  const Picky codec(hack.get(), 3);
  const Memory workspace = MakeMemory(LowerWorkspaceBytes(codec)), memory = MakeMemory(64 * 10);
  std::vector<LowerItem> items(5);
  // 0x7c7c and above are not finite in fp16.
  const uint8_t kFirst[] = {1, 3, 0x7c, 4, 0xff};
  for (size_t i = 0; i < items.size(); ++i) {
    std::memset(memory.get() + 64 * i, kFirst[i], 64);
    items[i] = {memory.get() + 64 * i, memory.get() + 64 * (5 + i), 0, 0, i % 2 == 0};
  }
  LowerPages(codec, 0, absl::MakeSpan(items), absl::MakeSpan(workspace.get(), LowerWorkspaceBytes(codec)));
  for (size_t i = 0; i < items.size(); ++i) {
    EXPECT_EQ(items[i].declined, i != 0 && i != 3) << i;
    if (i == 0 || i == 3) {
      EXPECT_EQ(items[i].lowered[63], kFirst[i]);
    }
    EXPECT_EQ(items[i].encoded[0], kFirst[i]);
  }
}

}  // namespace
}  // namespace kvmanager
