// The identity codec: encoded pages are raw pages.
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

/// Adds "raw" to `registry`. It takes no parameters.
void RegisterRaw(CodecRegistry& registry);

}  // namespace kvmanager
