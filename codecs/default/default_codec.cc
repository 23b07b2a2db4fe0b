#include "codecs/default/default_codec.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "codecs/hack/hack.h"
#include "codecs/zack_hack/zack_hack.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::StatusOr<std::unique_ptr<Codec>> MakeDefault(const CodecContext& context, const CodecParameters& parameters) {
  if (!parameters.empty()) {
    return InvalidField("codec default parameter", absl::StrCat("\"", parameters.begin()->first, "\""),
                        "calibration, or absent: name the codec to set its parameters");
  }
  // An artifact without zack+hack's tensors is an error there, not plain hack in silence.
  if (context.calibration != nullptr) return zack_hack::MakeCodec(context, CodecParameters{});
  // Finer than hack's own default: a quarter of raw's bytes, at which a real model keeps what it retrieves.
  KV_ASSIGN_OR_RETURN(const hack::HackParameters hack,
                      hack::ParseHackParameters({{"k_bits", "4"}, {"v_bits", "3"}}, context.layout));
  return MakeHackCodec(hack::MakeHackFormat(context.layout, hack));
}

}  // namespace

void RegisterDefaultCodec(CodecRegistry& registry) {
  registry.Register("default", "zack+hack with a calibration, otherwise hack with 4 bits for K and 3 for V",
                    MakeDefault);
}

}  // namespace kvmanager
