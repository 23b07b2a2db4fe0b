// How much memory an offered sequence takes here, before anything of the offer was looked at.
#pragma once

#include <cstdint>

#include "codecs/codec.h"
#include "kvmanager/store/hand_off_lease.h"

namespace kvmanager {

/// What the whole sequence takes of a pool at least, padding of slots not counted: a full page that the codec keeps raw
/// is raw; every other one has its place as an encoded one, and those that do not travel so, and open pages, are raw
/// besides. header: may be hostile, but for its configuration, which `info`'s codec was made for.
uint64_t BytesAtLeast(const HandOffHeader& header, const CodecInfo& info);

}  // namespace kvmanager
