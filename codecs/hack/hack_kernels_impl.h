// The body of hack_kernels.cc, included once per instruction set inside namespace kvmanager::hack, hence no include
// guard. Vectors of 16 lanes in GCC's vector extension: the compiler lowers them to what the enclosing #pragma GCC
// target allows. A lane does the scalar operations of hack_reference.cc in the same order, so that all instruction sets
// agree bit by bit.

namespace KV_KERNEL_ISA {

// In this order.
// clang-format off
#include "codecs/hack/hack_kernels_vectors_inl.h"
#include "codecs/hack/hack_kernels_rows_inl.h"
#include "codecs/hack/hack_kernels_codes_inl.h"
#include "codecs/hack/hack_kernels_planes_inl.h"
// clang-format on

static void StoreMeta(const Side& side, const Workspace& ws, uint8_t* record) {
  const SideLayout& layout = *side.layout;
  const size_t n = size_t(layout.partitions) * layout.meta_entries;
  if (!side.meta8) {
    std::memcpy(record + layout.steps, ws.stored_step, 2 * n);
    std::memcpy(record + layout.minima, ws.stored_minimum, 2 * n);
    return;
  }
  for (size_t m = 0; m < n; m += kLanes) {
    Store(record + layout.steps + m, __builtin_convertvector(Load<H>(ws.stored_step + m), B));
    Store(record + layout.minima + m, __builtin_convertvector(Load<H>(ws.stored_minimum + m), B));
  }
}

static bool EncodeSide(const Side& side, const uint8_t* raw, uint8_t* record, Workspace& ws) {
  const SideLayout& layout = *side.layout;
  if (!Convert(side, raw, ws)) return false;
  if (side.norms && !FactorNorms(side, record, ws)) return false;
  FindBounds(side, ws);
  bool fit = false;
  for (int s = 0; s < layout.segments; ++s) fit |= layout.segment_least_squares[s];
  const int group = side.along_tokens ? 1 : layout.partitions;
  for (int first = 0; first < layout.partitions; first += group) {
    float tops[2];
    if (fit) FitRanges(side, first, first + group, ws);
    if (!MakeMeta(side, first, first + group, ws, tops)) return false;
    if (side.meta8) {
      const uint16_t bits[2] = {FloatToHalf(tops[0]), FloatToHalf(tops[1])};
      std::memcpy(record + layout.tops + 4 * (first / group), bits, 4);
    }
  }
  StoreMeta(side, ws, record);
  side.stochastic ? Quantize<true>(side, ws, record) : Quantize<false>(side, ws, record);
  for (int strip = 0; strip < side.tokens / kStripTokens; ++strip) {
    uint8_t* out = record + layout.codes + size_t(strip) * layout.strip_bytes;
    for (int s = 0; s < layout.segments; ++s) {
      const uint8_t* codes = ws.codes + (size_t(s) * side.tokens + strip * kStripTokens) * kSegmentChannels;
      PackSegment(codes, layout.segment_bits[s], side.is_v, out + layout.segment_offset[s]);
    }
  }
  return true;
}

static bool Encode(const HackFormat& format, const uint8_t* raw, uint32_t layer, uint64_t first_token, uint8_t* page,
                   uint8_t* workspace) {
  Workspace& ws = *reinterpret_cast<Workspace*>(workspace);
  std::memset(page, 0, format.page_bytes);
  for (int h = 0; h < format.layout.kv_heads; ++h) {
    for (int s = 0; s < 2; ++s) {
      const Side side = MakeSide(format, h, s);
      if (side.stochastic) MakeSeeds(layer, h, s, first_token, side.tokens, ws.seeds);
      if (!EncodeSide(side, raw + format.layout.raw_offset(s, h, 0), page + format.heads[h].offset, ws)) {
        std::memset(page, 0, format.page_bytes);
        return false;
      }
    }
  }
  return true;
}

/// Steps or minima [kLanes entries from m on], as attention reads them.
KV_KERNEL_INLINE F LoadMeta(const Side& side, const uint8_t* record, bool step, size_t m) {
  const SideLayout& layout = *side.layout;
  const uint8_t* at = record + (step ? layout.steps : layout.minima);
  if (!side.meta8) return FromHalf(Load<H>(at + 2 * m));
  uint16_t bits;
  std::memcpy(&bits, record + layout.tops + (side.along_tokens ? 4 * (m / layout.meta_entries) : 0) + (step ? 0 : 2),
              2);
  const U stored = __builtin_convertvector(Load<B>(at + m), U);
  if (step) return HalfToFloat(bits) * __builtin_convertvector((I)stored, F) / 255.0f;
  return HalfToFloat(bits) * __builtin_convertvector((I)(stored << 24) >> 24, F) / 127.0f;
}

static void DecodeSide(const Side& side, const uint8_t* record, uint8_t* raw) {
  const SideLayout& layout = *side.layout;
  alignas(64) uint8_t codes[kSegmentsMax * kStripTokens * kSegmentChannels];
  alignas(64) float steps[PageLayout::kHeadDimMax], minima[PageLayout::kHeadDimMax], row[PageLayout::kHeadDimMax];
  const float norm_top = side.norms ? LoadHalf(record + layout.norm_top) : 0;
  alignas(64) float token_steps[8][kStripTokens], token_minima[8][kStripTokens];  // partitions of at least 32 channels
  for (int strip = 0; strip < side.tokens / kStripTokens; ++strip) {
    const uint8_t* in = record + layout.codes + size_t(strip) * layout.strip_bytes;
    for (int s = 0; s < layout.segments; ++s) {
      UnpackSegment(in + layout.segment_offset[s], layout.segment_bits[s], side.is_v,
                    codes + s * kStripTokens * kSegmentChannels);
    }
    if (!side.along_tokens) {
      for (int p = 0; p < layout.partitions; ++p) {
        for (int t = 0; t < kStripTokens; t += kLanes) {
          const size_t m = size_t(p) * side.tokens + strip * kStripTokens + t;
          Store(token_steps[p] + t, LoadMeta(side, record, true, m));
          Store(token_minima[p] + t, LoadMeta(side, record, false, m));
        }
      }
    }
    for (int t = 0; t < kStripTokens; ++t) {
      const int token = strip * kStripTokens + t;
      if (side.along_tokens && (t == 0 || token % layout.partition == 0)) {
        for (int c = 0; c < side.channels; c += kLanes) {
          const size_t m = size_t(token / layout.partition) * side.channels + c;
          Store(steps + c, LoadMeta(side, record, true, m));
          Store(minima + c, LoadMeta(side, record, false, m));
        }
      }
      uint8_t* out = raw + size_t(token) * side.channels * 2;
      const float norm = side.norms ? norm_top * float(record[layout.norms + token]) / 255.0f : 1;
      for (int c = 0; c < side.channels; c += kLanes) {
        const B stored =
            Load<B>(codes + (c / kSegmentChannels * kStripTokens + t) * kSegmentChannels + c % kSegmentChannels);
        const F code = __builtin_convertvector(__builtin_convertvector(stored, I), F);
        const int p = c / layout.partition;
        F value = side.along_tokens ? code * Load<F>(steps + c) + Load<F>(minima + c)
                                    : code * token_steps[p][t] + token_minima[p][t];
        if (side.norms) value *= norm;
        if (side.rotate) {
          Store(row + c, value);
        } else {
          StoreRaw(out + 2 * c, side.dtype, value);
        }
      }
      if (side.rotate) {
        HadamardRow(row, side.channels);
        for (int c = 0; c < side.channels; c += kLanes) StoreRaw(out + 2 * c, side.dtype, Load<F>(row + c));
      }
    }
  }
}

static void Decode(const HackFormat& format, const uint8_t* page, uint8_t* raw) {
  for (int h = 0; h < format.layout.kv_heads; ++h) {
    for (int s = 0; s < 2; ++s) {
      DecodeSide(MakeSide(format, h, s), page + format.heads[h].offset, raw + format.layout.raw_offset(s, h, 0));
    }
  }
}

}  // namespace KV_KERNEL_ISA
