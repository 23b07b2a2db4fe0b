// Attention over ZACK's pages: raw attention's kernel at each head's ranks, between two small products.
#pragma once

#include <memory>

#include "codecs/cpu_isa.h"
#include "codecs/page_attention.h"
#include "codecs/zack/zack_format.h"

namespace kvmanager::zack {

/// format: outlives the result. isa: at most what the processor runs.
std::unique_ptr<PageAttention> MakeZackAttention(const ZackFormat* format, Isa isa = BestIsa());

}  // namespace kvmanager::zack
