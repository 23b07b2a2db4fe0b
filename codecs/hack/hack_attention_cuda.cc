#include "codecs/hack/hack_attention_cuda.h"

#include "codecs/hack/hack_attention_cuda_table.h"

namespace kvmanager {

const device::AttendKernels* HackAttentionKernels(const hack::HackFormat& format) {
  const hack::HackParameters& p = format.parameters;
  const PageLayout& layout = format.layout;
  if (p.k_axis != hack::Axis::kChannel || p.meta_bits != 8 || p.partition != 64) return nullptr;
  if (layout.page_tokens != 64) return nullptr;
  for (const hack::HeadLayout& head : format.heads) {
    for (int side = 0; side < 2; ++side) {
      for (int s = 0; s < head.side[side].segments; ++s) {
        if (head.side[side].segment_bits[s] != (side == 0 ? p.k_bits : p.v_bits)) return nullptr;
      }
    }
  }
  return hack::FindHackAttention(layout.head_dim, p.k_bits, p.v_bits, p.rotation == hack::Rotation::kHadamard,
                                 p.v_norm);
}

}  // namespace kvmanager
