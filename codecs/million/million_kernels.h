// Encoding and decoding of MILLION pages.
//
// Free functions over values: any thread. Every instruction set writes the bytes of ReferenceEncode
// (million_reference.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "codecs/cpu_isa.h"
#include "codecs/million/million_codebooks.h"
#include "codecs/million/million_format.h"

namespace kvmanager::million {

/// Scratch of EncodePage.
size_t EncodeWorkspaceBytes(const MillionFormat& format);
/// Encodes one page of `layer`. workspace: 64-byte aligned. Allocates nothing.
void EncodePage(const MillionFormat& format, const MillionTables& tables, const uint8_t* raw, int layer,
                uint8_t* encoded, uint8_t* workspace, Isa isa = BestIsa());
/// mid + step * code in fp32, rounded to the layout's dtype.
void DecodePage(const MillionFormat& format, const MillionTables& tables, const uint8_t* encoded, int layer,
                uint8_t* raw);

}  // namespace kvmanager::million
