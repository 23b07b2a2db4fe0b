// The GPU's copy of a format against the format, and which kernel takes which parameters.
#include "codecs/hack/hack_device_format.h"

#include <utility>

#include "gtest/gtest.h"

namespace kvmanager::hack {
namespace {

HackDeviceFormat Made(const char* spec, const PageLayout& layout) {
  return MakeHackDeviceFormat(MakeHackFormat(layout, *ParseHackParameters(ParseCodecSpec(spec)->parameters, layout)));
}

TEST(HackDeviceFormatTest, HoldsTheFormat) {
  const PageLayout layout{DType::kBFloat16, 2, 128, 64};
  SegmentBits bits(2);
  for (auto& head : bits) {
    for (auto& side : head) side = {0, 1, 2, 3, 4, 8, 1, 2};
  }
  bits[1][0][0] = 8;
  const HackFormat format = MakeHackFormat(layout, {}, &bits);
  const HackDeviceFormat device = MakeHackDeviceFormat(format);
  EXPECT_EQ(device.shape.page_bytes, format.page_bytes);
  EXPECT_TRUE(device.shape.is_bfloat16);
  uint64_t end = 0;
  for (int h = 0; h < 2; ++h) {
    EXPECT_EQ(device.heads[h].offset, format.heads[h].offset);
    for (int side = 0; side < 2; ++side) {
      const SideLayout& want = format.heads[h].side[side];
      const HackDeviceSide& got = device.heads[h].side[side];
      for (int s = 0; s < 8; ++s) {
        EXPECT_EQ(got.segment_bits[s], want.segment_bits[s]);
        EXPECT_EQ(got.segment_offset[s], want.segment_offset[s]);
        EXPECT_EQ(got.least_squares >> s & 1, want.segment_least_squares[s]);
      }
      EXPECT_EQ(got.steps, want.steps);
      EXPECT_EQ(got.minima, want.minima);
      EXPECT_GE(got.end, want.end);
      // The sides tile the page: every byte is someone's.
      EXPECT_EQ(device.heads[h].offset + got.begin, end);
      end = device.heads[h].offset + got.end;
      EXPECT_EQ(end % 16, 0);
      EXPECT_LE(got.end - got.begin, device.shape.strip_bytes_max);
    }
  }
  EXPECT_EQ(end, format.page_bytes);
}

TEST(HackDeviceFormatTest, KnowsWhatWorksOnRows) {
  const PageLayout layout{DType::kFloat16, 8, 128, 64};
  const auto in_rows = [&](const char* spec) {
    const HackDeviceFormat f = Made(spec, layout);
    return std::pair(f.shape.in_rows[0], f.shape.in_rows[1]);
  };
  EXPECT_EQ(in_rows("hack"), std::pair(true, true));
  EXPECT_EQ(in_rows("hack:v_norm=0"), std::pair(true, true));
  EXPECT_EQ(in_rows("hack:rotation=none"), std::pair(false, true));
  EXPECT_EQ(in_rows("hack:rotation=none,v_norm=0"), std::pair(false, false));
}

TEST(HackDeviceFormatTest, ChoosesKernels) {
  const PageLayout layout{DType::kFloat16, 8, 128, 64};
  using Path = HackDevicePath;
  const auto paths = [](const HackDeviceFormat& f) { return std::pair(f.shape.encode[0], f.shape.encode[1]); };
  EXPECT_EQ(paths(Made("hack", layout)), std::pair(Path::kStrip, Path::kStrip));
  EXPECT_EQ(paths(Made("hack:v_bits=1", layout)), std::pair(Path::kStrip, Path::kFitted));
  EXPECT_EQ(paths(Made("hack:rotation=none,v_norm=0", layout)), std::pair(Path::kStrip, Path::kStrip));
  EXPECT_EQ(paths(Made("hack:k_axis=token", layout)), std::pair(Path::kGeneral, Path::kStrip));
  EXPECT_EQ(paths(Made("hack:rounding=stochastic", layout)), std::pair(Path::kGeneral, Path::kGeneral));
  EXPECT_TRUE(Made("hack:rounding=stochastic", layout).shape.decode_by_strip[0]);
  for (const PageLayout& other : {PageLayout{DType::kFloat16, 8, 96, 64}, PageLayout{DType::kFloat16, 8, 128, 128}}) {
    EXPECT_EQ(paths(Made("hack", other)), std::pair(Path::kGeneral, Path::kGeneral));
  }
}

}  // namespace
}  // namespace kvmanager::hack
