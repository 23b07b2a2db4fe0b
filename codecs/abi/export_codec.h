// The other direction: a Codec of this repository as the C table of kvmanager_codec.h.
//
// A shared object of an in-tree codec is one line, KVMANAGER_EXPORT_CODEC("hack", RegisterHack), linked with the codec,
// and hides every symbol but that of the table (export.lds). It is how the conformance suite reaches the codecs here,
// and how a C++ codec elsewhere that links this repository can be shipped. The table has no state: a description or a
// codec is made from scratch by the codec's own factory.
#pragma once

#include "codecs/abi/kvmanager_codec.h"
#include "codecs/registry.h"

namespace kvmanager {

/// The table of the codec `name` that `add` registers. Both are constants; called by one exported function per shared
/// object, always with the same arguments. An identity codec is exported as one whose encoding is a copy.
const kvmc_codec_api* ExportCodec(const char* name, void (*add)(CodecRegistry&));

}  // namespace kvmanager

#define KVMANAGER_EXPORT_CODEC(name, add) \
  extern "C" KVMC_EXPORT const kvmc_codec_api* kvmanager_codec_v1(void) { return ::kvmanager::ExportCodec(name, add); }
