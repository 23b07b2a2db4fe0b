#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "codecs/raw/raw.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/raw/raw_device_codec.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint32_t kRawVersion = 1;

/// Immutable; every method may be called from any thread at once.
class RawCodec final : public Codec {
 public:
  explicit RawCodec(const PageLayout& layout) : layout_(layout), attention_(MakeRawAttention(layout)) {
    info_.name = "raw";
    info_.spec = "raw";
    info_.version = kRawVersion;
    info_.encoded_bytes = layout.raw_bytes();  // a multiple of 64: 16 tokens of 16 channels are 512 bytes
    info_.payload_bytes = layout.raw_bytes();
    info_.identity = true;
  }

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return layout_; }
  size_t encode_workspace_bytes() const override { return 0; }

  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override {
    for (EncodeItem& item : items) {
      std::memcpy(item.encoded, item.raw, layout_.raw_bytes());
      item.declined = false;
    }
  }

  void Decode(absl::Span<const DecodeItem> items) const override {
    for (const DecodeItem& item : items) std::memcpy(item.raw, item.encoded, layout_.raw_bytes());
  }

  absl::Status Validate(int, absl::Span<const uint8_t> encoded) const override {
    if (encoded.size() != layout_.raw_bytes()) {
      return FieldError(absl::StatusCode::kDataLoss, "encoded page bytes", absl::StrCat(encoded.size()),
                        absl::StrCat(layout_.raw_bytes()));
    }
    const uint16_t exponent = layout_.dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
    for (size_t i = 0; i < encoded.size() / 2; ++i) {
      uint16_t bits;
      std::memcpy(&bits, encoded.data() + 2 * i, 2);
      if ((bits & exponent) == exponent) {
        return FieldError(absl::StatusCode::kDataLoss, absl::StrCat("encoded page element ", i),
                          absl::StrCat("0x", absl::Hex(bits)), "finite");
      }
    }
    return absl::OkStatus();
  }

  const PageAttention& attention() const override { return *attention_; }

  std::unique_ptr<DeviceCodec> NewDeviceCodec() const override { return MakeRawDeviceCodec(layout_); }

 private:
  const PageLayout layout_;
  CodecInfo info_;
  std::unique_ptr<PageAttention> attention_;
};

absl::StatusOr<std::unique_ptr<Codec>> MakeRawCodec(const CodecContext& context, const CodecParameters& parameters) {
  const PageLayout& layout = context.layout;
  KV_RETURN_IF_ERROR(RefuseCalibration(context, "raw keeps pages as they are"));
  if (!parameters.empty()) {
    return InvalidField("codec raw parameter", absl::StrCat("\"", parameters.begin()->first, "\""),
                        "absent: raw takes none");
  }
  if (layout.dtype != DType::kFloat16 && layout.dtype != DType::kBFloat16) {
    return InvalidField("dtype", int(layout.dtype), "float16 (0) or bfloat16 (1)");
  }
  if (layout.kv_heads < 1 || layout.kv_heads > PageLayout::kKvHeadsMax) {
    return InvalidField("kv_heads", layout.kv_heads, absl::StrCat("1..", PageLayout::kKvHeadsMax));
  }
  if (layout.head_dim < PageLayout::kHeadDimMin || layout.head_dim > PageLayout::kHeadDimMax ||
      layout.head_dim % 16 != 0) {
    return InvalidField("head_dim", layout.head_dim,
                        absl::StrCat("a multiple of 16 in ", PageLayout::kHeadDimMin, "..", PageLayout::kHeadDimMax));
  }
  if (layout.page_tokens < PageLayout::kPageTokensMin || layout.page_tokens > PageLayout::kPageTokensMax ||
      layout.page_tokens % 16 != 0) {
    return InvalidField(
        "page_tokens", layout.page_tokens,
        absl::StrCat("a multiple of 16 in ", PageLayout::kPageTokensMin, "..", PageLayout::kPageTokensMax));
  }
  return std::make_unique<RawCodec>(layout);
}

}  // namespace

void RegisterRaw(CodecRegistry& registry) {
  registry.Register("raw", "pages as they are (no parameters)", MakeRawCodec);
}

}  // namespace kvmanager
