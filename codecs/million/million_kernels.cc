#include "codecs/million/million_kernels.h"

#include <algorithm>
#include <cstring>

#include "codecs/million/million_encode_kernel.h"
#include "kvmanager/base/half.h"

namespace kvmanager::million {
namespace {

constexpr int kEntriesMax = 1 << kBitsMax;

const EncodeKernels& KernelsFor(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kEncodeAvx512;
  if (isa == Isa::kAvx2) return kEncodeAvx2;
#endif
  return kEncodePortable;
}

}  // namespace

size_t EncodeWorkspaceBytes(const MillionFormat& format) {
  const size_t d = format.layout.head_dim, width = std::max(format.side[0].width, format.side[1].width);
  return (d * kStripTokens + d + (width + 1) * kEntriesMax) * sizeof(float);
}

void EncodePage(const MillionFormat& format, const MillionTables& tables, const uint8_t* raw, int layer,
                uint8_t* encoded, uint8_t* workspace, Isa isa) {
  const EncodeKernels& kernels = KernelsFor(isa);
  const PageLayout& layout = format.layout;
  const int d = layout.head_dim;
  uint16_t indices[kStripTokens];
  float* x = reinterpret_cast<float*>(workspace);
  float* row = x + size_t(d) * kStripTokens;
  float* table = row + d;
  for (int head = 0; head < layout.kv_heads; ++head) {
    uint8_t* record = encoded + size_t(head) * format.record_bytes;
    for (int side = 0; side < 2; ++side) {
      const SideLayout& s = format.side[side];
      const SideTable& centroids = tables.at(side, layer, head);
      for (int strip = 0; strip < layout.page_tokens / kStripTokens; ++strip) {
        uint8_t* into = record + s.offset + size_t(strip) * s.strip_bytes;
        kernels.centre({raw + layout.raw_offset(side, head, strip * kStripTokens), centroids.mid, x, row, d,
                        layout.dtype == DType::kBFloat16});
        for (int m = 0; m < s.subspaces; ++m) {
          const size_t channel = size_t(m) * s.width;
          kernels.nearest({centroids.by_channel + channel * centroids.entries, centroids.step + channel,
                           x + channel * kStripTokens, table, indices, s.width, s.centroids, centroids.entries,
                           kFlip[side]});
          PackIndices(s, indices, m, into);
        }
      }
      const uint32_t end = side == kSideK ? format.side[kSideV].offset : format.record_bytes;
      std::memset(record + s.end, 0, end - s.end);
    }
  }
}

void DecodePage(const MillionFormat& format, const MillionTables& tables, const uint8_t* encoded, int layer,
                uint8_t* raw) {
  const PageLayout& layout = format.layout;
  uint16_t indices[kStripTokens];
  for (int head = 0; head < layout.kv_heads; ++head) {
    for (int side = 0; side < 2; ++side) {
      const SideLayout& s = format.side[side];
      const SideTable& table = tables.at(side, layer, head);
      const uint8_t* strips = encoded + size_t(head) * format.record_bytes + s.offset;
      for (int strip = 0; strip < layout.page_tokens / kStripTokens; ++strip) {
        uint8_t* out = raw + layout.raw_offset(side, head, strip * kStripTokens);
        for (int m = 0; m < s.subspaces; ++m) {
          UnpackIndices(s, strips + size_t(strip) * s.strip_bytes, m, indices);
          for (int c = m * s.width; c < (m + 1) * s.width; ++c) {
            const uint8_t* codes = table.by_channel + size_t(c) * table.entries;
            for (int t = 0; t < kStripTokens; ++t) {
              const float value = table.mid[c] + table.step[c] * float(CodeOf(side, codes[indices[t]]));
              StoreElement(out, layout.dtype, size_t(t) * layout.head_dim + c, value);
            }
          }
        }
      }
    }
  }
}

}  // namespace kvmanager::million
