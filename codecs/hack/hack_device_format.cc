#include "codecs/hack/hack_device_format.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace kvmanager::hack {

static_assert(std::is_trivially_copyable_v<HackDeviceHead> && std::is_trivially_copyable_v<HackDeviceShape>);

HackDeviceFormat MakeHackDeviceFormat(const HackFormat& format) {
  const HackParameters& parameters = format.parameters;
  const PageLayout& layout = format.layout;
  HackDeviceFormat out{};
  HackDeviceShape& shape = out.shape;
  shape.page_bytes = format.page_bytes;
  shape.kv_heads = layout.kv_heads, shape.head_dim = layout.head_dim, shape.page_tokens = layout.page_tokens;
  shape.partition = uint16_t(parameters.partition);
  shape.rotation_norm = float(1.0 / std::sqrt(double(layout.head_dim)));
  shape.is_bfloat16 = layout.dtype == DType::kBFloat16;
  shape.k_along_tokens = parameters.k_axis == Axis::kChannel;
  shape.meta8 = parameters.meta_bits == 8;
  shape.stochastic = parameters.rounding == Rounding::kStochastic;
  shape.hadamard = parameters.rotation == Rotation::kHadamard;

  bool fits[2] = {false, false};
  out.heads.resize(layout.kv_heads);
  for (int h = 0; h < layout.kv_heads; ++h) {
    const HeadLayout& from = format.heads[h];
    HackDeviceHead& head = out.heads[h];
    head.offset = from.offset;
    const uint32_t next = h + 1 < layout.kv_heads ? format.heads[h + 1].offset : format.page_bytes;
    for (int side = 0; side < 2; ++side) {
      const SideLayout& s = from.side[side];
      HackDeviceSide& to = head.side[side];
      for (int i = 0; i < s.segments; ++i) {
        to.segment_bits[i] = s.segment_bits[i];
        to.segment_offset[i] = uint16_t(s.segment_offset[i]);
        to.least_squares |= uint32_t(s.segment_least_squares[i]) << i;
      }
      fits[side] |= to.least_squares != 0;
      to.strip_bytes = s.strip_bytes;
      to.codes = s.codes, to.tops = s.tops, to.steps = s.steps, to.minima = s.minima, to.sums = s.sums;
      to.norms = s.norms, to.norm_top = s.norm_top;
      to.begin = s.codes;
      to.end = side == 0 ? from.side[1].codes : next - from.offset;
      shape.strip_bytes_max = std::max(shape.strip_bytes_max, to.end - to.begin);
    }
  }
  for (int side = 0; side < 2; ++side) {
    const bool in_strips = (side == 1 || shape.k_along_tokens) && layout.page_tokens == 64 && shape.partition == 64 &&
                           (layout.head_dim == 64 || layout.head_dim == 128);
    shape.decode_by_strip[side] = in_strips;
    shape.in_rows[side] = shape.hadamard || (side == 1 && parameters.v_norm);
    if (in_strips && !shape.stochastic)
      shape.encode[side] = fits[side] ? HackDevicePath::kFitted : HackDevicePath::kStrip;
  }
  return out;
}

HackDeviceFormat MakeHackDeviceFormat(absl::Span<const HackFormat* const> layers) {
  HackDeviceFormat out = MakeHackDeviceFormat(*layers[0]);
  out.shape.layer_heads = out.shape.kv_heads;
  for (const HackFormat* format : layers.subspan(1)) {
    const HackDeviceFormat layer = MakeHackDeviceFormat(*format);
    out.heads.insert(out.heads.end(), layer.heads.begin(), layer.heads.end());
    out.shape.page_bytes = std::max(out.shape.page_bytes, layer.shape.page_bytes);
    out.shape.strip_bytes_max = std::max(out.shape.strip_bytes_max, layer.shape.strip_bytes_max);
    for (int side = 0; side < 2; ++side) {
      // Only the fitted path does what another layer may need.
      if (layer.shape.encode[side] == HackDevicePath::kFitted) out.shape.encode[side] = HackDevicePath::kFitted;
    }
  }
  return out;
}

}  // namespace kvmanager::hack
