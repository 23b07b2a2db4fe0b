// ZACK one value at a time: encoding in the arithmetic that every encoder must repeat bit for bit, and attention in
// fp64 on the same bytes. For tests; pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "codecs/zack/zack_format.h"

namespace kvmanager::zack {

/// Writes the page of `layer`; false where a value is beyond fp16, and then the page is zero.
bool ReferenceEncode(const ZackFormat& format, int layer, const uint8_t* raw, uint8_t* page);

/// The first `tokens` tokens of a page, in one of its forms.
struct ReferencePage {
  const uint8_t* raw = nullptr;
  const uint8_t* encoded = nullptr;
  int tokens = 0;
};

struct ReferenceOutput {
  std::vector<double> out;     // [d]: as outputs are without folding, o = o' left_n^T
  std::vector<double> folded;  // [d]: o' [n], raw pages' V projected; zero beyond n
  double lse = 0;
};

/// One query row [d] over `pages` in order.
ReferenceOutput ReferenceAttend(const ZackFormat& format, int layer, int kv_head, const float* q, double scale,
                                absl::Span<const ReferencePage> pages);

}  // namespace kvmanager::zack
