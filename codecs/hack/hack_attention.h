// Attention on HACK's codes: integer products of an 8-bit query with K's codes, and of 8-bit probabilities with V's.
//
// One object per format, immutable; any thread. The arithmetic is that of ReferenceAttend (hack_reference.h), whose
// rounding decisions it repeats, with sums in fp32. Every row sees every token (task.visible is nullptr). With
// rotation=hadamard it maps: queries and outputs are multiplied by the Walsh-Hadamard matrix, once for all pages.
#pragma once

#include <memory>

#include "codecs/cpu_isa.h"
#include "codecs/hack/hack_format.h"
#include "codecs/page_attention.h"

namespace kvmanager::hack {

/// `format` is read while the object lives. isa: at most what the processor runs. A row's result is the same bits
/// whatever rows stand beside it.
std::unique_ptr<PageAttention> MakeHackAttention(const HackFormat* format, Isa isa = BestIsa());

}  // namespace kvmanager::hack
