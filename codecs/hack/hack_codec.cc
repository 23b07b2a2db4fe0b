#include "codecs/hack/hack_codec.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/hack/hack.h"
#include "codecs/hack/hack_attention.h"
#include "codecs/hack/hack_device_codec.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace hack {
namespace {

uint16_t Load16(const uint8_t* at) {
  uint16_t value;
  std::memcpy(&value, at, 2);
  return value;
}

absl::Status DataLoss(int head, int side, absl::string_view what, size_t index, double value, absl::string_view bound) {
  return FieldError(absl::StatusCode::kDataLoss,
                    absl::StrCat("encoded page head ", head, side == 0 ? " K " : " V ", what, "[", index, "]"),
                    absl::StrCat(value), bound);
}

/// fp16 values that scale codes: `count` of them, `stride` apart.
absl::Status CheckHalves(const uint8_t* at, size_t count, size_t stride, bool negative, int head, int side,
                         absl::string_view what) {
  for (size_t i = 0; i < count; ++i) {
    const float f = HalfToFloat(Load16(at + 2 * i * stride));
    if (!std::isfinite(f) || (!negative && f < 0)) {
      return DataLoss(head, side, what, i, f, negative ? "finite" : "finite, 0 or more");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSide(const HackFormat& format, const uint8_t* record, int head, int side) {
  const SideLayout& s = format.heads[head].side[side];
  const size_t meta = size_t(s.partitions) * s.meta_entries;
  if (format.parameters.meta_bits == 8) {
    const bool along_tokens = side == 1 || format.parameters.k_axis == Axis::kChannel;
    const size_t pairs = along_tokens ? s.partitions : 1;
    KV_RETURN_IF_ERROR(CheckHalves(record + s.tops, pairs, 2, false, head, side, "top step"));
    KV_RETURN_IF_ERROR(CheckHalves(record + s.tops + 2, pairs, 2, false, head, side, "top minimum"));
  } else {
    KV_RETURN_IF_ERROR(CheckHalves(record + s.steps, meta, 1, false, head, side, "step"));
    KV_RETURN_IF_ERROR(CheckHalves(record + s.minima, meta, 1, true, head, side, "minimum"));
  }
  if (s.norms != 0) KV_RETURN_IF_ERROR(CheckHalves(record + s.norm_top, 1, 1, false, head, side, "norm top"));
  if (s.sums == 0) return absl::OkStatus();
  for (size_t i = 0; i < meta; ++i) {
    const int channel = int(i / s.meta_entries) * s.partition;
    const int most = s.partition * ((1 << s.segment_bits[channel / kSegmentChannels]) - 1);
    const int sum = Load16(record + s.sums + 2 * i);
    if (sum > most) return DataLoss(head, side, "sum", i, sum, absl::StrCat("at most ", most));
  }
  return absl::OkStatus();
}

}  // namespace

HackCodec::HackCodec(HackFormat format, const HackKernels& kernels)
    : format_(std::move(format)), kernels_(kernels), attention_(MakeHackAttention(&format_)) {
  info_.name = "hack";
  info_.spec = HackSpec(format_.parameters);
  info_.version = kFormatVersion;
  info_.encoded_bytes = format_.page_bytes;
  info_.payload_bytes = format_.payload_bytes;
}

void HackCodec::Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const {
  KV_CHECK(workspace.size() >= encode_workspace_bytes());
  for (EncodeItem& item : items) {
    item.declined = !kernels_.encode(format_, item.raw, item.layer, item.first_token, item.encoded, workspace.data());
  }
}

void HackCodec::Decode(absl::Span<const DecodeItem> items) const {
  for (const DecodeItem& item : items) kernels_.decode(format_, item.encoded, item.raw);
}

absl::Status HackCodec::Validate(int, absl::Span<const uint8_t> encoded) const {
  if (encoded.size() != format_.page_bytes) {
    return FieldError(absl::StatusCode::kDataLoss, "encoded page bytes", absl::StrCat(encoded.size()),
                      absl::StrCat(format_.page_bytes));
  }
  for (int head = 0; head < format_.layout.kv_heads; ++head) {
    for (int side = 0; side < 2; ++side) {
      KV_RETURN_IF_ERROR(CheckSide(format_, encoded.data() + format_.heads[head].offset, head, side));
    }
  }
  return absl::OkStatus();
}

std::unique_ptr<DeviceCodec> HackCodec::NewDeviceCodec() const { return MakeHackDeviceCodec(format_); }

}  // namespace hack

std::unique_ptr<Codec> MakeHackCodec(hack::HackFormat format) {
  return std::make_unique<hack::HackCodec>(std::move(format), hack::HackKernelsFor(BestIsa()));
}

void RegisterHack(CodecRegistry& registry) {
  registry.Register(
      "hack", "codes of 1, 2, 3, 4 or 8 bits that attention multiplies (k_axis, k_bits, v_bits, meta, part, ...)",
      [](const CodecContext& context, const CodecParameters& parameters) -> absl::StatusOr<std::unique_ptr<Codec>> {
        KV_RETURN_IF_ERROR(RefuseCalibration(context, "hack takes its ranges from each page"));
        KV_ASSIGN_OR_RETURN(const hack::HackParameters checked, hack::ParseHackParameters(parameters, context.layout));
        return MakeHackCodec(hack::MakeHackFormat(context.layout, checked));
      });
}

}  // namespace kvmanager
