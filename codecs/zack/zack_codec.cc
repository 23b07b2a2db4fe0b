#include "codecs/zack/zack_codec.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/zack/rotation.h"
#include "codecs/zack/zack.h"
#include "codecs/zack/zack_attention.h"
#include "codecs/zack/zack_device_codec.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace zack {
namespace {

constexpr uint16_t kHalfExponent = 0x7c00;
constexpr float kHalfMax = 65504;
constexpr float kBFloat16Max = 0x1.fep127f;
constexpr const char* kSideNames[2] = {"K", "V"};

bool AllFinite(const uint16_t* half, size_t count) {
  uint16_t any = 0;
  for (size_t i = 0; i < count; ++i) any |= uint16_t(-int((half[i] & kHalfExponent) == kHalfExponent));
  return any == 0;
}

}  // namespace

ZackCodec::ZackCodec(ZackFormat format, const std::shared_ptr<const Calibration>& calibration, Isa isa)
    : format_(std::move(format)), isa_(isa), attention_(MakeZackAttention(&format_, isa)) {
  info_.name = "zack";
  info_.spec = WithCalibration(format_.spec, calibration);
  if (calibration != nullptr) info_.calibration_digest = calibration->digest();
  info_.version = kFormatVersion;
  info_.encoded_bytes = format_.page_bytes_max;
  info_.payload_bytes = format_.payload_bytes;
  const std::vector<uint32_t>& bytes = format_.page_bytes;
  if (std::any_of(bytes.begin(), bytes.end(), [&](uint32_t b) { return b != bytes[0]; })) info_.layer_bytes = bytes;
}

size_t ZackCodec::encode_workspace_bytes() const {
  return size_t{format_.layout.page_tokens} * format_.rank_max * sizeof(float);
}

void ZackCodec::Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const {
  KV_CHECK(workspace.size() >= encode_workspace_bytes());
  for (EncodeItem& item : items) {
    item.declined = !EncodePage(item, reinterpret_cast<float*>(workspace.data()));
    if (item.declined) std::memset(item.encoded, 0, format_.page_bytes[item.layer]);
  }
}

bool ZackCodec::EncodePage(const EncodeItem& item, float* rotated) const {
  const PageLayout& layout = format_.layout;
  for (int h = 0; h < layout.kv_heads; ++h) {
    const ZackHead& head = format_.head(int(item.layer), h);
    for (int side = 0; side < 2; ++side) {
      const int n = head.rank[side];
      const size_t count = size_t{layout.page_tokens} * n;
      uint16_t* out = reinterpret_cast<uint16_t*>(item.encoded + head.offset[side]);
      RotateRaw(item.raw + layout.raw_offset(side, h, 0), layout.dtype, layout.page_tokens, layout.head_dim,
                head.encode[side].data(), n, rotated, isa_);
      ConvertFromFloat(rotated, DType::kFloat16, count, out, isa_);
      if (!AllFinite(out, count)) return false;
    }
  }
  return true;
}

void ZackCodec::Decode(absl::Span<const DecodeItem> items) const {
  const PageLayout& layout = format_.layout;
  const int d = layout.head_dim;
  const float most = layout.dtype == DType::kFloat16 ? kHalfMax : kBFloat16Max;
  constexpr int kBlockTokens = 16;
  float values[kBlockTokens * PageLayout::kHeadDimMax];
  for (const DecodeItem& item : items) {
    for (int h = 0; h < layout.kv_heads; ++h) {
      const ZackHead& head = format_.head(int(item.layer), h);
      for (int side = 0; side < 2; ++side) {
        const size_t row_bytes = size_t(head.rank[side]) * 2;
        for (int token = 0; token < layout.page_tokens; token += kBlockTokens) {
          RotateRaw(item.encoded + head.offset[side] + token * row_bytes, DType::kFloat16, kBlockTokens,
                    head.rank[side], head.decode[side].data(), d, values, isa_);
          // Bytes of a peer may stand for more than the raw form can hold; raw pages are finite.
          for (int i = 0; i < kBlockTokens * d; ++i) values[i] = std::clamp(values[i], -most, most);
          ConvertFromFloat(values, layout.dtype, size_t{kBlockTokens} * d, item.raw + layout.raw_offset(side, h, token),
                           isa_);
        }
      }
    }
  }
}

absl::Status ZackCodec::Validate(int layer, absl::Span<const uint8_t> encoded) const {
  if (encoded.size() != format_.page_bytes[layer]) {
    return FieldError(absl::StatusCode::kDataLoss, "encoded page bytes", absl::StrCat(encoded.size()),
                      absl::StrCat(format_.page_bytes[layer]));
  }
  for (int h = 0; h < format_.layout.kv_heads; ++h) {
    const ZackHead& head = format_.head(layer, h);
    for (int side = 0; side < 2; ++side) {
      const size_t count = size_t{format_.layout.page_tokens} * head.rank[side];
      for (size_t i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, encoded.data() + head.offset[side] + 2 * i, 2);
        if ((bits & kHalfExponent) == kHalfExponent) {
          return FieldError(absl::StatusCode::kDataLoss,
                            absl::StrCat("encoded page head ", h, " ", kSideNames[side], "[", i, "]"),
                            absl::StrCat(HalfToFloat(bits)), "finite");
        }
      }
    }
  }
  return absl::OkStatus();
}

bool ZackCodec::OutputFactor(int layer, int kv_head, absl::Span<float> factor) const {
  if (!format_.parameters.fold) return false;
  const int d = format_.layout.head_dim;
  KV_CHECK(factor.size() == size_t(d) * d);
  std::fill(factor.begin(), factor.end(), 0.0f);
  const ZackHead& head = format_.head(layer, kv_head);
  for (int c = 0; c < head.rank[1]; ++c) {
    for (int r = 0; r < d; ++r) factor[size_t(r) * d + c] = head.decode[1][size_t(c) * d + r];
  }
  return true;
}

std::unique_ptr<DeviceCodec> ZackCodec::NewDeviceCodec() const { return MakeZackDeviceCodec(format_); }

std::string ZackCodec::Describe() const {
  std::string text = absl::StrFormat("zack: mode %s, %.4f of all dimensions removed (asked for %g)",
                                     format_.parameters.mode, format_.removed, format_.parameters.rate);
  for (int side = 0; side < 2; ++side) {
    int least = format_.layout.head_dim, most = 0;
    double sum = 0;
    for (const ZackHead& head : format_.heads) {
      least = std::min(least, head.rank[side]);
      most = std::max(most, head.rank[side]);
      sum += head.rank[side];
    }
    absl::StrAppendFormat(&text, "; %s ranks %d..%d, mean %.1f", kSideNames[side], least, most,
                          sum / double(format_.heads.size()));
  }
  return text;
}

}  // namespace zack

void RegisterZack(CodecRegistry& registry) {
  registry.Register(
      "zack", "K and V in fewer dimensions (calibration=NAME, mode=joint|balanced, rate=share to remove, fold=0|1)",
      [](const CodecContext& context, const CodecParameters& parameters) -> absl::StatusOr<std::unique_ptr<Codec>> {
        KV_ASSIGN_OR_RETURN(zack::ZackFormat format, zack::MakeZackFormat(context, parameters));
        return std::make_unique<zack::ZackCodec>(std::move(format), context.calibration);
      });
}

}  // namespace kvmanager
