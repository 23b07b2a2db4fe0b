#include "tests/fuzz/fuzz_target.h"

namespace kvmanager::fuzz {

absl::Span<const NamedTarget> CodecTargets() {
  static constexpr NamedTarget kTargets[] = {
      {"page", MakePageTarget},
      {"codec_spec", MakeCodecSpecTarget},
      {"calibration", MakeCalibrationTarget},
      {"manifest", MakeManifestTarget},
  };
  return kTargets;
}

}  // namespace kvmanager::fuzz
