#include "codecs/default/default_codec.h"

#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/hack/hack.h"
#include "codecs/zack_hack/zack_hack.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

bool HasZackHack(const CodecContext& context) {
  if (context.calibration == nullptr) return false;
  for (const auto& [name, tensor] : context.calibration->tensors()) {
    if (absl::StartsWith(name, "zack_hack.")) return true;
  }
  return false;
}

absl::StatusOr<std::unique_ptr<Codec>> MakeDefault(const CodecContext& context, const CodecParameters& parameters) {
  if (!parameters.empty()) {
    return InvalidField("codec default parameter", absl::StrCat("\"", parameters.begin()->first, "\""),
                        "calibration, or absent: name the codec to set its parameters");
  }
  if (HasZackHack(context)) return zack_hack::MakeCodec(context, CodecParameters{});
  KV_ASSIGN_OR_RETURN(const hack::HackParameters hack, hack::ParseHackParameters({}, context.layout));
  return MakeHackCodec(hack::MakeHackFormat(context.layout, hack));
}

}  // namespace

void RegisterDefaultCodec(CodecRegistry& registry) {
  registry.Register("default", "zack+hack with a calibration that has its tensors, otherwise hack", MakeDefault);
}

}  // namespace kvmanager
