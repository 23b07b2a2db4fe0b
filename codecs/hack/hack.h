// HACK as a codec: what main() registers, and what tests and other codecs make directly.
#pragma once

#include <memory>

#include "codecs/codec.h"
#include "codecs/hack/hack_format.h"
#include "codecs/registry.h"

namespace kvmanager {

/// Adds "hack" (docs/codecs.md) to `registry`.
void RegisterHack(CodecRegistry& registry);

/// The codec of one format; encodes with the fastest instruction set of this machine.
std::unique_ptr<Codec> MakeHackCodec(hack::HackFormat format);

}  // namespace kvmanager
