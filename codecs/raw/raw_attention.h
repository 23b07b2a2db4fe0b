// Attention over raw pages: fp16 or bf16 in, fp32 inside.
//
// One object per layout, immutable; any thread. The open page is read up to the tokens that its rows see, never beyond.
#pragma once

#include <memory>

#include "codecs/cpu_isa.h"
#include "codecs/page_attention.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

struct RawKernels;
/// The kernels themselves (raw_attention_kernel.h), for codecs whose pages hold 16-bit values too. isa: as below.
const RawKernels& RawKernelsOf(Isa isa);

/// isa: at most what the processor runs (BestIsa()). A row's result is the same bits whatever rows stand beside it.
std::unique_ptr<PageAttention> MakeRawAttention(const PageLayout& layout, Isa isa = BestIsa());

/// `count` elements of any dtype to and from fp32, round to nearest even.
void ConvertToFloat(const void* from, DType dtype, size_t count, float* to, Isa isa = BestIsa());
void ConvertFromFloat(const float* from, DType dtype, size_t count, void* to, Isa isa = BestIsa());

}  // namespace kvmanager
