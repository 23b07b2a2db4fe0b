// ZACK+MILLION: K and V rotated by ZACK's factors, in all channels, then quantised by MILLION's product codebooks,
// which were trained on rotated K and V (docs/codecs.md). For measuring.
//
//   zack+million:mode=balanced,fold=0,MILLION'S PARAMETERS,calibration=NAME
//
// mode and fold as in zack+hack; the others are million's (m, bits, or k_m, k_bits, v_m, v_bits).
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

/// Adds "zack+million" to `registry`.
void RegisterZackMillion(CodecRegistry& registry);

}  // namespace kvmanager
