#include "codecs/hack/hack_format.h"

#include <string>

#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager::hack {
namespace {

PageLayout Layout(int heads = 8, int head_dim = 128, int page_tokens = 64) {
  return {DType::kFloat16, uint16_t(heads), uint16_t(head_dim), uint16_t(page_tokens)};
}

absl::StatusOr<HackParameters> Parse(absl::string_view spec, const PageLayout& layout = Layout()) {
  KV_ASSIGN_OR_RETURN(const CodecSpec parsed, ParseCodecSpec(spec));
  return ParseHackParameters(parsed.parameters, layout);
}

HackFormat Format(absl::string_view spec, const PageLayout& layout = Layout()) {
  const auto parameters = Parse(spec, layout);
  EXPECT_TRUE(parameters.ok()) << parameters.status();
  return MakeHackFormat(layout, *parameters);
}

double PayloadPerToken(const HackFormat& f) {
  return double(f.payload_bytes) / f.layout.page_tokens / f.layout.kv_heads;
}

TEST(HackParametersTest, DefaultsAndCanonicalSpec) {
  EXPECT_EQ(HackSpec(*Parse("hack")),
            "hack:k_axis=channel,k_bits=3,v_bits=2,meta=8,part=64,k_range=minmax,v_range=minmax,rounding=nearest,q="
            "symmetric,sums=0,"
            "rotation=hadamard,v_norm=1");
  EXPECT_EQ(Parse("hack:v_bits=1")->v_range, Range::kLeastSquares);
  EXPECT_EQ(Parse("hack:v_bits=1,v_range=minmax")->v_range, Range::kMinMax);
  EXPECT_TRUE(Parse("hack:k_axis=token,q=asymmetric")->sums);
  for (int head_dim : {16, 32, 64, 128, 256}) {
    EXPECT_EQ(Parse("hack", Layout(1, head_dim))->rotation, Rotation::kHadamard) << head_dim;
  }
  for (int head_dim : {48, 80, 96, 192, 240}) {
    EXPECT_EQ(Parse("hack", Layout(1, head_dim))->rotation, Rotation::kNone) << head_dim;
  }
  for (const char* spec :
       {"hack", "hack:k_axis=token,sums=1,part=32,meta=16,rotation=none", "hack:k_bits=8,v_bits=1,rounding=stochastic",
        "hack:k_axis=token,q=asymmetric,k_range=least_squares,v_norm=0"}) {
    const std::string canonical = HackSpec(*Parse(spec));
    EXPECT_EQ(HackSpec(*Parse(canonical)), canonical);
  }
}

TEST(HackParametersTest, RefusesWithFieldValueAndBound) {
  const struct {
    const char* spec;
    PageLayout layout;
    const char* field;
    const char* value;
  } kCases[] = {
      {"hack:bits=3", Layout(), "codec hack parameter", "\"bits\""},
      {"hack:k_bits=5", Layout(), "codec parameter k_bits", "\"5\""},
      {"hack:k_bits=03", Layout(), "codec parameter k_bits", "\"03\""},
      {"hack:v_bits=0", Layout(), "codec parameter v_bits", "\"0\""},
      {"hack:k_axis=both", Layout(), "codec parameter k_axis", "\"both\""},
      {"hack:meta=4", Layout(), "codec parameter meta", "\"4\""},
      {"hack:part=48", Layout(), "codec parameter part", "\"48\""},
      {"hack:part=128", Layout(), "codec parameter part", "128"},
      {"hack:part=128", Layout(1, 128, 192), "codec parameter part", "128"},
      {"hack:k_axis=token", Layout(1, 96, 64), "codec parameter part", "64"},
      {"hack:q=asymmetric", Layout(), "codec parameter q", "asymmetric"},
      {"hack:k_axis=token,q=asymmetric,sums=0", Layout(), "codec parameter sums", "0"},
      {"hack:sums=1", Layout(), "codec parameter sums", "1"},
      {"hack:sums=yes", Layout(), "codec parameter sums", "\"yes\""},
      {"hack:hadamard=1", Layout(), "codec hack parameter", "\"hadamard\""},
      {"hack:rotation=hadamard", Layout(1, 96, 64), "codec parameter rotation", "hadamard"},
      {"hack:rotation=1", Layout(), "codec parameter rotation", "\"1\""},
      {"hack:v_norm=yes", Layout(), "codec parameter v_norm", "\"yes\""},
      {"hack:rounding=up", Layout(), "codec parameter rounding", "\"up\""},
      {"hack:k_range=max", Layout(), "codec parameter k_range", "\"max\""},
      {"hack", Layout(0), "kv_heads", "0"},
      {"hack", Layout(257), "kv_heads", "257"},
      {"hack", Layout(1, 120), "head_dim", "120"},
      {"hack", Layout(1, 272), "head_dim", "272"},
      {"hack", Layout(1, 128, 32), "page_tokens", "32"},
      {"hack", Layout(1, 128, 96), "page_tokens", "96"},
      {"hack", Layout(1, 128, 320), "page_tokens", "320"},
      {"hack", {DType::kFloat32, 1, 128, 64}, "dtype", "2"},
  };
  for (const auto& c : kCases) {
    const auto parameters = Parse(c.spec, c.layout);
    ASSERT_FALSE(parameters.ok()) << c.spec;
    EXPECT_EQ(parameters.status().code(), absl::StatusCode::kInvalidArgument);
    const ErrorDetail detail = DetailOf(parameters.status());
    EXPECT_EQ(detail.field, c.field) << c.spec;
    EXPECT_EQ(detail.value, c.value) << c.spec;
    EXPECT_FALSE(detail.bound.empty()) << c.spec;
  }
  EXPECT_NE(DetailOf(Parse("hack:bits=3").status()).bound.find("k_axis, k_bits, v_bits, meta"), std::string::npos);
  EXPECT_TRUE(Parse("hack:part=128", Layout(1, 128, 128)).ok());
}

TEST(HackFormatTest, BytesPerTokenAndHead) {
  EXPECT_EQ(PayloadPerToken(Format("hack:v_norm=0")), 88.125);
  EXPECT_EQ(PayloadPerToken(Format("hack:k_bits=2,v_norm=0")), 72.125);
  EXPECT_EQ(PayloadPerToken(Format("hack:k_bits=2,v_bits=1,v_norm=0")), 56.125);
  EXPECT_EQ(PayloadPerToken(Format("hack:k_bits=4,v_bits=3,v_norm=0")), 120.125);
  EXPECT_EQ(PayloadPerToken(Format("hack:k_bits=8,v_bits=8,v_norm=0")), 264.125);
  EXPECT_EQ(PayloadPerToken(Format("hack:meta=16,v_norm=0")), 96);
  EXPECT_EQ(PayloadPerToken(Format("hack:part=128,v_norm=0", Layout(8, 128, 128))), 84 + 8.0 / 128);
  EXPECT_EQ(PayloadPerToken(Format("hack:k_axis=token,k_bits=2,meta=16,v_norm=0")), 80);
  EXPECT_EQ(PayloadPerToken(Format("hack:k_axis=token,k_bits=2,meta=16,sums=1,v_norm=0")), 84);
  EXPECT_EQ(PayloadPerToken(Format("hack:k_axis=token,k_bits=2,v_norm=0")), 64 + 4 + 4 + 0.125);
}

TEST(HackFormatTest, NormsAreAByteOfATokenAndATopOfAPage) {
  for (int head_dim : {64, 128, 256}) {
    for (const char* spec : {"hack:", "hack:meta=16,", "hack:part=32,", "hack:k_axis=token,", "hack:v_bits=1,"}) {
      for (int page_tokens : {64, 128}) {
        const PageLayout layout = Layout(2, head_dim, page_tokens);
        const std::string text = spec;
        EXPECT_EQ(PayloadPerToken(Format(text + "v_norm=1", layout)),
                  PayloadPerToken(Format(text + "v_norm=0", layout)) + 1 + 2.0 / page_tokens);
      }
    }
  }
}

// What a page of 64 tokens takes of memory, with its padding.
TEST(HackFormatTest, RecordsOfTheUsualWidths) {
  const auto record = [](absl::string_view spec, int head_dim) {
    return Format(spec, Layout(2, head_dim)).heads[1].offset;
  };
  EXPECT_EQ(record("hack", 64), 46 * 64);
  EXPECT_EQ(record("hack:k_bits=4,v_bits=3", 64), 62 * 64);
  EXPECT_EQ(record("hack:k_bits=4", 64), 54 * 64);
  EXPECT_EQ(record("hack:k_bits=2", 64), 38 * 64);
  EXPECT_EQ(record("hack", 128), 90 * 64);
  EXPECT_EQ(record("hack", 256), 178 * 64);
  EXPECT_EQ(record("hack:v_norm=0", 128), 89 * 64);
}

TEST(HackFormatTest, TheNormsTopIsBehindThePairsOrAlone) {
  const SideLayout pairs = Format("hack:part=32").heads[1].side[1];
  EXPECT_EQ(pairs.norm_top, pairs.tops + 8);
  EXPECT_GT(pairs.norms, pairs.minima);
  EXPECT_EQ(pairs.end, pairs.norms + 64);
  const SideLayout alone = Format("hack:meta=16").heads[1].side[1];
  EXPECT_EQ(alone.norm_top, alone.tops);
  EXPECT_EQ(alone.steps, alone.tops + 16);
  for (const SideLayout& none : {Format("hack").heads[1].side[0], Format("hack:v_norm=0").heads[1].side[1]}) {
    EXPECT_EQ(none.norm_top, 0);
    EXPECT_EQ(none.norms, 0);
  }
}

// The worked example of docs/codecs.md.
TEST(HackFormatTest, OffsetsOfK3V2) {
  const HackFormat f = Format("hack");
  const SideLayout& k = f.heads[0].side[0];
  EXPECT_EQ(k.segments, 8);
  EXPECT_EQ(k.segment_offset[1], 384);
  EXPECT_EQ(k.strip_bytes, 3072);
  EXPECT_EQ(k.partitions, 1);
  EXPECT_EQ(k.partition, 64);
  EXPECT_EQ(k.meta_entries, 128);
  EXPECT_EQ(k.codes, 0);
  EXPECT_EQ(k.tops, 3072);
  EXPECT_EQ(k.steps, 3088);
  EXPECT_EQ(k.minima, 3216);
  EXPECT_EQ(k.sums, 0);
  EXPECT_EQ(k.end, 3344);
  const SideLayout& v = f.heads[0].side[1];
  EXPECT_EQ(v.strip_bytes, 2048);
  EXPECT_EQ(v.codes, 3344);
  EXPECT_EQ(v.tops, 5392);
  EXPECT_EQ(v.steps, 5408);
  EXPECT_EQ(v.minima, 5536);
  EXPECT_EQ(v.norm_top, 5396);
  EXPECT_EQ(v.norms, 5664);
  EXPECT_EQ(v.end, 5728);
  EXPECT_EQ(f.heads[1].offset, 5760);
  EXPECT_EQ(f.page_bytes, 8 * 5760);
  EXPECT_EQ(f.payload_bytes, 8 * 5706);
}

TEST(HackFormatTest, TokenAxisHasMetadataPerToken) {
  const HackFormat f = Format("hack:k_axis=token,k_bits=2,sums=1,part=32", Layout(1, 128, 128));
  const SideLayout& k = f.heads[0].side[0];
  EXPECT_EQ(k.partitions, 4);
  EXPECT_EQ(k.meta_entries, 128);
  EXPECT_EQ(k.strip_bytes, 2048);
  EXPECT_EQ(k.tops, 4096);
  EXPECT_EQ(k.steps, 4112);
  EXPECT_EQ(k.minima, 4112 + 512);
  EXPECT_EQ(k.sums, 4112 + 1024);
  EXPECT_EQ(k.end, 4112 + 1024 + 1024);
  EXPECT_EQ(f.heads[0].side[1].partitions, 4);
}

TEST(HackFormatTest, ArraysAreAlignedAndDoNotOverlap) {
  for (const char* spec :
       {"hack", "hack:meta=16,part=32", "hack:k_axis=token,sums=1,part=32", "hack:k_bits=1,v_bits=8"}) {
    for (const PageLayout& layout : {Layout(), Layout(3, 32, 192), Layout(2, 256, 256), Layout(5, 64, 128)}) {
      const HackFormat f = Format(spec, layout);
      EXPECT_EQ(f.page_bytes % 64, 0);
      EXPECT_LE(f.payload_bytes, f.page_bytes);
      uint32_t end = 0;
      for (const HeadLayout& head : f.heads) {
        EXPECT_EQ(head.offset % 64, 0);
        EXPECT_GE(head.offset, end);
        end = head.offset;
        for (const SideLayout& s : head.side) {
          for (uint32_t at : {s.codes, s.tops, s.steps, s.minima, s.sums, s.norms}) EXPECT_EQ(at % 16, 0);
          EXPECT_GE(head.offset + s.codes, end);
          EXPECT_GE(s.steps, s.codes + s.strip_bytes * (layout.page_tokens / 64));
          EXPECT_GT(s.minima, s.steps);
          EXPECT_GT(s.end, s.minima);
          end = head.offset + s.end;
        }
      }
      EXPECT_LE(end, f.page_bytes);
    }
  }
}

TEST(HackFormatTest, WidthsPerSegment) {
  const PageLayout layout = Layout(2, 64, 64);
  const SegmentBits bits = {{{{{4, 3, 1, 0}}, {{2, 2, 1, 0}}}}, {{{{0, 0, 0, 0}}, {{8, 4, 2, 1}}}}};
  const HackFormat f = MakeHackFormat(layout, *Parse("hack", layout), &bits);
  const SideLayout& k = f.heads[0].side[0];
  EXPECT_EQ(k.segment_offset[1], 512);
  EXPECT_EQ(k.segment_offset[2], 512 + 384);
  EXPECT_EQ(k.segment_offset[3], 512 + 384 + 128);
  EXPECT_EQ(k.strip_bytes, 1024);
  EXPECT_FALSE(k.segment_least_squares[1]);
  EXPECT_TRUE(k.segment_least_squares[2]);
  EXPECT_EQ(f.heads[1].side[0].strip_bytes, 0);
  EXPECT_EQ(f.heads[1].side[0].steps, 16);  // after the tops alone
  EXPECT_EQ(f.heads[1].side[1].strip_bytes, 15 * 128);
  EXPECT_EQ(f.payload_bytes, 1024u + 640 + 0 + 15 * 128 + 4 * (4 + 2 * 64) + 2 * (64 + 2));
}

}  // namespace
}  // namespace kvmanager::hack
