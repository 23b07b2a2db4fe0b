#include "codecs/million/million_codec.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/million/million.h"
#include "codecs/million/million_attention.h"
#include "codecs/million/million_device_codec.h"
#include "codecs/million/million_kernels.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace million {

MillionCodec::MillionCodec(const MillionFormat& format, const MillionCodebooks& codebooks, std::string spec,
                           std::string calibration_digest)
    : format_(format),
      tables_(format_, codebooks, TableOrderFor(format_.side[kSideK].bits), TableOrderFor(format_.side[kSideV].bits)),
      attention_(MakeMillionAttention(&format_, &tables_)) {
  info_.name = "million";
  info_.spec = std::move(spec);
  info_.calibration_digest = std::move(calibration_digest);
  info_.version = kFormatVersion;
  info_.encoded_bytes = format_.page_bytes;
  info_.payload_bytes = format_.payload_bytes;
}

size_t MillionCodec::encode_workspace_bytes() const { return EncodeWorkspaceBytes(format_); }

void MillionCodec::Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const {
  KV_CHECK(workspace.size() >= encode_workspace_bytes());
  for (EncodeItem& item : items) {
    EncodePage(format_, tables_, item.raw, int(item.layer), item.encoded, workspace.data());
    item.declined = false;
  }
}

void MillionCodec::Decode(absl::Span<const DecodeItem> items) const {
  for (const DecodeItem& item : items) DecodePage(format_, tables_, item.encoded, int(item.layer), item.raw);
}

std::unique_ptr<DeviceCodec> MillionCodec::NewDeviceCodec() const { return MakeMillionDeviceCodec(format_, tables_); }

absl::Status MillionCodec::Validate(int, absl::Span<const uint8_t> encoded) const {
  if (encoded.size() != format_.page_bytes) {
    return FieldError(absl::StatusCode::kDataLoss, "encoded page bytes", absl::StrCat(encoded.size()),
                      absl::StrCat(format_.page_bytes));
  }
  for (int head = 0; head < format_.layout.kv_heads; ++head) {
    const uint8_t* record = encoded.data() + size_t(head) * format_.record_bytes;
    for (int side = 0; side < 2; ++side) {
      const uint32_t end = side == kSideK ? format_.side[kSideV].offset : format_.record_bytes;
      for (uint32_t i = format_.side[side].end; i < end; ++i) {
        if (record[i] != 0) {
          return FieldError(absl::StatusCode::kDataLoss,
                            absl::StrCat("encoded page head ", head, side == kSideK ? " K" : " V", " byte ", i,
                                         ", beyond the last index"),
                            absl::StrCat(record[i]), "0");
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<MillionCodebooks> CodebooksOf(const Calibration& calibration, const std::string& prefix,
                                             const MillionFormat& format, const std::string& made_by) {
  const bool whole = format.parameters.whole_model;
  const int layers = calibration.model().layers, heads = format.layout.kv_heads;
  MillionCodebooks codebooks;
  codebooks.layers = layers;
  for (int side = 0; side < 2; ++side) {
    const SideLayout& s = format.side[side];
    const std::string name = absl::StrCat(prefix, side == kSideK ? ".k.m" : ".v.m", s.subspaces, ".b", s.bits);
    const uint64_t shape[] = {whole ? 1u : uint64_t(layers), whole ? 1u : uint64_t(heads), uint64_t(s.subspaces),
                              uint64_t(s.centroids), uint64_t(s.width)};
    KV_ASSIGN_OR_RETURN(const absl::Span<const uint16_t> values, calibration.Halves(name, shape, made_by));
    const size_t one = size_t(format.layout.head_dim) * s.centroids;
    for (int i = 0; i < layers * heads; ++i) {
      codebooks.side[side].push_back(values.data() + (whole ? 0 : i * one));
    }
  }
  return codebooks;
}

}  // namespace million

std::unique_ptr<Codec> MakeMillionCodec(const million::MillionFormat& format,
                                        const million::MillionCodebooks& codebooks, std::string spec,
                                        std::string calibration_digest) {
  return std::make_unique<million::MillionCodec>(format, codebooks, std::move(spec), std::move(calibration_digest));
}

void RegisterMillion(CodecRegistry& registry) {
  registry.Register(
      "million", "product quantisation to trained centroids (m, bits, k_m, k_bits, v_m, v_bits, scope, calibration)",
      [](const CodecContext& context, const CodecParameters& parameters) -> absl::StatusOr<std::unique_ptr<Codec>> {
        KV_ASSIGN_OR_RETURN(const million::MillionParameters checked,
                            million::ParseMillionParameters(parameters, context.layout));
        const std::string spec = million::MillionSpec(checked);
        if (context.calibration == nullptr) {
          return FieldError(absl::StatusCode::kFailedPrecondition, "codec parameter calibration", "absent",
                            absl::StrCat("an artifact with million's codebooks: make one with kvctl calibrate --codec ",
                                         spec, " and name it as calibration=FILE"));
        }
        const million::MillionFormat format = million::MakeMillionFormat(context.layout, checked);
        KV_ASSIGN_OR_RETURN(const million::MillionCodebooks codebooks,
                            million::CodebooksOf(*context.calibration,
                                                 checked.whole_model ? "million_model" : "million", format, spec));
        return MakeMillionCodec(format, codebooks, WithCalibration(spec, context.calibration),
                                context.calibration->digest());
      });
}

}  // namespace kvmanager
