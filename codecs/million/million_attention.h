// Attention on MILLION's indices: integer products of the query, and of the probabilities, with the codes of looked-up
// centroids.
//
// For a row q, K's codebook (mid, step, code; million_codebooks.h) and a token's centroids, its score is
//   scale (q . mid + u sum_c x_c code_c),   x_c = round(q_c step_c / u),   u = max_c |q_c step_c| / (127 * 2^shift)
// (MILLION, section III-C: scores from the codebook), and with p of a strip of 64 tokens rounded to multiples of their
// largest / 255, the output gains
//   w (mid_c sum_t p'_t + step_c sum_t p'_t code_tc),   p'_t = round(p_t / w),   w = max_t p_t / 255.
// shift is the largest of 2..8 for which, as for all smaller ones, at most kWideMax (4) channels exceed the largest
// |q_c step_c| / 2^shift; 0 where 2 is not. x is one signed byte without outlier channels, and in them two.
// Both sums are exact integers. Neither K nor V is rebuilt: a strip's codes are looked up once, for all rows.
//
// One object per format and tables, immutable; any thread. Every row sees every token (task.visible is nullptr).
#pragma once

#include <memory>

#include "codecs/cpu_isa.h"
#include "codecs/million/million_codebooks.h"
#include "codecs/million/million_format.h"
#include "codecs/page_attention.h"

namespace kvmanager::million {

/// How codes are looked up (million_lookup.h).
enum class LookUps : uint8_t { kBest, kByAddress };

/// The order of tables that attention on this machine reads, for a side of so many bits.
TableOrder TableOrderFor(int bits);

/// `format` and `tables` are read while the object lives. isa: at most what the processor runs. kByAddress wants tables
/// of TableOrder::kBoth. A row's result is the same bits whatever rows stand beside it.
std::unique_ptr<PageAttention> MakeMillionAttention(const MillionFormat* format, const MillionTables* tables,
                                                    Isa isa = BestIsa(), LookUps look_ups = LookUps::kBest);

}  // namespace kvmanager::million
