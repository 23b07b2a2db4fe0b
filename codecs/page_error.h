// How far attention on an encoded page is from attention on the raw page that it was made of.
//
// A pure function; any thread. For sampling in a running daemon, and for whoever compares codecs page by page.
#pragma once

#include <cstdint>

#include "codecs/codec.h"

namespace kvmanager {

struct PageErrorTask {
  const Codec* codec = nullptr;  // not an identity codec
  int layer = 0;
  const uint8_t* raw = nullptr;      // a full page, 64-byte aligned
  const uint8_t* encoded = nullptr;  // what the codec made of it
  const void* q = nullptr;           // [q_tokens][query_heads][head_dim] of q_dtype, after RoPE
  int q_tokens = 0;                  // at least 1
  int query_heads = 0;               // a multiple of the layout's kv_heads
  DType q_dtype = DType::kFloat32;
  float scale = 0;  // of scores; 0: 1/sqrt(head_dim)
};

/// With o = softmax(scale q K) V over the page's tokens alone, o raw and o' by the codec's own attention on the encoded
/// form: sqrt(sum |o' - o|^2 / sum |o|^2) over all rows, heads and channels. Outputs that a codec leaves in a space of
/// its own (fold) are compared in the model's. NaN where o is zero or something is not finite.
double RelativePageError(const PageErrorTask& task);

}  // namespace kvmanager
