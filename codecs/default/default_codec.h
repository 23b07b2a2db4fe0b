// "default": the codec of a cache whose owner did not choose one. With a calibration that zack+hack can use it is
// zack+hack with its defaults, otherwise hack with 4 bits for K and 3 for V: hack's own K3 V2 keeps a real model's
// perplexity within about a percent, but loses a quarter of what it retrieves
// (docs/benchmarks/2026-11-23-real-models.md). info() is that of the codec chosen.
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

/// Adds "default" to `registry`.
void RegisterDefaultCodec(CodecRegistry& registry);

}  // namespace kvmanager
