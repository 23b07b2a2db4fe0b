#include "codecs/million/million_device_format.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace kvmanager::million {
namespace {

constexpr uint32_t AlignUp(uint32_t bytes) { return (bytes + 63) / 64 * 64; }

void FillPairs(const SideTable& table, int side, MillionPairTables* pairs) {
  for (int subspace = 0; subspace < 64; ++subspace) {
    for (int index = 0; index < 256; ++index) {
      uint8_t* const to = pairs->rows[index] + 128 * side + 4 * (subspace % 32) + 2 * (subspace / 32);
      for (int c = 0; c < 2; ++c) {
        to[c] = uint8_t(CodeOf(side, table.by_channel[size_t(2 * subspace + c) * table.entries + index]));
      }
    }
  }
  std::memcpy(pairs->step[side], table.step, sizeof pairs->step[side]);
  std::memcpy(pairs->mid[side], table.mid, sizeof pairs->mid[side]);
}

MillionAnySide AnySideOf(const SideLayout& from) {
  MillionAnySide side = {};
  side.offset = from.offset;
  side.bytes = (from.strip_bytes + 15) / 16 * 16;
  for (int i = 0; i < kPlanes; ++i) {
    side.plane[i] = (from.bits & kPlaneBits[i]) != 0 ? from.plane[i] : MillionAnySide::kNoPlane;
  }
  side.bits = uint32_t(from.bits);
  while (1 << side.width_log2 < from.width) ++side.width_log2;
  return side;
}

/// Appends a side's codes: [subspace][2^bits][width].
void AppendCodes(const SideLayout& layout, const SideTable& table, int side, std::vector<uint8_t>* codes) {
  for (int m = 0; m < layout.subspaces; ++m) {
    for (int index = 0; index < layout.centroids; ++index) {
      for (int c = m * layout.width; c < (m + 1) * layout.width; ++c) {
        codes->push_back(uint8_t(CodeOf(side, table.by_channel[size_t(c) * table.entries + index]) + 128));
      }
    }
  }
}

void FillAny(const MillionFormat& format, const MillionTables& tables, MillionDeviceFormat* made) {
  const int heads = format.layout.kv_heads, d = format.layout.head_dim;
  MillionAnyLayer layer = {};
  uint32_t head_bytes = 0;
  for (int side = 0; side < 2; ++side) {
    layer.side[side] = AnySideOf(format.side[side]);
    layer.side[side].codes = head_bytes;
    head_bytes += uint32_t(d * format.side[side].centroids);
  }
  layer.record_bytes = format.record_bytes;
  layer.shared_bytes = head_bytes <= uint32_t(2 * d * 256) ? head_bytes : 0;
  made->any_layers.assign(tables.layers(), layer);
  std::map<std::pair<const uint8_t*, const uint8_t*>, uint64_t> known;
  for (int at = 0; at < tables.layers() * heads; ++at) {
    const SideTable* sides[2];
    for (int side = 0; side < 2; ++side) sides[side] = &tables.at(side, at / heads, at % heads);
    MillionAnyHead& head = made->any_heads.emplace_back();
    const auto [codes, added] = known.try_emplace({sides[0]->by_channel, sides[1]->by_channel}, made->any_codes.size());
    head.codes = codes->second;
    for (int side = 0; side < 2; ++side) {
      if (added) AppendCodes(format.side[side], *sides[side], side, &made->any_codes);
      std::copy_n(sides[side]->step, d, head.step[side]);
      std::copy_n(sides[side]->mid, d, head.mid[side]);
    }
  }
}

}  // namespace

bool MillionAny(const MillionFormat& format) {
  const int d = format.layout.head_dim;
  return (d == 64 || d == 128) && format.layout.page_tokens == kStripTokens;
}

bool MillionPairs(const MillionFormat& format) {
  const SideParameters pair = {64, 8};
  return format.layout.head_dim == 128 && format.layout.page_tokens == kStripTokens &&
         format.parameters.side[kSideK] == pair && format.parameters.side[kSideV] == pair;
}

MillionDeviceFormat MakeMillionDeviceFormat(const MillionFormat& format, const MillionTables& tables) {
  MillionDeviceFormat made;
  MillionDeviceShape& shape = made.shape;
  const int heads = format.layout.kv_heads, d = format.layout.head_dim;
  shape.kv_heads = uint16_t(heads);
  shape.head_dim = uint16_t(d);
  shape.page_tokens = format.layout.page_tokens;
  shape.bfloat16 = format.layout.dtype == DType::kBFloat16;
  shape.record_bytes = format.record_bytes;
  uint32_t codebook_bytes[2];
  for (int side = 0; side < 2; ++side) {
    shape.side[side] = format.side[side];
    shape.entries[side] = uint32_t(tables.at(side, 0, 0).entries);
    shape.steps_at[side] = AlignUp(uint32_t(d) * shape.entries[side]);
    shape.mids_at[side] = shape.steps_at[side] + AlignUp(uint32_t(d * sizeof(float)));
    codebook_bytes[side] = shape.mids_at[side] + AlignUp(uint32_t(d * sizeof(float)));
  }
  std::map<const uint8_t*, uint64_t> known;
  for (int layer = 0; layer < tables.layers(); ++layer) {
    for (int head = 0; head < heads; ++head) {
      for (int side = 0; side < 2; ++side) {
        const SideTable& table = tables.at(side, layer, head);
        const auto [at, added] = known.try_emplace(table.by_channel, made.bytes.size());
        made.codebooks.push_back(at->second);
        if (!added) continue;
        made.bytes.resize(made.bytes.size() + codebook_bytes[side]);
        uint8_t* const to = made.bytes.data() + at->second;
        std::memcpy(to, table.by_channel, size_t(d) * shape.entries[side]);
        std::memcpy(to + shape.steps_at[side], table.step, d * sizeof(float));
        std::memcpy(to + shape.mids_at[side], table.mid, d * sizeof(float));
      }
    }
  }
  if (MillionPairs(format)) {
    made.pairs.resize(size_t(tables.layers()) * heads);
    for (size_t i = 0; i < made.pairs.size(); ++i) {
      for (int side = 0; side < 2; ++side) {
        FillPairs(tables.at(side, int(i) / heads, int(i) % heads), side, &made.pairs[i]);
      }
    }
  }
  if (MillionAny(format)) FillAny(format, tables, &made);
  return made;
}

}  // namespace kvmanager::million
