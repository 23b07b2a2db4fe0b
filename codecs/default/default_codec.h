// "default": the codec of a cache whose owner did not choose one. With a calibration that zack+hack can use it is
// zack+hack with its defaults, otherwise hack with its own; info() is that of the codec chosen.
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

/// Adds "default" to `registry`.
void RegisterDefaultCodec(CodecRegistry& registry);

}  // namespace kvmanager
