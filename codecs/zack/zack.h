// ZACK: K and V in fewer dimensions (docs/codecs.md).
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

/// Adds "zack" to `registry`. Parameters: calibration=NAME (required), mode=joint|balanced, rate=0..0.95, fold=0|1.
void RegisterZack(CodecRegistry& registry);

}  // namespace kvmanager
