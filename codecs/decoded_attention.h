// Attention for codecs that have none of their own: a page is decoded to scratch, one head at a time, and attended to
// raw.
//
// Immutable; any thread. It costs a decoding per page, head and call, so a daemon counts the pages that went this way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "codecs/page_attention.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

/// What such a codec offers. Any thread; allocates nothing.
class HeadDecoder {
 public:
  virtual ~HeadDecoder() = default;
  /// Bytes of scratch that DecodeHead needs.
  virtual size_t decode_workspace_bytes() const = 0;
  /// raw: [side: K, V][page_tokens][head_dim] of the layout's dtype, 64-byte aligned. False: the page cannot be
  /// decoded.
  virtual bool DecodeHead(int layer, int kv_head, const uint8_t* encoded, uint8_t* raw,
                          absl::Span<uint8_t> workspace) const = 0;
  /// Called once per Attend with the number of pages that were decoded.
  virtual void OnDecoded(size_t pages) const = 0;
};

/// `decoder` outlives it. A page that cannot be decoded makes the rows' results NaN: never a wrong answer.
std::unique_ptr<PageAttention> MakeDecodedAttention(const PageLayout& layout, const HeadDecoder* decoder);

/// Makes a state's rows NaN whatever they are merged with.
void SpoilSoftmax(int rows, int head_dim, const SoftmaxRows& state);

}  // namespace kvmanager
