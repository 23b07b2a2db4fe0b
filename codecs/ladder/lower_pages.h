// Encodes pages of one rung of a codec again by the next rung, in fewer bytes, and measures what that loses.
//
// Pure functions; any thread, except that a codec that waits for a process (codecs/waiting_codec.h) is called on its
// workers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "codecs/codec.h"

namespace kvmanager {

struct LowerItem {
  const uint8_t* encoded = nullptr;  // a page of rung from_rung, 64-byte aligned
  uint8_t* lowered = nullptr;  // page_bytes(layer) of rung from_rung + 1, 64-byte aligned; every byte is written unless
                               // the page is declined
  uint32_t layer = 0;          // of the model
  uint64_t first_token = 0;    // position in the context of the page's first token
  bool declined = false;       // out: the next rung cannot encode it, or it did not decode to finite values; it stays
};

/// Bytes of workspace for LowerPages and LoweringError, from any rung of `ladder`.
size_t LowerWorkspaceBytes(const Codec& ladder);

/// Decodes each page, then encodes it by rung from_rung + 1, which there is. workspace: at least
/// LowerWorkspaceBytes(ladder), 64-byte aligned. Allocates nothing but what the codecs' Decode does.
void LowerPages(const Codec& ladder, int from_rung, absl::Span<LowerItem> items, absl::Span<uint8_t> workspace);

/// With x the values of a page and x' those of the page that LowerPages made of it, both decoded: for K and for V
/// sum |x' - x|^2 / sum |x|^2 over all heads, tokens and channels; the square root of the mean of the two. NaN where K
/// or V is zero everywhere or something is not finite. REQUIRES: `item` was lowered and not declined. workspace as for
/// LowerPages.
double LoweringError(const Codec& ladder, int from_rung, const LowerItem& item, absl::Span<uint8_t> workspace);

}  // namespace kvmanager
