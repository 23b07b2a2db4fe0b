// The GPU's encoder and decoder against the CPU's codec, byte by byte: every parameter, adversarial data, guard bytes
// around what is written.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/hack/hack_page_testing.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager::hack {
namespace {

constexpr size_t kGuardBytes = 256;
constexpr uint8_t kGuard = 0xa5;

struct Counts {
  int encoded = 0;
  int declined = 0;
};

/// Encodes pages of every kind in `kinds` with both, then decodes what was encoded.
class Comparison {
 public:
  explicit Comparison(const HackFormat& format)
      : format_(format),
        codec_(format, HackKernelsFor(BestIsa())),
        device_(MakeHackDeviceFormat(format)),
        heads_(device_.heads) {}

  void Run(const std::vector<Data>& kinds, uint32_t seed, Counts* counts) {
    const PageLayout& layout = format_.layout;
    const std::string what = absl::StrCat(HackSpec(format_.parameters), " d=", layout.head_dim,
                                          " page=", layout.page_tokens, " dtype=", int(layout.dtype), " seed=", seed);
    const size_t raw_bytes = layout.raw_bytes(), page_bytes = format_.page_bytes, n = kinds.size();
    const size_t raw_stride = raw_bytes + kGuardBytes, page_stride = page_bytes + kGuardBytes;
    std::vector<uint8_t> raw(n * raw_stride, kGuard), want(n * page_stride, kGuard), want_raw(n * raw_stride, kGuard);
    TestArray<uint8_t> device_raw(raw.size()), device_pages(want);
    std::vector<DeviceEncodeItem> items(n);
    std::vector<uint32_t> declined(n);
    for (size_t i = 0; i < n; ++i) {
      items[i].raw = device_raw.data() + i * raw_stride;
      items[i].encoded = device_pages.data() + i * page_stride;
      items[i].layer = seed % 7 + i;
      items[i].first_token = (uint64_t{seed} * 31 + i) * layout.page_tokens + (uint64_t{1} << 33);
      const std::vector<uint8_t> page = DataPage(layout, kinds[i], seed + uint32_t(i));
      std::memcpy(raw.data() + i * raw_stride, page.data(), raw_bytes);
      EncodeItem item;
      item.raw = Aligned(page, 0), item.encoded = Room(page_bytes, 1);
      item.layer = items[i].layer, item.first_token = items[i].first_token;
      codec_.Encode(absl::MakeSpan(&item, 1),
                    {Room(codec_.encode_workspace_bytes(), 2), codec_.encode_workspace_bytes()});
      std::memcpy(want.data() + i * page_stride, item.encoded, page_bytes);
      declined[i] = item.declined;
      (item.declined ? counts->declined : counts->encoded) += 1;
      const DecodeItem back = {item.encoded, Room(raw_bytes, 0), item.layer};
      codec_.Decode(absl::MakeConstSpan(&back, 1));
      std::memcpy(want_raw.data() + i * raw_stride, back.raw, raw_bytes);
    }
    device_raw.Write(raw);
    TestArray<DeviceEncodeItem> device_items(items);
    TestArray<uint32_t> device_declined(std::vector<uint32_t>(n, 7));
    ASSERT_EQ(LaunchHackEncode(device_.shape, heads_.data(), device_items.data(), uint32_t(n), device_declined.data(),
                               nullptr),
              0);
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(device_declined.Read(), declined) << what;
    const std::vector<uint8_t> got = device_pages.Read();
    for (size_t i = 0; i < n; ++i) {
      ExpectEqual(want.data() + i * page_stride, got.data() + i * page_stride, page_stride,
                  absl::StrCat(what, " data=", int(kinds[i])));
    }

    // Decoding: of the CPU's pages, so that one error does not hide another.
    device_pages.Write(want);
    TestArray<uint8_t> device_back(std::vector<uint8_t>(raw.size(), kGuard));
    std::vector<DeviceDecodeItem> decodes(n);
    for (size_t i = 0; i < n; ++i) decodes[i] = {items[i].encoded, device_back.data() + i * raw_stride};
    TestArray<DeviceDecodeItem> device_decodes(decodes);
    ASSERT_EQ(LaunchHackDecode(device_.shape, heads_.data(), device_decodes.data(), uint32_t(n), nullptr), 0);
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<uint8_t> back = device_back.Read();
    for (size_t i = 0; i < n; ++i) {
      ExpectEqual(want_raw.data() + i * raw_stride, back.data() + i * raw_stride, raw_stride,
                  absl::StrCat("decode ", what, " data=", int(kinds[i])));
    }
  }

 private:
  /// Scratch of 64-byte alignment, one per slot.
  uint8_t* Room(size_t bytes, int slot) {
    rooms_[slot].resize(bytes + 64);
    return rooms_[slot].data() + (64 - reinterpret_cast<uintptr_t>(rooms_[slot].data()) % 64) % 64;
  }
  const uint8_t* Aligned(const std::vector<uint8_t>& from, int slot) {
    uint8_t* to = Room(from.size(), slot);
    std::memcpy(to, from.data(), from.size());
    return to;
  }
  static void ExpectEqual(const uint8_t* want, const uint8_t* got, size_t bytes, const std::string& what) {
    if (std::memcmp(want, got, bytes) == 0) return;
    const size_t at = std::mismatch(want, want + bytes, got).first - want;
    size_t wrong = 0;
    for (size_t i = 0; i < bytes; ++i) wrong += want[i] != got[i];
    ADD_FAILURE() << what << ": byte " << at << " of " << bytes - kGuardBytes << " is " << int(got[at]) << ", not "
                  << int(want[at]) << "; " << wrong << " differ";
  }

  const HackFormat format_;
  const HackCodec codec_;
  const HackDeviceFormat device_;
  const TestArray<HackDeviceHead> heads_;
  std::vector<uint8_t> rooms_[3];
};

HackFormat Format(const PageLayout& layout, const HackParameters& parameters) {
  const auto checked = ParseHackParameters(ParseCodecSpec(HackSpec(parameters))->parameters, layout);
  EXPECT_TRUE(checked.ok()) << checked.status();
  return MakeHackFormat(layout, *checked);
}

std::vector<Data> AllKinds() {
  std::vector<Data> kinds;
  for (int i = 0; i < kDataKinds; ++i) kinds.push_back(Data(i));
  return kinds;
}

class HackEncodeGpuTest : public GpuTest {};

TEST_F(HackEncodeGpuTest, AgreesOnStrips) {
  constexpr int kBits[] = {1, 2, 3, 4, 8};
  Counts counts;
  uint32_t seed = 1;
  for (int head_dim : {64, 128}) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (int mask = 0; mask < 40; ++mask) {
        HackParameters p;
        p.k_bits = kBits[mask % 5], p.v_bits = kBits[(mask + mask / 5) % 5];
        p.meta_bits = mask % 3 == 2 ? 16 : 8;
        p.k_range = mask % 7 == 3 ? Range::kLeastSquares : Range::kMinMax;
        p.v_range = p.v_bits == 1 || mask % 7 == 4 ? Range::kLeastSquares : Range::kMinMax;
        p.rotation = mask % 2 ? Rotation::kHadamard : Rotation::kNone;
        p.v_norm = mask / 2 % 2 != 0;
        const PageLayout layout{dtype, 2, uint16_t(head_dim), 64};
        Comparison(Format(layout, p)).Run(AllKinds(), seed, &counts);
        seed += 20;
      }
    }
  }
  EXPECT_GT(counts.encoded, 1000);
  EXPECT_GT(counts.declined, 20);
}

// Every kernel once: what compute-sanitizer can run in a minute.
TEST_F(HackEncodeGpuTest, AgreesOnAFewPages) {
  Counts counts;
  uint32_t seed = 50000;
  for (const char* spec : {"hack", "hack:k_bits=2,v_bits=1", "hack:k_bits=1,k_range=least_squares,v_bits=8,meta=16",
                           "hack:rounding=stochastic,part=32,v_bits=1", "hack:rotation=none,k_bits=4,v_bits=3",
                           "hack:rotation=none,v_norm=0", "hack:rotation=none,v_norm=0,v_bits=1",
                           "hack:k_axis=token,q=asymmetric,k_range=least_squares"}) {
    const PageLayout layout{seed % 2 ? DType::kBFloat16 : DType::kFloat16, 2, uint16_t(seed % 3 ? 64 : 128), 64};
    Comparison(MakeHackFormat(layout, *ParseHackParameters(ParseCodecSpec(spec)->parameters, layout)))
        .Run({Data::kRandom, Data::kHuge, Data::kOutliers}, ++seed, &counts);
  }
  EXPECT_GT(counts.encoded, 10);
}

TEST_F(HackEncodeGpuTest, AgreesOnRandomParameters) {
  constexpr int kBits[] = {1, 2, 3, 4, 8};
  std::mt19937 random(5);
  Counts counts;
  int tried = 0;
  while (tried < 240) {
    const auto pick = [&](int n) { return int(random() % n); };
    HackParameters p;
    p.k_axis = pick(2) ? Axis::kToken : Axis::kChannel;
    p.k_bits = kBits[pick(5)], p.v_bits = kBits[pick(5)];
    p.meta_bits = pick(2) ? 16 : 8;
    p.partition = 32 << pick(3);
    p.k_range = pick(3) ? Range::kMinMax : Range::kLeastSquares;
    p.v_range = pick(3) ? Range::kMinMax : Range::kLeastSquares;
    p.rounding = pick(2) ? Rounding::kNearest : Rounding::kStochastic;
    p.query = p.k_axis == Axis::kToken && pick(2) ? QueryCode::kAsymmetric : QueryCode::kSymmetric;
    p.sums = p.query == QueryCode::kAsymmetric || (p.k_axis == Axis::kToken && pick(2));
    p.rotation = pick(2) ? Rotation::kHadamard : Rotation::kNone;
    p.v_norm = pick(2) != 0;
    const bool rotates = p.rotation == Rotation::kHadamard;
    const PageLayout layout{pick(2) ? DType::kFloat16 : DType::kBFloat16, uint16_t(1 + pick(2)),
                            uint16_t(rotates ? 16 << pick(5) : 16 * (1 + pick(16))), uint16_t(64 << pick(3))};
    if (!ParseHackParameters(ParseCodecSpec(HackSpec(p))->parameters, layout).ok()) continue;
    const int first = pick(kDataKinds);
    Comparison(Format(layout, p)).Run({Data(first), Data((first + 1) % kDataKinds), Data::kRandom}, random(), &counts);
    ++tried;
  }
  EXPECT_GT(counts.encoded, 400);
  EXPECT_GT(counts.declined, 20);
}

TEST_F(HackEncodeGpuTest, AgreesOnWidthsPerSegment) {
  std::mt19937 random(3);
  constexpr uint8_t kWidths[] = {0, 1, 2, 3, 4, 8};
  Counts counts;
  for (int round = 0; round < 48; ++round) {
    const PageLayout layout{round % 2 ? DType::kBFloat16 : DType::kFloat16, 3, uint16_t(round % 4 < 2 ? 128 : 64),
                            uint16_t(round % 3 ? 64 : 128)};
    SegmentBits bits(3);
    for (auto& head : bits) {
      for (auto& side : head) {
        for (int s = 0; s < layout.head_dim / 16; ++s) side.push_back(round == 0 ? 0 : kWidths[random() % 6]);
      }
    }
    HackParameters p;
    p.meta_bits = round % 4 == 3 ? 16 : 8;
    p.rounding = round % 5 == 4 ? Rounding::kStochastic : Rounding::kNearest;
    p.rotation = round % 3 == 1 ? Rotation::kHadamard : Rotation::kNone;
    p.v_norm = round % 7 < 5;
    Comparison(MakeHackFormat(layout, p, &bits)).Run(AllKinds(), 100 * uint32_t(round), &counts);
  }
  EXPECT_GT(counts.encoded, 300);
}

// Least squares of 1 bit: many channels, since the kernel leaves out tries that cannot win.
TEST_F(HackEncodeGpuTest, AgreesOnManyLeastSquaresRanges) {
  Counts counts;
  for (uint32_t round = 0; round < 20; ++round) {
    HackParameters p;
    p.k_bits = 2, p.v_bits = 1, p.v_range = Range::kLeastSquares;
    p.meta_bits = round % 3 == 2 ? 16 : 8;
    p.rotation = round / 2 % 2 ? Rotation::kHadamard : Rotation::kNone;
    p.v_norm = round / 4 % 2 != 0;
    const PageLayout layout{round % 2 ? DType::kBFloat16 : DType::kFloat16, 8, 128, 64};
    Comparison(Format(layout, p)).Run(AllKinds(), 10000 + 100 * round, &counts);
  }
  EXPECT_GT(counts.encoded, 180);
}

TEST_F(HackEncodeGpuTest, DeclinesWhatIsNotFinite) {
  for (const char* spec :
       {"hack", "hack:k_axis=token", "hack:v_bits=1", "hack:rotation=none", "hack:rotation=none,v_norm=0"}) {
    const PageLayout layout{DType::kFloat16, 2, 128, 64};
    const HackFormat format = MakeHackFormat(layout, *ParseHackParameters(ParseCodecSpec(spec)->parameters, layout));
    const HackDeviceFormat device = MakeHackDeviceFormat(format);
    TestArray<HackDeviceHead> heads(device.heads);
    std::vector<uint8_t> raw;
    constexpr int kKinds = 5, kPages = 52 * kKinds;
    std::vector<uint32_t> expected;
    for (int i = 0; i < kPages; ++i) {
      std::vector<uint8_t> page = DataPage(layout, Data::kRandom, i);
      const uint16_t bits[kKinds] = {0x7c00, 0xfc00, 0x7e00, 0xffff, 0x3c00};  // infinities, NaNs, 1
      std::memcpy(page.data() + page.size() * (i % 7 + 1) / 8 / 2 * 2, &bits[i % kKinds], 2);
      expected.push_back(i % kKinds < 4);
      raw.insert(raw.end(), page.begin(), page.end());
    }
    TestArray<uint8_t> device_raw(raw), pages(kPages * format.page_bytes);
    std::vector<DeviceEncodeItem> items;
    for (int i = 0; i < kPages; ++i) {
      items.push_back({device_raw.data() + i * layout.raw_bytes(), pages.data() + i * format.page_bytes, 0, 0});
    }
    TestArray<DeviceEncodeItem> device_items(items);
    TestArray<uint32_t> declined(kPages);
    ASSERT_EQ(LaunchHackEncode(device.shape, heads.data(), device_items.data(), kPages, declined.data(), nullptr), 0);
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(declined.Read(), expected) << spec;
    const std::vector<uint8_t> got = pages.Read();
    for (int i = 0; i < kPages; ++i) {
      const auto page = got.begin() + i * format.page_bytes;
      EXPECT_EQ(std::all_of(page, page + format.page_bytes, [](uint8_t b) { return b == 0; }), expected[i] != 0)
          << spec << ", page " << i;
    }
  }
}

TEST_F(HackEncodeGpuTest, DecodesAnyBytes) {
  std::mt19937 random(9);
  for (const char* spec :
       {"hack", "hack:k_axis=token,sums=1,k_bits=8,v_bits=8", "hack:meta=16", "hack:rotation=none,v_norm=0"}) {
    const PageLayout layout{DType::kFloat16, 2, 128, 64};
    const HackDeviceFormat device =
        MakeHackDeviceFormat(MakeHackFormat(layout, *ParseHackParameters(ParseCodecSpec(spec)->parameters, layout)));
    TestArray<HackDeviceHead> heads(device.heads);
    std::vector<uint8_t> bytes(device.shape.page_bytes);
    for (uint8_t& b : bytes) b = uint8_t(random());
    TestArray<uint8_t> page(bytes), raw(layout.raw_bytes());
    TestArray<DeviceDecodeItem> item(std::vector<DeviceDecodeItem>{{page.data(), raw.data()}});
    ASSERT_EQ(LaunchHackDecode(device.shape, heads.data(), item.data(), 1, nullptr), 0);
    ASSERT_CUDA(cudaDeviceSynchronize());
  }
}

}  // namespace
}  // namespace kvmanager::hack
