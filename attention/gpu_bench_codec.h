// Codecs with artifacts that were made up, for benchmarks of a GPU.
#pragma once

#include <memory>
#include <string>

#include "codecs/codec.h"

namespace kvmanager {

/// Of one layer, by its spec without a calibration: million, zack+hack or zack+million. Prints and exits where there is
/// none.
std::unique_ptr<Codec> MakeBenchCodec(const std::string& spec, const PageLayout& layout, int query_heads);

}  // namespace kvmanager
