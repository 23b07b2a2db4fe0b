#include "codecs/million/million_codec.h"

#include <cstring>
#include <list>
#include <random>
#include <string>

#include "codecs/million/million.h"
#include "codecs/million/million_reference.h"
#include "codecs/million/million_testing.h"
#include "gtest/gtest.h"

namespace kvmanager {
namespace {

using million::AlignedArray;
using million::Books;
using million::MakeAligned;
using million::MakeLayout;
using million::MillionFormat;

constexpr int kLayers = 2;
const PageLayout kLayout = MakeLayout(2, 32, 64);

/// An artifact of random codebooks.
class Source final : public CalibrationSource {
 public:
  explicit Source(int kv_heads = 2, bool not_finite = false, uint64_t m = 16) {
    const auto add = [&](const std::string& name, uint64_t layers, uint64_t heads, uint64_t subspaces,
                         uint64_t centroids) {
      std::vector<uint16_t>& values = memory_.emplace_back(layers * heads * centroids * 32);
      std::mt19937 random(uint32_t(memory_.size()));
      std::normal_distribution<float> normal;
      for (uint16_t& x : values) x = FloatToHalf(normal(random));
      if (not_finite) values[7] = 0x7c00;
      tensors_[name] = {"F16",
                        {layers, heads, subspaces, centroids, 32 / subspaces},
                        absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(values.data()), 2 * values.size())};
    };
    add("million.k.m16.b8", kLayers, kv_heads, m, 256);
    add("million.v.m16.b8", kLayers, kv_heads, 16, 256);
    add("million_model.k.m16.b8", 1, 1, 16, 256);
    add("million_model.v.m16.b8", 1, 1, 16, 256);
    CalibrationModel model;
    model.model = "test";
    model.layers = kLayers, model.kv_heads = kv_heads, model.query_heads = 4, model.head_dim = 32;
    bytes_ = SerializeCalibration(model, tensors_, {});
  }
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view name) override {
    return Calibration::Parse(bytes_, name);
  }

 private:
  std::list<std::vector<uint16_t>> memory_;
  TensorMap tensors_;
  std::string bytes_;
};

absl::StatusOr<std::unique_ptr<Codec>> Make(absl::string_view spec, Source source = Source()) {
  CodecRegistry registry;
  RegisterMillion(registry);
  registry.SetCalibrations(&source);
  CodecContext context;
  context.layout = kLayout;
  context.layers = kLayers;
  return registry.Create(spec, context);
}

AlignedArray<uint8_t> RandomPage(uint32_t seed) {
  AlignedArray<uint8_t> raw = MakeAligned<uint8_t>(kLayout.raw_bytes());
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < kLayout.raw_bytes() / 2; ++i) StoreElement(raw.get(), kLayout.dtype, i, normal(random));
  return raw;
}

TEST(MillionCodec, SaysWhatItIs) {
  const auto codec = Make("million:m=16,calibration=a");
  ASSERT_TRUE(codec.ok()) << codec.status();
  const CodecInfo& info = (*codec)->info();
  EXPECT_EQ(info.name, "million");
  EXPECT_EQ(info.spec, "million:k_m=16,k_bits=8,v_m=16,v_bits=8,scope=head,calibration=" + info.calibration_digest);
  EXPECT_EQ(info.calibration_digest.size(), 64u);
  EXPECT_EQ(info.version, 1u);
  EXPECT_EQ(info.payload_bytes, 2u * 64 * 32);
  EXPECT_EQ(info.encoded_bytes, info.payload_bytes);
  EXPECT_FALSE(info.identity);
  EXPECT_EQ((*codec)->layout(), kLayout);
}

TEST(MillionCodec, SaysWhatIsMissingOrWrong) {
  const absl::Status absent = Make("million:m=16").status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(absent).field, "codec parameter calibration");
  EXPECT_NE(DetailOf(absent).bound.find("kvctl calibrate --codec million:k_m=16"), std::string::npos);
  const absl::Status other = Make("million:m=16,bits=6,calibration=a").status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(other).field, "calibration a tensor million.k.m16.b6");
  EXPECT_NE(DetailOf(other).bound.find("k_bits=6"), std::string::npos);
  EXPECT_EQ(DetailOf(Make("million:m=16,calibration=a", Source(4)).status()).field, "calibration a kv_heads");
  EXPECT_EQ(Make("million:m=16,calibration=a", Source(2, true)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(Make("million:m=16,calibration=a", Source(2, false, 8)).status()).field,
            "calibration a tensor million.k.m16.b8 shape");
  EXPECT_EQ(DetailOf(Make("million:m=5,calibration=a").status()).field, "codec parameter m");
}

TEST(MillionCodec, EncodesAsTheReferenceAndDecodesWhatItEncoded) {
  const MillionFormat format = million::MakeFormat(kLayout, {16, 7}, {8, 10});
  const Books books(format, kLayers, 3);
  const auto codec = MakeMillionCodec(format, books.books, "inner:x=1", "digest");
  EXPECT_EQ(codec->info().spec, "inner:x=1");
  EXPECT_EQ(codec->info().calibration_digest, "digest");
  std::vector<AlignedArray<uint8_t>> raw, encoded;
  std::vector<EncodeItem> items;
  for (int i = 0; i < 3; ++i) {
    raw.push_back(RandomPage(i)), encoded.push_back(MakeAligned<uint8_t>(format.page_bytes));
    std::memset(encoded.back().get(), 0xee, format.page_bytes);
    items.push_back({raw.back().get(), encoded.back().get(), uint32_t(i % kLayers), uint64_t(64 * i), true});
  }
  AlignedArray<uint8_t> workspace = MakeAligned<uint8_t>(codec->encode_workspace_bytes());
  codec->Encode(absl::MakeSpan(items), absl::MakeSpan(workspace.get(), codec->encode_workspace_bytes()));
  AlignedArray<uint8_t> expected = MakeAligned<uint8_t>(format.page_bytes),
                        again = MakeAligned<uint8_t>(format.page_bytes);
  AlignedArray<uint8_t> decoded = MakeAligned<uint8_t>(kLayout.raw_bytes());
  for (const EncodeItem& item : items) {
    EXPECT_FALSE(item.declined);
    million::ReferenceEncode(format, *books.tables, item.raw, int(item.layer), expected.get());
    ASSERT_EQ(0, std::memcmp(expected.get(), item.encoded, format.page_bytes));
    EXPECT_TRUE(codec->Validate(int(item.layer), absl::MakeSpan(item.encoded, format.page_bytes)).ok());
    // Decoded values are centroids: they encode to themselves, wherever no two centroids round to the same.
    const DecodeItem back = {item.encoded, decoded.get(), item.layer};
    codec->Decode(absl::MakeConstSpan(&back, 1));
    EncodeItem second = {decoded.get(), again.get(), item.layer, item.first_token, true};
    codec->Encode(absl::MakeSpan(&second, 1), absl::MakeSpan(workspace.get(), codec->encode_workspace_bytes()));
    int different = 0;
    for (uint32_t i = 0; i < format.page_bytes; ++i) different += again[i] != item.encoded[i];
    EXPECT_LE(different, int(format.page_bytes / 100));
  }
}

TEST(MillionCodec, OneCodebookForTheWholeModel) {
  const auto codec = Make("million:m=16,scope=model,calibration=a");
  ASSERT_TRUE(codec.ok()) << codec.status();
  AlignedArray<uint8_t> raw = RandomPage(1), first = MakeAligned<uint8_t>((*codec)->info().encoded_bytes),
                        second = MakeAligned<uint8_t>((*codec)->info().encoded_bytes);
  // Both heads hold the same values.
  for (int side = 0; side < 2; ++side) {
    std::memcpy(raw.get() + kLayout.raw_offset(side, 1, 0), raw.get() + kLayout.raw_offset(side, 0, 0),
                kLayout.raw_head_bytes());
  }
  EncodeItem items[] = {{raw.get(), first.get(), 0, 0, true}, {raw.get(), second.get(), 1, 0, true}};
  AlignedArray<uint8_t> workspace = MakeAligned<uint8_t>((*codec)->encode_workspace_bytes());
  (*codec)->Encode(absl::MakeSpan(items), absl::MakeSpan(workspace.get(), (*codec)->encode_workspace_bytes()));
  const size_t bytes = (*codec)->info().encoded_bytes;
  EXPECT_EQ(0, std::memcmp(first.get(), second.get(), bytes));
  EXPECT_EQ(0, std::memcmp(first.get(), first.get() + bytes / 2, bytes / 2));
}

TEST(MillionCodec, RefusesPagesOfTheWrongSizeAndWithBitsBeyondTheIndices) {
  const MillionFormat format = million::MakeFormat(kLayout, {1, 5}, {2, 9});  // 40 and 144 bytes of 64 and 192
  const Books books(format, kLayers, 3);
  const auto codec = MakeMillionCodec(format, books.books, "x");
  std::vector<uint8_t> page(format.page_bytes);
  EXPECT_TRUE(codec->Validate(0, page).ok());
  for (size_t bytes : {size_t{0}, page.size() - 1, page.size() - 64}) {
    const absl::Status status = codec->Validate(0, absl::MakeConstSpan(page).subspan(0, bytes));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(DetailOf(status).field, "encoded page bytes");
  }
  page.push_back(0);
  EXPECT_EQ(codec->Validate(0, page).code(), absl::StatusCode::kDataLoss);
  page.pop_back();
  page[format.record_bytes + 40] = 1;
  const absl::Status k = codec->Validate(1, page);
  EXPECT_EQ(k.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(DetailOf(k).field, "encoded page head 1 K byte 40, beyond the last index");
  page[format.record_bytes + 40] = 0;
  page[64 + 144] = 0x80;
  EXPECT_EQ(DetailOf(codec->Validate(1, page)).field, "encoded page head 0 V byte 208, beyond the last index");
  page[64 + 144] = 0;
  std::mt19937 random(1);
  for (int i = 0; i < 40; ++i) page[i] = uint8_t(random());
  EXPECT_TRUE(codec->Validate(0, page).ok());
}

}  // namespace
}  // namespace kvmanager
