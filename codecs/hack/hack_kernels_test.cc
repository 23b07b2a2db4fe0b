// Every instruction set against the readable reference, byte by byte, over parameters and adversarial data.
#include "codecs/hack/hack_kernels.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "codecs/hack/hack_page_testing.h"
#include "codecs/hack/hack_reference.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::hack {
namespace {

struct AlignedBytes {
  explicit AlignedBytes(size_t n) : size(n), data(static_cast<uint8_t*>(std::aligned_alloc(64, (n + 63) / 64 * 64))) {}
  ~AlignedBytes() { std::free(data); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  std::string text() const { return std::string(reinterpret_cast<const char*>(data), size); }
  size_t size;
  uint8_t* data;
};

void Fill(const PageLayout& layout, Data kind, uint32_t seed, uint8_t* raw) {
  const std::vector<uint8_t> page = DataPage(layout, kind, seed);
  std::memcpy(raw, page.data(), page.size());
}

/// Encodes with the reference and every instruction set, decodes what was encoded; returns whether it was encoded.
bool ExpectAgreement(const HackFormat& format, Data kind, uint32_t seed) {
  const PageLayout& layout = format.layout;
  AlignedBytes raw(layout.raw_bytes()), want(format.page_bytes), got(format.page_bytes);
  AlignedBytes want_raw(layout.raw_bytes()), got_raw(layout.raw_bytes()), workspace(HackEncodeWorkspaceBytes(format));
  Fill(layout, kind, seed, raw.data);
  const uint32_t layer = seed % 7;
  const uint64_t first_token = uint64_t(seed) * layout.page_tokens + (uint64_t{1} << 33);
  const bool encoded = ReferenceEncode(format, raw.data, layer, first_token, want.data);
  if (encoded) ReferenceDecode(format, want.data, want_raw.data);
  for (Isa isa : SupportedIsas()) {
    const HackKernels& kernels = HackKernelsFor(isa);
    const std::string what =
        absl::StrCat(IsaName(isa), " ", HackSpec(format.parameters), " d=", layout.head_dim,
                     " page=", layout.page_tokens, " data=", int(kind), " dtype=", int(layout.dtype));
    std::memset(got.data, 0xa5, got.size);
    EXPECT_EQ(kernels.encode(format, raw.data, layer, first_token, got.data, workspace.data), encoded) << what;
    EXPECT_TRUE(got.text() == want.text()) << what;
    if (!encoded) continue;
    kernels.decode(format, want.data, got_raw.data);
    EXPECT_TRUE(got_raw.text() == want_raw.text()) << what;
  }
  return encoded;
}

HackFormat Format(const PageLayout& layout, const HackParameters& parameters) {
  CodecParameters text;
  const CodecSpec spec = *ParseCodecSpec(HackSpec(parameters));
  const auto checked = ParseHackParameters(spec.parameters, layout);
  EXPECT_TRUE(checked.ok()) << checked.status();
  return MakeHackFormat(layout, *checked);
}

class KernelsTest : public testing::TestWithParam<Axis> {};

TEST_P(KernelsTest, AgreeOnEveryParameter) {
  constexpr int kBits[] = {1, 2, 3, 4, 8};
  uint32_t seed = 1;
  int encoded = 0, declined = 0;
  for (int k = 0; k < 5; ++k) {
    for (int mask = 0; mask < 64; ++mask) {
      HackParameters p;
      p.k_axis = GetParam();
      p.k_bits = kBits[k];
      p.v_bits = kBits[(k + mask) % 5];
      p.meta_bits = mask & 1 ? 16 : 8;
      p.rounding = mask & 2 ? Rounding::kStochastic : Rounding::kNearest;
      p.k_range = mask & 4 ? Range::kLeastSquares : Range::kMinMax;
      p.v_range = mask & 8 ? Range::kLeastSquares : Range::kMinMax;
      p.rotation = mask & 16 ? Rotation::kHadamard : Rotation::kNone;
      p.v_norm = (__builtin_popcount(mask) + k) % 2 == 0;
      p.partition = mask & 32 ? 64 : 32;
      p.sums = p.k_axis == Axis::kToken && k % 2 == 0;
      PageLayout layout{(mask ^ k) & 1 ? DType::kBFloat16 : DType::kFloat16, 1, 64, 64};
      const HackFormat format = Format(layout, p);
      const Data kind = Data(seed % kDataKinds);
      (ExpectAgreement(format, kind, seed) ? encoded : declined) += 1;
      ++seed;
    }
  }
  EXPECT_GT(encoded, 200);
  EXPECT_GT(declined, 5);
}

TEST_P(KernelsTest, AgreeOnEveryKindOfDataAndShape) {
  uint32_t seed = 1000;
  for (const auto& [head_dim, page_tokens, partition] :
       {std::array{64, 64, 64}, std::array{64, 256, 32}, std::array{128, 64, 64}, std::array{128, 128, 128},
        std::array{256, 64, 64}, std::array{256, 128, 32}}) {
    for (int i = 0; i < kDataKinds; ++i) {
      const Data kind = Data(i);
      HackParameters p;
      p.k_axis = GetParam();
      p.partition = partition;
      p.sums = p.k_axis == Axis::kToken;
      p.rotation = i % 3 ? Rotation::kHadamard : Rotation::kNone;
      p.v_norm = i % 4 != 1;
      PageLayout layout{seed % 2 ? DType::kBFloat16 : DType::kFloat16, 2, uint16_t(head_dim), uint16_t(page_tokens)};
      ExpectAgreement(Format(layout, p), kind, ++seed);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Axes, KernelsTest, testing::Values(Axis::kChannel, Axis::kToken),
                         [](const auto& info) { return info.param == Axis::kChannel ? "Channel" : "Token"; });

// Tokens of very different norms, some zero, some of which V alone is zero.
TEST(KernelsTest, AgreeOnNorms) {
  std::mt19937 random(12);
  for (int head_dim : {64, 128, 256}) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (int round = 0; round < 6; ++round) {
        const PageLayout layout{dtype, 2, uint16_t(head_dim), uint16_t(round % 2 ? 64 : 128)};
        HackParameters p;
        p.rotation = round % 3 == 0 ? Rotation::kNone : Rotation::kHadamard;
        p.meta_bits = round == 4 ? 16 : 8;
        const HackFormat format = Format(layout, p);
        AlignedBytes raw(layout.raw_bytes()), want(format.page_bytes), got(format.page_bytes);
        AlignedBytes workspace(HackEncodeWorkspaceBytes(format));
        Fill(layout, Data::kRandom, uint32_t(round), raw.data);
        for (int head = 0; head < 2; ++head) {
          for (int t = 0; t < layout.page_tokens; ++t) {
            const float factor = round == 5 || random() % 5 == 0 ? 0.0f : std::ldexp(1.0f, int(random() % 24) - 16);
            for (int c = 0; c < head_dim; ++c) {
              const size_t at = layout.raw_offset(1, head, t) / 2 + c;
              StoreElement(raw.data, dtype, at, LoadElement(raw.data, dtype, at) * factor);
            }
          }
        }
        ASSERT_TRUE(ReferenceEncode(format, raw.data, 0, 0, want.data));
        for (Isa isa : SupportedIsas()) {
          ASSERT_TRUE(HackKernelsFor(isa).encode(format, raw.data, 0, 0, got.data, workspace.data));
          EXPECT_TRUE(got.text() == want.text()) << IsaName(isa) << " d=" << head_dim << " round " << round;
        }
      }
    }
  }
}

TEST(KernelsTest, AgreeOnOddHeadDim) {
  const PageLayout layout{DType::kFloat16, 3, 80, 128};
  HackParameters p;
  p.rotation = Rotation::kNone;
  for (int i = 0; i < kDataKinds; ++i) ExpectAgreement(Format(layout, p), Data(i), 5);
}

TEST(KernelsTest, AgreeOnWidthsPerSegment) {
  std::mt19937 random(3);
  constexpr uint8_t kWidths[] = {0, 1, 2, 3, 4, 8};
  for (int round = 0; round < 24; ++round) {
    const PageLayout layout{round % 2 ? DType::kBFloat16 : DType::kFloat16, 2, 64, uint16_t(round % 3 ? 64 : 128)};
    SegmentBits bits(2);
    for (auto& head : bits) {
      for (auto& side : head) {
        for (int s = 0; s < 4; ++s) side.push_back(round == 0 ? 0 : kWidths[random() % 6]);
      }
    }
    HackParameters p;
    p.meta_bits = round % 4 == 3 ? 16 : 8;
    p.rounding = round % 5 == 4 ? Rounding::kStochastic : Rounding::kNearest;
    p.rotation = round % 4 == 1 ? Rotation::kHadamard : Rotation::kNone;
    p.v_norm = round % 6 != 2;
    const HackFormat format = MakeHackFormat(layout, p, &bits);
    ExpectAgreement(format, Data(round % kDataKinds), uint32_t(round));
  }
}

TEST(KernelsTest, DecodesAnyBytes) {
  std::mt19937 random(9);
  for (const char* spec :
       {"hack", "hack:k_axis=token,sums=1,k_bits=8,v_bits=8", "hack:meta=16", "hack:rotation=none,v_norm=0"}) {
    const PageLayout layout{DType::kFloat16, 2, 128, 64};
    const HackFormat format = MakeHackFormat(layout, *ParseHackParameters(ParseCodecSpec(spec)->parameters, layout));
    AlignedBytes page(format.page_bytes), raw(layout.raw_bytes());
    for (int round = 0; round < 50; ++round) {
      for (size_t i = 0; i < page.size; ++i) page.data[i] = uint8_t(random());
      for (Isa isa : SupportedIsas()) HackKernelsFor(isa).decode(format, page.data, raw.data);
    }
  }
}

}  // namespace
}  // namespace kvmanager::hack
