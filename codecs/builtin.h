// The codecs of this repository, a line each.
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

void RegisterBuiltinCodecs(CodecRegistry& registry);

}  // namespace kvmanager
