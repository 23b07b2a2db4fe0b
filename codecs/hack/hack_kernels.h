// The fast encoder and decoder of HACK pages: one source, compiled per instruction set and chosen at run time.
//
// Pure functions of their arguments: any thread may call them; they allocate nothing and lock nothing. Every
// instruction set writes the same bytes as hack_reference.h, because each lane does the reference's IEEE fp32
// operations in its order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/cpu_isa.h"
#include "codecs/hack/hack_format.h"

namespace kvmanager::hack {

struct HackKernels {
  /// Encodes one page. false: declined, and the page's bytes are all zero. raw, page, workspace: 64-byte aligned.
  bool (*encode)(const HackFormat& format, const uint8_t* raw, uint32_t layer, uint64_t first_token, uint8_t* page,
                 uint8_t* workspace);
  /// Decodes one page; page, raw: 64-byte aligned. Any bytes are safe to decode.
  void (*decode)(const HackFormat& format, const uint8_t* page, uint8_t* raw);
};

/// isa: at most what the processor runs (BestIsa()).
const HackKernels& HackKernelsFor(Isa isa);

/// Bytes of encode's workspace.
size_t HackEncodeWorkspaceBytes(const HackFormat& format);

}  // namespace kvmanager::hack
