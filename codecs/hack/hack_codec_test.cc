#include "codecs/hack/hack_codec.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "codecs/hack/hack.h"
#include "codecs/hack/hack_reference.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<uint8_t[], Free>;
Aligned Allocate(size_t bytes) {
  return Aligned(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
}

std::unique_ptr<Codec> Make(absl::string_view spec, const PageLayout& layout) {
  CodecRegistry registry;
  RegisterHack(registry);
  auto codec = registry.Create(spec, layout);
  EXPECT_TRUE(codec.ok()) << codec.status();
  return std::move(codec).value();
}

void FillNormal(const PageLayout& layout, uint32_t seed, uint8_t* raw) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < layout.raw_bytes() / 2; ++i) StoreElement(raw, layout.dtype, i, normal(random));
}

constexpr PageLayout kLayout = {DType::kFloat16, 2, 128, 64};

TEST(HackCodecTest, SaysWhatItIs) {
  const auto codec = Make("hack:v_bits=1,k_bits=2", kLayout);
  EXPECT_EQ(codec->info().name, "hack");
  EXPECT_EQ(codec->info().spec,
            "hack:k_axis=channel,k_bits=2,v_bits=1,meta=8,part=64,k_range=minmax,v_range=least_squares,rounding="
            "nearest,q=symmetric,"
            "sums=0,rotation=hadamard,v_norm=1");
  EXPECT_EQ(codec->info().version, 2);
  EXPECT_EQ(codec->info().payload_bytes, (57.125 + 1 / 32.0) * 64 * 2);
  EXPECT_EQ(codec->info().encoded_bytes % 64, 0);
  EXPECT_FALSE(codec->info().identity);
  EXPECT_EQ(codec->layout(), kLayout);
}

TEST(HackCodecTest, RefusesByName) {
  CodecRegistry registry;
  RegisterHack(registry);
  EXPECT_EQ(DetailOf(registry.Create("hack:k_bits=7", kLayout).status()).field, "codec parameter k_bits");
  EXPECT_EQ(DetailOf(registry.Create("hack:window=7", kLayout).status()).value, "\"window\"");
}

TEST(HackCodecTest, EncodesABatchAsTheReferenceDoesWhereverItRuns) {
  for (const char* spec :
       {"hack", "hack:k_axis=token,q=asymmetric,rounding=stochastic", "hack:v_bits=1", "hack:rotation=none,v_norm=0"}) {
    const auto codec = Make(spec, kLayout);
    const hack::HackFormat format =
        hack::MakeHackFormat(kLayout, *hack::ParseHackParameters(ParseCodecSpec(spec)->parameters, kLayout));
    constexpr int kPages = 4;
    const auto check = [&] {
      std::vector<Aligned> raw, encoded;
      std::vector<EncodeItem> items;
      for (int i = 0; i < kPages; ++i) {
        raw.push_back(Allocate(kLayout.raw_bytes())), encoded.push_back(Allocate(format.page_bytes));
        FillNormal(kLayout, i, raw.back().get());
        std::memset(encoded.back().get(), 0xee, format.page_bytes);
        items.push_back({raw.back().get(), encoded.back().get(), uint32_t(i), uint64_t(64 * i), true});
      }
      const Aligned workspace = Allocate(codec->encode_workspace_bytes());
      codec->Encode(absl::MakeSpan(items), {workspace.get(), codec->encode_workspace_bytes()});
      for (int i = 0; i < kPages; ++i) {
        EXPECT_FALSE(items[i].declined);
        std::vector<uint8_t> want(format.page_bytes);
        ASSERT_TRUE(hack::ReferenceEncode(format, raw[i].get(), i, 64 * i, want.data()));
        EXPECT_EQ(std::memcmp(want.data(), encoded[i].get(), want.size()), 0) << spec << " page " << i;
        EXPECT_TRUE(codec->Validate(0, {encoded[i].get(), want.size()}).ok());
      }
    };
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) threads.emplace_back(check);
    for (std::thread& t : threads) t.join();
  }
}

TEST(HackCodecTest, DecodeIsCloseToRaw) {
  const struct {
    const char* spec;
    double most;  // rms error of a normal distribution of deviation 1
  } kCases[] = {{"hack:k_bits=8,v_bits=8,meta=16", 0.01},
                {"hack:k_bits=4,v_bits=4", 0.12},
                {"hack", 0.5},
                {"hack:rotation=none", 0.5},
                {"hack:v_norm=0", 0.5}};
  for (const auto& c : kCases) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      PageLayout layout = kLayout;
      layout.dtype = dtype;
      const auto codec = Make(c.spec, layout);
      const Aligned raw = Allocate(layout.raw_bytes()), back = Allocate(layout.raw_bytes());
      const Aligned encoded = Allocate(codec->info().encoded_bytes),
                    workspace = Allocate(codec->encode_workspace_bytes());
      FillNormal(layout, 3, raw.get());
      EncodeItem item{raw.get(), encoded.get(), 0, 0, true};
      codec->Encode({&item, 1}, {workspace.get(), codec->encode_workspace_bytes()});
      const DecodeItem decode{encoded.get(), back.get()};
      codec->Decode({&decode, 1});
      double error = 0;
      const size_t n = layout.raw_bytes() / 2;
      for (size_t i = 0; i < n; ++i) {
        const double off = LoadElement(raw.get(), dtype, i) - LoadElement(back.get(), dtype, i);
        error += off * off;
      }
      EXPECT_LT(std::sqrt(error / double(n)), c.most) << c.spec;
    }
  }
}

TEST(HackCodecTest, DeclinesOnePageOfABatchAlone) {
  PageLayout layout = kLayout;
  layout.dtype = DType::kBFloat16;
  const auto codec = Make("hack", layout);
  const Aligned good = Allocate(layout.raw_bytes()), bad = Allocate(layout.raw_bytes()),
                workspace = Allocate(codec->encode_workspace_bytes());
  const Aligned a = Allocate(codec->info().encoded_bytes), b = Allocate(codec->info().encoded_bytes),
                c = Allocate(codec->info().encoded_bytes);
  FillNormal(layout, 1, good.get()), FillNormal(layout, 2, bad.get());
  StoreElement(bad.get() + layout.raw_offset(1, 1, 63), layout.dtype, 127, 1e9f);
  EncodeItem items[] = {{good.get(), a.get()}, {bad.get(), b.get()}, {good.get(), c.get()}};
  codec->Encode(absl::MakeSpan(items), {workspace.get(), codec->encode_workspace_bytes()});
  EXPECT_FALSE(items[0].declined);
  EXPECT_TRUE(items[1].declined);
  EXPECT_FALSE(items[2].declined);
  EXPECT_EQ(std::memcmp(a.get(), c.get(), codec->info().encoded_bytes), 0);
}

TEST(HackCodecTest, ValidateNamesWhatIsWrong) {
  struct Case {
    const char* spec;
    uint32_t (*at)(const hack::SideLayout&);
    uint16_t bits;
    const char* field;
  };
  const Case kCases[] = {
      {"hack", [](const hack::SideLayout& s) { return s.tops; }, 0x7c00, "encoded page head 1 V top step[0]"},
      {"hack", [](const hack::SideLayout& s) { return s.tops; }, 0xbc00, "encoded page head 1 V top step[0]"},
      {"hack", [](const hack::SideLayout& s) { return s.tops + 2; }, 0x7e00, "encoded page head 1 V top minimum[0]"},
      {"hack:part=32", [](const hack::SideLayout& s) { return s.tops + 6; }, 0x7e00,
       "encoded page head 1 V top minimum[1]"},
      {"hack", [](const hack::SideLayout& s) { return s.norm_top; }, 0x7c00, "encoded page head 1 V norm top[0]"},
      {"hack:meta=16", [](const hack::SideLayout& s) { return s.norm_top; }, 0xbc00,
       "encoded page head 1 V norm top[0]"},
      {"hack:meta=16", [](const hack::SideLayout& s) { return s.steps + 6; }, 0x8400, "encoded page head 1 V step[3]"},
      {"hack:meta=16", [](const hack::SideLayout& s) { return s.minima; }, 0xfc00, "encoded page head 1 V minimum[0]"},
  };
  for (const Case& c : kCases) {
    const hack::HackFormat format =
        hack::MakeHackFormat(kLayout, *hack::ParseHackParameters(ParseCodecSpec(c.spec)->parameters, kLayout));
    const auto codec = MakeHackCodec(format);
    const Aligned page = Allocate(format.page_bytes);
    std::memset(page.get(), 0, format.page_bytes);
    EXPECT_TRUE(codec->Validate(0, {page.get(), format.page_bytes}).ok());
    std::memcpy(page.get() + format.heads[1].offset + c.at(format.heads[1].side[1]), &c.bits, 2);
    const absl::Status status = codec->Validate(0, {page.get(), format.page_bytes});
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << c.field;
    EXPECT_EQ(DetailOf(status).field, c.field);
    EXPECT_FALSE(DetailOf(status).bound.empty());
    EXPECT_EQ(codec->Validate(0, {page.get(), format.page_bytes - 64}).code(), absl::StatusCode::kDataLoss);
  }
}

TEST(HackCodecTest, ValidateBoundsTheSums) {
  const hack::HackFormat format = hack::MakeHackFormat(
      kLayout, *hack::ParseHackParameters({{"k_axis", "token"}, {"k_bits", "2"}, {"sums", "1"}}, kLayout));
  const auto codec = MakeHackCodec(format);
  std::vector<uint8_t> page(format.page_bytes);
  uint8_t* sum = page.data() + format.heads[0].side[0].sums + 2 * 70;
  *sum = 3 * 64;
  EXPECT_TRUE(codec->Validate(0, page).ok());
  *sum += 1;
  EXPECT_EQ(DetailOf(codec->Validate(0, page)).field, "encoded page head 0 K sum[70]");
}

// Whatever bytes pass Validate, attention and decode stay within the page and give finite results.
TEST(HackCodecTest, MutatedPagesThatPassAreSafeToRead) {
  std::mt19937 random(17);
  for (const char* spec : {"hack", "hack:k_axis=token,q=asymmetric", "hack:meta=16,k_bits=8,v_bits=8",
                           "hack:rotation=none,v_bits=1", "hack:v_norm=0"}) {
    const auto codec = Make(spec, kLayout);
    const size_t bytes = codec->info().encoded_bytes;
    const Aligned raw = Allocate(kLayout.raw_bytes()), page = Allocate(bytes),
                  workspace = Allocate(codec->encode_workspace_bytes());
    FillNormal(kLayout, 1, raw.get());
    EncodeItem item{raw.get(), page.get()};
    codec->Encode({&item, 1}, {workspace.get(), codec->encode_workspace_bytes()});
    const std::vector<uint8_t> clean(page.get(), page.get() + bytes);
    constexpr int kRows = 4;
    const size_t attend_bytes = codec->attention().workspace_bytes(kRows);
    const Aligned attend_workspace = Allocate(attend_bytes), q = Allocate(4 * kRows * 128),
                  acc = Allocate(4 * kRows * 128);
    for (int i = 0; i < kRows * 128; ++i) reinterpret_cast<float*>(q.get())[i] = float(i % 7) - 3;
    int passed = 0, refused = 0;
    for (int round = 0; round < 300; ++round) {
      std::memcpy(page.get(), clean.data(), bytes);
      const int changes = round % 3 == 0 ? int(bytes) : 1 << random() % 10;
      for (int i = 0; i < changes; ++i) page[random() % bytes] = uint8_t(random());
      if (!codec->Validate(0, {page.get(), bytes}).ok()) {
        ++refused;
        continue;
      }
      ++passed;
      const DecodeItem decode{page.get(), raw.get()};
      codec->Decode({&decode, 1});
      float max[kRows] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sum[kRows] = {};
      std::memset(acc.get(), 0, 4 * kRows * 128);
      const uint8_t* pages[] = {page.get()};
      codec->attention().Attend({reinterpret_cast<float*>(q.get()), kRows, 0.088f, 0, 1, pages},
                                {max, sum, reinterpret_cast<float*>(acc.get())},
                                {attend_workspace.get(), attend_bytes});
      for (int r = 0; r < kRows; ++r) {
        ASSERT_TRUE(std::isfinite(max[r])) << spec;
        ASSERT_TRUE(sum[r] >= 0.99f && std::isfinite(sum[r])) << spec;
      }
      for (int i = 0; i < kRows * 128; ++i) ASSERT_TRUE(std::isfinite(reinterpret_cast<float*>(acc.get())[i])) << spec;
    }
    EXPECT_GT(passed, 20) << spec;
    EXPECT_GT(refused, 5) << spec;
  }
}

TEST(HackCodecTest, AttentionIsTheReferences) {
  for (const char* spec : {"hack", "hack:k_axis=token,q=asymmetric", "hack:rotation=none,v_norm=0"}) {
    const auto codec = Make(spec, kLayout);
    const hack::HackFormat format =
        hack::MakeHackFormat(kLayout, *hack::ParseHackParameters(ParseCodecSpec(spec)->parameters, kLayout));
    const Aligned raw = Allocate(kLayout.raw_bytes()), page = Allocate(format.page_bytes),
                  workspace = Allocate(codec->encode_workspace_bytes());
    FillNormal(kLayout, 8, raw.get());
    EncodeItem item{raw.get(), page.get()};
    codec->Encode({&item, 1}, {workspace.get(), codec->encode_workspace_bytes()});
    const size_t attend_bytes = codec->attention().workspace_bytes(1);
    const Aligned attend_workspace = Allocate(attend_bytes), q = Allocate(4 * 128), acc = Allocate(4 * 128);
    for (int i = 0; i < 128; ++i) reinterpret_cast<float*>(q.get())[i] = std::sin(float(i));
    std::memset(acc.get(), 0, 4 * 128);
    float max = -INFINITY, sum = 0, want_max = -INFINITY, want_sum = 0;
    std::vector<float> want_acc(128);
    const uint8_t* pages[] = {page.get()};
    const PageAttentionTask task{reinterpret_cast<float*>(q.get()), 1, 0.088f, 0, 1, pages};
    codec->attention().Attend(task, {&max, &sum, reinterpret_cast<float*>(acc.get())},
                              {attend_workspace.get(), attend_bytes});
    hack::ReferenceAttend(format, task, {&want_max, &want_sum, want_acc.data()});
    EXPECT_NEAR(max + std::log(sum), want_max + std::log(want_sum), 1e-4);
    for (int i = 0; i < 128; ++i)
      EXPECT_NEAR(reinterpret_cast<float*>(acc.get())[i] / sum, want_acc[i] / want_sum, 1e-3);
  }
}

}  // namespace
}  // namespace kvmanager
